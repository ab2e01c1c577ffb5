"""The kernel of matmuls that are grouped along m, for Hopper GPUs.

It is the dense matmul's kernel with another tile scheduler and another epilogue:

- The tiles along m are listed on the device (`GroupTiles`). Thread blocks read the list
  from global memory, where it stays in the L1 cache, and need not search for groups.
- b is read as one matrix [groups * n, k]. A tile reads the rows of its group.
- Subtiles at the border of a group are stored in parts of 32, 16, ... 1 rows.
- Rows after the last group become zeros.
- The amax of each row of a tile, if it is wanted, is stored at the tile's number. Rows
  of other groups count as zeros.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.ops.grouped_matmul.tiles import ROWS, GroupTiles, most_tiles
from pallas_kernels.ops.matmul import kernel as matmul_kernel
from pallas_kernels.ops.matmul.plan import PIECE_M, Product, Tuning, tile_k
from pallas_kernels.ops.matmul.tile import (
    Tile,
    larger,
    load_columns,
    load_rows,
    row_maxima,
)
from pallas_kernels.ops.matmul.walk import LastStripe, Place, Stages, Walk, in_stripes


class Scales(NamedTuple):
    """The scales of a grouped matmul: each that is not None multiplies the result.

    Attributes:
      rows: A scale for each row of a, float32 [rows].
      groups: A scale for each group, float32 [groups].
      columns: A scale for each group and column, float32 [groups * n].
    """

    rows: Any = None
    groups: Any = None
    columns: Any = None


# `jit` traces the kernel once for all calls with the same shapes.
@functools.partial(jax.jit, static_argnames=("product", "tuning", "sms"))
def run(
    product: Product,
    a: Array,
    b: Array,
    scales: Scales,
    tiles: GroupTiles,
    tuning: Tuning,
    sms: int,
) -> tuple[Array, Array | None]:
    """Computes the grouped matmul [rows, n] of a [rows, k] and b [groups, n, k].

    Tiles must have the height `tuning.tile_m`.

    Returns:
      The result; and the amax of each row of each listed tile, a float32 vector,
      rounded like the result, or None if it is not wanted.
    """
    (rows, k), (groups, n, _) = a.shape, b.shape
    columns = -(-n // tuning.span[1])
    most = most_tiles(rows, groups, tuning.tile_m) * columns
    of_tiles = len(tiles.group), -(-n // tuning.tile_n), tuning.tile_m
    maxima = jax.ShapeDtypeStruct(of_tiles, jnp.float32) if product.maxima else None
    y, maxima = mosaic.kernel(
        functools.partial(_kernel, product, tuning, n),
        out_type=(jax.ShapeDtypeStruct((rows, n), product.out_dtype), maxima),
        scratch_types=matmul_kernel.scratch(
            product, tuning, a.dtype, b.dtype, any_row=True
        ),
        kernel_name="grouped_matmul",
        **matmul_kernel.settings(tuning, most, sms),
    )(a, b.reshape(groups * n, k), scales, tiles)
    if maxima is not None:
        # Tiles after the last one are not computed.
        is_tile = jnp.arange(len(maxima)) < tiles.totals[0]
        maxima = jnp.where(is_tile[:, None, None], maxima, 0)
        maxima = matmul_kernel.stored_maxima(product, maxima)
    return y, maxima


def _kernel(
    product: Product, t: Tuning, n: int, a, b, scales, tiles, out, maxima,
    a_smem, b_smem, out_smem, filled, free,
) -> None:  # fmt: skip
    warpgroup = lax.axis_index("warpgroup")
    rows, k = a.shape
    depth = tile_k(a.dtype)
    walk = GroupedWalk(t, (rows, n, k), depth, tiles)

    def copies(step, place, stage, filled):
        of_step = pl.ds(step * depth, depth)
        parts = a.at[place.rows, of_step], b.at[place.columns, of_step]
        stage = a_smem.at[stage], b_smem.at[stage]
        matmul_kernel.copy_operands(t, parts, stage, filled)

    stages = Stages(walk, a_smem, b_smem, filled, free, None, copies)
    stages.fill()
    tile = GroupedTile(product, t, stages, scales, None, (), (out,), maxima, out_smem)
    matmul_kernel.compute_tiles(walk, tile, warpgroup)
    tile.store_zeros(tiles.totals[1])


@dataclasses.dataclass(frozen=True)
class GroupedPlace(Place):
    """The place of a group's tile; `columns` are the tile's rows of b [groups * n, k].

    Attributes:
      number: The tile's number in the list.
      group: The tile's group.
      column: The tile's first column of the result.
      first: The first row to store. Rows before belong to another group or tile.
      end: One more than the last row of the group.
    """

    number: Any
    group: Any
    column: Any
    first: Any
    end: Any


class GroupedWalk(Walk):
    """A tile scheduler with a list of the tiles along m on the device."""

    def __init__(
        self,
        tuning: Tuning,
        shape: tuple[int, int, int],
        tile_k: int,
        tiles: GroupTiles,
    ) -> None:
        super().__init__(tuning, shape, tile_k)
        self._listed = tiles
        count, width = tiles.totals[0], tuning.width
        self._columns = self.grid[1]
        self.total = count * self._columns
        full = lax.div(count, width)
        fewer = count - full * width
        # A division by a variable is a function call, and with a call only one
        # wgmma runs at a time.
        share = jnp.float32(1)
        for rows in range(2, width):
            share = jnp.where(fewer == rows, 1 / rows, share)
        self._last = LastStripe(full, fewer, share)

    def place(self, number: Array) -> GroupedPlace:
        """Returns the place of a tile of this thread block."""
        t, (_, n), listed = self.tuning, self.shape, self._listed
        index = lax.axis_index("sm") + number * lax.axis_size("sm")
        at, column = in_stripes(index, self._columns, t.width, self._last)
        if t.cluster:
            # The two thread blocks of a cluster have neighbouring tiles.
            column = 2 * column + lax.axis_index("pair")
        column = lax.min(column * t.tile_n, n - t.tile_n)
        group = listed.group[at]
        # The copy engine reads whole groups of 8 rows.
        row = lax.div(listed.row[at], ROWS) * ROWS
        return GroupedPlace(
            rows=pl.ds(row, t.tile_m),
            columns=pl.ds(group * n + column, t.tile_n),
            number=at,
            group=group,
            column=column,
            first=listed.first[at],
            end=listed.end[at],
        )


@dataclasses.dataclass(frozen=True)
class GroupedTile(Tile):
    """A warpgroup's part of a tile of one group.

    The field `a_scale` holds all scales, as `Scales`.
    """

    def _scaling(self, place: GroupedPlace, band):
        """Returns a function that scales the subtile at row i, column j of the tile."""
        scales, store_n = self.a_scale, self.tuning.store_n(self.product)
        of_group = None if scales.groups is None else scales.groups[place.group]
        of_rows: dict[int, Array] = {}
        if scales.rows is not None:
            a_scale = scales.rows.at[place.rows].at[band]
            starts = range(0, self.tuning.height, PIECE_M)
            of_rows = {i: load_rows(a_scale.at[pl.ds(i, PIECE_M)]) for i in starts}
            if of_group is not None:
                of_rows = {i: scale * of_group for i, scale in of_rows.items()}

        def scaled(value, i, j):
            if of_rows:
                value = value * lax.broadcast_in_dim(of_rows[i], value.shape, (0,))
            elif of_group is not None:
                value = value * of_group
            if scales.columns is None:
                return value
            of_columns = scales.columns.at[place.columns].at[pl.ds(j, store_n)]
            of_columns = load_columns(of_columns)
            return value * lax.broadcast_in_dim(of_columns, value.shape, (1,))

        return scaled

    def _store(self, pieces, addends, place: GroupedPlace, band) -> None:
        """Stores the group's rows of the epilogue subtiles, and their amaxes.

        The arguments are as in `Tile._store`; `addends` is not used.
        """
        smem = self.out_smem.at[lax.axis_index("warpgroup")]
        largest = None
        for number, (i, j, value) in enumerate(pieces):
            row = place.rows.start + band.start + i
            first = lax.clamp(0, place.first - row, PIECE_M)
            end = lax.clamp(0, place.end - row, PIECE_M)
            if self.product.maxima:
                largest = larger(largest, value, j)
                if j + value.shape[1] == self.tuning.tile_n:
                    self._store_maxima(largest, place, band, i, first, end)
            staged = smem.at[number % smem.shape[0]]
            # The copy engine must have read the previous subtile of this buffer.
            plgpu.wait_smem_to_gmem(smem.shape[0] - 1, wait_read_only=True)
            staged[...] = value.astype(self.product.out_dtype)
            plgpu.commit_smem()
            self._store_rows(staged, row, place.column + j, first, end - first)

    def _store_maxima(self, largest, place, band, i, first, end) -> None:
        """Stores the amax of each row of a subtile; 0 for rows of other groups.

        Args:
          largest: The largest magnitudes of the subtiles of these rows, elementwise.
          place: The place of the tile.
          band: The rows of this warpgroup in the tile.
          i: The first row of the subtile in the band.
          first: The first row of the group in the subtile.
          end: One more than the last row of the group in the subtile.
        """
        column = pl.cdiv(place.column, self.tuning.tile_n)
        to = self.maxima.at[place.number, column].at[band].at[pl.ds(i, PIECE_M)]
        sizes = row_maxima(largest)
        layout = plgpu.Layout.WGMMA.reduce(1)
        row = plgpu.broadcasted_iota(jnp.int32, sizes.shape, 0, layout=layout)
        mosaic.store(to, jnp.where((row >= first) & (row < end), sizes, 0))

    def _store_rows(self, staged, row, column, first, count) -> None:
        """Stores `count` rows of a subtile, from row `first` on, as one commit group.

        Args:
          staged: The subtile in shared memory.
          row: The row of the result at which the subtile begins.
          column: The column of the result at which the subtile begins.
          first: The first row of the subtile to store.
          count: The number of rows; zero or a negative number stores nothing.
        """
        (out,) = self.out
        columns = pl.ds(column, staged.shape[1])

        def send(start, size):
            plgpu.copy_smem_to_gmem(
                staged.at[pl.ds(start, size)],
                out.at[pl.ds(row + start, size), columns],
                commit_group=False,
            )

        @pl.when(count == PIECE_M)
        def _():
            send(0, PIECE_M)

        @pl.when((count > 0) & (count < PIECE_M))
        def _():
            # Each bit of the count is a part to store.
            size, start = PIECE_M // 2, first
            while size:
                bit = lax.bitwise_and(count, jnp.int32(size))
                pl.when(bit != 0)(functools.partial(send, start, size))
                start, size = start + bit, size // 2

        plgpu.commit_smem_to_gmem_group()

    def store_zeros(self, first) -> None:
        """Stores this warpgroup's share of zeros in all rows from row `first` on."""
        rows, n = self.out[0].shape
        t, warpgroup = self.tuning, lax.axis_index("warpgroup")
        staged = self.out_smem.at[warpgroup].at[0]
        block, blocks = lax.axis_index("sm"), lax.axis_size("sm")
        if t.cluster:
            block, blocks = 2 * block + lax.axis_index("pair"), 2 * blocks
        worker, workers = block * t.warpgroups + warpgroup, blocks * t.warpgroups
        across = n // staged.shape[1]
        pieces = lax.div(rows - first + PIECE_M - 1, PIECE_M) * across

        @pl.when(worker < pieces)
        def _():
            zeros = jnp.zeros(staged.shape, self.product.out_dtype)
            staged[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            plgpu.commit_smem()

            @pl.loop(0, lax.div(pieces - worker + workers - 1, workers))
            def _(number):
                piece = worker + number * workers
                row = first + lax.div(piece, across) * PIECE_M
                column = lax.rem(piece, across) * staged.shape[1]
                count = lax.min(rows - row, PIECE_M)
                self._store_rows(staged, row, column, 0, count)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
