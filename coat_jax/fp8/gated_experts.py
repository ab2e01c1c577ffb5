"""Gated MLPs of experts in FP8: two grouped matmuls with a gate between them.

Two calls of `fp8_ragged_dot` would quantize each copy of a token, and the gate would be
another pass over the rows. Here tokens are quantized before they are copied. One kernel
computes the gate, and writes the codes that the second matmul and the backward pass
read. Another kernel computes all gradients of the gate.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

import pallas_kernels as kernels
from coat_jax.fp8.fused import STEEPEST, quantized_gate
from coat_jax.fp8.matmul import (
    dtype_of,
    once,
    quantize_tensor,
    quantize_tokens,
    tensor_scales,
)
from coat_jax.fp8.prologue import Prologue
from coat_jax.fp8.ragged_dot import (
    codes_of_experts,
    gradient_scale,
    grouped,
    has_group,
    quantized_experts,
    stored,
)
from coat_jax.fp8.rows import inverted, taken, total, wide_order
from coat_jax.quantization.array import scales_as_bits
from coat_jax.quantization.formats import E4M3, E5M2
from coat_jax.remat.notes import Note
from pallas_kernels import Activation, Scaled, numerics
from pallas_kernels.dispatch import array_types
from pallas_kernels.ops.grouped_matmul.tiles import BLOCK


class ExpertRows(NamedTuple):
    """Rows that are sorted by expert, or the tokens that the rows are copies of.

    Attributes:
      x: The rows [m, k], or the tokens [t, k].
      order: None if `x` holds rows. If `x` holds tokens, a permutation: row i is a copy
        of token order[i] // (m // t).
    """

    x: Float[Array, "_ k"]
    order: Int[Array, " m"] | None = None

    @property
    def count(self) -> int:
        """The number of rows, m."""
        return len(self.x if self.order is None else self.order)

    @property
    def _padded_index(self) -> Int[Array, " padded"]:
        """The index of each row's token, then t for each of 128 rows of padding."""
        tokens = len(self.x)
        index = wide_order(self.order) // (self.count // tokens)
        return jnp.pad(index, (0, BLOCK), constant_values=tokens)

    @property
    def _places(self) -> Int[Array, "t k"]:
        """The indices of the rows that are copies of each token."""
        places = inverted(self.order).reshape(len(self.x), -1)
        return places.astype(jnp.int32)

    def padded[Rows](self, arrays: Rows) -> Rows:
        """Returns the rows of arrays like `x`, with 128 rows of padding at the end.

        Padding is zeros, but undefined if `x` holds tokens and an array has their
        codes.
        """
        if self.order is None:
            return jax.tree.map(_padded, arrays)
        return jax.tree.map(self._of_tokens, arrays)

    def _of_tokens(self, x: Shaped[Array, "t *k"]) -> Shaped[Array, "padded *k"]:
        if x.ndim == 1:
            return taken(x, self._padded_index)
        return kernels.copy_rows(x, self._places, rows=self.count + BLOCK)

    def transposed(self, group_sizes: Int[Array, " g"]) -> Float[Array, "k columns"]:
        """Returns the padded rows transposed group by group; `x` must be codes."""
        if self.order is None:
            return kernels.grouped_transpose(_padded(self.x), group_sizes)
        index = self._padded_index.astype(jnp.int32)
        return kernels.grouped_transpose(self.x, group_sizes, index=index)

    def gradient(self, rows: Float[Array, "padded k"]) -> Float[Array, "_ k"]:
        """Computes the gradient of `x` from the gradients of the padded rows.

        If `x` holds tokens, it sums the gradients of each token's rows.
        """
        if self.order is None:
            return rows[: self.count]
        return total(rows, self._places, dtype=rows.dtype)


