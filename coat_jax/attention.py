"""Causal attention, whose backward pass can go through its heads in parts."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from coat_jax.devices import arrays_are_on_one_device


def causal_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    *,
    parts: int = 1,
) -> Float[Array, "b s n d"]:
    """Softmax attention of each position to itself and those before it.

    Backward saves q, k, v, and on GPUs the output and a statistic a row: cuDNN's flash
    attention there, elsewhere XLA's, whose probabilities are recomputed.

    Args:
      q: Queries.
      k: Keys; their heads divide those of the queries.
      v: Values.
      parts: As how many parts of the heads backward is computed, one after the other,
        which takes less memory where residuals are decoded first. As many as divide the
        key heads; and one where devices may share them.
    """
    parts = math.gcd(parts, k.shape[2])
    if parts == 1 or not arrays_are_on_one_device():
        return _attention(q, k, v)
    return _in_parts(q, k, v, k.shape[2], parts)


def _attention(q, k, v):
    attention = partial(jax.nn.dot_product_attention, is_causal=True)
    if _has_flash_attention(q):
        return attention(q, k, v, implementation="cudnn")
    return jax.checkpoint(partial(attention, implementation="xla"))(q, k, v)


def _has_flash_attention(q: Array) -> bool:
    # What cuDNN's kernel takes when it is differentiated.
    _, length, _, head_dim = q.shape
    return (
        jax.default_backend() == "gpu"
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and length % 2 == 0
    )


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_parts(q, k, v, kv_heads, parts):
    return _attention(q, k, v)


def _in_parts_fwd(q, k, v, kv_heads, parts):
    return jax.vjp(_attention, q, k, v)


def _in_parts_bwd(kv_heads, parts, vjp, do):
    b, s, n, d = do.shape
    q, k = (
        jax.ShapeDtypeStruct((b, s, heads // parts, d), do.dtype)
        for heads in (n, kv_heads)
    )
    # A backward pass of fewer heads. Its residuals are those of all, cut: there is no
    # forward pass of fewer.
    fewer = jax.eval_shape(lambda *qkv: jax.vjp(_attention, *qkv)[1], q, k, k)
    likes, structure = jax.tree.flatten(fewer)
    grads = []
    for index in range(parts):
        residuals = map(partial(_part, index), jax.tree.leaves(vjp), likes)
        grads.append(structure.unflatten(residuals)(_part(index, do, q)))
    return tuple(jnp.concatenate(each, axis=2) for each in zip(*grads, strict=True))


_in_parts.defvjp(_in_parts_fwd, _in_parts_bwd)


def _part(index: int, x: Array, like: jax.ShapeDtypeStruct) -> Array:
    """A part of `x` in the shape of `like`, which has fewer heads."""
    sizes = zip(x.shape, like.shape, strict=True)
    start = [index * fewer if fewer < n else 0 for n, fewer in sizes]
    return lax.dynamic_slice(x, start, like.shape)
