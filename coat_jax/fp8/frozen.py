"""An FP8 matmul with a weight that is kept in FP8 and not trained.

A frozen weight takes a byte a number: its E4M3 codes, with a float32 scale for each
output feature. Forward reads the codes as they are. Backward needs the gradient of the
activations alone,

    dx = dy @ diag(scale) @ codes,

where the scales of outputs are in the contracted axis. They are multiplied into dy
before it is quantized, so that backward reads the same codes, transposed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.fp8 import matmul
from coat_jax.quantization.formats import E5M2
from pallas_kernels import Scaled
from pallas_kernels.dispatch import array_types


def freeze(weight: Float[Array, "... k"]) -> Scaled:
    """Quantizes a weight to E4M3, with a scale for each output feature.

    Args:
      weight: The weight [..., k], bfloat16 or float32.

    Returns:
      The codes [..., k] and the scales [...]. The weight is their product.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.fp8.frozen import freeze, thawed
      >>> weight = freeze(jnp.full((3, 4), 0.5))
      >>> weight.codes.nbytes, weight.scale.nbytes
      (12, 12)
      >>> round(float(thawed(weight, jnp.float32)[0, 0]), 2)
      0.5
    """
    return matmul.quantize_tokens(weight)


def thawed(weight: Scaled, dtype: Any) -> Float[Array, "... k"]:
    """Returns the numbers of a frozen weight, codes times scales."""
    wide = weight.codes.astype(jnp.float32) * weight.scale[..., None]
    return wide.astype(dtype)


def frozen_linear(x: Float[Array, "*batch k"], weight: Scaled) -> Float[Array, "..."]:
    """Computes `x @ w.T` with a frozen weight, in the dtype of `x`.

    Forward has E4M3 activations with a scale for each token, as the recipe "coat" has.
    Backward has an E5M2 gradient with one scale, and saves nothing but the weight.

    Args:
      x: Activations [..., k], bfloat16 or float32.
      weight: The codes [..., k] and scales of a weight; see `freeze`.

    Raises:
      ValueError: If the contracted sizes differ.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax.fp8.frozen import freeze, frozen_linear
      >>> weight = freeze(jnp.ones((3, 4)))
      >>> frozen_linear(jnp.ones((2, 4)), weight).shape
      (2, 3)
      >>> jax.grad(lambda x: frozen_linear(x, weight).sum())(jnp.ones((2, 4))).shape
      (2, 4)
    """
    scale = weight.scale.reshape(-1)

    def multiply(x, codes):
        return _frozen_matmul(x, codes.reshape(-1, codes.shape[-1]), scale)

    return matmul.in_rows(multiply, x, lax.stop_gradient(weight.codes))


@jax.custom_vjp
def _frozen_matmul(x, codes, scale):
    return _forward(x, codes, scale)[0]


@array_types.on_common_mesh
def _forward(x, codes, scale):
    tokens = matmul.quantize_tokens(x)
    y = matmul.matmul_codes(tokens.codes, codes, tokens.scale, scale, dtype=x.dtype)
    return matmul.once(y), (codes, scale, matmul.dtype_of(x))


@array_types.on_common_mesh
def _backward(residuals, dy):
    codes, scale, like = residuals
    scaled = (dy.astype(jnp.float32) * scale).astype(dy.dtype)
    gradient = matmul.quantize_tensor(scaled, E5M2, copies="row")
    one = jnp.ones((), jnp.float32)
    dx = matmul.matmul_codes(
        gradient.row, kernels.transpose(codes), gradient.scale, one, dtype=like.dtype
    )
    return dx, None, None


_frozen_matmul.defvjp(_forward, _backward)
