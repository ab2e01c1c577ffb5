"""The kernel that lists the tiles of grouped rows, for Hopper GPUs.

XLA would list the tiles in five kernels, which take longer than the epilogues of the
fastest matmuls. Here each lane has a tile, and goes through all groups to find the
tile's group.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES
from pallas_kernels.ops.grouped_matmul.tiles import ROWS, GroupTiles, listed_tiles


@functools.partial(jax.jit, static_argnames=("rows", "height"))
def run(group_sizes: Int[Array, " groups"], *, rows: int, height: int) -> GroupTiles:
    """Returns the tiles of grouped rows, as `tiles_in_jnp` does."""
    count = listed_tiles(rows, len(group_sizes), height)
    line = jax.ShapeDtypeStruct((count,), jnp.int32)
    totals = jax.ShapeDtypeStruct((2,), jnp.int32)
    *lines, totals = mosaic.kernel(
        functools.partial(_kernel, rows, height),
        out_type=(line, line, line, line, totals),
        kernel_name="group_tiles",
        grid=(count // LANES,),
        grid_names=("block",),
    )(group_sizes)
    group, row, first, end = lines
    return GroupTiles(
        group=group, row=row, first=first, end=end, totals=totals, height=height
    )


def _kernel(rows: int, height: int, group_sizes, *out) -> None:
    *lines, totals = out
    block, shape = lax.axis_index("block"), (LANES,)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=1)
    index = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    index = index + block * LANES

    def spread(x):
        return plgpu.layout_cast(jnp.full(shape, x, jnp.int32), layout)

    def add(group, carry):
        start, tiles_before, *values = carry
        end = lax.min(start + group_sizes[group], rows)
        base = lax.div(start, ROWS) * ROWS
        count = lax.div(end - base + height - 1, height)
        count = lax.select(end > start, count, 0)
        is_of = (index >= spread(tiles_before)) & (index < spread(tiles_before + count))
        row = spread(base) + (index - spread(tiles_before)) * height
        of_tile = (
            spread(group),
            jnp.minimum(row, spread(rows - height)),
            jnp.maximum(row, spread(start)),
            spread(end),
        )
        values = [jnp.where(is_of, x, y) for x, y in zip(of_tile, values, strict=True)]
        return end, tiles_before + count, *values

    zero = jnp.int32(0)
    none = (zero, zero, *[spread(zero)] * len(lines))
    end, count, *values = lax.fori_loop(0, group_sizes.shape[0], add, none)
    for line, value in zip(lines, values, strict=True):
        mosaic.store(line.at[pl.ds(block * LANES, LANES)], value)

    @pl.when(block == 0)
    def _():
        totals[0] = count
        totals[1] = end
