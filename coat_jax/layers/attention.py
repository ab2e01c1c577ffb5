"""Causal attention by what is fastest, and what its backward pass saves."""

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
    """Softmax attention of each position to itself and those before it.

    Backward saves q, k, v, and on GPUs the output and a statistic a row: cuDNN's flash
    attention there, elsewhere XLA's, whose probabilities are recomputed.

    Args:
      q: Queries.
      k: Keys; their heads divide those of the queries.
      v: Values.
      kept: Copies of the three, to save in their place. They get no gradients.
    """
    return _keeping(q, k, v, kept) if kept else _attention(q, k, v)


@jax.custom_vjp
def _keeping(q, k, v, kept):
    return _attention(q, k, v)


def _keeping_fwd(q, k, v, kept):
    o, vjp = jax.vjp(_attention, q, k, v)
    copies = {id(x): copy for x, copy in zip((q, k, v), kept, strict=True)}
    return o, jax.tree.map(lambda x: copies.get(id(x), x), vjp)


def _keeping_bwd(vjp, do):
    return *vjp(do), None


_keeping.defvjp(_keeping_fwd, _keeping_bwd)


def _attention(q, k, v):
    attention = partial(jax.nn.dot_product_attention, is_causal=True)
    if _has_flash_attention(q):
        return attention(q, k, v, implementation="cudnn")
    return jax.checkpoint(partial(attention, implementation="xla"))(q, k, v)


def _has_flash_attention(q: Array) -> bool:
    # cuDNN's kernel has a backward pass for these arrays only.
    _, length, _, head_dim = q.shape
    return (
        jax.default_backend() == "gpu"
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and length % 2 == 0
    )
