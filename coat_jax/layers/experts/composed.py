"""Computes the experts of a layer with functions that JAX differentiates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.layers.experts.parallel import ExpertAxis
from coat_jax.layers.experts.products import Product
from coat_jax.layers.experts.routing import (
    Experts,
    Shares,
    chosen_experts,
    routed,
    router_logits,
)
from coat_jax.layers.experts.rows import sums_of_tokens, weights_of_rows
from coat_jax.layers.experts.sent import sorted_rows
from coat_jax.meshes import batch_shards, on_explicit_tokens


def experts_sum(
    params: Any,
    h: Float[Array, "tokens h"],
    *,
    product: Product,
    gated: Callable[[Array, Array], Array],
    experts: Experts,
    axis_name: str | None = None,
) -> tuple[Float[Array, "tokens h"], Shares]:
    """Computes the weighted sum of the outputs of each token's experts.

    Args:
      params: The parameters; see `Recipe.experts`.
      h: The norm's output.
      product: The matmul of rows and the weights of their experts.
      gated: A function of gate and up [rows, 2, f] and the weights of rows [rows, 1],
        which returns the operand [rows, f] of `down`.
      experts: The experts.
      axis_name: The mesh axis that splits the experts, within `shard_map`.

    Returns:
      The sums in the dtype of `h`, and the router's statistics.
    """
    # Backward reads the norm's output in its own dtype, not a float32 copy of it.
    logits = jax.checkpoint(router_logits)(h, params["router"])
    ids = chosen_experts(logits, experts, params["router_bias"])
    weights, shares = routed(logits, ids, experts)
    rows = sorted_rows(ids, experts, axis_name)
    gate_up = product(h, params["gate_up"], rows, True)
    gate_up = gate_up.reshape(len(gate_up), 2, -1)
    a = gated(gate_up, weights_of_rows(weights, rows)[:, None])
    y = sums_of_tokens(product(a, params["down"], rows, False), rows)
    return y.astype(h.dtype), shares


def weighted_gate(
    gate: Callable[[Array, Array], Array],
    gate_up: Float[Array, "rows 2 f"],
    weights: Float[Array, "rows 1"],
) -> Float[Array, "rows f"]:
    """Computes `gate(g, u) * weights`, rounded to the dtype of `gate_up`.

    g and u are the two halves of `gate_up`, and `gate` multiplies the activation of g
    by u. Experts are weighted before their last matmul. Its results have a row of the
    residual stream's size for each choice, and with this order they need not be saved
    for the gradients of the weights.
    """
    a = gate(gate_up[:, 0], gate_up[:, 1])
    return _weighted(a, weights)


@jax.checkpoint
def _weighted(a: Array, weights: Array) -> Array:
    """Computes `a * weights` in float32, but saves `a` in its own dtype."""
    return (a.astype(jnp.float32) * weights).astype(a.dtype)


def over_shards_of(
    segment: Callable[[Any, Array], tuple[Array, Shares]],
    params: Any,
    x: Float[Array, "b s h"],
    axis: ExpertAxis,
) -> tuple[Float[Array, "b s h"], Shares]:
    """Applies a segment to each shard of the batch, on a mesh with explicit axes.

    Each shard sorts its own tokens. If a mesh axis splits the experts, each device is a
    shard.
    """
    count = batch_shards(x, None)

    def run(params, x):
        if axis.spread:
            specs = axis.params, axis.tokens
            spread = axis.over_devices(segment, x, specs, axis.tokens)
            return spread(axis.split(params), x)
        if count == 1:
            return segment(params, x)
        split = x.reshape(count, -1, *x.shape[1:])
        shards = jax.vmap(segment, (None, 0))(params, split)
        return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), shards)

    return on_explicit_tokens(run, x, (2, Shares(1, 1, 1)))(params, x)
