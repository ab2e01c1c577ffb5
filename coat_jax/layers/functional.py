"""Norms and gates, in the dtype of their input.

Norms compute in float32, gates in the dtype of their input. `coat.fp8_remat` with the
policy `nothing_saveable` saves only the inputs of a norm or gate, in FP8, and the
backward pass recomputes everything else from these inputs (COAT, arXiv 2410.19313,
section 5).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.meshes import whole
from pallas_kernels.ops.norm.reference import affine, standardized


def rms_norm(
    x: Float[Array, "*batch d"],
    weight: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Array, "*batch d"]:
    """Computes `x / sqrt(mean(x**2) + eps) * weight`, with means over the last axis.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.functional import rms_norm
      >>> rms_norm(jnp.array([[3.0, -3.0]]), eps=0.0)
      Array([[ 1., -1.]], dtype=float32)
    """
    y, _ = standardized(x.astype(jnp.float32), "rms", eps)
    return affine(y, whole(weight), None).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*batch d"],
    weight: Float[Array, " d"] | None = None,
    bias: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Array, "*batch d"]:
    """Computes `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last axis.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.functional import layer_norm
      >>> layer_norm(jnp.array([[1.0, 3.0]]), eps=0.0)
      Array([[-1.,  1.]], dtype=float32)
    """
    y, _ = standardized(x.astype(jnp.float32), "layer", eps)
    return affine(y, whole(weight), whole(bias)).astype(x.dtype)


def swiglu(gate: Float[Array, "*s"], up: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Computes the gated activation `silu(gate) * up`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.functional import swiglu
      >>> swiglu(jnp.zeros(2), jnp.ones(2))
      Array([0., 0.], dtype=float32)
    """
    return jax.nn.silu(gate) * up


def geglu(
    gate: Float[Array, "*s"], up: Float[Array, "*s"], *, approximate: bool = True
) -> Float[Array, "*s"]:
    """Computes the gated activation `gelu(gate) * up`.

    GELU has its tanh form if `approximate` is true.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.functional import geglu
      >>> geglu(jnp.zeros(2), jnp.ones(2))
      Array([0., 0.], dtype=float32)
    """
    return jax.nn.gelu(gate, approximate=approximate) * up
