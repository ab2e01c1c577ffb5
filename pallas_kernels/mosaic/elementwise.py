"""The engine of elementwise kernels: every array is read once and written once.

Arrays are seen as [rows, parts, groups, group]. A thread block reads a few strips of
them, 8 neighbours a lane, applies a function to each, in float32 registers, and
encodes what it returns. All but transposed copies goes between registers and global
memory directly, and many thread blocks a multiprocessor hide its latency. For
transposed copies the copy engine brings tiles into shared memory, of which a lane has a
row, and stores its codes byte by byte; then it writes them out.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import (
    LANES,
    encode,
    encode_groups,
    largest_of,
    strip_layout,
)
from pallas_kernels.mosaic.strips import Encoding, Tuning, Walk
from pallas_kernels.numerics import GROUP, Groups, normal


class Encoded(NamedTuple):
    """What was written: arrays, or refs; None where not wanted."""

    wide: Any = None  # [rows, parts, n]
    groups: Any = None  # Of [rows, parts, n] and [rows, parts, n / group].
    row: Any = None  # [rows, parts, n]
    transposed: Any = None  # [parts, n, rows]
    maxima: Any = None  # [thread blocks]


@functools.partial(
    jax.jit,
    static_argnames=("fn", "name", "encoding", "more", "group", "parts", "tuning"),
)
def run(
    fn: Callable,
    operands: tuple[Array | Groups, ...],
    scale: Float[Array, ""] | None = None,
    more_scale: Float[Array, ""] | None = None,
    after: Array | None = None,
    *,
    name: str,
    encoding: Encoding,
    more: Encoding | None = None,
    group: int = GROUP,
    parts: int = 1,
    tuning: Tuning | None = None,
) -> list[Encoded]:
    """Applies `fn` to operands and encodes its values.

    Args:
      fn: Takes strips of the parts of all operands as they are stored, `Groups` where
        they are, and returns a float32 strip for each part of the values, and one more
        where that is wanted. Where codes are wanted and there is no scale it returns
        codes.
      operands: Arrays [rows, parts, n], groups of such, and scalars.
      scale: What `row` and `transposed` codes multiply with on the way back.
      more_scale: The same for `more`.
      after: What has to be there before, and is not read.
      name: The kernel's, in profiles.
      encoding: What is wanted of the parts.
      more: What is wanted of one more value, if there is one.
      group: Elements of a group, in operands and values.
      parts: Parts of the values.
      tuning: How to lay the kernel over the GPU.

    Returns:
      The parts as `encoding` has it, then what more there is.
    """
    rows, _, n = jax.tree.leaves(operands)[0].shape
    tuning = tuning or Tuning()
    if more is not None:  # All leave in tiles if some do.
        encoding = dataclasses.replace(encoding, tiles=encoding.tiles or more.tiles)
    walk = Walk.of((rows, parts, n // group, group), encoding, tuning)
    wanted = [(encoding, parts)] if more is None else [(encoding, parts), (more, 1)]
    out_type = [outputs(each, walk, count) for each, count in wanted]
    staged = encoding.tiles

    def view(x):
        if not x.ndim:
            return x.astype(jnp.float32).reshape(1)
        as_it_is = staged or x.shape[-1] != n
        return x if as_it_is else x.reshape(*x.shape[:-1], n // group, group)

    def kernel(operands, scales, _, out, tiles, stages=None):
        cta = lax.axis_index("cta")
        places = walk.indices(cta)
        sinks = [
            Sink(to, tiles[j], wanted[j][0], None if scale is None else scale[0])
            for j, (to, scale) in enumerate(zip(out, scales, strict=True))
        ]
        if staged:
            load, ahead = stages.strips(operands, walk, cta), 1
        else:
            load = [functools.partial(_loaded, operands, place) for place in places]
            ahead = walk.strips
        loaded = [list(strips()) for strips in load[:ahead]]
        for j, place in enumerate(places):
            loaded += [list(strips()) for strips in load[j + ahead :][:1]]
            values = fn(*loaded.pop(0))
            sinks[0].put(values[:parts], place)
            for sink in sinks[1:]:
                sink.put(values[parts:], place)
        for sink in sinks:
            sink.finish(walk, cta)

    @jax.custom_batching.sequential_vmap
    def launch(operands, scales, after):
        scratch = {"tiles": [scratch_of(each, walk, count) for each, count in wanted]}
        if staged:
            scratch["stages"] = Stages.of(operands, walk)
        (out,) = mosaic.kernel(
            kernel,
            out_type=(out_type,),
            kernel_name=name,
            grid=(walk.ctas,),
            grid_names=("cta",),
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(
                approx_math=True,  # Of `fn`; quantization has no such operations.
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # Nothing is read from where the same kernel writes.
                unsafe_no_auto_barriers=True,
            ),
        )(operands, scales, after)
        return out

    scales = [None if x is None else view(jnp.asarray(x)) for x in (scale, more_scale)]
    out = launch(jax.tree.map(view, operands), scales[: len(wanted)], after)
    return [_reshaped(x, (rows, -1, n)) for x in out]


def _reshaped(out: Encoded, shape: tuple[int, ...]) -> Encoded:
    """Arrays without an axis of groups."""
    wide, row = (None if x is None else x.reshape(shape) for x in (out.wide, out.row))
    groups = out.groups
    if groups is not None:
        groups = groups._replace(codes=groups.codes.reshape(shape))
    return out._replace(wide=wide, row=row, groups=groups)


def outputs(
    encoding: Encoding, walk: Walk, parts: int, ctas: int | None = None
) -> Encoded:
    """The shapes and dtypes of what is written, by `ctas` if not the walk's."""
    rows, groups, group = walk.rows, walk.groups, walk.group
    shape = (rows, parts, groups, group)
    if encoding.tiles:  # The copy engine has no use for groups.
        shape = (rows, parts, groups * group)

    def like(dtype, shape=shape):
        return None if dtype is None else jax.ShapeDtypeStruct(shape, dtype)

    in_groups = None
    if encoding.groups is not None:
        scale = like(jnp.bfloat16, (rows, parts, groups))
        in_groups = Groups(like(encoding.groups, (rows, parts, groups, group)), scale)
    return Encoded(
        wide=like(encoding.wide),
        groups=in_groups,
        row=like(encoding.row),
        transposed=like(encoding.transposed, (parts, groups * group, rows)),
        maxima=like(jnp.float32 if encoding.maxima else None, (ctas or walk.ctas,)),
    )


