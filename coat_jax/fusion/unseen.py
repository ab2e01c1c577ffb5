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
    return jnp.broadcast_to(mean, q.shape)


@mean_of_values.defjvp
def _(scale, primals, tangents):
    (q, k, v), (dq, dk, dv) = primals, tangents
    tangent = mean_of_values(q, k, dv, scale)
    if scale:
        centred = v - _mean(v)
        tangent += scale * (_mixed(dq, k, centred) + _mixed(q, dk, centred))
    return mean_of_values(q, k, v, scale), tangent.astype(q.dtype)


def _mean(v: Array) -> Array:
    """Returns the mean [b, 1, m, d] of values [b, t, m, d]."""
    return v.mean(axis=1, keepdims=True, dtype=jnp.float32).astype(v.dtype)


def _mixed(q: Array, k: Array, v: Array) -> Float[Array, "b s n d"]:
    """Returns the mean of values times their products with queries, in float32."""
    b, s, n, d = q.shape
    of_float32 = {"preferred_element_type": jnp.float32}
    product = jnp.einsum("btmi,btmj->bmij", k, v, **of_float32) / k.shape[1]
    q = q.reshape(b, s, k.shape[2], -1, d)
    y = jnp.einsum("bsmgi,bmij->bsmgj", q, product.astype(q.dtype), **of_float32)
    return y.reshape(b, s, n, d)
