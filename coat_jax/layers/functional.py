"""Norms and gates, in the dtype of their input.

Norms compute in float32, gates in the dtype of their input.

Each norm and gate takes a `residual_format`. Without it, autodiff chooses the residuals
as usual. With it, only the input activations are saved, in this format and in groups of
16, and backward recomputes the rest from them (COAT, arXiv 2410.19313, section 5).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.quantization.formats import Format
from coat_jax.remat.api import fp8_inputs
from pallas_kernels.numerics import on_last_axes


def rms_norm(
    x: Float[Array, "*batch d"],
    weight: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-5,
    residual_format: Format | None = None,
) -> Float[Array, "*batch d"]:
    """Computes `x / sqrt(mean(x**2) + eps) * weight`, with means over the last axis.

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
    """Computes `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last axis.

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
    """Computes the gated activation `silu(gate) * up`.

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
    """Computes the gated activation `gelu(gate) * up`.

    GELU has its tanh form if `approximate` is true.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.functional import geglu
      >>> geglu(jnp.zeros(2), jnp.ones(2))
      Array([0., 0.], dtype=float32)
    """
    gelu = partial(jax.nn.gelu, approximate=approximate)
    return _gated(gelu, gate, up, residual_format)


def _gated(
    activation: Callable, gate: Array, up: Array, residual_format: Format | None
) -> Array:
    def product(gate, up):
        return activation(gate) * up

    return _saving(product, residual_format, params_argnums=())(gate, up)


def _affine(y: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        y = y * on_last_axes(weight.astype(jnp.float32), y.ndim)
    if bias is not None:
        y = y + on_last_axes(bias.astype(jnp.float32), y.ndim)
    return y


def _saving(fn: Callable, residual_format: Format | None, params_argnums=0) -> Callable:
    if residual_format is None:
        return fn
    return fp8_inputs(fn, params_argnums=params_argnums, format=residual_format)
