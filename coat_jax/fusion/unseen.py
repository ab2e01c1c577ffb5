"""Attention of a query that sees no key.

A mask hides a key by a large negative number. If it hides all keys of a query, all
scores of this query are equal, and attention is the mean of all values. If the number
is added to the scores, they are equal because the sum is rounded, but the gradients of
the softmax still pass through the sum to queries and keys.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def mean_of_values(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b t m d"],
    v: Float[Array, "b t m d"],
    scale: float,
) -> Float[Array, "b s n d"]:
    """Returns the mean of all values, for each query.

    The derivatives equal the derivatives of softmax attention with the scores
    `scale * q @ k.T` at a point where all scores of a query are equal.

    Args:
      q: Queries.
      k: Keys; m divides n.
      v: Values.
      scale: The factor on products of queries and keys. With 0 the result does not
        depend on them.
    """
    mean = jnp.repeat(_mean(v), q.shape[2] // k.shape[2], axis=2)
    return jnp.broadcast_to(mean, q.shape).astype(q.dtype)


@mean_of_values.defjvp
def _(scale, primals, tangents):
    # These are derivatives at a point and have no derivatives of their own. Flash
    # attention, which reads the same arrays, refuses second derivatives.
    (q, k, v), (dq, dk, dv) = primals, tangents
    tangent = mean_of_values(q, k, dv, scale).astype(jnp.float32)
    if scale:
        centred = v.astype(jnp.float32) - _mean(v)
        tangent += scale * (_mixed(dq, k, centred) + _mixed(q, dk, centred))
    return mean_of_values(q, k, v, scale), tangent.astype(q.dtype)


def _mean(v: Array) -> Float[Array, "b 1 m d"]:
    """Returns the mean of values in float32."""
    return v.mean(axis=1, keepdims=True, dtype=jnp.float32)


def _mixed(q: Array, k: Array, v: Array) -> Float[Array, "b s n d"]:
    """Returns the mean of values times their products with queries, in float32."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    product = jnp.einsum("btmi,btmj->bmij", k, v) / k.shape[1]
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    return jnp.einsum("bsmgi,bmij->bsmgj", groups, product).reshape(q.shape)
