"""How kernels go over rows: a warpgroup holds a row.

A row [n] is seen as its groups [n / 16, 16], so that a reduction over axis 1 is one
within a group. Rows come through shared memory, the next ones' copies ahead, and go
out from registers.
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
from pallas_kernels.numerics import GROUP, Groups, NormKind

LONGEST = 12288  # Of which two and the sums of two fit in shared memory.
_SHARED = 227 * 1024  # Bytes of shared memory of a multiprocessor.
_RESERVED = 3328  # Of which a thread block takes so many besides its arrays.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a kernel is laid over the GPU.

    Attributes:
      elements: Rows of a pipeline step have so many elements together, or it is one.
      stages: Pipeline steps in flight; fewer where shared memory is short.
      ctas: Thread blocks on each multiprocessor; fewer likewise.
      sms: Multiprocessors.
      params: Up to which length of rows parameters stay in registers.
      held: Up to which length backward keeps a row in registers.
      sums: How many sums of gradients a lane keeps in registers; more go to shared
        memory.
    """

    elements: int = 4096
    stages: int = 2
    ctas: int = 4
    sms: int = 132
    params: int = 4096
    held: int = 4096
    sums: int = 64


class Rows(NamedTuple):
    """What is read of rows: arrays of all groups [groups, 16], or refs."""

    x: Any  # bfloat16, or `Groups` with scales [groups].
    add: Any = None
    dy: Any = None


class Params(NamedTuple):
    """What all rows share: arrays [n / 16, 16], or refs."""

    weight: Any = None
    bias: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of `n` in tiles: so many elements that each lane has a vector of them."""

    n: int

    @property
    def tiles(self) -> range:
        """The tiles of a row."""
        return range(len(self._vectors))

    @functools.cached_property
    def _vectors(self) -> list[int]:
        """How many neighbours a lane has of each tile: 8 but at the end."""
        whole, rest = divmod(self.n // LANES, 8)
        vector = math.gcd(rest, 8)
        return [8] * whole + [vector] * (rest // vector)

    def shape(self, tile: int) -> tuple[int, int]:
        """The shape of a tile."""
        return LANES * self._vectors[tile] // GROUP, GROUP

    def groups(self, tiles: Iterable[int]) -> int:
        """How many groups some tiles have together."""
        return sum(self.shape(tile)[0] for tile in tiles)

    def tile(self, ref: Any, tile: int, first: int = 0) -> Any:
        """A tile of a row's ref, which may begin with another than the first tile."""
        start = self.groups(range(first, tile))
        return ref.at[pl.ds(start, self.shape(tile)[0])]

    def load(
        self, ref: Any, tile: int, factor: Array | None = None, first: int = 0
    ) -> Array:
        """A tile, as `tile` finds it, in float32, times a factor."""

        def load(ref):
            x, layout = self.tile(ref, tile, first), strip_layout(self.shape(tile))
            layout = layout.reduce(1) if len(x.shape) == 1 else layout
            return plgpu.load(x, layout=layout, optimized=False)

        x = jax.tree.map(load, ref)
        if factor is None:
            return decode(x)
        if isinstance(x, Groups):
            return decode(x._replace(scale=x.scale.astype(jnp.float32) * factor))
        return decode(x) * factor

    def loader(self, ref: Any, longest: int) -> Callable[[int], Array]:
        """Loads tiles when they are asked for, or all now if rows are no longer."""
        if ref is None or self.n > longest:
            return functools.partial(self.load, ref)
        return [self.load(ref, tile) for tile in self.tiles].__getitem__


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm(Row):
    """What is known of a norm when it is compiled."""

    kind: NormKind
    eps: float

    def mean(self, x: Callable[[int], Array]) -> Array | float:
        """What the norm subtracts from a row."""
        return self.average(map(x, self.tiles)) if self.kind == "layer" else 0.0

    def centered(self, x: Array, mean: Array | float) -> Array:
        """A tile less the mean."""
        return x - mean if self.kind == "layer" else x

    def rate(self, square: Array) -> Array:
        """What the norm multiplies with what is left, from its mean square."""
        return lax.rsqrt(square + self.eps)

    def average(self, tiles: Iterable[Any]) -> Any:
        """The mean of a row, or of each of several, whose tiles are trees."""
        return jax.tree.map(
            lambda x: x * (1 / self.n), reduced(jnp.add, jnp.sum, tiles)
        )


