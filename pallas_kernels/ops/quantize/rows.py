"""The kernel that quantizes rows, each with a scale of its own, in one pass."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import scale_of_bits
from pallas_kernels.mosaic.rows import Row, Rows, Share, Tuning, reduced
from pallas_kernels.numerics import GROUP, magnitude_bits, normal, reciprocal


@functools.partial(jax.jit, static_argnames=("dtype", "tuning"))
def run(
    x: Float[Array, "tokens n"], *, dtype: DTypeLike, tuning: Tuning
) -> tuple[Float[Array, "tokens n"], Float[Array, " tokens"]]:
    """The codes of rows, and their scales."""
    tokens, n = x.shape
    tiles = Row(n=n)
    rows = Rows(x.reshape(-1, GROUP))
    share = Share.of(rows, n, tuning)

    def kernel(rows, out):
        codes, scales = out

        def row(row, index, _):
            x = [normal(tiles.load(row.x, tile)) for tile in tiles.tiles]
            bits = reduced(jnp.maximum, jnp.max, map(magnitude_bits, x))
            # Bits of arrays, not of scalars, are taken for floats.
            scale = scale_of_bits(jnp.broadcast_to(bits, tiles.shape(0)), dtype)
            inverse = reciprocal(scale)[0, 0]
            scales[index] = scale[0, 0]
            for tile in tiles.tiles:
                # Nothing to saturate: at most a percent is beyond the largest code.
                to = tiles.tile(share.row(codes, index), tile)
                mosaic.store(to, (x[tile] * inverse).astype(dtype))

        share.over(row, rows)

    outputs = (
        jax.ShapeDtypeStruct(rows.x.shape, dtype),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    codes, scales = share.launch("quantize_rows", kernel, outputs, rows)
    return codes.reshape(x.shape), scales
