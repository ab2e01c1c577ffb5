"""Attention in JAX with the residuals of cuDNN's flash attention, as a stand-in."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(options: Any, q, k, v, mask) -> jax.Array:
    """Computes attention in float32, and its gradients from its statistics.

    Args:
      options: An object with the attributes `scale`, `causal`, `window` and `lengths`.
      q: Queries [b, s, n, d].
      k: Keys [b, t, m, d]; m divides n.
      v: Values [b, t, m, d].
      mask: True for each key that counts, [#b, #n, s, t], or None.
    """
    return _forward(options, q, k, v, mask)[0]


def _forward(options, q, k, v, mask):
    scores = _scores(options, q, k, mask)
    statistics = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - statistics[..., None])
    o = jnp.einsum("bnst,btnd->bsnd", p, _repeated(v, q)).astype(q.dtype)
    return o, (q, k, v, mask, o, statistics)


def _backward(options, saved, do):
    q, k, v, mask, o, statistics = saved
    p = jnp.exp(_scores(options, q, k, mask) - statistics[..., None])
    do, o = do.astype(jnp.float32), o.astype(jnp.float32)
    dp = jnp.einsum("bsnd,btnd->bnst", do, _repeated(v, q))
    ds = p * (dp - jnp.einsum("bsnd,bsnd->bns", do, o)[..., None]) * options.scale
    dq = jnp.einsum("bnst,btnd->bsnd", ds, _repeated(k, q))
    dk = jnp.einsum("bnst,bsnd->btnd", ds, q.astype(jnp.float32))
    dv = jnp.einsum("bnst,bsnd->btnd", p, do)
    dk, dv = (x.reshape(*k.shape[:3], -1, k.shape[3]).sum(3) for x in (dk, dv))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attention.defvjp(_forward, _backward)


def _repeated(x, q):
    return jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2)


def _scores(options, q, k, mask):
    scores = jnp.einsum("bsnd,btnd->bnst", q.astype(jnp.float32), _repeated(k, q))
    scores *= options.scale
    distance = jnp.arange(scores.shape[2])[:, None] - jnp.arange(scores.shape[3])
    if options.causal:
        scores = jnp.where(distance >= 0, scores, -jnp.inf)
    if options.window:
        scores = jnp.where(distance < options.window, scores, -jnp.inf)
    if options.lengths:
        hidden = jnp.arange(scores.shape[3]) >= options.lengths[1]
        scores = jnp.where(hidden, -jnp.inf, scores)
    # cuDNN's kernel adds masks to scores.
    return scores if mask is None else scores + jnp.where(mask, 0.0, -2e12)
