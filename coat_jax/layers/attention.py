"""Attention with the fastest implementation, and its saved residuals."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def causal_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    kept: tuple[Array, ...] = (),
) -> Float[Array, "b s n d"]:
    """Computes softmax attention of each position to itself and earlier positions.

    The output is `softmax(q @ k.T / sqrt(d)) @ v` for each head, with later positions
    masked. cuDNN's flash attention runs where it can: on GPUs, for heads and dtypes
    that it supports. It saves q, k, v, the output, and one softmax statistic per query
    and head. XLA's attention runs elsewhere. It saves q, k, v and recomputes the
    probabilities.

    Args:
      q: Queries.
      k: Keys; the number of key heads divides the number of query heads.
      v: Values.
      kept: Copies of q, k and v, which are saved in their place. They get no gradients.
    """
    return _keeping(q, k, v, kept) if kept else _attention(q, k, v)


def full_attention(
    q: Float[Array, "b s n d"], k: Float[Array, "b s k d"], v: Float[Array, "b s k d"]
) -> Float[Array, "b s n d"]:
    """Computes softmax attention of each position to all positions.

    The implementation and what it saves are those of `causal_attention`.
    """
    return _attention(q, k, v, causal=False)


@jax.custom_vjp
def _keeping(q, k, v, kept):
    return _attention(q, k, v)


def _keeping_fwd(q, k, v, kept):
    # `vjp` is a tree of residuals, in which the copies replace q, k and v.
    o, vjp = jax.vjp(_attention, q, k, v)
    copies = {id(x): copy for x, copy in zip((q, k, v), kept, strict=True)}
    return o, jax.tree.map(lambda x: copies.get(id(x), x), vjp)


def _keeping_bwd(vjp, do):
    return *vjp(do), None


_keeping.defvjp(_keeping_fwd, _keeping_bwd)


def _attention(q, k, v, causal=True):
    attention = partial(jax.nn.dot_product_attention, is_causal=causal)
    if _has_flash_attention(q):
        return attention(q, k, v, implementation="cudnn")
    return jax.checkpoint(partial(attention, implementation="xla"))(q, k, v)


def _has_flash_attention(q: Array) -> bool:
    # cuDNN's kernel has a backward pass only for these shapes and dtypes.
    _, length, _, head_dim = q.shape
    return (
        jax.default_backend() == "gpu"
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and length % 2 == 0
    )
