"""The kernel of gated activations with per-token scales, for rows that a warp holds.

A thread block has four rows, and each of its warps one of them in registers. So lanes
load 16 bytes at once of rows of 256 elements or more, and find the row's amax within
their warp.
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
from pallas_kernels.mosaic.codec import (
    decode,
    encode_groups,
    floats,
    strip_layout,
)
from pallas_kernels.numerics import GROUP, magnitude_bits, reciprocal, row_scale
from pallas_kernels.ops.gate.reference import Gated

_CODES = jnp.float8_e4m3fn  # The dtype of groups that are kept.
_WARPS = 4
_SHAPE = (_WARPS, 16, GROUP)  # Of a strip: 8 neighbours of a row for each lane.
_LAYOUT = strip_layout(_SHAPE)
_STEP = 16 * GROUP
_LONGEST = 4 * _STEP  # The longest row that has place in the registers of a warp.


def takes(tokens: int, n: int) -> bool:
    """Returns whether the kernel can take `tokens` rows of `n`."""
    return tokens >= _WARPS and not n % _STEP and n <= _LONGEST


def run(fn: Callable, outputs: Gated, operands: tuple[Any, ...]) -> Gated:
    """Runs the kernel; see `kernel.run`. Arrays are [tokens, parts, groups, 16]."""
    tokens, _, groups, _ = outputs.values.shape
    parts = jax.tree.leaves(operands)[0].shape[1]
    strips = range(groups // _SHAPE[1])

    def kernel(operands, out):
        # The last two thread blocks may overlap.
        first = jnp.minimum(lax.axis_index("cta") * _WARPS, tokens - _WARPS)
        rows = pl.ds(first, _WARPS)

        def place(strip, part):
            return rows, part, pl.ds(strip * _SHAPE[1], _SHAPE[1])

        def load(x, strip, part):
            def load(ref):
                layout = _LAYOUT if len(ref.shape) == 4 else _LAYOUT.reduce(2)
                x = ref.at[place(strip, part)]
                return plgpu.load(x, layout=layout, optimized=False)

            return jax.tree.map(load, x)

        pairs = [(i, part) for i in range(len(operands)) for part in range(parts)]
        # All loads are issued before the first one is needed, so that their latencies
        # overlap.
        loaded = [[load(operands[i], strip, p) for i, p in pairs] for strip in strips]
        values, scales = [], []
        for strip, arrays in zip(strips, loaded, strict=True):
            (value,) = fn(*arrays)
            values.append(value)
            if out.groups is None:
                continue
            for (i, part), x in zip(pairs, arrays, strict=True):
                at, (codes, scale) = (
                    place(strip, part),
                    encode_groups(decode(x), _CODES),
                )
                mosaic.store(out.groups[i].codes.at[at], codes)
                mosaic.store(out.groups[i].scale.at[at], scale)
                scales.append(scale)
        scale = row_scale(floats(_of_rows(values)), out.values.dtype)
        mosaic.store(out.scale.at[rows], scale)
        if out.groups is not None:
            largest = _of_rows([decode(scale) for scale in scales])
            mosaic.store(out.largest_scale.at[rows], floats(largest))
        inverse = lax.broadcast_in_dim(reciprocal(scale), _SHAPE, (0,))
        inverse = plgpu.layout_cast(inverse, _LAYOUT)
        for strip, value in zip(strips, values, strict=True):
            to = out.values.at[place(strip, 0)]
            # No value exceeds the amax, so the cast need not saturate.
            mosaic.store(to, (value * inverse).astype(to.dtype))

    (out,) = mosaic.kernel(
        kernel,
        out_type=(outputs,),
        kernel_name="gated",
        grid=(pl.cdiv(tokens, _WARPS),),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # This affects only `fn`.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # The kernel loads from no memory that it stores to.
            unsafe_no_auto_barriers=True,
        ),
    )(operands)
    return out


def _of_rows(strips: list[Array]) -> Array:
    """Returns the bits of the amax of each row."""
    bits = functools.reduce(jnp.maximum, map(magnitude_bits, strips))
    while bits.ndim > 1:
        bits = jnp.max(bits, axis=bits.ndim - 1)
    return bits
