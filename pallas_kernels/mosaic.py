"""Kernels as Mosaic takes them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def kernel(body: Callable, **how: Any) -> Callable:
    """`plgpu.kernel`, whose indices have 32 bits also where JAX's default is 64."""
    launch = plgpu.kernel(body, **how)

    def run(*operands):
        with jax.enable_x64(False):
            return launch(*operands)

    return run
