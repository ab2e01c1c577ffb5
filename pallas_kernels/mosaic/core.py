"""Kernels as Mosaic takes them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.codec import LANES

_REGISTERS = 2**16  # Of a multiprocessor.
_LOADING_REGISTERS = 24


def kernel(body: Callable, **how: Any) -> Callable:
    """`plgpu.kernel`, whose indices have 32 bits also where JAX's default is 64."""
    launch = plgpu.kernel(body, **how)

    def run(*operands):
        with jax.enable_x64(False):
            return launch(*operands)

    return run


def store(ref: Any, value: jax.Array) -> None:
    """Writes to memory that is not swizzled, in any way that a layout asks for."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX 0.11 has no other way there.
        ref[...] = value


def registers(computing: int) -> tuple[int, int]:
    """Registers of a lane that loads, and of one that computes.

    In a thread block one warpgroup loads, and `computing` others compute. They share
    what all lanes start with; to ask for more is to wait for ever.
    """
    warpgroups = computing + 1
    start = _REGISTERS // (LANES * warpgroups) // 8 * 8
    rest = start * warpgroups - _LOADING_REGISTERS
    return _LOADING_REGISTERS, min(rest // computing // 8 * 8, 240)
