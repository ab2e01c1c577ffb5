"""Gated MLPs of experts in FP8: two grouped matmuls with a gate between them.

`fp8_ragged_dot` cannot know that a gate computes the rows that it reads, and that rows
are copies of tokens. Here tokens are quantized before they are copied, one kernel
computes the gate, writes the codes that the second matmul reads and what backward
reads, and another one computes all gradients of the gate.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

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
from coat_jax.fp8.rows import sums, taken, wide_order
from coat_jax.quantization.array import scales_as_bits
from coat_jax.quantization.formats import E4M3, E5M2
from pallas_kernels import Activation, Scaled, numerics
from pallas_kernels.dispatch import array_types
from pallas_kernels.ops.grouped_matmul.tiles import BLOCK


class ExpertRows(NamedTuple):
    """Rows that are sorted by expert, or the tokens that they are copies of.

    Attributes:
      x: The rows [m, k], or the tokens [t, k].
      order: A permutation if they are tokens: row i is of token order[i] // (m // t).
    """

    x: Float[Array, "_ k"]
    order: Int[Array, " m"] | None = None

    @property
    def count(self) -> int:
        """The number of rows, m."""
        return len(self.x if self.order is None else self.order)

    def padded[Rows](self, arrays: Rows) -> Rows:
        """Returns the rows of arrays like `x`, with 128 rows of zeros at the end."""
        if self.order is None:
            return jax.tree.map(_padded, arrays)
        tokens = len(self.x)
        index = wide_order(self.order) // (self.count // tokens)
        index = jnp.pad(index, (0, BLOCK), constant_values=tokens)
        return jax.tree.map(lambda x: taken(x, index), arrays)

    def gradient(self, rows: Float[Array, "padded k"]) -> Float[Array, "_ k"]:
        """Returns the gradient of `x`: of rows, or the sums of the rows of tokens."""
        rows = rows[: self.count]
        return rows if self.order is None else sums(rows, self.order, len(self.x))


def gated_experts(
    rows: ExpertRows,
    gate_up: Sequence[Float[Array, "g k _"]],
    down: Float[Array, "g f n"],
    group_sizes: Int[Array, " g"],
    *,
    activation: Activation,
    inner: DTypeLike,
    dtype: DTypeLike,
) -> list[Array]:
    """Computes `ragged_dot(activation(gate) * up, down)` of `ragged_dot(x, gate_up)`.

    It is `fp8_ragged_dot` otherwise: rows after the last group give zeros, and have
    zero gradients.

    Args:
      rows: The rows x.
      gate_up: The weights of gate and up in one array [g, k, 2 f], or in two [g, k, f].
      down: The weights after the gate.
      group_sizes: The number of rows of each group.
      activation: The activation.
      inner: The dtype of gate and up.
      dtype: The dtype of the result.

    Returns:
      The result [m, n], in a list.
    """
    arrays = rows, tuple(gate_up), down, group_sizes
    arrays = array_types.varying_alike(arrays)
    return [_gated_experts(*arrays, activation, inner, dtype)]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _gated_experts(rows, gate_up, down, group_sizes, activation, inner, dtype):
    return _forward(rows, gate_up, down, group_sizes, activation, inner, dtype)[0]


@array_types.on_common_mesh
def _forward(rows, gate_up, down, group_sizes, activation, inner, dtype):
    x = rows.padded(quantize_tokens(rows.x))
    tiles = kernels.group_tiles(group_sizes, rows=len(x.codes))
    parts, scales = zip(*map(quantized_experts, gate_up), strict=True)
    w = jax.tree.map(lambda *v: v[0] if len(v) == 1 else jnp.concatenate(v, 1), *parts)
    y = grouped(x, w, group_sizes, tiles, inner)
    gate = Prologue(activation, (), "copies")
    a, inner_groups = quantized_gate(y.reshape(len(y), 2, -1), gate)
    # Only backward needs rows of padding.
    a = jax.tree.map(lambda v: v[: rows.count], a)
    w_down, down_scale = quantized_experts(down)
    of_rows = kernels.group_tiles(group_sizes, rows=rows.count)
    y = grouped(a, w_down, group_sizes, of_rows, dtype)
    # Rows of no group do not count.
    of_groups = jnp.where(has_group(x.scale, group_sizes), x.scale, 0)
    x_scale, a_scale = tensor_scales(x._replace(scale=of_groups), a)
    codes = quantize_tensor(rows.x, E4M3, copies="row", scale=x_scale).row
    of_weights = gate_up, down, jnp.max(jnp.stack(scales), axis=0), down_scale
    saved = rows._replace(x=codes), inner_groups, tiles
    like = dtype_of(rows.x)
    return once(y), (saved, of_weights, (x_scale, a_scale), group_sizes, like)


@array_types.on_common_mesh
def _backward(activation, inner, dtype, residuals, dy):
    saved, of_weights, (x_scale, a_scale), group_sizes, like = residuals
    rows, inner_groups, tiles = saved
    groups, largest_scale = jax.tree.map(scales_as_bits, inner_groups)
    gate_up, down, scale_of_pair, down_scale = of_weights
    dy_scale = gradient_scale(dy, group_sizes)
    dy = Scaled(
        _padded(quantize_tensor(dy, E5M2, copies="row", scale=dy_scale).row), dy_scale
    )
    w = codes_of_experts(down, down_scale)
    da = grouped(dy, w, group_sizes, tiles, inner)
    weights = jnp.ones(len(da), jnp.float32)
    scale, of_gate = grouped_gate_gradient(
        groups, largest_scale, da, weights, group_sizes, a_scale, activation
    )
    transposed = kernels.grouped_transpose(dy.codes, group_sizes)
    d_down = kernels.grouped_weight_gradient(
        *(of_gate.product, transposed, group_sizes, a_scale, dy_scale),
        out_dtype=stored(down.dtype),
    )
    x = kernels.grouped_transpose(rows.padded(rows.x), group_sizes)
    d_gate_up = kernels.grouped_weight_gradient(
        *(x, of_gate.transposed, group_sizes, x_scale, scale),
        out_dtype=stored(gate_up[0].dtype),
    )
    gradient = Scaled(of_gate.values.reshape(len(da), -1), scale)
    parts = [codes_of_experts(part, scale_of_pair).codes for part in gate_up]
    w = Scaled(jnp.concatenate(parts, axis=2), scale_of_pair)
    dx = rows.gradient(grouped(gradient, w, group_sizes, tiles, like.dtype))
    of_pair = jnp.split(d_gate_up, len(gate_up), axis=2)
    of_pair = tuple(d.astype(w.dtype) for d, w in zip(of_pair, gate_up, strict=True))
    of_order, of_sizes = jax.tree.map(_no_gradient, (rows.order, group_sizes))
    of_rows = ExpertRows(dx.astype(like.dtype), of_order)
    return of_rows, of_pair, d_down.astype(down.dtype), of_sizes


_gated_experts.defvjp(_forward, _backward)


def grouped_gate_gradient(
    groups: Scaled,
    largest_scale: Float[Array, " rows"],
    da: Float[Array, "rows f"],
    weights: Float[Array, " rows"],
    group_sizes: Int[Array, " g"],
    a_scale: Float[Array, ""],
    gate: Activation,
) -> tuple[Float[Array, ""], kernels.WeightedGradients]:
    """Computes gradients of gates by rows that are sorted by group and have weights.

    Args:
      groups: Gate and up [rows, 2, f] in groups of 16.
      largest_scale: The largest group scale of each row.
      da: The gradient of `weight * activation(gate) * up`.
      weights: The weight of each row.
      group_sizes: The number of rows of each group.
      a_scale: The scale of the product that is returned, too.
      gate: The activation.

    Returns:
      The scale of the gradients of gate and up, per tensor, and these gradients as E5M2
      codes, with the product and the gradients of the weights.
    """
    largest = numerics.magnitude(da.astype(jnp.float32) * weights[:, None])
    # The amax of gate and up is at most the largest group scale times E4M3.max.
    bound = kernels.Bound((largest_scale, largest[None]), E4M3.max * STEEPEST[gate])
    (scale,) = kernels.tensor_scales(bound, dtype=E5M2.dtype)
    scales = {"scale": scale, "product_scale": a_scale}
    arrays = groups, da, weights, group_sizes
    return scale, kernels.weighted_gate_grad(*arrays, **scales, activation=gate)


def _padded(x: Array) -> Array:
    return jnp.pad(x, [(0, BLOCK)] + [(0, 0)] * (x.ndim - 1))


def _no_gradient(x: Array) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)
