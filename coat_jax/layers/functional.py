"""Norms, gates and rotary embeddings, in the dtype of their input.

Norms and rotary embeddings compute in float32, gates in the dtype they are given.

Each norm and gate takes a `residual_format`. Without one, backward reads what autodiff
saves. With one it saves only the activations that come in, as groups of 16 in that
format, and recomputes the rest from them (COAT, arXiv 2410.19313, section 5).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.quantization.array import Format
from coat_jax.remat.api import fp8_inputs
from pallas_kernels.ops.rope.reference import turned


def rms_norm(
    x: Float[Array, "*batch d"],
    weight: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-5,
    residual_format: Format | None = None,
) -> Float[Array, "*batch d"]:
    """Divides each row by its root mean square and scales it by `weight`.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> from coat_jax.layers.functional import rms_norm
      >>> rms_norm(jnp.array([[3.0, -3.0]]), eps=0.0, residual_format=coat.E4M3)
      Array([[ 1., -1.]], dtype=float32)
    """

    def norm(weight, x):
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return _affine(y, weight, None).astype(x.dtype)

    return _saving(norm, residual_format)(weight, x)


def layer_norm(
    x: Float[Array, "*batch d"],
    weight: Float[Array, " d"] | None = None,
    bias: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-5,
    residual_format: Format | None = None,
) -> Float[Array, "*batch d"]:
    """Standardizes each row, then scales it by `weight` and shifts it by `bias`.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.functional import layer_norm
      >>> layer_norm(jnp.array([[1.0, 3.0]]), eps=0.0)
      Array([[-1.,  1.]], dtype=float32)
    """

    def norm(params, x):
        wide = x.astype(jnp.float32)
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
        y = centered * jax.lax.rsqrt(variance + eps)
        return _affine(y, *params).astype(x.dtype)

    return _saving(norm, residual_format)((weight, bias), x)


def swiglu(
    gate: Float[Array, "*s"],
    up: Float[Array, "*s"],
    *,
    residual_format: Format | None = None,
) -> Float[Array, "*s"]:
    """The gated activation silu(gate) * up.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> from coat_jax.layers.functional import swiglu
      >>> swiglu(jnp.zeros(2), jnp.ones(2), residual_format=coat.E4M3)
      Array([0., 0.], dtype=float32)
    """
    return _gated(jax.nn.silu, gate, up, residual_format)


def geglu(
    gate: Float[Array, "*s"],
    up: Float[Array, "*s"],
    *,
    approximate: bool = True,
    residual_format: Format | None = None,
) -> Float[Array, "*s"]:
    """The gated activation gelu(gate) * up, with gelu's tanh form if approximate.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.functional import geglu
      >>> geglu(jnp.zeros(2), jnp.ones(2))
      Array([0., 0.], dtype=float32)
    """
    gelu = partial(jax.nn.gelu, approximate=approximate)
    return _gated(gelu, gate, up, residual_format)


def angles(
    length: int, dim: int, theta: float
) -> tuple[Float[Array, "seq half"], Float[Array, "seq half"]]:
    """Cosines and sines of the rotary embedding's angles, for heads of size `dim`."""
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotary(
    x: Float[Array, "batch seq heads d"],
    *,
    theta: float = 10_000.0,
    inverse: bool = False,
) -> Float[Array, "batch seq heads d"]:
    """Rotates queries or keys by their positions, pairing halves as Llama does.

    Or back, with `inverse`, which is also what backward does. Linear in `x`: backward
    saves nothing, and computes the angles again.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.functional import rotary
      >>> rotary(jnp.ones((1, 1, 1, 4)))[0, 0, 0]
      Array([1., 1., 1., 1.], dtype=float32)
    """
    cos, sin = angles(x.shape[1], x.shape[-1], theta)
    return turned(x, cos, -sin if inverse else sin).astype(x.dtype)


def _gated(
    activation: Callable, gate: Array, up: Array, residual_format: Format | None
) -> Array:
    def product(gate, up):
        return activation(gate) * up

    return _saving(product, residual_format, params_argnums=())(gate, up)


def _affine(y: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        y = y * weight.astype(jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)


def _saving(fn: Callable, residual_format: Format | None, params_argnums=0) -> Callable:
    if residual_format is None:
        return fn
    return fp8_inputs(fn, params_argnums=params_argnums, format=residual_format)
