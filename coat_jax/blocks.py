"""A transformer layer in four segments, and the recipes that say what each saves.

The FP8 precision flow of COAT (arXiv 2410.19313, section 5). A segment is a function
from parameters and activations; a `Recipe` chooses its matrix product and what backward
keeps of it. In `coat` every segment but attention keeps nothing but its activations, in
FP8 groups, and recomputes the rest: norm outputs, gate products and rotary embeddings
are not saved, and one FP8 copy serves a tensor's linear and non-linear consumers. The
residual stream stays wide and is not saved.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax import linear, nonlinear
from coat_jax.remat import fp8_inputs, fp8_remat

RecipeName = Literal["bf16", "te", "coat", "coat_max"]
NormName = Literal["rms", "layer"]
GateName = Literal["silu", "gelu"]
Params = Mapping[str, Array | None]
NORMS: dict[NormName, Callable] = {
    "rms": nonlinear.rms_norm,
    "layer": nonlinear.layer_norm,
}
GATES: dict[GateName, Callable] = {"silu": nonlinear.swiglu, "gelu": nonlinear.geglu}


def _plain_linear(x: Array, w: Array) -> Array:
    return jnp.tensordot(x, w.astype(x.dtype), axes=1)


def _identity(fn: Callable) -> Callable:
    return fn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a layer multiplies with, and what its backward pass keeps.

    Attributes:
      linear: The matrix product (x, w) -> x @ w.
      output: Applied to the product that follows attention.
      pointwise: Applied to norms, gates and rotary embeddings.
      segment: Applied to whole segments, but for attention's.
      attention: Applied to attention's segment.
    """

    linear: Callable = _plain_linear
    output: Callable = _identity
    pointwise: Callable = _identity
    segment: Callable = _identity
    attention: Callable = _identity


_COAT = Recipe(
    linear=linear.linear,
    # Keeps attention's output as attention's backward does, instead of another copy.
    output=jax.checkpoint,
    segment=fp8_inputs,
)
RECIPES: dict[RecipeName, Recipe] = {
    # What jax.vjp saves, no more and no less.
    "bf16": Recipe(),
    # As TransformerEngine: FP8 products with FP8 residuals; norms and gates recompute
    # from BF16 inputs.
    "te": Recipe(linear=linear.linear, pointwise=jax.checkpoint),
    "coat": _COAT,
    # The queries, keys, values and outputs of attention in FP8 too.
    "coat_max": dataclasses.replace(_COAT, attention=fp8_remat),
}


def attention_in(
    recipe: Recipe,
    params: Params,
    x: Float[Array, "b s h"],
    *,
    norm: NormName,
    eps: float,
    num_kv_heads: int,
    head_dim: int,
    theta: float,
) -> tuple[Float[Array, "b s n d"], Float[Array, "b s k d"], Float[Array, "b s k d"]]:
    """Norm, fused query / key / value product, rotary embedding.

    Args:
      recipe: What to multiply with and what to keep.
      params: `norm` [h] or None, and `qkv` [h, k * (n / k + 2) * d]: for every key head
        its queries, then its key, then its value.
      x: The residual stream.
      norm: Which norm.
      eps: Its epsilon.
      num_kv_heads: Number of key heads, k.
      head_dim: Size of a head, d.
      theta: Base of the rotary embedding.

    Returns:
      Queries, keys and values.
    """

    def segment(params, x):
        h = _norm(recipe, norm, eps)(params["norm"], x)
        y = recipe.linear(h, params["qkv"])
        y = y.reshape(*y.shape[:2], num_kv_heads, -1, head_dim)
        q = y[..., :-2, :].reshape(*y.shape[:2], -1, head_dim)
        k, v = y[..., -2, :], y[..., -1, :]
        rotary = recipe.pointwise(partial(nonlinear.rotary, theta=theta))
        return rotary(q), rotary(k), v

    return recipe.segment(segment)(params, x)


def attention_out(
    recipe: Recipe,
    params: Params,
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
) -> Float[Array, "b s h"]:
    """Causal attention and its output product; `params` holds `out` [n * d, h]."""

    def segment(params, q, k, v):
        output = recipe.output(
            lambda o, w: recipe.linear(o.reshape(*o.shape[:2], -1), w)
        )
        return output(causal_attention(q, k, v), params["out"])

    return recipe.attention(segment)(params, q, k, v)


def gated_mlp(
    recipe: Recipe,
    params: Params,
    x: Float[Array, "b s h"],
    *,
    norm: NormName,
    eps: float,
    gate: GateName = "silu",
) -> Float[Array, "b s h"]:
    """Norm, fused gate / up product, gated activation, down product.

    Args:
      recipe: What to multiply with and what to keep.
      params: `norm` [h] or None, `gate_up` [h, 2, f] and `down` [f, h].
      x: The residual stream.
      norm: Which norm.
      eps: Its epsilon.
      gate: Activation of the gate.
    """

    def expand(params, x):
        h = _norm(recipe, norm, eps)(params["norm"], x)
        y = recipe.linear(h, params["gate_up"])
        return y[..., 0, :], y[..., 1, :]

    def contract(params, gate_value, up):
        activation = recipe.pointwise(GATES[gate])
        return recipe.linear(activation(gate_value, up), params["down"])

    gate_value, up = recipe.segment(expand)(params, x)
    return recipe.segment(contract)(params, gate_value, up)


def causal_attention(
    q: Float[Array, "b s n d"], k: Float[Array, "b s k d"], v: Float[Array, "b s k d"]
) -> Float[Array, "b s n d"]:
    """Softmax attention of each position to itself and those before it.

    Backward saves q, k, v, and on GPUs the output and a statistic a row: cuDNN's flash
    attention there, elsewhere XLA's, whose probabilities are recomputed.
    """
    attention = partial(jax.nn.dot_product_attention, is_causal=True)
    if _has_flash_attention(q):
        return attention(q, k, v, implementation="cudnn")
    return jax.checkpoint(partial(attention, implementation="xla"))(q, k, v)


def _has_flash_attention(q: Array) -> bool:
    # What cuDNN's kernel takes when it is differentiated.
    _, length, _, head_dim = q.shape
    return (
        jax.default_backend() == "gpu"
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and length % 2 == 0
    )


def _norm(recipe: Recipe, name: NormName, eps: float) -> Callable:
    return recipe.pointwise(lambda weight, x: NORMS[name](x, weight, eps=eps))
