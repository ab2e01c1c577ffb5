"""Kernels of norms: every array is read once and every result is written once."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES, encode_groups, largest_of, strip_layout
from pallas_kernels.mosaic.rows import Norm, Params, Rows, Share, Tuning, reduced
from pallas_kernels.numerics import GROUP, Scaled, reciprocal, row_scale
from pallas_kernels.ops.norm.reference import CODES, Normed, NormGrads

_MAX = float(jnp.finfo(jnp.float32).max)


@functools.partial(
    jax.jit, static_argnames=("norm", "scaled_rows", "keep_groups", "tuning")
)
def forward(
    norm: Norm,
    rows: Rows,
    params: Params,
    y_scale: Array | None,
    *,
    scaled_rows: bool,
    keep_groups: bool,
    tuning: Tuning,
) -> Normed:
    """Runs the kernel of `pallas_kernels.norm`, which has the formulas.

    Args:
      norm: The norm.
      rows: The input.
      params: The weight and the bias.
      y_scale: The scale of per-tensor codes, [1], or None.
      scaled_rows: Whether to return codes with per-token scales.
      keep_groups: Whether to return the input in groups of 16 as well.
      tuning: Settings of the kernel's pipeline.
    """
    share = Share.of(rows, norm.n, tuning, parts=_parts(norm, params))
    tokens, groups = share.tokens, share.tokens * share.groups
    wide = y_scale is None and not scaled_rows

    def like(dtype, shape=(groups, GROUP)):
        return jax.ShapeDtypeStruct(shape, dtype)

    kept = Scaled(like(CODES), like(jnp.bfloat16, (groups,)))
    outputs = Normed(
        y=like(jnp.bfloat16 if wide else CODES),
        largest=like(jnp.float32, (tokens,)) if wide else None,
        scale=like(jnp.float32, (tokens,)) if scaled_rows else None,
        groups=kept if keep_groups else None,
    )

    def kernel(rows, params, y_scale, out):
        weight, bias = (
            norm.loader(share.of_part(ref), tuning.params) for ref in params
        )
        inverse = _inverse(norm, y_scale)

        def read(row, index, tile):
            x = norm.load(row.x, tile)
            if out.groups is not None:
                for ref, value in zip(out.groups, encode_groups(x, CODES), strict=True):
                    mosaic.store(norm.tile(share.row(ref, index), tile), value)
            return x

        def row(row, index, _):
            x = [read(row, index, tile) for tile in norm.tiles]
            mean = norm.mean(x.__getitem__)
            y = [norm.centered(x, mean) for x in x]
            factor = norm.rate(norm.average(y * y for y in y))
            if params.weight is not None:
                y = [y * weight(tile) for tile, y in enumerate(y)]
            if params.bias is not None:
                y = [y * factor + bias(tile) for tile, y in enumerate(y)]
                factor = 1.0
            # `factor` multiplies y last, so that one multiplication applies the rate of
            # the norm and the scale of the codes.
            if inverse is not None:
                # An infinite factor would turn zeros into NaN.
                factor = jnp.minimum(factor * inverse, _MAX)
            elif out.scale is not None:
                largest = _largest(y)
                scale = row_scale(largest, CODES)
                # Codes do not depend on the rate, which goes into the stored scale.
                out.scale[index] = scale * factor
                factor = 1 / scale
            else:
                out.largest[index] = _largest(y) * factor
            for tile in norm.tiles:
                to = norm.tile(share.row(out.y, index), tile)
                mosaic.store(to, (y[tile] * factor).astype(out.y.dtype))

        share.over(row, rows)

    return share.launch("norm", kernel, outputs, rows, params, y_scale)


@functools.partial(jax.jit, static_argnames=("norm", "keep_maxima", "tuning"))
def backward(
    norm: Norm,
    rows: Rows,
    params: Params,
    y_scale: Array | None,
    *,
    keep_maxima: bool,
    tuning: Tuning,
) -> NormGrads:
    """Runs the kernel of `pallas_kernels.norm_grad`, which has the formulas.

    The returned gradients of weight and bias are partial sums, one for each thread
    block: [ctas * n / 16, 16].

    Args:
      norm: The norm.
      rows: The input, the gradient of the output, and the array to add.
      params: The weight and the bias.
      y_scale: The scale of the codes of the norm's output, [1]; None returns no codes.
      keep_maxima: Whether to return the amax of parts of the input's gradient.
      tuning: Settings of the kernel's pipeline.
    """
    n, groups = norm.n, norm.n // GROUP
    with_bias = params.bias is not None
    count = (params.weight is not None) + with_bias
    # Sums of the first tiles fit in registers; the sums of these tiles do not.
    in_shared = [
        tile
        for tile in norm.tiles
        if count * norm.groups(range(tile + 1)) * GROUP > tuning.sums * LANES
    ]
    shape = norm.groups(in_shared), GROUP
    scratch = (plgpu.SMEM(shape, jnp.float32),) * count if in_shared else ()
    share = Share.of(
        rows,
        n,
        tuning,
        parts=_parts(norm, params),
        other_bytes=len(scratch) * math.prod(shape) * 4,
    )
    partial = jax.ShapeDtypeStruct((share.ctas * groups, GROUP), jnp.float32)
    outputs = NormGrads(
        dx=jax.ShapeDtypeStruct(rows.dy.shape, jnp.bfloat16),
        dweight=None if params.weight is None else partial,
        dbias=partial if with_bias else None,
        y=None if y_scale is None else jax.ShapeDtypeStruct(rows.dy.shape, CODES),
        largest=jax.ShapeDtypeStruct((share.ctas,), jnp.float32)
        if keep_maxima
        else None,
    )

    def kernel(rows, params, y_scale, out, *scratch):
        inverse = _inverse(norm, y_scale)
        sums = _Sums(norm, in_shared, scratch)
        weight = norm.loader(share.of_part(params.weight), tuning.params)
        # Registers have no room for the bias.
        bias = norm.loader(share.of_part(params.bias), longest=0)

        # Tiles of long rows would fill the registers, so they are read again from
        # shared memory.
        def row(row, index, carry):
            so_far, largest = carry
            held = norm.n <= tuning.held
            load_x, dy = (norm.loader(ref, tuning.held) for ref in (row.x, row.dy))
            mean = norm.mean(load_x)

            def weighted(tile):
                return dy(tile) if params.weight is None else dy(tile) * weight(tile)

            def products(tile):
                x, g = norm.centered(load_x(tile), mean), weighted(tile)
                return (x * x, x * g, g) if norm.kind == "layer" else (x * x, x * g)

            def standardized(tile):
                x = load_x(tile) * rate if held else norm.load(row.x, tile, rate)
                return norm.centered(x, mean * rate)

            # dx = (g - z * mean(z * g) - mean(g)) * rate with z = x * rate, and `level`
            # is mean(g). RMSNorm has no mean(g).
            square, along, *level = norm.average(map(products, norm.tiles))
            rate = norm.rate(square)
            along = along * rate
            for tile in norm.tiles:
                x = standardized(tile)
                dx = weighted(tile) - x * along
                dx = (dx - level[0] if level else dx) * rate
                if row.add is not None:
                    dx = dx + norm.load(row.add, tile)
                to = norm.tile(share.row(out.dx, index), tile)
                mosaic.store(to, dx.astype(jnp.bfloat16))
                if keep_maxima:
                    so_far_of_shape = largest[dx.shape]
                    largest |= {dx.shape: jnp.maximum(so_far_of_shape, jnp.abs(dx))}
                if inverse is not None:
                    y = x if params.weight is None else x * weight(tile)
                    y = y if params.bias is None else y + bias(tile)
                    to = norm.tile(share.row(out.y, index), tile)
                    mosaic.store(to, (y * inverse).astype(CODES))
                more = NormGrads(None, dy(tile) * x, dy(tile))
                so_far = sums.add(so_far, tile, _present(more, of_params))
            return so_far, largest

        of_params = out._replace(dx=None, y=None, largest=None)
        cta = lax.axis_index("cta")
        own = [share.row(ref, cta) for ref in _present(out, of_params)]
        shapes = map(norm.shape, norm.tiles if keep_maxima else ())
        largest = {shape: _zeros(shape) for shape in shapes}
        so_far, largest = share.over(row, rows, (sums.start(len(own)), largest))
        sums.write(so_far, own)
        if keep_maxima:
            out.largest[cta] = largest_of(largest.values(), jnp.bfloat16)

    arrays = rows, params, y_scale
    return share.launch("norm_grad", kernel, outputs, *arrays, scratch=scratch)


def _parts(norm: Norm, params: Params) -> int:
    """Returns the number of parts of rows, each of which has its own parameters."""
    sizes = (param.size for param in jax.tree.leaves(params))
    return max(sizes, default=norm.n) // norm.n


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Sums over the rows of a thread block, for the gradients of weight and bias.

    Attributes:
      norm: The norm, which has the tiles of a row.
      shared: The indices of the last tiles of a row, which are summed in shared memory
        because registers do not suffice. The other tiles are summed in registers.
      refs: A reference to shared memory for each sum.
    """

    norm: Norm
    shared: list[int]
    refs: tuple[Any, ...]

    def start(self, count: int) -> list[list[Array]]:
        zeros = [_zeros(shape) for shape in map(self.norm.shape, self.norm.tiles)]
        for ref in self.refs:
            for tile in self.shared:
                mosaic.store(self._tile(ref, tile), zeros[tile])
        return [zeros[: len(zeros) - len(self.shared)]] * count

    def add(self, sums: list[list[Array]], tile: int, more: list[Array]) -> list:
        if tile not in self.shared:
            pairs = zip(sums, more, strict=True)
            return [[*s[:tile], s[tile] + x, *s[tile + 1 :]] for s, x in pairs]
        for ref, x in zip(self.refs, more, strict=True):
            mosaic.store(self._tile(ref, tile), self._load(ref, tile) + x)
        return sums

    def write(self, sums: list[list[Array]], to: list[Any]) -> None:
        for j, ref in enumerate(to):
            for tile in self.norm.tiles:
                shared = tile in self.shared
                total = self._load(self.refs[j], tile) if shared else sums[j][tile]
                mosaic.store(self.norm.tile(ref, tile), total)

    def _tile(self, ref: Any, tile: int) -> Any:
        return self.norm.tile(ref, tile, self.shared[0])

    def _load(self, ref: Any, tile: int) -> Array:
        return self.norm.load(ref, tile, first=self.shared[0])


def _zeros(shape: tuple[int, int]) -> Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), strip_layout(shape))


def _present(values: NormGrads, refs: NormGrads) -> list[Any]:
    """Returns the values for which there are refs."""
    return [x for x, ref in zip(values, refs, strict=True) if ref is not None]


def _inverse(norm: Norm, scale: Any) -> Array | None:
    """Returns 1 / scale, where `scale` is a ref to one number; None without a ref."""
    if scale is None:
        return None
    # Mosaic computes with reinterpreted bits of arrays, but not of scalars.
    return reciprocal(jnp.broadcast_to(scale[0], norm.shape(0)))[0, 0]


def _largest(x: list[Array]) -> Array:
    return reduced(jnp.maximum, jnp.max, map(jnp.abs, x))
