"""Kernels over rows: a warpgroup handles one row at a time.

A row [n] is viewed as its groups [n / 16, 16], so that a reduction over axis 1 reduces
each group. Rows are copied to shared memory ahead of their use, in a pipeline. Results
are stored from registers.
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
from jaxtyping import Array

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES, decode, strip_layout
from pallas_kernels.numerics import GROUP, NormKind, Scaled

# The longest row: two rows and two float32 accumulators fit in shared memory.
LONGEST = 12288
_SHARED = 227 * 1024  # Bytes of shared memory of a multiprocessor.
_RESERVED = 3328  # Bytes of shared memory of a thread block besides its arrays.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes of a row kernel's pipeline, and limits of what stays in registers.

    Attributes:
      elements: The most elements of a pipeline step, which has at least one row.
      stages: The most pipeline steps in flight; fewer where shared memory is short.
      ctas: The most thread blocks on each multiprocessor; fewer where shared memory is
        short.
      sms: The number of multiprocessors.
      params: The longest row for which parameters stay in registers.
      held: The longest row that the backward kernel holds in registers.
      sums: The most sums of parameter gradients that a lane holds in registers; the
        others are in shared memory.
    """

    elements: int = 4096
    stages: int = 2
    ctas: int = 4
    sms: int = 132
    params: int = 4096
    held: int = 4096
    sums: int = 64


class Rows(NamedTuple):
    """The inputs of a kernel that are read row by row: arrays [groups, 16], or refs."""

    x: Any  # bfloat16 or float32, or `Scaled` with scales [groups].
    add: Any = None
    dy: Any = None