class Combine(NamedTuple):
    """The weighted sum of the rows of each token, after the last matmul.

    Attributes:
      weights: A weight for each of the k rows of the t tokens, float32 or bfloat16.
      places: A permutation: the index, among the sorted rows, of the row that each
        weight belongs to. Weights are in row-major order.
    """

    weights: Float[Array, "t k"]
    places: Int[Array, " m"]

    @property
    def by_token(self) -> Int[Array, "t k"]:
        """The indices of each token's rows among the sorted rows."""
        return wide_order(self.places).reshape(self.weights.shape)

    def weights_of_rows(self, group_sizes: Int[Array, " g"]) -> Float[Array, " m"]:
        """Returns the weight of each row, 0 for rows of no group.

        Rows of no group may have the weight NaN, which must not enter per-tensor
        scales: these follow from maxima over all rows.
        """
        weights = self.weights.astype(jnp.float32).reshape(-1)
        weights = weights[inverted(self.places)]
        return jnp.where(has_group(weights, group_sizes), weights, 0)

    def gradient(
        self, of_rows: Float[Array, " padded"], group_sizes: Int[Array, " g"]
    ) -> Float[Array, "t k"]:
        """Returns the gradient of `weights` from the gradient of each row's weight."""
        of_rows = of_rows[: len(self.places)]
        of_rows = jnp.where(has_group(of_rows, group_sizes), of_rows, 0)
        return of_rows[self.by_token].astype(self.weights.dtype)


def gated_experts(
    rows: ExpertRows,
    gate_up: Sequence[Float[Array, "g k _"]],
    down: Float[Array, "g f n"],
    group_sizes: Int[Array, " g"],
    combine: Combine | None = None,
    *,
    activation: Activation,
    inner: DTypeLike,
    outer: DTypeLike,
    dtype: DTypeLike,
) -> list[Array]:
    """Computes `ragged_dot(activation(gate) * up, down)`, the gated MLPs of experts.

    Gate and up are the two halves of `ragged_dot(x, gate_up)`, where x are the rows.
    Rows after the last group give zeros, and have zero gradients, as in
    `fp8_ragged_dot`.

    With `combine` a row's weight w multiplies the input of the last matmul:
    w * (a @ down) is (w * a) @ down, and the weight's gradient <dy, a @ down> is
    <dy @ down.T, a>. So the products a @ down need not be saved for the gradients of
    the weights.

    Args:
      rows: The rows x.
      gate_up: The weights of gate and up in one array [g, k, 2 f], or in two [g, k, f].
      down: The weights after the gate.
      group_sizes: The number of rows of each group.
      combine: The weighted sums of rows to return; None returns the rows themselves.
      activation: The activation.
      inner: The dtype of gate and up.
      outer: The dtype of the rows after the last matmul.
      dtype: The dtype of the result. Sums of rows are computed in float32.

    Returns:
      The rows [m, n], or with `combine` the sums [t, n], in a list.
    """
    arrays = rows, tuple(gate_up), down, group_sizes, combine
    arrays = array_types.varying_alike(arrays)
    return [_gated_experts(*arrays, activation, inner, outer, dtype)]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _gated_experts(
    rows, gate_up, down, group_sizes, combine, activation, inner, outer, dtype
):
    arrays = rows, gate_up, down, group_sizes, combine
    return _forward(*arrays, activation, inner, outer, dtype)[0]