def scratch_of(encoding: Encoding, walk: Walk, parts: int) -> list[Encoded]:
    """For each part the tiles that the copy engine writes out."""
    if not encoding.tiles:
        return []
    columns = walk.columns * walk.group
    transposed = None
    if encoding.transposed is not None:
        transposed = plgpu.SMEM((columns, walk.strip_rows), encoding.transposed)

    def tile(dtype):
        return None if dtype is None else tile_of(dtype, walk)

    tiles = Encoded(
        wide=tile(encoding.wide),
        row=tile(encoding.row),
        transposed=transposed,
    )
    return [tiles] * parts


def tile_of(dtype: DTypeLike, walk: Walk) -> Any:
    """Shared memory of a tile, of which lanes have a row each."""
    columns, size = walk.columns * walk.group, jnp.dtype(dtype).itemsize
    transforms = ()
    if size > 1:  # Rows of codes are short: few of them share a bank.
        width = math.gcd(128 // size, columns, walk.groups * walk.group)
        transforms = (
            plgpu.TilingTransform((8, width)),
            plgpu.SwizzleTransform(width * size),
        )
    return plgpu.SMEM((walk.strip_rows, columns), dtype, transforms=transforms)


class Stages(NamedTuple):
    """Tiles of all operands in shared memory."""

    tiles: Any  # For each operand one for each part, none for scalars.
    barrier: Any

    @classmethod
    def of(cls, operands: Any, walk: Walk) -> "Stages":
        """What shared memory to allocate."""
        elements = [jax.tree.leaves(operand)[0] for operand in operands]
        tiles = [
            [tile_of(x.dtype, walk)] * x.shape[1] if x.ndim > 1 else []
            for x in elements
        ]
        barrier = plgpu.Barrier(num_arrivals=sum(map(len, tiles)))
        return cls(tiles, barrier)

    def strips(self, operands: Any, walk: Walk, cta: Array) -> list[Callable]:
        """What loads the strips of a thread block, as `_loaded` has each."""
        row, group = walk.start(cta)
        rows = pl.ds(row, walk.strip_rows)
        columns = pl.ds(group * walk.group, walk.columns * walk.group)
        elements = [jax.tree.leaves(operand)[0] for operand in operands]
        for x, tiles in zip(elements, self.tiles, strict=True):
            for part, tile in enumerate(tiles):
                place = (rows, part, columns)
                plgpu.copy_gmem_to_smem(x.at[place], tile, self.barrier)
        # While these are under way.
        scales = [
            [
                _scales(x.scale.at[rows, part], group, walk)
                for part in range(x.codes.shape[1])
            ]
            if isinstance(x, Groups)
            else []
            for x in operands
        ]
        plgpu.barrier_wait(self.barrier)
        loads = [[strips_of(tile) for tile in tiles] for tiles in self.tiles]

        def strips(j):
            for x, of_parts, of_groups in zip(elements, loads, scales, strict=True):
                if not of_parts:
                    yield x[0]
                for part, load in enumerate(of_parts):
                    strip = load[j]()
                    yield Groups(strip, of_groups[part][j]) if of_groups else strip

        return [functools.partial(strips, j) for j in range(walk.strips)]


def _scales(ref: Any, start: Array, walk: Walk) -> list[Array]:
    """For each strip of a tile the scales of its rows, of which a lane has one."""
    count = walk.columns
    # As many at once as are aligned: neighbouring lanes read far from each other.
    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE(math.gcd(count, walk.groups))
    of_rows = plgpu.load(ref.at[:, pl.ds(start, count)], layout=layout, optimized=False)
    of_rows = plgpu.layout_cast(
        of_rows.astype(jnp.float32), plgpu.Layout.TCGEN05_TMEM_NATIVE(1)
    )
    columns = [lax.slice(of_rows, (0, j), (LANES, j + 1)) for j in range(count)]
    return [jnp.sum(column, axis=1) for column in columns]


def strips_of(tile: Any) -> list[Callable[[], Array]]:
    """What loads the columns of a tile, in strips of 16."""
    size = jnp.dtype(tile.dtype).itemsize
    starts = range(0, tile.shape[1], GROUP)
    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE(GROUP // size)
    load = functools.partial(plgpu.load, layout=layout, optimized=False)
    if size == 1:
        return [lambda at=j: load(tile.at[:, pl.ds(at, GROUP)]) for j in starts]
    columns = load(tile)  # Swizzling keeps strips together.

    def strip(start):
        x = lax.slice(columns, (0, start), (LANES, start + GROUP))
        return plgpu.layout_cast(x, strip_layout((LANES, GROUP)))

    return [functools.partial(strip, j) for j in starts]


def _loaded(operands: Any, place: Callable) -> list[Array | Groups]:
    """A strip of each part of all operands."""

    def load(ref, part, shape):
        layout = strip_layout(shape)
        if len(ref.shape) < 4:  # A scale for each group.
            layout = layout.reduce(len(shape) - 1)
        return plgpu.load(ref.at[place(part)], layout=layout, optimized=False)

    strips = []
    for operand in operands:
        codes = jax.tree.leaves(operand)[0]
        if len(codes.shape) == 1:
            strips.append(codes[0])
            continue
        for part in range(codes.shape[1]):
            shape = codes.at[place(part)].shape
            strips.append(
                jax.tree.map(lambda ref, p=part, s=shape: load(ref, p, s), operand)
            )
    return strips


class Sink:
    """Encodes values strip by strip, and writes them."""

    def __init__(self, out: Encoded, scratch: Iterable, encoding: Encoding, scale):
        self._out = out
        self._scratch = list(scratch)
        self._encoding = encoding
        self._scale = scale
        self._tiles = {}  # Strips of a tile, by part, until it is complete.
        self._largest = None

    def put(self, values: Iterable[Array], place: Callable) -> None:
        """Writes a strip of every part."""
        for part, value in enumerate(values):
            self._put(value, part, place(part))

    def _put(self, value, part, index):
        out, encoding = self._out, self._encoding
        if encoding.maxima:
            largest = jnp.abs(value)
            if self._largest is not None:
                largest = jnp.maximum(self._largest, largest)
            self._largest = largest
        if out.groups is not None:
            codes, scale = encode_groups(value, encoding.groups)
            mosaic.store(out.groups.codes.at[index], codes)
            mosaic.store(out.groups.scale.at[index], scale)
        if out.wide is not None:
            self._write("wide", value.astype(encoding.wide), part, index)
        dtype = encoding.row if encoding.transposed is None else encoding.transposed
        if dtype is None:
            return
        codes = value
        if self._scale is not None:
            codes = value if encoding.denormals else normal(value)
            codes = encode(codes, self._scale, dtype)
        if out.row is not None:
            self._write("row", codes, part, index)
        if out.transposed is not None:
            self._transpose(codes, part)

    def _write(self, name, strip, part, index):
        if not self._encoding.tiles:
            mosaic.store(getattr(self._out, name).at[index], strip)
            return
        strips = self._tiles.setdefault((part, name), [])
        if strip.dtype.itemsize == 1:
            columns = pl.ds(len(strips) * GROUP, GROUP)
            mosaic.store(self._scratch[part].row.at[:, columns], strip)
            strip = None
        else:
            # Vectors of 16 bytes, which swizzling keeps together.
            vector = GROUP // strip.dtype.itemsize
            strip = plgpu.layout_cast(strip, plgpu.Layout.TCGEN05_TMEM_NATIVE(vector))
        strips.append(strip)

    def _transpose(self, codes, part):
        done = self._tiles.setdefault((part, "transposed"), [])
        to = self._scratch[part].transposed.at[pl.ds(len(done) * GROUP, GROUP)]
        bytes_of_lane = plgpu.layout_cast(codes, plgpu.Layout.TCGEN05_TMEM_NATIVE(1))
        mosaic.store(to.transpose((1, 0)), bytes_of_lane)
        done.append(None)

    def finish(self, walk: Walk, cta: Array, first_part: Array | int = 0) -> None:
        """Writes what thread blocks have one of; its parts start at `first_part`."""
        if self._largest is not None:
            largest = largest_of([self._largest], self._encoding.wide)
            self._out.maxima[lax.axis_index("cta")] = largest
        if not self._tiles:
            return
        for (part, name), strips in self._tiles.items():
            if strips[0] is not None:
                tile = getattr(self._scratch[part], name)
                tile[...] = jnp.concatenate(strips, axis=1)
        plgpu.commit_smem()
        row, group = walk.start(cta)
        rows = pl.ds(row, walk.strip_rows)
        columns = pl.ds(group * walk.group, walk.columns * walk.group)
        for part, name in self._tiles:
            at = first_part + part
            place = (at, columns, rows) if name == "transposed" else (rows, at, columns)
            to = getattr(self._out, name).at[place]
            plgpu.copy_smem_to_gmem(getattr(self._scratch[part], name), to)
        plgpu.wait_smem_to_gmem(0)
