"""Multiplies rows by the weights of their experts, with and without FP8.

Weights are [experts, out, in]. In FP8 each weight is quantized twice, for the forward
and for the backward pass. In the forward pass each output feature of an expert has a
scale. The matmul of the input gradient contracts the output features, so there each
expert has one scale, the largest of its forward scales: no second pass computes an
amax. Matmuls of weight gradients contract rows, so in the backward pass activations and
their gradients have one scale per tensor.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.fp8.matmul import (
    dtype_of,
    once,
    quantize_tensor,
    quantize_tokens,
    tensor_scales,
)
from coat_jax.fp8.ragged_dot import grouped, quantizable, stored
from coat_jax.layers.experts.rows import Rows
from coat_jax.quantization.formats import E4M3, E5M2
from pallas_kernels import Scaled
from pallas_kernels.dispatch import array_types

# A function (x, w, rows, of_tokens) that multiplies rows by their experts' weights. If
# `of_tokens`, x is [tokens, in] and every row reads its token; otherwise [rows, in].
Product = Callable[[Array, Array, Rows, bool], Float[Array, "rows out"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightOfExperts:
    """Codes of the weights of experts, for one matmul.

    Attributes:
      codes: The codes, [experts, out, in] for the forward pass or [experts, in, out]
        for the backward pass, with a scale for each row of the matrices.
      dtype: The dtype of the weights.
    """

    codes: Scaled
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})

    @classmethod
    def forward(cls, w: Float[Array, "experts out in"]) -> "WeightOfExperts":
        """Quantizes weights for `forward_product`, with a scale per output feature."""
        return cls(codes=quantize_tokens(w), dtype=w.dtype)

    @classmethod
    def backward(
        cls, w: Float[Array, "experts out in"], scale: Float[Array, " experts"]
    ) -> "WeightOfExperts":
        """Quantizes weights for `input_gradient`, with a scale for each expert.

        `scale` is the property `scale_of_experts` of the result of `forward`.
        """
        count, _, inputs = w.shape
        scale = jnp.broadcast_to(scale[:, None], (count, inputs))
        codes = kernels.quantize_columns(quantizable(w), scale)
        return cls(codes=codes, dtype=w.dtype)

    def scaled(self, factor: Float[Array, " experts"]) -> "WeightOfExperts":
        """Returns the weights of each expert times a factor."""
        scale = self.codes.scale * factor[:, None]
        return dataclasses.replace(self, codes=self.codes._replace(scale=scale))

    @property
    def scale_of_experts(self) -> Float[Array, " experts"]:
        """The largest scale of each expert, if `codes` are for the forward pass."""
        return jnp.max(self.codes.scale, axis=1)


def forward_product(
    x: Scaled, w: WeightOfExperts, rows: Rows, dtype: DTypeLike
) -> Float[Array, "rows out"]:
    """Multiplies rows of codes, with a scale per row, by their experts' weights."""
    return once(grouped(x, w.codes, rows.sizes, rows.tiles(), dtype))


def input_gradient(
    dy: Scaled,
    w: WeightOfExperts,
    rows: Rows,
    dtype: DTypeLike,
    *,
    keep_maxima: bool = False,
) -> Any:
    """Computes the gradient of a matmul's rows from codes of its result's gradient.

    With `keep_maxima` it also returns the amax of each part of the computed gradient.
    """
    options = {"keep_maxima": keep_maxima}
    return grouped(dy, w.codes, rows.sizes, rows.tiles(), dtype, **options)


def weight_gradient(
    dy: Scaled, x: Scaled, rows: Rows, dtype: DTypeLike
) -> Float[Array, "experts out in"]:
    """Computes the gradient of the experts' weights from transposed codes.

    Args:
      dy: Codes of the result's gradient, transposed as by `grouped_transpose`, with a
        scale per tensor or expert.
      x: Codes of the rows, also transposed, with a scale per tensor or expert.
      rows: The rows.
      dtype: The dtype of the weights.
    """
    arrays = dy.codes, x.codes, rows.sizes, dy.scale, x.scale
    dw = kernels.grouped_weight_gradient(*arrays, out_dtype=stored(dtype))
    return dw.astype(dtype)


