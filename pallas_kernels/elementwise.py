"""The engine of elementwise kernels: every array is read once and written once.

Arrays are seen as [rows, parts, groups, group]. A thread block reads a few strips of
them, 8 or 16 neighbours a lane, applies a function to each, in float32 registers, and
encodes what it returns. All but transposed copies goes between registers and global
memory directly, and many thread blocks a multiprocessor hide its latency. For
transposed copies a lane has a row, and stores its codes byte by byte into shared
memory, which the copy engine then writes out.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.codec import (
    GROUP,
    LANES,
    decode,  # noqa: F401
    encode,
    encode_groups,
    magnitude_bits,
    rounded,
    strip_layout,
    total_max,
)
from pallas_kernels.reference.quantize import Groups, normal

_STRIP = LANES * GROUP  # Elements, at most.
_ROWS = 16  # Of a strip of several rows, at most.
_ROW_GROUPS = 8  # Of each of these rows.
_COLUMNS = 64  # Of a tile for a transposed copy, at least.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How kernels are laid over the GPU.

    Attributes:
      elements: Of each array, what a lane reads before it computes.
      vector: Neighbours among these, 8 or 16. None means 8 where values of 16 bits or
        more are written, which then fill whole sectors of memory.
      columns: Of a tile of 128 rows, where a transposed copy is written; 64 or 128.
      ahead: Of these columns, how many are read before the first are computed with.
    """

    elements: int = 32
    vector: int | None = None
    columns: int = 64
    ahead: int = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """What is written of the values of a kernel; any of these.

    Attributes:
      wide: The values, as a dtype of 16 or 32 bits.
      groups: Codes of this dtype and a bfloat16 scale for each group.
      row: Codes of this dtype, of the given scale.
      transposed: The same, transposed.
      denormals: Whether these codes tell denormal values from zeros.
      maxima: Whether to write the largest magnitude of each thread block's values, as
        `wide` has them.
    """

    wide: DTypeLike | None = None
    groups: DTypeLike | None = None
    row: DTypeLike | None = None
    transposed: DTypeLike | None = None
    denormals: bool = False
    maxima: bool = False