@array_types.on_common_mesh
def _forward(
    rows, gate_up, down, group_sizes, combine, activation, inner, outer, dtype
):
    x = rows.padded(quantize_tokens(rows.x))
    tiles = kernels.group_tiles(group_sizes, rows=len(x.codes))
    parts, scales = zip(*map(quantized_experts, gate_up), strict=True)
    w = jax.tree.map(lambda *v: v[0] if len(v) == 1 else jnp.concatenate(v, 1), *parts)
    y = grouped(x, w, group_sizes, tiles, inner)
    gate = Prologue(activation, (), "copies")
    a, inner_groups = quantized_gate(y.reshape(len(y), 2, -1), gate)
    # Only the backward pass needs the rows of padding.
    a = jax.tree.map(lambda v: v[: rows.count], a)
    product_scale = a.scale
    if combine is not None:
        weights = combine.weights_of_rows(group_sizes)
        a = a._replace(scale=a.scale * weights)
        # Weights may be negative.
        product_scale *= jnp.abs(by_group(weights, group_sizes)[0])
    w_down, down_scale = quantized_experts(down)
    of_rows = kernels.group_tiles(group_sizes, rows=rows.count)
    y = grouped(a, w_down, group_sizes, of_rows, outer)
    if combine is not None:
        y = total(y, combine.by_token, dtype=dtype)
    y = y.astype(dtype)
    # Rows of no group must not affect the per-tensor scales.
    of_groups = jnp.where(has_group(x.scale, group_sizes), x.scale, 0)
    largest = x._replace(scale=of_groups), a._replace(scale=product_scale)
    x_scale, a_scale = tensor_scales(*largest)
    codes = quantize_tensor(rows.x, E4M3, copies="row", scale=x_scale).row
    of_weights = gate_up, down, jnp.max(jnp.stack(scales), axis=0), down_scale
    saved = rows._replace(x=codes), inner_groups, tiles, _exact(combine)
    like = dtype_of(rows.x)
    return once(y), (saved, of_weights, (x_scale, a_scale), group_sizes, like)


@array_types.on_common_mesh
def _backward(activation, inner, outer, dtype, residuals, dy):
    saved, of_weights, (x_scale, a_scale), group_sizes, like = residuals
    rows, inner_groups, tiles, combine = saved
    combine = _exact(combine)
    groups, largest_scale = jax.tree.map(scales_as_bits, inner_groups)
    gate_up, down, scale_of_pair, down_scale = of_weights
    dy, dy_transposed, weights = _gradient_of_rows(dy, group_sizes, combine)
    w = codes_of_experts(down, down_scale)
    da, da_maxima = grouped(dy, w, group_sizes, tiles, inner, keep_maxima=True)
    of_group = jnp.float32(1)
    if combine is not None:
        weights, of_group = by_group(weights, group_sizes)
    bounds = largest_scale, da_maxima
    scale, of_gate = grouped_gate_gradient(
        groups, da, bounds, weights, group_sizes, a_scale, activation
    )
    d_down = kernels.grouped_weight_gradient(
        of_gate.product,
        dy_transposed,
        group_sizes,
        a_scale * of_group,
        dy.scale,
        out_dtype=stored(down.dtype),
    )
    x = rows.transposed(group_sizes)
    d_gate_up = kernels.grouped_weight_gradient(
        x,
        of_gate.transposed,
        group_sizes,
        x_scale,
        scale * of_group,
        out_dtype=stored(gate_up[0].dtype),
    )
    gradient = Scaled(of_gate.values.reshape(len(da), -1), scale)
    parts = [codes_of_experts(part, scale_of_pair).codes for part in gate_up]
    w = Scaled(jnp.concatenate(parts, axis=2), scale_of_pair * of_group)
    dx = rows.gradient(grouped(gradient, w, group_sizes, tiles, like.dtype))
    of_pair = jnp.split(d_gate_up, len(gate_up), axis=2)
    of_pair = tuple(d.astype(w.dtype) for d, w in zip(of_pair, gate_up, strict=True))
    of_order, of_sizes = jax.tree.map(_no_gradient, (rows.order, group_sizes))
    of_rows = ExpertRows(dx.astype(like.dtype), of_order)
    of_sums = None
    if combine is not None:
        d_weights = combine.gradient(of_gate.weights, group_sizes)
        of_sums = Combine(d_weights, _no_gradient(combine.places))
    return of_rows, of_pair, d_down.astype(down.dtype), of_sizes, of_sums


_gated_experts.defvjp(_forward, _backward)


def _exact(combine: Combine | None) -> Combine | None:
    """Bitcasts weights to integers or back; `fp8_remat` saves integers exactly."""
    if combine is None:
        return None
    with Note("weights of choices", "the gradient of a gate").scope():
        return combine._replace(weights=scales_as_bits(combine.weights))


