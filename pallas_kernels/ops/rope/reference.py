"""RoPE of attention heads, and the gradients of heads as one array, in jnp."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.numerics import Codes
from pallas_kernels.ops.quantize.reference import quantize_tensor


def split_heads(
    y: Float[Array, "b s columns"],
    cos: Float[Array, "s h"],
    sin: Float[Array, "s h"],
    *,
    num_kv_heads: int,
    dtype: DTypeLike,
) -> tuple[Float[Array, "b s n d"], Float[Array, "b s m d"], Float[Array, "b s m d"]]:
    """Splits `y` into heads and applies RoPE, like `pallas_kernels.matmul_heads`."""
    b, s, _ = y.shape
    y = y.reshape(b, s, num_kv_heads, -1, 2 * cos.shape[-1])
    q, k, v = (
        y[..., :-2, :].reshape(b, s, -1, y.shape[-1]),
        y[..., -2, :],
        y[..., -1, :],
    )
    return tuple(x.astype(dtype) for x in (turned(q, cos, sin), turned(k, cos, sin), v))


def join_heads(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s m d"],
    v: Float[Array, "b s m d"],
    cos: Float[Array, "s h"],
    sin: Float[Array, "s h"],
    scale: Float[Array, ""],
    *,
    dtype: DTypeLike,
    keep_maxima: bool,
) -> Codes:
    """Computes `pallas_kernels.join_heads` in jnp."""
    b, s, m, d = k.shape
    q = turned(q, cos, -sin).reshape(b, s, m, -1, d)
    k = turned(k, cos, -sin)
    parts = [q, k[..., None, :], v.astype(jnp.float32)[..., None, :]]
    joined = jnp.concatenate(parts, axis=-2).reshape(b, s, -1)
    return quantize_tensor(
        joined, scale, dtype=dtype, row=True, transposed=True, keep_maxima=keep_maxima
    )


def turned(
    x: Float[Array, "b s n d"], cos: Float[Array, "s h"], sin: Float[Array, "s h"]
) -> Float[Array, "b s n d"]:
    """Applies RoPE in float32.

    The halves [x, y] of a head become [x cos - y sin, y cos + x sin].
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    c, n = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([first * c - second * n, second * c + first * n], -1)
