"""The kernel of gated activations with per-token scales, for rows that a warp holds.

A thread block has four rows, one in the registers of each warp. So lanes load 16 bytes
at once of rows of 256 elements or more, and find the row's amax within their warp.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import decode, encode_groups, floats, strip_layout
from pallas_kernels.numerics import GROUP, Scaled, magnitude_bits, reciprocal, row_scale
from pallas_kernels.ops.gate.reference import Gated

_CODES = jnp.float8_e4m3fn  # The dtype of groups that are kept.
_WARPS = 4
_GROUPS = 16  # Groups of a row in a strip; a lane has 8 neighbouring elements.
_SHAPE = (_WARPS, _GROUPS, GROUP)
_LAYOUT = strip_layout(_SHAPE)
_STEP = _GROUPS * GROUP
_LONGEST = 4 * _STEP  # The longest row that fits in the registers of a warp.


def takes(tokens: int, n: int) -> bool:
    """Returns whether the kernel can take `tokens` rows of length `n`."""
    return tokens >= _WARPS and not n % _STEP and n <= _LONGEST


def run(fn: Callable, outputs: Gated, operands: tuple[Any, ...]) -> Gated:
    """Runs the kernel; see `kernel.run`. Arrays are [tokens, parts, groups, 16]."""
    tokens, _, groups, _ = outputs.values.shape
    count = jax.tree.leaves(operands)[0].shape[1]
    strips = range(groups // _GROUPS)

    def kernel(operands, out):
        # The last two thread blocks may overlap.
        first = jnp.minimum(lax.axis_index("cta") * _WARPS, tokens - _WARPS)
        rows = pl.ds(first, _WARPS)
        # All loads are issued before the first one is needed, so that their latencies
        # overlap.
        loaded = [_loaded(operands, count, rows, strip) for strip in strips]
        values, scales = [], []
        for strip, arrays in zip(strips, loaded, strict=True):
            values += fn(*arrays)
            if out.groups is not None:
                scales += _keep(arrays, out.groups, count, rows, strip)
        scale = row_scale(floats(_of_rows(values)), out.values.dtype)
        mosaic.store(out.scale.at[rows], scale)
        if out.groups is not None:
            mosaic.store(out.largest_scale.at[rows], floats(_of_rows(scales)))
        inverse = lax.broadcast_in_dim(reciprocal(scale), _SHAPE, (0,))
        inverse = plgpu.layout_cast(inverse, _LAYOUT)
        for strip, value in zip(strips, values, strict=True):
            to = out.values.at[_index(rows, 0, strip)]
            # No value exceeds the amax, so the cast need not saturate.
            mosaic.store(to, (value * inverse).astype(to.dtype))

    (out,) = mosaic.kernel(
        kernel,
        out_type=(outputs,),
        kernel_name="gated",
        grid=(pl.cdiv(tokens, _WARPS),),
        grid_names=("cta",),
        compiler_params=mosaic.by_lanes(approx_math=True),  # This affects only `fn`.
    )(operands)
    return out


def _index(rows: Any, part: int, strip: int) -> tuple[Any, int, Any]:
    return rows, part, pl.ds(strip * _GROUPS, _GROUPS)


def _pairs(arrays: tuple[Any, ...], count: int) -> list[tuple[Any, int]]:
    """Returns each of `count` parts of arrays, as the array and the part's index."""
    return [(x, i) for x in arrays for i in range(count)]


def _loaded(operands: tuple[Any, ...], count: int, rows: Any, strip: int) -> list[Any]:
    """Loads a strip of some rows, for each of the `count` parts of all operands."""

    def load(ref, i):
        layout = _LAYOUT if len(ref.shape) == 4 else _LAYOUT.reduce(2)
        at = _index(rows, i, strip)
        return plgpu.load(ref.at[at], layout=layout, optimized=False)

    return [
        jax.tree.map(functools.partial(load, i=i), x)
        for x, i in _pairs(operands, count)
    ]


def _keep(
    arrays: list[Any], groups: tuple[Scaled, ...], count: int, rows: Any, strip: int
) -> list[Array]:
    """Quantizes strips in groups, stores them, and returns the scales in float32.

    Args:
      arrays: A strip of each part of all operands.
      groups: Refs to the codes and scales of all operands.
      count: The number of parts of an operand.
      rows: The rows of the strips.
      strip: The index of the strips in their rows.
    """
    scales = []
    for x, (to, i) in zip(arrays, _pairs(groups, count), strict=True):
        codes, scale = encode_groups(decode(x), _CODES)
        at = _index(rows, i, strip)
        mosaic.store(to.codes.at[at], codes)
        mosaic.store(to.scale.at[at], scale)
        scales.append(scale.astype(jnp.float32))
    return scales


def _of_rows(strips: list[Array]) -> Array:
    """Returns the bits of the amax of each row."""
    bits = functools.reduce(jnp.maximum, map(magnitude_bits, strips))
    while bits.ndim > 1:
        bits = jnp.max(bits, axis=bits.ndim - 1)
    return bits