def merged(w: Float[Array, "experts *out in"]) -> Float[Array, "experts n in"]:
    """Merges all output axes, so that the weights of an expert are one matrix."""
    return w.reshape(len(w), -1, w.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def plain_product(
    x: Float[Array, "tokens_or_rows in"],
    w: Float[Array, "experts *out in"],
    rows: Rows,
    of_tokens: bool,
) -> Float[Array, "rows out"]:
    """Multiplies rows by the weights of their experts, in the dtype of `x`.

    With `of_tokens`, `x` has a row for each token. Only `x` is saved, and the backward
    pass gathers the rows of experts from it again. The kernels of grouped matmuls run
    if `x` is bfloat16, and `jax.lax.ragged_dot` runs otherwise.
    """
    return _plain(x, w, rows, of_tokens)


def _plain(x, w, rows, of_tokens):
    x, w = array_types.varying_alike((x, w))
    x = rows.of_tokens(x) if of_tokens else x
    return once(_multiplied(x, merged(w).astype(x.dtype), rows))


def _multiplied(x, w, rows):
    if x.dtype == jnp.bfloat16:
        return kernels.grouped_matmul(x, w, rows.sizes, tiles=rows.tiles())
    return _ragged_dot(x, w, rows.sizes)


# `vmap` of `ragged_dot` needs mapped weights, and maps only over first axes.
@jax.custom_batching.sequential_vmap
def _ragged_dot(x, w, sizes):
    return lax.ragged_dot(x, w.swapaxes(1, 2), sizes)


@jax.custom_batching.sequential_vmap
def _ragged_dot_grads(x, w, sizes, dy):
    def multiply(x, w):
        return lax.ragged_dot(x, w.swapaxes(1, 2), sizes)

    return jax.vjp(multiply, x, w)[1](dy)


def _plain_fwd(x, w, rows, of_tokens):
    return _plain(x, w, rows, of_tokens), (x, w, rows)


def _plain_bwd(of_tokens, residuals, dy):
    x, w, rows = residuals
    x_rows = rows.of_tokens(x) if of_tokens else x
    wide = merged(array_types.varying_alike(w, (w, x))).astype(x.dtype)
    if x.dtype == jnp.bfloat16:
        dx = _multiplied(dy, wide.swapaxes(1, 2), rows)
        operands = (kernels.grouped_transpose(v, rows.sizes) for v in (dy, x_rows))
        dw = kernels.grouped_weight_gradient(
            *operands, rows.sizes, out_dtype=stored(w.dtype)
        )
    else:
        dx, dw = _ragged_dot_grads(x_rows, wide, rows.sizes, dy)
    dx = rows.sums(dx).astype(x.dtype) if of_tokens else dx
    return dx, _total_like(w, dw.astype(w.dtype).reshape(w.shape)), None


plain_product.defvjp(_plain_fwd, _plain_bwd)


def _total_like(w: Array, dw: Array) -> Array:
    """Sums a weight's gradient over the devices that have the same weight.

    Within `shard_map` weights are saved as they came in: arguments take no further
    memory, but copies with a type that varies over devices would.
    """
    alike = array_types.varying_axes(dw) - array_types.varying_axes(w)
    return lax.psum(dw, tuple(sorted(alike))) if alike else dw


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def fp8_product(
    x: Float[Array, "tokens_or_rows in"],
    w: Float[Array, "experts *out in"],
    rows: Rows,
    of_tokens: bool,
) -> Float[Array, "rows out"]:
    """Computes `plain_product` in FP8, and saves E4M3 codes of `x`."""
    return _fp8_fwd(x, w, rows, of_tokens)[0]


@array_types.on_common_mesh
def _fp8_fwd(x, w, rows, of_tokens):
    codes = quantize_tokens(x)
    (scale,) = tensor_scales(codes)
    scale = rows.common(scale) if of_tokens else scale
    saved = quantize_tensor(x, E4M3, copies="row", scale=scale)
    if of_tokens:
        codes = jax.tree.map(rows.of_tokens, codes)
    wide = merged(array_types.varying_alike(w, (w, x)))
    of_forward = WeightOfExperts.forward(wide)
    y = forward_product(codes, of_forward, rows, x.dtype)
    of_weights = w, of_forward.scale_of_experts
    return y, (Scaled(saved.row, scale), dtype_of(x), of_weights, rows)


@array_types.on_common_mesh
def _fp8_bwd(of_tokens, residuals, dy):
    x, like, (w, of_experts), rows = residuals
    gradient = quantize_tensor(dy, E5M2, copies="row")
    gradient = Scaled(gradient.row, gradient.scale)
    wide = merged(array_types.varying_alike(w, (w, dy)))
    of_backward = WeightOfExperts.backward(wide, of_experts)
    dx = input_gradient(gradient, of_backward, rows, like.dtype)
    dx = rows.sums(dx).astype(like.dtype) if of_tokens else dx
    codes = rows.of_tokens(x.codes) if of_tokens else x.codes
    operands = (
        Scaled(kernels.grouped_transpose(v.codes, rows.sizes), v.scale)
        for v in (gradient, x._replace(codes=codes))
    )
    dw = weight_gradient(*operands, rows, w.dtype)
    return dx, _total_like(w, dw.reshape(w.shape)), None


fp8_product.defvjp(_fp8_fwd, _fp8_bwd)