def _gradient_of_rows(
    dy: Float[Array, "_ n"], group_sizes: Int[Array, " g"], combine: Combine | None
) -> tuple[Scaled, Float[Array, "n columns"], Float[Array, " padded"]]:
    """Quantizes the gradients of rows; also returns their transpose and the weights.

    The gradients are not multiplied by the weights.

    Args:
      dy: The gradient of rows or, with `combine`, of tokens.
      group_sizes: The number of rows of each group.
      combine: The sums of rows, or None for rows without weights.

    Returns:
      The E5M2 codes of all rows and of 128 rows of padding at the end, with one scale;
      the codes transposed group by group; and the weights of rows and padding.
    """
    if combine is None:
        counts = has_group(dy, group_sizes)
    else:
        counts = jnp.any(combine.by_token < jnp.sum(group_sizes), axis=1)
    scale = gradient_scale(dy, counts)
    codes = quantize_tensor(dy, E5M2, copies="row", scale=scale).row
    if combine is None:
        rows, weights = ExpertRows(codes), jnp.ones(len(codes), jnp.float32)
    else:
        rows = ExpertRows(codes, inverted(combine.places))
        weights = combine.weights_of_rows(group_sizes)
    padded = rows.padded(codes)
    transposed = kernels.grouped_transpose(padded, group_sizes)
    return Scaled(padded, scale), transposed, _padded(weights)


def by_group(
    weights: Float[Array, " rows"], group_sizes: Int[Array, " g"]
) -> tuple[Float[Array, " rows"], Float[Array, " g"]]:
    """Divides the weights of rows by a power of two for each group.

    Products with weights are quantized with one scale for all groups. Without the
    division, products with the small weights of one expert would become zero next to
    products with the large weights of another.

    Returns:
      The divided weights, at most 1 in magnitude, and the powers of two. The weights of
      rows of no group are undefined.
    """
    rows, ends = jnp.arange(len(weights))[:, None], jnp.cumsum(group_sizes)[None]
    is_of = (rows >= ends - group_sizes[None]) & (rows < ends)
    largest = numerics.magnitude(jnp.where(is_of, weights[:, None], 0), axis=0)
    power = numerics.power_of_two_scale(largest, 1.0)
    group = jnp.minimum(jnp.sum(rows >= ends, axis=1), len(power) - 1)
    return weights / power[group], power


def grouped_gate_gradient(
    groups: Scaled,
    da: Float[Array, "rows f"],
    maxima: tuple[Float[Array, " rows"], Float[Array, " parts"]],
    weights: Float[Array, " rows"],
    group_sizes: Int[Array, " g"],
    a_scale: Float[Array, ""],
    gate: Activation,
) -> tuple[Float[Array, ""], kernels.WeightedGradients]:
    """Computes the gradients of gate, up and weights, for weighted rows by group.

    Args:
      groups: The codes of gate and up [rows, 2, f] in groups of 16.
      da: The gradient of a row's product weight * act(g) * u, where act is the
        activation, and g and u are gate and up.
      maxima: The largest group scale of each row, and the amax of parts of `da`.
      weights: The weight of each row, at most 1.
      group_sizes: The number of rows of each group.
      a_scale: The scale of the products, which are recomputed.
      gate: The name of the activation.

    Returns:
      The per-tensor scale of the gradients of gate and up; and these gradients as E5M2
      codes, with the codes of the products and the gradients of the weights.
    """
    # The amax of gate and up is at most the largest group scale times E4M3.max.
    bound = kernels.Bound(maxima, E4M3.max * STEEPEST[gate])
    (scale,) = kernels.tensor_scales(bound, dtype=E5M2.dtype)
    scales = {"scale": scale, "product_scale": a_scale}
    arrays = groups, da, weights, group_sizes
    return scale, kernels.weighted_gate_grad(*arrays, **scales, activation=gate)


def _padded(x: Array) -> Array:
    return jnp.pad(x, [(0, BLOCK)] + [(0, 0)] * (x.ndim - 1))


def _no_gradient(x: Array) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)