class Params(NamedTuple):
    """A weight and a bias for each part of the rows: [parts * n / 16, 16], or refs."""

    weight: Any = None
    bias: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of `n` elements, cut into tiles of one vector per lane."""

    n: int

    @property
    def tiles(self) -> range:
        """The indices of a row's tiles."""
        return range(len(self._vectors))

    @functools.cached_property
    def _vectors(self) -> list[int]:
        """The vector length of each tile: 8, or less at the end of the row."""
        full, remainder = divmod(self.n // LANES, 8)
        vector = math.gcd(remainder, 8)
        return [8] * full + [vector] * (remainder // vector)

    def shape(self, tile: int) -> tuple[int, int]:
        """Returns the shape of a tile, [groups, 16]."""
        return LANES * self._vectors[tile] // GROUP, GROUP

    def groups(self, tiles: Iterable[int]) -> int:
        """Returns the number of groups of some tiles together."""
        return sum(self.shape(tile)[0] for tile in tiles)

    def tile(self, ref: Any, tile: int, first: int = 0) -> Any:
        """Returns a ref to a tile, in a `ref` that begins at the row's tile `first`."""
        start = self.groups(range(first, tile))
        return ref.at[pl.ds(start, self.shape(tile)[0])]

    def load(
        self, ref: Any, tile: int, factor: Array | None = None, first: int = 0
    ) -> Array:
        """Loads a `tile` of `ref` in float32, and multiplies it by `factor`.

        `ref` begins at the row's tile `first`.
        """

        def load(ref):
            x, layout = self.tile(ref, tile, first), strip_layout(self.shape(tile))
            layout = layout.reduce(1) if len(x.shape) == 1 else layout
            return plgpu.load(x, layout=layout, optimized=False)

        x = jax.tree.map(load, ref)
        if factor is None:
            return decode(x)
        if isinstance(x, Scaled):  # A group has fewer scales than elements.
            return decode(x._replace(scale=x.scale.astype(jnp.float32) * factor))
        return decode(x) * factor

    def loader(self, ref: Any, longest: int) -> Callable[[int], Array]:
        """Returns a function that takes the index of a tile and returns the tile.

        Rows of at most `longest` elements are loaded to registers now. Tiles of longer
        rows are loaded at each call.
        """
        if ref is None or self.n > longest:
            return functools.partial(self.load, ref)
        return [self.load(ref, tile) for tile in self.tiles].__getitem__


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm(Row):
    """Compile-time properties of a norm, and its arithmetic on tiles."""

    kind: NormKind
    eps: float

    def mean(self, x: Callable[[int], Array]) -> Array | float:
        """Returns the mean that the norm subtracts from a row: 0 for RMSNorm.

        `x` is a function that returns the tile of each index.
        """
        return self.average(map(x, self.tiles)) if self.kind == "layer" else 0.0

    def centered(self, x: Array, mean: Array | float) -> Array:
        """Returns `x - mean` for LayerNorm, `x` for RMSNorm."""
        return x - mean if self.kind == "layer" else x

    def rate(self, square: Array) -> Array:
        """Returns the factor of a centered row, 1 / sqrt(square + eps).

        `square` is the mean square of the centered row.
        """
        return lax.rsqrt(square + self.eps)

    def average(self, tiles: Iterable[Any]) -> Any:
        """Returns the mean of a row's elements, from the row's tiles.

        If the tiles are trees, each leaf is a tile of a row of its own, and the result
        is a tree of means.
        """
        return jax.tree.map(
            lambda x: x * (1 / self.n), reduced(jnp.add, jnp.sum, tiles)
        )


def obstacle(shape: tuple[int, ...], longest: int = LONGEST) -> str | None:
    """Returns why the kernels cannot take rows of an array of `shape`, or None."""
    if not math.prod(shape):
        return "there are no rows"
    if shape[-1] % LANES or shape[-1] > longest:
        most = f"multiples of {LANES} up to {longest} long"
        return f"rows must be {most}, got {shape[-1]}"
    return None


def reduced(combine: Callable, reduce: Callable, tiles: Iterable[Any]) -> Any:
    """Reduces the tiles of a row to a scalar, or trees of tiles to trees of scalars.

    Tiles of the same shape are combined elementwise first, so that only one tile per
    shape is reduced across lanes.

    Args:
      combine: A function that combines two arrays elementwise, such as `jnp.add`.
      reduce: The reduction of an array along an axis, such as `jnp.sum`.
      tiles: The tiles of a row, or trees of tiles.
    """
    shapes: dict[tuple[int, ...], Any] = {}
    for tile in tiles:
        shape = jax.tree.leaves(tile)[0].shape
        so_far = shapes.get(shape)
        new = tile if so_far is None else jax.tree.map(combine, so_far, tile)
        shapes[shape] = new
    scalars = (
        jax.tree.map(lambda x: reduce(reduce(x, axis=1), axis=0), x)
        for x in shapes.values()
    )
    return functools.reduce(functools.partial(jax.tree.map, combine), scalars)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """Distribution of rows over thread blocks and pipeline steps.

    Rows are in equal parts, such as the sequences of a batch. A thread block has rows
    of one part.

    Attributes:
      groups: The number of groups of a row.
      rows: The number of rows of a pipeline step.
      steps: The number of steps of a part.
      stages: The number of steps in flight.
      parts: The number of parts.
      ctas_of_part: The number of thread blocks of a part.
    """

    groups: int
    rows: int
    steps: int
    stages: int
    parts: int
    ctas_of_part: int

    @classmethod
    def of(
        cls,
        arrays: Rows,
        n: int,
        tuning: Tuning,
        *,
        parts: int = 1,
        other_bytes: int = 0,
    ) -> "Share":
        """Chooses the rows of a step, the stages and the thread blocks.

        The rows of a step are the largest power of two that `tuning` allows and that
        divides the number of rows of a part. `other_bytes` is the shared memory that a
        thread block needs for other arrays.
        """
        leaves = jax.tree.leaves(arrays)
        tokens = leaves[0].size // n // parts
        rows = math.gcd(tokens, 1 << (max(tuning.elements // n, 1).bit_length() - 1))
        steps = tokens // rows
        step_bytes = sum(x.size * x.dtype.itemsize for x in leaves) // (parts * steps)
        # Copies overlap with computation only if there are two stages. So two stages
        # come before more thread blocks.
        for ctas in range(tuning.ctas, 0, -1):
            available = _SHARED // ctas - _RESERVED - other_bytes
            stages = min(tuning.stages, available // step_bytes)
            if stages > 1:
                break
        return cls(
            groups=n // GROUP,
            rows=rows,
            steps=steps,
            stages=max(stages, 1),
            parts=parts,
            ctas_of_part=min(steps, max(ctas * tuning.sms // parts, 1)),
        )

    @property
    def ctas(self) -> int:
        """The number of thread blocks."""
        return self.parts * self.ctas_of_part

    @property
    def tokens(self) -> int:
        """The number of rows."""
        return self.parts * self.steps * self.rows

    @property
    def _cta(self) -> tuple[Array | int, Array]:
        """This thread block's part, and its index among the part's thread blocks."""
        cta = lax.axis_index("cta")
        if self.parts == 1:
            return 0, cta
        return cta // self.ctas_of_part, cta % self.ctas_of_part

    def row(self, ref: Any, index: Array | int) -> Any:
        """Returns a ref to the row at `index` of a ref to several rows."""
        return ref.at[pl.ds(index * self.groups, self.groups)]

    def of_part(self, ref: Any) -> Any:
        """Returns this part's row of a ref with a row per part; None without a ref."""
        return None if ref is None else self.row(ref, self._cta[0])

    def launch(self, name, kernel, outputs, *arrays, scratch=()):
        """Runs a kernel in each thread block, and returns the outputs.

        The kernel takes refs of `arrays`, refs of `outputs`, and the `scratch` memory.
        """
        (out,) = mosaic.kernel(
            kernel,
            out_type=(outputs,),
            kernel_name=name,
            grid=(self.ctas,),
            grid_names=("cta",),
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # Only copies overwrite shared memory that other lanes read, and `over`
                # waits for these reads.
                unsafe_no_auto_barriers=True,
            ),
        )(*arrays)
        return out

    def over(self, row: Callable, rows: Rows, carry: Any = None) -> Any:
        """Runs `carry = row(refs, index, carry)` for each row of this thread block.

        `refs` are the refs of the row in `rows`; `index` is its index among all rows.
        """
        i, cta = self._cta
        first, stride = i * self.steps + cta, self.ctas_of_part
        refs, tree = jax.tree.flatten(rows)
        block = self.rows * self.groups

        def staged(ref):
            # Copies to shared memory must be a multiple of 128 bytes. Other arrays are
            # read from global memory.
            return math.prod((block, *ref.shape[1:])) * ref.dtype.itemsize % 128 == 0

        def spec(ref):
            if not staged(ref):
                return plgpu.BlockSpec(memory_space=plgpu.GMEM)
            return plgpu.BlockSpec(
                (block, *ref.shape[1:]),
                lambda j: (first + j * stride, 0)[: len(ref.shape)],
                # This promise allows one contiguous copy of any size.
                oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        def body(indices, *arguments):
            staged_refs = arguments[: len(refs)]
            (carry,) = arguments[len(refs) :] or (None,)
            start = (first + indices[0] * stride) * self.rows
            for j in range(self.rows):
                refs_of_part = [
                    self.row(ref, j if staged(ref) else start + j)
                    for ref in staged_refs
                ]
                carry = row(jax.tree.unflatten(tree, refs_of_part), start + j, carry)
            # The next copy overwrites these rows, so all warps must have read them.
            plgpu.commit_smem()
            return carry

        return plgpu.emit_pipeline(
            body,
            grid=((self.steps - cta + stride - 1) // stride,),
            in_specs=[spec(ref) for ref in refs],
            max_concurrent_steps=self.stages,
            init_carry=carry,
        )(*refs)
