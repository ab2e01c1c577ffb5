"""RMSNorm and LayerNorm with FP8 inputs and outputs, in jnp."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.numerics import (
    GROUP,
    NormKind,
    Scaled,
    code_max,
    magnitude,
    reciprocal,
    row_scale,
)
from pallas_kernels.ops.quantize.groups import groups_in_jnp, numbers_in_jnp
from pallas_kernels.ops.quantize.tensor import maxima_in_jnp

CODES = jnp.float8_e4m3fn


class Normed(NamedTuple):
    """Outputs of `norm`, None where an output was not asked for.

    Attributes:
      y: The output [..., n], bfloat16, or float8_e4m3fn codes if a scale is given.
      transposed: The transpose of `y`, [n, tokens], if `copies` is "transposed" or
        "both".
      largest: The amax of each token of a bfloat16 `y`, float32 [...].
      scale: The per-token scales, float32 [...], with scale="row".
      groups: The input in groups of 16: e4m3 codes and bfloat16 scales.
    """

    y: Array | None
    transposed: Array | None = None
    largest: Array | None = None
    scale: Array | None = None
    groups: Scaled | None = None


class NormGrads(NamedTuple):
    """Outputs of `norm_grad`, None where an output was not asked for.

    Attributes:
      dx: The gradient with respect to the norm's input, bfloat16 [..., n].
      dweight: The gradient of the weight, float32 of the weight's shape.
      dbias: The gradient of the bias, float32 of the bias's shape.
      y: The transpose of the recomputed output of the norm, float8_e4m3fn [n, tokens].
      largest: The amax of parts of `dx`, float32 [parts].
    """

    dx: Array
    dweight: Array | None
    dbias: Array | None
    y: Array | None = None
    largest: Array | None = None


def norm(
    x: Float[Array, "... n"] | Scaled,
    weight: Float[Array, "*parts n"] | None,
    bias: Float[Array, "*parts n"] | None,
    *,
    kind: NormKind,
    eps: float,
    scale: Array | Literal["row"] | None,
    keep_groups: bool,
) -> Normed:
    """Computes `pallas_kernels.norm` in jnp, without the transposed copy.

    `scale` is a scalar, "row" for per-token scales, or None for a bfloat16 output. With
    `keep_groups` the input is returned in groups of 16 as well.
    """
    wide = _wide(x)
    standard, _ = standardized(wide, kind, eps)
    result = _encoded(affine(standard, weight, bias), scale)
    groups = groups_in_jnp(wide, dtype=CODES, group=GROUP) if keep_groups else None
    return result._replace(groups=groups)


def norm_grad(
    x: Float[Array, "... n"] | Scaled,
    dy: Float[Array, "... n"],
    weight: Float[Array, "*parts n"] | None,
    bias: Float[Array, "*parts n"] | None,
    *,
    kind: NormKind,
    eps: float,
    y_scale: Float[Array, ""] | None,
    add: Float[Array, "... n"] | None,
    keep_maxima: bool,
) -> NormGrads:
    """Computes `pallas_kernels.norm_grad` in jnp, with `y` not transposed: [..., n].

    Args:
      x: The input of the norm.
      dy: The gradient of the norm's output.
      weight: The weight of the norm, or None.
      bias: The bias of the norm, or None.
      kind: The norm, "rms" or "layer".
      eps: The number that is added to the mean square, or to the variance.
      y_scale: The scale of the codes `y` of the norm's output; None returns no codes.
      add: An array to add to the gradient of the input, or None.
      keep_maxima: Whether to return the amax of parts of the input's gradient.
    """
    standard, rate = standardized(_wide(x), kind, eps)
    dy = dy.astype(jnp.float32)
    g = affine(dy, weight, None)
    along = jnp.mean(g * standard, axis=-1, keepdims=True)
    dx = g - standard * along
    if kind == "layer":
        dx = dx - jnp.mean(g, axis=-1, keepdims=True)
    dx = dx * rate
    if add is not None:
        dx = dx + add.astype(jnp.float32)
    dx = dx.astype(jnp.bfloat16)

    def total(x, param):
        tokens = range(param.ndim - 1, x.ndim - 1)
        return jnp.sum(x, axis=tuple(tokens))

    y = None
    if y_scale is not None:
        y = _encoded(affine(standard, weight, bias), y_scale).y
    return NormGrads(
        dx=dx,
        dweight=None if weight is None else total(dy * standard, weight),
        dbias=None if bias is None else total(dy, bias),
        y=y,
        largest=maxima_in_jnp(dx) if keep_maxima else None,
    )


def standardized(
    x: Float[Array, "... n"], kind: NormKind, eps: float
) -> tuple[Float[Array, "... n"], Float[Array, "... 1"]]:
    """Returns the normalized rows and their rate.

    `rate = 1 / sqrt(mean(x**2) + eps)`; "layer" first subtracts `mean(x)` from x.
    """
    if kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    rate = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * rate, rate


def affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    """Returns x * weight + bias; a weight or bias of None is left out.

    A weight or bias with leading axes has a row for each part of `x`.
    """

    def on_rows(param):
        between = [1] * (x.ndim - param.ndim)
        shape = *param.shape[:-1], *between, param.shape[-1]
        return param.astype(jnp.float32).reshape(shape)

    x = x if weight is None else x * on_rows(weight)
    return x if bias is None else x + on_rows(bias)


def _wide(x: Array | Scaled) -> Array:
    if isinstance(x, Scaled):
        return numbers_in_jnp(x, dtype=jnp.float32, group=GROUP)
    return x.astype(jnp.float32)


def _encoded(y: Array, scale: Array | str | None) -> Normed:
    if scale is None:
        largest = lax.reduce_precision(magnitude(y, axis=-1), 8, 7)
        return Normed(y.astype(jnp.bfloat16), largest=largest)
    if not isinstance(scale, str):
        return Normed(_codes(y * reciprocal(scale)))
    rows = row_scale(magnitude(y, axis=-1), CODES)
    return Normed(_codes(y * (1 / rows)[..., None]), scale=rows)


def _codes(x: Array) -> Array:
    codes = jnp.clip(x, -code_max(CODES), code_max(CODES)).astype(CODES)
    # Without the barrier XLA may remove a conversion to 8 bits and back.
    return lax.optimization_barrier(codes)
