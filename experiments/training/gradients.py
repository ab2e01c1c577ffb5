"""Computes the gradients of a batch as sums over its microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32


def microbatches(batch: Any, count: int) -> Any:
    """Splits the rows [b, ...] of a batch's arrays into [count, b / count, ...].

    Neighbouring rows are in different microbatches. Every microbatch therefore has rows
    of every device, and no row moves between devices.
    """
    return jax.tree.map(
        lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch
    )


def accumulated(
    gradients: Callable[..., tuple[Any, tuple[nnx.State, nnx.State]]],
    params: nnx.State,
    histories: nnx.State,
    parts: Any,
    shares: Float32[Array, " count"],
    *,
    placed: Any,
) -> tuple[Any, nnx.State, nnx.State]:
    """Sums losses and gradients of microbatches, which run one after another.

    Sums of gradients are float32, and are rounded once to the parameters' dtypes.

    Args:
      gradients: A function of parameters, histories and a microbatch that returns
        `(loss, (gradients, next histories))`. The loss may be a tree of arrays.
      params: The parameters.
      histories: The amax histories before the first microbatch.
      parts: The microbatches, stacked as `microbatches` returns them.
      shares: The factor of each microbatch in the sums.
      placed: The shardings of the sums of gradients; None means no constraint.

    Returns:
      The loss and the gradients of the batch, and the histories after it.
    """

    def in_shards(sums):
        return (
            sums if placed is None else jax.lax.with_sharding_constraint(sums, placed)
        )

    def add(carry, part):
        sums, histories = carry
        batch, share = part
        loss, (grads, histories) = gradients(params, histories, batch)
        sums = jax.tree.map(lambda s, g: s + g.astype(jnp.float32) * share, sums, grads)
        loss = jax.tree.map(lambda x: x * share, loss)
        return (in_shards(sums), histories), loss

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    carry = in_shards(zeros), histories
    (sums, histories), losses = jax.lax.scan(add, carry, (parts, shares))
    loss = jax.tree.map(lambda x: jnp.sum(x, axis=0), losses)
    grads = jax.tree.map(lambda s, p: s.astype(p.dtype), sums, params)
    return loss, grads, histories
