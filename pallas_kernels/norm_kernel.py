"""The norms' kernels: a warpgroup holds a row, and every array is read once.

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

from pallas_kernels.elementwise import decode, encode_groups, strip_layout
from pallas_kernels.reference.norm import CODES, GROUP, Kind, Normed, NormGrads
from pallas_kernels.reference.quantize import TINY, Groups, code_max

LANES = 128  # Of a warpgroup; each holds as many elements of a row.
_TOP = code_max(CODES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a kernel is laid over the GPU.

    Attributes:
      elements: Rows of a pipeline step have so many elements together, or it is one.
      stages: Pipeline steps in flight.
      ctas: Thread blocks on each multiprocessor.
      sms: Multiprocessors.
      resident: Up to which length of rows parameters stay in registers.
    """

    elements: int = 4096
    stages: int = 2
    ctas: int = 4
    sms: int = 132
    resident: int = 4096


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
class Norm:
    """What is known of a norm when it is compiled.

    Rows are handled in tiles: so many elements that each lane has a vector.
    """

    n: int
    kind: Kind
    eps: float

    @property
    def vector(self) -> int:
        """How many neighbours of a row a lane has."""
        return math.gcd(self.n // LANES, 8)

    @property
    def tiles(self) -> range:
        """The tiles of a row."""
        return range(self.n // LANES // self.vector)

    def tile(self, ref: Any, tile: int) -> Any:
        """A tile of a row's ref."""
        groups = LANES * self.vector // GROUP
        return ref.at[pl.ds(tile * groups, groups)]

    def load(self, ref: Any, tile: int) -> Array:
        """A tile in float32."""

        def load(ref):
            x = self.tile(ref, tile)
            layout = strip_layout((LANES * self.vector // GROUP, GROUP))
            layout = layout.reduce(1) if len(x.shape) == 1 else layout
            return plgpu.load(x, layout=layout, optimized=False)

        return decode(jax.tree.map(load, ref))

    def mean(self, x: Callable[[int], Array]) -> Array | float:
        """What the norm subtracts from a row."""
        if self.kind == "rms":
            return 0.0
        return self.average(map(x, self.tiles))

    def centered(self, x: Array, mean: Array | float) -> Array:
        """A tile less the mean."""
        return x if self.kind == "rms" else x - mean

    def rate(self, square: Array) -> Array:
        """What the norm multiplies with what is left, from its mean square."""
        return lax.rsqrt(square + self.eps)

    def average(self, tiles: Iterable[Array]) -> Array:
        """The mean of a row."""
        total = functools.reduce(jnp.add, tiles)
        return jnp.sum(jnp.sum(total, axis=1), axis=0) * (1 / self.n)

    def params(self, refs: Params, resident: int) -> Callable[[int, Array], Array]:
        """A function that multiplies a tile with the weight, and adds the bias."""

        def loads(ref):
            load = functools.partial(self.load, ref)
            if ref is None or self.n > resident:
                return load
            return [load(tile) for tile in self.tiles].__getitem__

        weight, bias = map(loads, refs)

        def apply(tile: int, x: Array) -> Array:
            if refs.weight is not None:
                x = x * weight(tile)
            return x if refs.bias is None else x + bias(tile)

        return apply


@functools.partial(
    jax.jit, static_argnames=("norm", "scaled_rows", "keep_groups", "tuning")
)
def forward(
    norm: Norm,
    rows: Rows,
    params: Params,
    inverse: Array | None,
    *,
    scaled_rows: bool,
    keep_groups: bool,
    tuning: Tuning,
) -> Normed:
    """Norms `rows`; `inverse` is 1 / scale of per-tensor codes, [1]."""
    codes = jax.tree.leaves(rows)[0]
    groups, tokens = codes.shape[0], codes.size // norm.n
    share = Share.of(tokens, norm.n, tuning)
    wide = inverse is None and not scaled_rows

    def like(dtype, shape=(groups, GROUP)):
        return jax.ShapeDtypeStruct(shape, dtype)

    kept = Groups(like(CODES), like(jnp.bfloat16, (groups,)))
    outputs = Normed(
        y=like(jnp.bfloat16 if wide else CODES),
        largest=like(jnp.float32, (tokens,)) if wide else None,
        scale=like(jnp.float32, (tokens,)) if scaled_rows else None,
        groups=kept if keep_groups else None,
        total=None if rows.add is None else like(jnp.bfloat16),
    )

    def kernel(rows, params, inverse, out):
        apply = norm.params(params, tuning.resident)
        inverse = None if inverse is None else inverse[0]

        def read(row, index, tile):
            x = norm.load(row.x, tile)
            if out.total is not None:
                x = (x + norm.load(row.add, tile)).astype(jnp.bfloat16)
                norm.tile(share.row(out.total, index), tile)[...] = x
                x = x.astype(jnp.float32)
            if out.groups is not None:
                for ref, value in zip(out.groups, encode_groups(x, CODES), strict=True):
                    norm.tile(share.row(ref, index), tile)[...] = value
            return x

        def row(row, index, _):
            x = [read(row, index, tile) for tile in norm.tiles]
            mean = norm.mean(x.__getitem__)
            x = [norm.centered(x, mean) for x in x]
            rate = norm.rate(norm.average(x * x for x in x))
            y = [apply(tile, x * rate) for tile, x in enumerate(x)]
            if inverse is not None:
                # Saturated, which the conversion does on a GPU only.
                y = [jnp.clip(y * inverse, -_TOP, _TOP) for y in y]
            elif out.scale is not None:
                largest = _largest(y)
                scale = jnp.maximum(largest * (1 / _TOP), TINY) + largest * 0.0
                out.scale[index] = scale
                y = [y * (1 / scale) for y in y]
            else:
                out.largest[index] = _largest(y)
            for tile in norm.tiles:
                to = norm.tile(share.row(out.y, index), tile)
                to[...] = y[tile].astype(out.y.dtype)

        share.over(row, rows, tuning.stages)

    return share.launch(kernel, outputs, rows, params, inverse)


@functools.partial(jax.jit, static_argnames=("norm", "with_bias", "tuning"))
def backward(
    norm: Norm, rows: Rows, params: Params, *, with_bias: bool, tuning: Tuning
) -> NormGrads:
    """The gradients; those of parameters by thread block, [ctas * n / 16, 16]."""
    n = norm.n
    share = Share.of(rows.dy.size // n, n, tuning)
    partial = jax.ShapeDtypeStruct((share.ctas * n // GROUP, GROUP), jnp.float32)
    outputs = NormGrads(
        dx=jax.ShapeDtypeStruct(rows.dy.shape, jnp.bfloat16),
        dweight=None if params.weight is None else partial,
        dbias=partial if with_bias else None,
    )

    def kernel(rows, params, out):
        apply = norm.params(params, tuning.resident)

        def row(row, index, sums):
            # From shared memory each time, lest a long row fills the registers.
            mean = norm.mean(functools.partial(norm.load, row.x))

            def centered(tile):
                return norm.centered(norm.load(row.x, tile), mean)

            def products(tile):
                x, g = centered(tile), apply(tile, norm.load(row.dy, tile))
                return (x * x, x * g, g) if norm.kind == "layer" else (x * x, x * g)

            products = map(products, norm.tiles)
            total = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), products)
            square, along, *level = (norm.average([x]) for x in total)
            rate = norm.rate(square)
            along = along * rate
            sums = [list(tiles) for tiles in sums]
            for tile in norm.tiles:
                x, dy = centered(tile) * rate, norm.load(row.dy, tile)
                dx = apply(tile, dy) - x * along
                dx = (dx - level[0] if level else dx) * rate
                if row.add is not None:
                    dx = dx + norm.load(row.add, tile)
                to = norm.tile(share.row(out.dx, index), tile)
                to[...] = dx.astype(jnp.bfloat16)
                for so_far, more in zip(sums, (dy * x, dy), strict=True):
                    if so_far:
                        so_far[tile] = so_far[tile] + more
            return sums

        shape = (LANES * norm.vector // GROUP, GROUP)
        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), strip_layout(shape))
        refs = out.dweight, out.dbias
        sums = [[] if ref is None else [zero] * len(norm.tiles) for ref in refs]
        sums = share.over(row, rows, tuning.stages, sums)
        for ref, tiles in zip(refs, sums, strict=True):
            for tile, value in enumerate(tiles):
                own = share.row(ref, lax.axis_index("cta"))
                norm.tile(own, tile)[...] = value

    return share.launch(kernel, outputs, rows, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """How rows are shared among thread blocks.

    Attributes:
      groups: Groups of a row.
      rows: Rows of a pipeline step.
      steps: All steps.
      ctas: Thread blocks.
    """

    groups: int
    rows: int
    steps: int
    ctas: int

    @classmethod
    def of(cls, tokens: int, n: int, tuning: Tuning) -> "Share":
        """As many rows a step as `tuning` allows, of the powers of two dividing all."""
        rows = math.gcd(tokens, 1 << (max(tuning.elements // n, 1).bit_length() - 1))
        steps = tokens // rows
        ctas = min(steps, tuning.ctas * tuning.sms)
        return cls(groups=n // GROUP, rows=rows, steps=steps, ctas=ctas)

    def row(self, ref: Any, index: Array | int) -> Any:
        """A row of several."""
        return ref.at[pl.ds(index * self.groups, self.groups)]

    def launch(self, kernel, outputs, *arrays):
        """Runs kernel(*refs, outputs' refs) by all thread blocks."""
        (out,) = plgpu.kernel(
            kernel,
            out_type=(outputs,),
            grid=(self.ctas,),
            grid_names=("cta",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # Copies write shared memory, and `over` waits for its readers.
                unsafe_no_auto_barriers=True,
            ),
        )(*arrays)
        return out

    def over(self, row: Callable, rows: Rows, stages: int, carry: Any = None) -> Any:
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
            max_concurrent_steps=stages,
            init_carry=carry,
        )(*refs)


def _largest(x: list[Array]) -> Array:
    x = functools.reduce(jnp.maximum, [jnp.abs(x) for x in x])
    return jnp.max(jnp.max(x, axis=1), axis=0)
