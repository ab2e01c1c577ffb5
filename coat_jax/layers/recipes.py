"""Three segments of a transformer layer, and recipes for what each segment saves.

The recipes "coat" and "coat_max" run the FP8 precision flow of COAT (arXiv 2410.19313,
section 5), which is in `coat_jax.layers.flow`. The other recipes compute the same layer
from plain functions, for comparison.
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
# The residual stream between segments. A `Stream`, in the FP8 flow, also carries the
# scale of its gradient.
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
      linear: The matmul (x, w) -> x @ w.T; None for the FP8 flow, in which every
        segment saves its activations in FP8 groups and recomputes the rest.
      pointwise: The wrapper of norms, gates and RoPE outside of the flow.
      attention: The wrapper of attention and the output projection behind it.
    """

    linear: Callable | None = None
    pointwise: Callable = _identity
    attention: Callable = _identity


RECIPES: dict[RecipeName, Recipe] = {
    # This saves exactly the arrays that jax.vjp saves.
    "bf16": Recipe(linear=_plain_linear),
    # FP8 matmuls save FP8 operands, as in TransformerEngine. Norms, gates and RoPE are
    # recomputed from BF16 inputs.
    "te": Recipe(linear=linear.linear, pointwise=jax.checkpoint),
    # Attention saves queries, keys, values and outputs in BF16.
    "coat": Recipe(pointwise=jax.checkpoint),
    # `fp8_remat` saves these arrays in FP8 as well.
    "coat_max": Recipe(pointwise=jax.checkpoint, attention=fp8_remat),
}


def enter(recipe: Recipe, x: Float[Array, "b s h"]) -> Residual:
    """Returns the residual stream in the form that the first segment takes.

    Raises:
      ValueError: If the recipe uses the FP8 flow and `x` is neither bfloat16 nor
        float32.
    """
    if recipe.linear is not None:
        return x
    check_dtype("the residual stream", x.dtype, WIDE)
    return Stream.of(x)


def leave(recipe: Recipe, x: Residual) -> Float[Array, "b s h"]:
    """Returns the array of the residual stream, from what the last segment returns."""
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
    """Computes queries, keys and values: `norm(x) @ qkv.T + qkv_bias`, then RoPE.

    Args:
      recipe: The kind of matmuls and the activations to save.
      params: The parameters: `norm` [h] or None, `qkv` [k * (n / k + 2) * d, h] and
        optionally `qkv_bias`.
      x: The residual stream.
      norm: The norm.
      heads: The order of heads in the columns of the matmul.

    Returns:
      Queries, keys, values, a tuple of copies of them to save for backward (may be
      empty), and `x` for the next segment.
    """
    if recipe.linear is None:
        # A wrapper such as `fp8_remat` saves its own copies of q, k and v.
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
    """Computes `x + causal_attention(q, k, v) @ out.T + out_bias`.

    `params` holds `out` [h, n * d] and optionally `out_bias` [h]; `kept` are the copies
    that `attention_in` returns.
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
    """Computes `x + (activation(gate) * up) @ down.T + down_bias`.

    Gate and up are the two halves of `norm(x) @ gate_up.T + gate_up_bias`.

    Args:
      recipe: The kind of matmuls and the activations to save.
      params: The parameters: `norm` [h] or None, `gate_up` [2, f, h], `down` [h, f],
        and optionally `gate_up_bias` [2, f] and `down_bias` [h].
      x: The residual stream.
      norm: The norm.
      gate: The activation of the gate.
    """
    if recipe.linear is None:
        return flow.gated_mlp(params, x, norm, gate)
    h = norm_of(recipe, norm)(params["norm"], x)
    y = linear.once(recipe.linear(h, params["gate_up"]))
    y = biased(y, params.get("gate_up_bias"))
    a = recipe.pointwise(GATES[gate])(y[..., 0, :], y[..., 1, :])
    return x + biased(recipe.linear(a, params["down"]), params.get("down_bias"))


def norm_of(recipe: Recipe, norm: Norm) -> Callable:
    """Returns the function (weight, x) -> norm(x), with the recipe's residuals."""
    fn = NORMS[norm.kind]
    return recipe.pointwise(lambda weight, x: fn(x, weight, eps=norm.eps))
