"""The engine of elementwise kernels, which read inputs and write outputs once.

Arrays are viewed as [rows, parts, groups, group]. A thread block reads a few strips of
them, applies a function to each strip in float32 registers, and encodes the results.

Without a transposed copy, a lane has 8 neighbours in a strip. Data goes directly
between registers and global memory, and many thread blocks per multiprocessor hide the
latency. With a transposed copy, the copy engine (TMA) brings tiles into shared memory
and each lane has one row of a tile. The lane stores its codes byte by byte into a
transposed tile, which the copy engine writes out.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES, strip_layout
from pallas_kernels.mosaic.sink import Encoded, Sink
from pallas_kernels.mosaic.strips import Blocks, Encoding, Tuning, Walk
from pallas_kernels.numerics import GROUP, Scaled

_ROWS_AT_ONCE = 32  # Rows that are copied after their indices were read.


@functools.partial(
    jax.jit,
    static_argnames=(
        *("fn", "name", "encoding", "more", "sums", "group", "parts", "apart"),
        "tuning",
    ),
)
def run(
    fn: Callable,
    operands: tuple[Array | Scaled, ...],
    scale: Float[Array, ""] | None = None,
    more_scale: Float[Array, ""] | None = None,
    after: Array | None = None,
    blocks: Blocks | None = None,
    *,
    name: str,
    encoding: Encoding,
    more: Encoding | None = None,
    sums: bool = False,
    group: int = GROUP,
    parts: int = 1,
    apart: bool = False,
    tuning: Tuning | None = None,
) -> list[Encoded]:
    """Computes the values `fn(*operands)` and encodes them.

    Args:
      fn: A function of strips. Its arguments are one strip per part of each operand, as
        stored: an array, or `Scaled`. It returns one float32 strip per part of the
        values, then an additional strip if `more` is given, and a strip to sum if
        `sums` is true. For codes without a scale, it returns the codes themselves.
      operands: Arrays [rows, parts, n], `Scaled` of such arrays, and scalars. With
        tiles also arrays [rows] with a number for each row.
      scale: The per-tensor scale of `row` and `transposed` codes, `value / scale`.
      more_scale: The per-tensor scale of the codes of the additional value.
      after: An array that must be computed before the kernel runs. It is not read.
      blocks: The blocks of rows, if there are tiles and rows are not read in order.
      name: The kernel's name in profiles.
      encoding: The outputs to write for the parts.
      more: The outputs to write for the additional value, if there is one.
      sums: Whether to return sums of rows, in as many parts as the kernel chooses.
      group: The number of elements of a group, in operands and values.
      parts: The number of parts of the values.
      apart: Whether each part has outputs of its own. Otherwise all parts share them.
      tuning: Tile sizes; None means the default.

    Returns:
      The outputs for the parts, then the outputs for the additional value and the
      sums, if any.
    """
    rows, _, n = jax.tree.leaves(operands)[0].shape
    tuning = tuning or Tuning()
    if more is not None:  # The parts use tiles if the additional value does.
        encoding = dataclasses.replace(encoding, tiles=encoding.tiles or more.tiles)
    count = None if blocks is None else len(blocks.source)
    walk = Walk.of((rows, parts, n // group, group), encoding, tuning, count)
    requests = [(encoding, 1)] * parts if apart else [(encoding, parts)]
    scales = [scale] * len(requests)
    if more is not None:
        requests, scales = [*requests, (more, 1)], [*scales, more_scale]
    if sums:
        requests, scales = [*requests, (Encoding(sums=True), 1)], [*scales, None]
    out_type = [outputs(each, walk, count) for each, count in requests]
    staged = encoding.tiles

    def view(x):
        if not x.ndim:
            return x.astype(jnp.float32).reshape(1)
        as_it_is = staged or x.shape[-1] != n
        return x if as_it_is else x.reshape(*x.shape[:-1], n // group, group)

    def kernel(operands, scales, _, blocks, out, tiles, stages=None):
        cta = lax.axis_index("cta")
        places = walk.indices(cta, blocks)
        valid = _valid(walk, cta, blocks)
        sinks = [
            Sink(to, tile, each, None if scale is None else scale[0], valid)
            for to, tile, (each, _), scale in zip(
                out, tiles, requests, scales, strict=True
            )
        ]
        if staged:
            load, ahead = stages.strips(operands, walk, cta, blocks), 1
        else:
            # All strips are loaded before the first one is computed, so that their
            # latencies overlap.
            load = [
                functools.partial(_loaded, operands, index_of) for index_of in places
            ]
            ahead = walk.strips
        loaded = [list(strips()) for strips in load[:ahead]]
        for j, index_of in enumerate(places):
            loaded += [list(strips()) for strips in load[j + ahead :][:1]]
            values = iter(fn(*loaded.pop(0)))
            for sink, (_, count) in zip(sinks, requests, strict=True):
                sink.put(itertools.islice(values, count), index_of)
        for sink in sinks:
            sink.finish(walk, cta, blocks=blocks)

    @jax.custom_batching.sequential_vmap
    def launch(operands, scales, after, blocks):
        scratch = {"tiles": [scratch_of(each, walk, count) for each, count in requests]}
        if staged:
            indexed = blocks is not None and blocks.index is not None
            scratch["stages"] = Stages.of(operands, walk, indexed)
        (out,) = mosaic.kernel(
            kernel,
            out_type=(out_type,),
            kernel_name=name,
            grid=(walk.ctas,),
            grid_names=("cta",),
            scratch_types=scratch,
            compiler_params=mosaic.by_lanes(approx_math=True),
        )(operands, scales, after, blocks)
        return out

    scales = [None if x is None else view(jnp.asarray(x)) for x in scales]
    out = launch(jax.tree.map(view, operands), scales, after, blocks)
    return [_reshaped(x, (rows, -1, n)) for x in out]


def _valid(walk: Walk, cta: Array, blocks: Blocks | None) -> Array | None:
    """Returns a bit mask of a strip's codes that are in the block, or None for all."""
    if blocks is None or blocks.count is None:
        return None
    shape = walk.strip_rows, walk.group
    layout = strip_layout(shape)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    count = jnp.broadcast_to(blocks.count[lax.div(cta, walk.across)], shape)
    return jnp.where(row < count, jnp.int32(-1), jnp.int32(0))


