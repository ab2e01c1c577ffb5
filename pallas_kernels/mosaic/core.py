"""Kernel launch, stores and register counts for Mosaic GPU."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.codec import LANES

_REGISTERS = 2**16  # Registers of a multiprocessor.
_LOADING_REGISTERS = 24  # Registers of a lane that only issues copies.


def kernel(body: Callable, **options: Any) -> Callable:
    """Wraps `plgpu.kernel` so that indices have 32 bits even if JAX defaults to 64."""
    launch = plgpu.kernel(body, **options)

    def run(*operands):
        with jax.enable_x64(False):
            return launch(*operands)

    return run


def store(ref: Any, value: jax.Array) -> None:
    """Stores a value of any layout to memory that is not swizzled."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX 0.11 has no `plgpu.store`.
        ref[...] = value


def registers(computing: int) -> tuple[int, int]:
    """Returns the registers of a loading lane and of a computing lane.

    In a thread block one warpgroup loads and `computing` warpgroups compute. Together
    they may use the registers with which all lanes start. A kernel that asks for more
    waits forever.
    """
    warpgroups = computing + 1
    start = _REGISTERS // (LANES * warpgroups) // 8 * 8
    rest = start * warpgroups - _LOADING_REGISTERS
    return _LOADING_REGISTERS, min(rest // computing // 8 * 8, 240)
