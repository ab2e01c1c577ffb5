"""The kernel that quantizes with per-token scales, computed or given, in one pass."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import saturated, scale_of_bits
from pallas_kernels.mosaic.rows import Row, Rows, Share, Tuning, reduced
from pallas_kernels.numerics import GROUP, magnitude_bits, normal, reciprocal


@functools.partial(jax.jit, static_argnames=("dtype", "tuning"))
def run(
    x: Float[Array, "tokens n"],
    inverse: Float[Array, " tokens"] | None,
    after: Array | None,
    *,
    dtype: DTypeLike,
    tuning: Tuning,
) -> tuple[Float[Array, "tokens n"], Float[Array, " tokens"] | None]:
    """Returns the codes of x / scale and the per-token scales.

    See `quantize_rows` for the scales. With `inverse`, the reciprocals of given scales,
    the function returns the codes of x * inverse and None. `after` is not read.
    """
    tokens, n = x.shape
    tiles = Row(n=n)
    rows = Rows(x.reshape(-1, GROUP))
    share = Share.of(rows, n, tuning)

    def kernel(rows, known, _, out):
        codes, scales = out

        def with_known(row, index, _):
            factor = known[index]
            for tile in tiles.tiles:
                value = normal(tiles.load(row.x, tile)) * factor
                to = tiles.tile(share.row(codes, index), tile)
                mosaic.store(to, saturated(value, dtype))

        def with_own(row, index, _):
            x = [normal(tiles.load(row.x, tile)) for tile in tiles.tiles]
            bits = reduced(jnp.maximum, jnp.max, map(magnitude_bits, x))
            # Mosaic computes with reinterpreted bits of arrays, but not of scalars.
            scale = scale_of_bits(jnp.broadcast_to(bits, tiles.shape(0)), dtype)
            inverse = reciprocal(scale)[0, 0]
            scales[index] = scale[0, 0]
            for tile in tiles.tiles:
                # Rounding the scale leaves values at most a percent above the largest
                # code. They round to that code, so saturation is not needed.
                to = tiles.tile(share.row(codes, index), tile)
                mosaic.store(to, (x[tile] * inverse).astype(dtype))

        share.over(with_own if known is None else with_known, rows)

    scales = jax.ShapeDtypeStruct((tokens,), jnp.float32) if inverse is None else None
    outputs = jax.ShapeDtypeStruct(rows.x.shape, dtype), scales
    operands = rows, inverse, after
    codes, scales = share.launch("quantize_rows", kernel, outputs, *operands)
    return codes.reshape(x.shape), scales