def obstacle(shape: tuple[int, ...], longest: int = LONGEST) -> str | None:
    """Why an array of this shape has no rows for the kernels, if so."""
    if not math.prod(shape):
        return "there are no rows"
    if shape[-1] % LANES or shape[-1] > longest:
        most = f"multiples of {LANES} up to {longest} long"
        return f"rows must be {most}, got {shape[-1]}"
    return None


def reduced(combine: Callable, reduce: Callable, tiles: Iterable[Any]) -> Any:
    """A row's scalar, or a tree of several rows', from tiles of one shape or more."""
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
    """How rows are shared among thread blocks.

    Attributes:
      groups: Groups of a row.
      rows: Rows of a pipeline step.
      steps: All steps.
      stages: Steps in flight.
      ctas: Thread blocks.
    """

    groups: int
    rows: int
    steps: int
    stages: int
    ctas: int

    @classmethod
    def of(cls, arrays: Rows, n: int, tuning: Tuning, other_bytes: int = 0) -> "Share":
        """As many rows a step as `tuning` allows, of the powers of two dividing all."""
        leaves = jax.tree.leaves(arrays)
        tokens = leaves[0].size // n
        rows = math.gcd(tokens, 1 << (max(tuning.elements // n, 1).bit_length() - 1))
        steps = tokens // rows
        step_bytes = sum(x.size * x.dtype.itemsize for x in leaves) // steps
        for ctas in range(tuning.ctas, 0, -1):
            own = _SHARED // ctas - _RESERVED - other_bytes
            stages = min(tuning.stages, own // step_bytes)
            if stages > 1:
                break
        return cls(
            groups=n // GROUP,
            rows=rows,
            steps=steps,
            stages=max(stages, 1),
            ctas=min(steps, ctas * tuning.sms),
        )

    def row(self, ref: Any, index: Array | int) -> Any:
        """A row of several."""
        return ref.at[pl.ds(index * self.groups, self.groups)]

    def launch(self, name, kernel, outputs, *arrays, scratch=()):
        """Runs kernel(*refs, outputs' refs) by all thread blocks."""
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
                # Copies write shared memory, and `over` waits for its readers.
                unsafe_no_auto_barriers=True,
            ),
        )(*arrays)
        return out

    def over(self, row: Callable, rows: Rows, carry: Any = None) -> Any:
        """Calls carry = row(refs to a row, its index, carry) for this block's rows."""
        cta = lax.axis_index("cta")
        refs, tree = jax.tree.flatten(rows)
        block = self.rows * self.groups

        def staged(ref):
            # What copies to shared memory are multiples of.
            return math.prod((block, *ref.shape[1:])) * ref.dtype.itemsize % 128 == 0

        def spec(ref):
            if not staged(ref):
                return plgpu.BlockSpec(memory_space=plgpu.GMEM)
            return plgpu.BlockSpec(
                (block, *ref.shape[1:]),
                lambda j: (cta + j * self.ctas, 0)[: len(ref.shape)],
                # Which makes it one contiguous copy, of any size.
                oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        def body(indices, *arguments):
            staged_refs = arguments[: len(refs)]
            (carry,) = arguments[len(refs) :] or (None,)
            start = (cta + indices[0] * self.ctas) * self.rows
            for j in range(self.rows):
                own = [
                    self.row(ref, j if staged(ref) else start + j)
                    for ref in staged_refs
                ]
                carry = row(jax.tree.unflatten(tree, own), start + j, carry)
            plgpu.commit_smem()  # All warps have read.
            return carry

        return plgpu.emit_pipeline(
            body,
            grid=((self.steps - cta + self.ctas - 1) // self.ctas,),
            in_specs=[spec(ref) for ref in refs],
            max_concurrent_steps=self.stages,
            init_carry=carry,
        )(*refs)