class Encoded(NamedTuple):
    """What was written: arrays, or refs; None where not wanted."""

    wide: Any = None  # [rows, parts, n]
    groups: Any = None  # Of [rows, parts, n] and [rows, parts, n / group].
    row: Any = None  # [rows, parts, n]
    transposed: Any = None  # [parts, n, rows]
    maxima: Any = None  # [thread blocks]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """The strips of arrays [rows, parts, groups, group] that thread blocks handle.

    Thread blocks at the end overlap, and write the same where they do.

    Attributes:
      rows: All rows.
      groups: All groups of a row.
      group: Elements of a group.
      strip_rows: Rows of a strip.
      strip_groups: Groups of each of its rows.
      strips: Strips of a thread block, side by side.
      ahead: Strips that are read before the first is computed with.
    """

    rows: int
    groups: int
    group: int
    strip_rows: int
    strip_groups: int
    strips: int
    ahead: int

    @classmethod
    def of(cls, shape: tuple[int, ...], encoding: Encoding, tuning: Tuning) -> "Walk":
        """How to go over arrays of `shape`, [rows, parts, groups, group]."""
        rows, parts, groups, group = shape
        vector = tuning.vector or (GROUP if encoding.wide is None else GROUP // 2)
        strips = ahead = max(tuning.elements // vector, 1)
        strip_rows, strip_groups = vector, _ROW_GROUPS
        if encoding.transposed is not None:
            strip_rows, strip_groups = LANES, 1
            columns = tuning.columns if tuning.columns <= groups * group else _COLUMNS
            strips, ahead = columns // GROUP, max(tuning.ahead // GROUP, 1)
        elif rows == parts == 1:
            strip_rows, strip_groups = 1, LANES * vector // group
        return cls(
            rows=rows,
            groups=groups,
            group=group,
            strip_rows=strip_rows,
            strip_groups=strip_groups,
            strips=min(strips, max(groups // strip_groups, 1)),
            ahead=ahead,
        )

    @property
    def columns(self) -> int:
        """Groups of a row that a thread block handles."""
        return self.strips * self.strip_groups

    @property
    def ctas(self) -> int:
        """Thread blocks."""
        return -(-self.rows // self.strip_rows) * -(-self.groups // self.columns)

    def start(self, cta: Array) -> tuple[Array, Array]:
        """A thread block's first row and group."""
        across = -(-self.groups // self.columns)
        row = jnp.minimum(
            lax.div(cta, across) * self.strip_rows, self.rows - self.strip_rows
        )
        group = jnp.minimum(
            lax.rem(cta, across) * self.columns, self.groups - self.columns
        )
        return row, group

    def indices(self, cta: Array) -> list[Callable]:
        """For each strip, what takes a part to the strip's place in an array."""
        row, first = self.start(cta)

        def place(part, group):
            return _span(row, self.strip_rows), part, _span(group, self.strip_groups)

        starts = [first + j * self.strip_groups for j in range(self.strips)]
        return [functools.partial(place, group=group) for group in starts]


def _span(start: Array, size: int) -> Any:
    return start if size == 1 else pl.ds(start, size)


def obstacle(
    rows: int, parts: int, n: int, *, group: int = GROUP, transposed: bool = False
) -> str | None:
    """Why arrays [rows, parts, n] in groups are not for the kernels, if so."""
    if group % GROUP or group & (group - 1) or group > 256:
        return f"groups have 16, 32, 64, 128 or 256 elements, got {group}"
    if rows == parts == 1 and n < _STRIP:
        return f"it takes {_STRIP} elements or more, got {n}"
    if n % group:
        return f"the last axis must be a multiple of {group}, got {n}"
    if transposed:
        if rows < LANES or n < _COLUMNS:
            least = f"{LANES} rows of {_COLUMNS} elements or more"
            return f"a transposed copy takes {least}, got {rows} of {n}"
        if rows % GROUP:
            return f"a transposed copy takes a multiple of {GROUP} rows, got {rows}"
    elif rows * parts > 1 and (rows < _ROWS or n < _ROW_GROUPS * group):
        least = f"{_ROWS} rows of {_ROW_GROUPS * group} elements or more"
        return f"it takes {least}, got {rows} of {n}"
    return None


@functools.partial(
    jax.jit, static_argnames=("fn", "encoding", "group", "parts", "tuning")
)
def run(
    fn: Callable,
    operands: tuple[Array | Groups, ...],
    scale: Float[Array, ""] | None = None,
    *,
    encoding: Encoding,
    group: int = GROUP,
    parts: int = 1,
    tuning: Tuning | None = None,
) -> Encoded:
    """Applies `fn` to operands and encodes its values.

    Args:
      fn: Takes strips of the parts of all operands as they are stored, `Groups` where
        they are, and returns a float32 strip for each part of the values. Where codes
        are wanted and there is no scale it returns codes.
      operands: Arrays [rows, parts, n], groups of such, and scalars.
      scale: What `row` and `transposed` codes multiply with on the way back.
      encoding: What is wanted.
      group: Elements of a group, in operands and values.
      parts: Parts of the values.
      tuning: How to lay the kernel over the GPU.
    """
    rows, _, n = jax.tree.leaves(operands)[0].shape
    shape = (rows, parts, n // group, group)
    walk = Walk.of(shape, encoding, tuning or Tuning())
    outputs = _outputs(encoding, walk, parts)

    def view(x):
        if not x.ndim:
            return x.astype(jnp.float32).reshape(1)
        per_group = x.shape[-1] != n
        return x if per_group else x.reshape(*x.shape[:-1], n // group, group)

    def kernel(operands, scale, out, *scratch):
        cta = lax.axis_index("cta")
        scale = None if scale is None else scale[0]
        places = walk.indices(cta)
        sink = Sink(out, scratch, encoding, scale)
        ahead = walk.ahead
        loaded = [_loaded(operands, place) for place in places[:ahead]]
        for j, place in enumerate(places):
            loaded += [_loaded(operands, later) for later in places[j + ahead :][:1]]
            sink.put(fn(*loaded.pop(0)), place)
        sink.finish(walk, cta)

    @jax.custom_batching.sequential_vmap
    def launch(operands, scale):
        (out,) = plgpu.kernel(
            kernel,
            out_type=(outputs,),
            grid=(walk.ctas,),
            grid_names=("cta",),
            scratch_types=_scratch(encoding, walk, parts),
            compiler_params=plgpu.CompilerParams(
                approx_math=True,  # Of `fn`; quantization has no such operations.
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # Nothing is read from where the same kernel writes.
                unsafe_no_auto_barriers=True,
            ),
        )(operands, scale)
        return out

    operands = jax.tree.map(view, operands)
    scale = None if scale is None else view(jnp.asarray(scale))
    out = launch(operands, scale)
    arrays = [
        None if x is None else x.reshape(rows, parts, n) for x in (out.wide, out.row)
    ]
    groups, largest = out.groups, out.maxima
    if groups is not None:
        groups = Groups(groups.codes.reshape(rows, parts, n), groups.scale)
    if largest is not None:
        largest = lax.bitcast_convert_type(largest, jnp.float32)
    return Encoded(arrays[0], groups, arrays[1], out.transposed, largest)


def _outputs(encoding: Encoding, walk: Walk, parts: int) -> Encoded:
    rows, groups, group = walk.rows, walk.groups, walk.group
    shape = (rows, parts, groups, group)
    if encoding.transposed is not None:  # The copy engine has no use for groups.
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
        maxima=like(jnp.uint32 if encoding.maxima else None, (walk.ctas,)),
    )


def _scratch(encoding: Encoding, walk: Walk, parts: int) -> list[Encoded]:
    """For each part the tiles that the copy engine writes out."""
    if encoding.transposed is None:
        return []
    columns = walk.columns * walk.group

    def tile(dtype):
        if dtype is None:
            return None
        width = min(columns, 128 // jnp.dtype(dtype).itemsize)
        swizzle = width * jnp.dtype(dtype).itemsize
        transforms = (
            plgpu.TilingTransform((8, width)),
            plgpu.SwizzleTransform(swizzle),
        )
        return plgpu.SMEM((walk.strip_rows, columns), dtype, transforms=transforms)

    tiles = Encoded(
        wide=tile(encoding.wide),
        row=tile(encoding.row),
        transposed=plgpu.SMEM((columns, walk.strip_rows), encoding.transposed),
    )
    return [tiles] * parts


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
            out.groups.codes.at[index][...] = codes
            out.groups.scale.at[index][...] = scale
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
        if self._encoding.transposed is None:
            getattr(self._out, name).at[index][...] = strip
        else:
            # Vectors of 16 bytes, which swizzling keeps together.
            vector = GROUP // strip.dtype.itemsize
            strip = plgpu.layout_cast(strip, plgpu.Layout.TCGEN05_TMEM_NATIVE(vector))
            self._tiles.setdefault((part, name), []).append(strip)

    def _transpose(self, codes, part):
        done = self._tiles.setdefault((part, "transposed"), [])
        to = self._scratch[part].transposed.at[pl.ds(len(done) * GROUP, GROUP)]
        bytes_of_lane = plgpu.layout_cast(codes, plgpu.Layout.TCGEN05_TMEM_NATIVE(1))
        to.transpose((1, 0))[...] = bytes_of_lane
        done.append(None)

    def finish(self, walk: Walk, cta: Array) -> None:
        """Writes what thread blocks have one of."""
        if self._largest is not None:
            bits = total_max(magnitude_bits(self._largest))
            if self._encoding.wide == jnp.bfloat16:
                bits = rounded(jnp.minimum(bits, jnp.uint32(0x7FC00000)))  # Or NaN.
            self._out.maxima[cta] = bits
        if not self._tiles:
            return
        for (part, name), strips in self._tiles.items():
            if name != "transposed":
                tile = getattr(self._scratch[part], name)
                tile[...] = jnp.concatenate(strips, axis=1)
        plgpu.commit_smem()
        row, group = walk.start(cta)
        rows = pl.ds(row, walk.strip_rows)
        columns = pl.ds(group * walk.group, walk.columns * walk.group)
        for part, name in self._tiles:
            place = (
                (part, columns, rows) if name == "transposed" else (rows, part, columns)
            )
            to = getattr(self._out, name).at[place]
            plgpu.copy_smem_to_gmem(getattr(self._scratch[part], name), to)
        plgpu.wait_smem_to_gmem(0)
