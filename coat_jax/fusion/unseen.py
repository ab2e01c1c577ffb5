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


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def mean_of_values(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b t m d"],
    v: Float[Array, "b t m d"],
    scale: float,
) -> Float[Array, "b s n d"]:
    """Returns the mean of all values, for each query.

    The derivatives equal the derivatives of softmax attention with the scores
    `scale * q @ k.T` at a point where all scores of a query are equal. The backward
    pass reads nothing but the arguments, as flash attention's does.

    Args:
      q: Queries.
      k: Keys; m divides n.
      v: Values.
      scale: The factor on products of queries and keys. With 0 the result does not
        depend on them.
    """
    del k, scale
    mean = jnp.repeat(_mean(v), q.shape[2] // v.shape[2], axis=2)
    return jnp.broadcast_to(mean, q.shape).astype(q.dtype)


def _forward(q, k, v, scale):
    return mean_of_values(q, k, v, scale), (q, k, v)


def _backward(scale, saved, dy):
    q, k, v = (x.astype(jnp.float32) for x in saved)
    b, t, m, d = k.shape
    dy = dy.astype(jnp.float32).reshape(b, q.shape[1], m, -1, d)
    dq, dk = jnp.zeros_like(q), jnp.zeros_like(k)
    dv = jnp.broadcast_to(dy.sum((1, 3))[:, None] / t, v.shape)
    if scale:
        centred = v - _mean(v)
        slopes = jnp.einsum("btmi,btmj->bmij", k, centred) * (scale / t)
        dq = jnp.einsum("bmij,bsmgj->bsmgi", slopes, dy).reshape(q.shape)
        products = jnp.einsum("bsmgi,bsmgj->bmij", q.reshape(dy.shape), dy)
        dk = jnp.einsum("bmij,btmj->btmi", products * (scale / t), centred)
    pairs = zip((dq, dk, dv), saved, strict=True)
    return tuple(dx.astype(x.dtype) for dx, x in pairs)


mean_of_values.defvjp(_forward, _backward)


def _mean(v: Array) -> Float[Array, "b 1 m d"]:
    """Returns the mean of values in float32."""
    return v.mean(axis=1, keepdims=True, dtype=jnp.float32)
