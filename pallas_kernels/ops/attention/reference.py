"""The definition of attention in jnp, with scores and probabilities in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.ops.attention.plan import Scoring


def attention(
    scoring: Scoring,
    q: Float[Array, "b s m g d"],
    k: Float[Array, "b s m d"],
    v: Float[Array, "b s m d"],
    window: Int[Array, ""] | None,
    segment_ids: Int[Array, "b s"] | None,
) -> tuple[Float[Array, "b s m g d"], Float[Array, "b m g s"]]:
    """Computes attention, and the log-sum-exp of each query's scores.

    Args:
      scoring: The formula of scores, and the kinds of masks.
      q: Queries, g for each of m key heads.
      k: Keys.
      v: Values.
      window: The number of positions that a query attends to; None means all.
      segment_ids: The number of each position's segment, or None.
    """
    scores, _ = _scores(scoring, q, k, window, segment_ids)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    p = jnp.exp(scores - largest)
    total = jnp.sum(p, axis=-1)
    share = p / jnp.where(total > 0, total, 1)[..., None]
    out = _wide("bmgst,btmd->bsmgd", share, v)
    return out.astype(q.dtype), jnp.log(total) + largest[..., 0]


def attention_grad(
    scoring: Scoring,
    do: Float[Array, "b s m g d"],
    q: Float[Array, "b s m g d"],
    k: Float[Array, "b s m d"],
    v: Float[Array, "b s m d"],
    out: Float[Array, "b s m g d"],
    lse: Float[Array, "b m g s"],
    window: Int[Array, ""] | None,
    segment_ids: Int[Array, "b s"] | None,
) -> tuple[Float[Array, "b s m g d"], Float[Array, "b s m d"], Float[Array, "b s m d"]]:
    """Computes the gradients of q, k and v (arXiv 2307.08691, section 2.2).

    `out` and `lse` are the results of `attention`, and `do` is the gradient of `out`.
    The other arguments are as in `attention`.
    """
    scores, derivative = _scores(scoring, q, k, window, segment_ids)
    p = jnp.exp(scores - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None])
    delta = _wide("bsmgd,bsmgd->bmgs", out, do)
    dp = _wide("bsmgd,btmd->bmgst", do, v)
    ds = p * (dp - delta[..., None]) * derivative * scoring.scale
    dq = _wide("bmgst,btmd->bsmgd", ds, k)
    dk = _wide("bmgst,bsmgd->btmd", ds, q)
    dv = _wide("bmgst,bsmgd->btmd", p, do)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _wide(equation: str, a: Array, b: Array) -> Array:
    """Computes an einsum in float32."""
    return jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32))


def _scores(scoring, q, k, window, segment_ids):
    """Returns scores [b, m, g, s, t], and the derivative of the soft cap.

    Masked scores are -inf. Without a soft cap the derivative is 1.
    """
    scores = scoring.scale * _wide("bsmgd,btmd->bmgst", q, k)
    derivative = jnp.float32(1)
    if scoring.softcap is not None:
        share = jnp.tanh(scores / scoring.softcap)
        scores, derivative = scoring.softcap * share, 1 - share * share
    counts = _mask(scoring, q.shape[1], window, segment_ids)
    return jnp.where(counts, scores, -jnp.inf), derivative


def _mask(
    scoring: Scoring, length: int, window: Array | None, segment_ids: Array | None
) -> Bool[Array, "#b 1 1 s s"]:
    """Returns a mask that is True where a query attends to a key."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    mask = jnp.ones((1, 1, 1, length, length), bool)
    if scoring.causal:
        mask &= distance >= 0
    if window is not None:
        mask &= abs(distance) < window
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None]
        mask &= same[:, None, None]
    return mask
