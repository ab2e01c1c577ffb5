"""Gradients of attention's heads as one array, in jnp."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.reference.quantize import Copies, quantize_tensor


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
) -> Copies:
    """See `pallas_kernels.join_heads`."""
    b, s, m, d = k.shape

    def turned(x):
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        c, n = cos[:, None], sin[:, None]
        return jnp.concatenate([first * c + second * n, second * c - first * n], -1)

    q = turned(q).reshape(b, s, m, -1, d)
    parts = [q, turned(k)[..., None, :], v.astype(jnp.float32)[..., None, :]]
    joined = jnp.concatenate(parts, axis=-2).reshape(b, s, -1)
    how = {"dtype": dtype, "row": True, "transposed": True, "keep_maxima": keep_maxima}
    return quantize_tensor(joined, scale, **how)
