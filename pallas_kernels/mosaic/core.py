"""Kernel launch and stores for Mosaic GPU."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import lowering


def kernel(body: Callable, *, kernel_name: str, **options: Any) -> Callable:
    """Wraps `plgpu.kernel` so that its kernel is lowered once in a process.

    Indices have 32 bits even if JAX defaults to 64.
    """
    launch = plgpu.kernel(body, kernel_name=kernel_name, **options)

    def run(*operands):
        with jax.enable_x64(False):
            return launch(*operands)

    return lowering.once(run, kernel_name)


def by_lanes(*, approx_math: bool = False) -> plgpu.CompilerParams:
    """Returns the parameters of a kernel that never loads from memory it stores to.

    The kernel is written for single lanes, and Mosaic adds no barriers between them.

    Args:
      approx_math: Whether transcendental functions may be approximate. Quantization
        uses no transcendental functions.
    """
    return plgpu.CompilerParams(
        approx_math=approx_math,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=True,
    )


def store(ref: Any, value: jax.Array) -> None:
    """Stores a value of any register layout to memory that is not swizzled."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX 0.11 has no `plgpu.store`.
        ref[...] = value
