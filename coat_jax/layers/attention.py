"""Attention with the fastest implementation, and its saved residuals."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch, stand_ins


def causal_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    kept: tuple[Array, ...] = (),
    segment_ids: Int[Array, "b s"] | None = None,
) -> Float[Array, "b s n d"]:
    """Computes softmax attention of each position to itself and earlier positions.

    The output is `softmax(q @ k.T / sqrt(d)) @ v` for each head, with later positions
    masked. cuDNN's flash attention runs where it can: on GPUs, for heads and dtypes
    that it supports. It saves q, k, v, the output, and one softmax statistic per query
    and head. XLA's attention runs elsewhere. It saves q, k, v and recomputes the
    probabilities.

    With `segment_ids` positions attend only to positions of their own segment. Both
    implementations then read a mask [b, 1, s, s], which cuDNN takes as numbers to add,
    and compute the parts that are masked.

    Args:
      q: Queries.
      k: Keys; the number of key heads divides the number of query heads.
      v: Values.
      kept: Copies of q, k and v, which are saved in their place. They get no gradients.
      segment_ids: The number of each position's document, in packed sequences; None
        means that a sequence is one document.
    """
    if kept:
        return _keeping(q, k, v, kept, segment_ids)
    return _attention(q, k, v, segment_ids)


def full_attention(
    q: Float[Array, "b s n d"], k: Float[Array, "b s k d"], v: Float[Array, "b s k d"]
) -> Float[Array, "b s n d"]:
    """Computes softmax attention of each position to all positions.

    The implementation and what it saves are those of `causal_attention`.
    """
    return _attention(q, k, v, causal=False)


@jax.custom_vjp
def _keeping(q, k, v, kept, segment_ids):
    return _attention(q, k, v, segment_ids)


def _keeping_fwd(q, k, v, kept, segment_ids):
    # `vjp` is a tree of residuals, in which the copies replace q, k and v.
    o, vjp = jax.vjp(lambda q, k, v: _attention(q, k, v, segment_ids), q, k, v)
    copies = {id(x): copy for x, copy in zip((q, k, v), kept, strict=True)}
    return o, jax.tree.map(lambda x: copies.get(id(x), x), vjp)


def _keeping_bwd(vjp, do):
    return *vjp(do), None, None


_keeping.defvjp(_keeping_fwd, _keeping_bwd)


def _attention(q, k, v, segment_ids=None, causal=True):
    def attention(q, k, v, segment_ids, implementation):
        mask = None if segment_ids is None else _same_segment(segment_ids)
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=causal, implementation=implementation
        )

    if _has_flash_attention(q):
        if stand_ins.active():
            return stand_ins.attention(q, k, v)
        return attention(q, k, v, segment_ids, "cudnn")
    plain = jax.checkpoint(partial(attention, implementation="xla"))
    return plain(q, k, v, segment_ids)


def _same_segment(ids: Int[Array, "b s"]) -> Bool[Array, "b 1 s s"]:
    return ids[:, None, :, None] == ids[:, None, None, :]


def _has_flash_attention(q: Array) -> bool:
    # cuDNN's kernel has a backward pass only for these shapes and dtypes.
    _, length, _, head_dim = q.shape
    return (
        (stand_ins.active() or dispatch.has_gpu())
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and length % 2 == 0
    )
