"""A transformer layer in three segments, and the recipes that say what each saves.

The FP8 precision flow of COAT (arXiv 2410.19313, section 5) is that of
`coat_jax.layers.flow`; the other recipes compute the same from plain functions, for
comparison.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.layers import flow
from coat_jax.layers import functional as nonlinear
from coat_jax.layers import matmul as linear
from coat_jax.layers.attention import causal_attention
from coat_jax.layers.flow import (
    GateName,
    Heads,
    Norm,
    NormName,
    Params,
    Stream,
    biased,
    joined,
)
from coat_jax.remat.api import fp8_remat
from pallas_kernels.checks import WIDE, check_dtype

RecipeName = Literal["bf16", "te", "coat", "coat_max"]
# Between segments; in the FP8 flow with what brings its gradient's scale.
Residual = Float[Array, "b s h"] | Stream
NORMS: dict[NormName, Callable] = {
    "rms": nonlinear.rms_norm,
    "layer": nonlinear.layer_norm,
}
GATES: dict[GateName, Callable] = {
    "silu": nonlinear.swiglu,
    "gelu": nonlinear.geglu,
    "gelu_exact": partial(nonlinear.geglu, approximate=False),
}


def _plain_linear(x: Array, w: Array) -> Array:
    return jnp.tensordot(x, w.astype(x.dtype), axes=(-1, -1))


def _identity(fn: Callable) -> Callable:
    return fn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The matmuls of a layer, and the activations that it saves.

    Attributes:
      linear: The matrix product (x, w) -> x @ w.T; None for the FP8 flow, in which
        every segment keeps its activations in FP8 groups and recomputes the rest.
      pointwise: Applied to norms, gates and rotary embeddings outside of the flow.
      attention: Applied to attention and the product that follows.
    """

    linear: Callable | None = None
    pointwise: Callable = _identity
    attention: Callable = _identity


RECIPES: dict[RecipeName, Recipe] = {
    # This saves exactly the arrays that jax.vjp saves.
    "bf16": Recipe(linear=_plain_linear),
    # TransformerEngine does the same: FP8 matmuls save FP8 operands. Norms and gates
    # recompute from BF16 inputs.
    "te": Recipe(linear=linear.linear, pointwise=jax.checkpoint),
    # Queries, keys, values and outputs of attention stay BF16 ...
    "coat": Recipe(pointwise=jax.checkpoint),
    # ... or are kept in FP8 too.
    "coat_max": Recipe(pointwise=jax.checkpoint, attention=fp8_remat),
}


def enter(recipe: Recipe, x: Float[Array, "b s h"]) -> Residual:
    """The residual stream as the first segment takes it.

    Raises:
      ValueError: If the recipe is one of the FP8 flow and `x` neither bfloat16 nor
        float32.
    """
    if recipe.linear is not None:
        return x
    check_dtype("the residual stream", x.dtype, WIDE)
    return Stream.of(x)


def leave(recipe: Recipe, x: Residual) -> Float[Array, "b s h"]:
    """The residual stream that the last segment returns."""
    return x if recipe.linear is not None else flow.leave(x)


def attention_in(
    recipe: Recipe,
    params: Params,
    x: Residual,
    *,
    norm: Norm,
    heads: Heads,
) -> tuple[
    Float[Array, "b s n d"],
    Float[Array, "b s k d"],
    Float[Array, "b s k d"],
    tuple[Array, ...],
    Float[Array, "b s h"],
]:
    """Norm, fused query / key / value product, rotary embedding.

    Args:
      recipe: What to multiply with and what to keep.
      params: `norm` [h] or None, `qkv` [k * (n / k + 2) * d, h] and maybe `qkv_bias`.
      x: The residual stream.
      norm: Which norm.
      heads: How the columns of the product are heads.

    Returns:
      Queries, keys, values, copies of them for backward to save, if there are any, and
      `x`, to go on with.
    """
    if recipe.linear is None:
        # Attention that is wrapped has its own way to save.
        return flow.attention_in(params, x, norm, heads, recipe.attention is _identity)
    h = norm_of(recipe, norm)(params["norm"], x)
    y = linear.once(recipe.linear(h, params["qkv"]))
    y = biased(y, params.get("qkv_bias"))
    return *recipe.pointwise(heads.split)(y), (), x


def attention_out(
    recipe: Recipe,
    params: Params,
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    kept: tuple[Array, ...],
    x: Float[Array, "b s h"],
) -> Residual:
    """`x` plus causal attention and its output product.

    `params` holds `out` [h, n * d] and maybe `out_bias` [h]; `kept` are the copies that
    `attention_in` returns.
    """

    def segment(params, q, k, v, x):
        o = causal_attention(q, k, v, kept)
        if recipe.linear is None:
            return flow.attention_out(params, o, x)
        y = recipe.linear(joined(o), params["out"])
        return linear.once(x + biased(y, params.get("out_bias")))

    return recipe.attention(segment)(params, q, k, v, x)


def gated_mlp(
    recipe: Recipe,
    params: Params,
    x: Residual,
    *,
    norm: Norm,
    gate: GateName = "silu",
) -> Residual:
    """`x` plus norm, fused gate / up product, gated activation, down product.

    Args:
      recipe: What to multiply with and what to keep.
      params: `norm` [h] or None, `gate_up` [2, f, h], `down` [h, f], and maybe
        `gate_up_bias` [2, f] and `down_bias` [h].
      x: The residual stream.
      norm: Which norm.
      gate: Activation of the gate.
    """
    if recipe.linear is None:
        return flow.gated_mlp(params, x, norm, gate)
    h = norm_of(recipe, norm)(params["norm"], x)
    y = linear.once(recipe.linear(h, params["gate_up"]))
    y = biased(y, params.get("gate_up_bias"))
    a = recipe.pointwise(GATES[gate])(y[..., 0, :], y[..., 1, :])
    return x + biased(recipe.linear(a, params["down"]), params.get("down_bias"))


def norm_of(recipe: Recipe, norm: Norm) -> Callable:
    """The function (weight, x) -> norm of `x`, differentiated as the recipe says."""
    fn = NORMS[norm.kind]
    return recipe.pointwise(lambda weight, x: fn(x, weight, eps=norm.eps))