def _reshaped(out: Encoded, shape: tuple[int, ...]) -> Encoded:
    """Reshapes outputs to `shape`, [rows, parts, n], without an axis of groups."""
    wide, row = (None if x is None else x.reshape(shape) for x in (out.wide, out.row))
    groups = out.groups
    if groups is not None:
        groups = groups._replace(codes=groups.codes.reshape(shape))
    return out._replace(wide=wide, row=row, groups=groups)


def outputs(
    encoding: Encoding, walk: Walk, parts: int, ctas: int | None = None
) -> Encoded:
    """Returns the outputs' shapes and dtypes.

    `ctas` is the number of thread blocks, if it is not `walk.ctas`.
    """
    rows, groups, group = walk.rows, walk.groups, walk.group
    shape = (rows, parts, groups, group)
    if encoding.tiles:  # The copy engine writes rows, without an axis of groups.
        shape = (rows, parts, groups * group)

    def like(dtype, shape=shape):
        return None if dtype is None else jax.ShapeDtypeStruct(shape, dtype)

    in_groups = None
    if encoding.groups is not None:
        scale = like(jnp.bfloat16, (rows, parts, groups))
        in_groups = Scaled(like(encoding.groups, (rows, parts, groups, group)), scale)
    return Encoded(
        wide=like(encoding.wide),
        groups=in_groups,
        row=like(encoding.row),
        transposed=like(
            encoding.transposed, (parts, groups * group, walk.transposed_columns)
        ),
        maxima=like(jnp.float32 if encoding.maxima else None, (ctas or walk.ctas,)),
        sums=like(jnp.float32 if encoding.sums else None, (walk.across, rows)),
    )


