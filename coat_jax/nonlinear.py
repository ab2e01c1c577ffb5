"""Norms, gates and rotary embeddings, computed in float32 and returned in the input's
dtype. Plain functions: what backward saves of them is the recipe's choice (blocks.py).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*batch d"],
    weight: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Array, "*batch d"]:
    """Divides each row by its root mean square and scales it by `weight`."""
    wide = x.astype(jnp.float32)
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return _affine(y, weight, None).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*batch d"],
    weight: Float[Array, " d"] | None = None,
    bias: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Array, "*batch d"]:
    """Standardizes each row, then scales and shifts it; OLMo's has neither."""
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    y = centered * jax.lax.rsqrt(variance + eps)
    return _affine(y, weight, bias).astype(x.dtype)


def swiglu(gate: Float[Array, "*s"], up: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The gated activation silu(gate) * up."""
    return _gated(jax.nn.silu, gate, up)


def geglu(gate: Float[Array, "*s"], up: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The gated activation gelu(gate) * up, with the tanh form of gelu."""
    return _gated(jax.nn.gelu, gate, up)


def rotate(
    x: Float[Array, "batch seq heads d"],
    cos: Float[Array, "seq half"],
    sin: Float[Array, "seq half"],
) -> Float[Array, "batch seq heads d"]:
    """Rotary position embedding of queries or keys, halves as Llama pairs them."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotary_table(
    length: int, head_dim: int, theta: float
) -> tuple[Float[Array, "seq half"], Float[Array, "seq half"]]:
    """Cosines and sines of `rotate` for positions 0 to length - 1."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _gated(activation, gate: Array, up: Array) -> Array:
    wide = activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return wide.astype(up.dtype)


def _affine(y: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        y = y * weight.astype(jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)
