"""Matmuls with a frozen weight, which is stored in FP8 or in its own dtype.

A frozen weight in FP8 takes one byte per element: E4M3 codes with one scale, a power of
two. A scale for each output feature would hardly be more exact, because the codes are
floating-point numbers. It also could not be factored out of the sum over output
features in the gradient of the activations,

    dx = dy @ (scale * codes).

The forward pass reads the codes as they are. Tensor cores need the contracted axis of
FP8 operands last, so the backward pass transposes the codes. A kernel does this. If XLA
transposed the codes, it would give the stacked weights of all layers the transposed
layout, and keep a transposed copy of the stack.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.fp8 import matmul
from coat_jax.quantization.formats import E4M3, E5M2
from pallas_kernels import Codes
from pallas_kernels.dispatch import array_types


def freeze(weight: Float[Array, "... k"]) -> Codes:
    """Quantizes a weight to E4M3, with one scale that is a power of two.

    Args:
      weight: The weight [..., k], of any floating dtype.

    Returns:
      The codes [..., k] and the scale. Their product approximates the weight.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.fp8.frozen import freeze, thawed
      >>> weight = freeze(jnp.full((3, 4), 0.3))
      >>> weight.row.nbytes, weight.scale.nbytes
      (12, 4)
      >>> round(float(thawed(weight)[0, 0]), 4)
      0.3125
    """
    return matmul.quantize_tensor(weight, E4M3, copies="row")


def thawed(weight: Codes) -> Float[Array, "... k"]:
    """Dequantizes a frozen weight, or a stack of frozen weights, to float32."""
    codes, scale = weight.row, weight.scale
    scale = jnp.expand_dims(scale, tuple(range(scale.ndim, codes.ndim)))
    return codes.astype(jnp.float32) * scale


def frozen_linear(
    x: Float[Array, "*batch k"], weight: Codes | Float[Array, "... k"]
) -> Float[Array, "..."]:
    """Computes `x @ w.T` with a frozen weight, in the dtype of `x`.

    Only the weight is saved for the backward pass, by reference. If it is in FP8, the
    forward pass quantizes the activations to E4M3 with a scale for each token, as in
    the recipe "coat", and the backward pass quantizes the output gradient to E5M2 with
    one scale. A weight that is not in FP8 is cast to the dtype of `x`.

    Args:
      x: Activations [..., k], bfloat16 or float32.
      weight: A weight [..., k], or its codes; see `freeze`. Its gradient is zero.

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
    if not isinstance(weight, Codes):
        matmul.check_contracted(x, weight)
        return _plain_matmul(x, weight)
    return matmul.in_rows(_frozen_matmul, x, weight.row, weight.scale)


# This rule is used instead of `lax.stop_gradient`, which returns a new array: a loop
# over layers would save a copy of each layer's weight.
@jax.custom_jvp
def _plain_matmul(x, w):
    return jnp.tensordot(x, w.astype(x.dtype), axes=(-1, -1))


@_plain_matmul.defjvp
def _plain_tangent(primals, tangents):
    x, w = primals
    return _plain_matmul(x, w), _plain_matmul(tangents[0], w)


@jax.custom_vjp
def _frozen_matmul(x, codes, scale):
    return _forward(x, codes, scale)[0]


@array_types.on_common_mesh
def _forward(x, codes, scale):
    tokens = matmul.quantize_tokens(x)
    rows = codes.reshape(-1, codes.shape[-1])
    y = matmul.matmul_codes(tokens.codes, rows, tokens.scale, scale, dtype=x.dtype)
    return matmul.once(y), (codes, scale, matmul.dtype_of(x))


@array_types.on_common_mesh
def _backward(residuals, dy):
    codes, scale, like = residuals
    gradient = matmul.quantize_tensor(dy, E5M2, copies="row")
    columns = kernels.transpose(codes)
    dx = matmul.matmul_codes(
        gradient.row, columns, gradient.scale, scale, dtype=like.dtype
    )
    return dx, None, None


_frozen_matmul.defvjp(_forward, _backward)