def scratch_of(encoding: Encoding, walk: Walk, parts: int) -> list[Encoded]:
    """Returns the shared memory tiles that the copy engine writes out, per part."""
    if not encoding.tiles:
        return []
    columns = walk.columns * walk.group
    transposed = None
    if encoding.transposed is not None:
        transposed = plgpu.SMEM((columns, walk.strip_rows), encoding.transposed)

    def tile(dtype):
        return None if dtype is None else tile_of(dtype, walk)

    tiles = Encoded(
        wide=tile(encoding.wide), row=tile(encoding.row), transposed=transposed
    )
    return [tiles] * parts


def tile_of(dtype: DTypeLike, walk: Walk) -> Any:
    """Returns the shared memory of a tile; each lane has one row of it."""
    columns, size = walk.columns * walk.group, jnp.dtype(dtype).itemsize
    transforms = ()
    # Rows of 1-byte codes are so short that few of them share a bank. Other rows are
    # swizzled against bank conflicts.
    if size > 1:
        width = math.gcd(128 // size, columns, walk.groups * walk.group)
        transforms = (plgpu.SwizzleTransform(width * size),)
        # Tiles of 8 rows would begin at multiples of 8, and blocks begin at any row.
        if walk.blocks is None:
            transforms = (plgpu.TilingTransform((8, width)), *transforms)
    return plgpu.SMEM((walk.strip_rows, columns), dtype, transforms=transforms)


class Stages(NamedTuple):
    """Tiles of all operands in shared memory, and the barrier for copies to them."""

    tiles: Any  # A list per operand with a tile per part; empty for scalars.
    barrier: Any

    @classmethod
    def of(cls, operands: Any, walk: Walk, indexed: bool = False) -> "Stages":
        """Returns the shared memory to allocate.

        Rows are copied one by one if they are `indexed`.
        """
        elements = [jax.tree.leaves(operand)[0] for operand in operands]
        tiles = [
            [tile_of(x.dtype, walk)] * x.shape[1] if x.ndim > 1 else []
            for x in elements
        ]
        copies = walk.strip_rows if indexed else 1
        barrier = plgpu.Barrier(num_arrivals=copies * sum(map(len, tiles)))
        return cls(tiles, barrier)

    def strips(
        self, operands: Any, walk: Walk, cta: Array, blocks: Blocks | None = None
    ) -> list[Callable]:
        """Starts the copies and returns one function per strip that loads it.

        Each function yields what `_loaded` returns.
        """
        row, group = walk.start(cta, blocks)
        rows = pl.ds(row, walk.strip_rows)
        columns = pl.ds(group * walk.group, walk.columns * walk.group)
        elements = [jax.tree.leaves(operand)[0] for operand in operands]
        if blocks is not None and blocks.index is not None:
            self._copy_rows(elements, blocks.index, row, columns)
        else:
            self._copy(elements, rows, columns)
        # The scales are loaded while the copies are in flight.
        scales = [
            [_scales(x.scale.at[rows, i], group, walk) for i in range(x.codes.shape[1])]
            if isinstance(x, Scaled)
            else []
            for x in operands
        ]
        of_rows = [
            _of_rows(x.at[rows], (walk.strip_rows, walk.group))
            if x.shape == (walk.rows,)
            else None
            for x in elements
        ]
        plgpu.barrier_wait(self.barrier)
        loads = [[strips_of(tile) for tile in tiles] for tiles in self.tiles]

        def strips(j):
            for x, of_parts, of_groups, of_row in zip(
                elements, loads, scales, of_rows, strict=True
            ):
                if not of_parts:
                    yield x[0] if of_row is None else of_row
                for i, load in enumerate(of_parts):
                    strip = load[j]()
                    yield Scaled(strip, of_groups[i][j]) if of_groups else strip

        return [functools.partial(strips, j) for j in range(walk.strips)]

    def _copy(self, arrays: Any, row: Any, columns: Any, to: Any = slice(None)) -> None:
        """Starts the copies of arrays' rows and columns to the rows `to` of tiles.

        `row` is the index of one row, or a slice.
        """
        for x, tiles in zip(arrays, self.tiles, strict=True):
            for i, tile in enumerate(tiles):
                part = x.at[row, i, columns]
                plgpu.copy_gmem_to_smem(part, tile.at[to], self.barrier)

    def _copy_rows(self, arrays: Any, index: Any, row: Array, columns: Any) -> None:
        """Starts a copy of each row that `index` lists, from position `row` on."""

        @pl.loop(0, LANES // _ROWS_AT_ONCE)
        def _(number):
            first = number * _ROWS_AT_ONCE
            # Indices are read before the first copy, so that their latencies overlap.
            sources = [index[row + first + j] for j in range(_ROWS_AT_ONCE)]
            for j, source in enumerate(sources):
                self._copy(arrays, source, columns, first + j)


def _of_rows(ref: Any, shape: tuple[int, int]) -> Array:
    """Loads one number per row, and broadcasts it to a strip of `shape`."""
    layout = strip_layout(shape)
    of_lanes = plgpu.load(ref, layout=layout.reduce(1), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(of_lanes, shape, (0,)), layout)


def _scales(ref: Any, start: Array, walk: Walk) -> list[Array]:
    """Returns the scales of each strip of a tile; each lane has its row's scale."""
    count = walk.columns
    # Neighbouring lanes read different rows, far apart in memory. So each lane reads as
    # many scales at once as alignment allows.
    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE(math.gcd(count, walk.groups))
    of_rows = plgpu.load(ref.at[:, pl.ds(start, count)], layout=layout, optimized=False)
    of_rows = plgpu.layout_cast(
        of_rows.astype(jnp.float32), plgpu.Layout.TCGEN05_TMEM_NATIVE(1)
    )
    columns = [lax.slice(of_rows, (0, j), (LANES, j + 1)) for j in range(count)]
    # The sum removes an axis of length 1.
    return [jnp.sum(column, axis=1) for column in columns]


def strips_of(tile: Any) -> list[Callable[[], Array]]:
    """Returns functions that load a tile's strips, each of 16 columns."""
    size = jnp.dtype(tile.dtype).itemsize
    starts = range(0, tile.shape[1], GROUP)
    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE(GROUP // size)
    load = functools.partial(plgpu.load, layout=layout, optimized=False)
    if size == 1:
        return [lambda at=j: load(tile.at[:, pl.ds(at, GROUP)]) for j in starts]
    # A swizzled tile is loaded whole and cut into strips in registers.
    columns = load(tile)

    def strip(start):
        x = lax.slice(columns, (0, start), (LANES, start + GROUP))
        return plgpu.layout_cast(x, strip_layout((LANES, GROUP)))

    return [functools.partial(strip, j) for j in starts]


def _loaded(operands: Any, index_of: Callable) -> list[Array | Scaled]:
    """Loads a strip of each part of all operands from global memory."""

    def load(ref, i, shape):
        layout = strip_layout(shape)
        if len(ref.shape) < 4:  # The ref holds one scale per group.
            layout = layout.reduce(len(shape) - 1)
        return plgpu.load(ref.at[index_of(i)], layout=layout, optimized=False)

    strips = []
    for operand in operands:
        codes = jax.tree.leaves(operand)[0]
        if len(codes.shape) == 1:
            strips.append(codes[0])
            continue
        for i in range(codes.shape[1]):
            shape = codes.at[index_of(i)].shape
            strips.append(
                jax.tree.map(lambda ref, p=i, s=shape: load(ref, p, s), operand)
            )
    return strips
