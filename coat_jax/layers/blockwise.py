"""FP8 matmuls with a scale for each block of 128 x 128 or 1 x 128 elements.

The scales follow DeepSeek-V3 (arXiv 2412.19437, section 3.3): in each of the three
matmuls of a linear layer the first operand has a scale for every 1 x 128 elements along
the contracted axis, and the second operand has one for every 128 x 128 elements. All
codes are E4M3, also for gradients. Axes are padded with zeros to multiples of 128.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.fp8.matmul import in_rows, once, stored
from pallas_kernels import Block, Scaled
from pallas_kernels.dispatch import array_types

BLOCK = 128


def linear(
    x: Float[Array, "*batch k"], w: Float[Array, "... k"]
) -> Float[Array, "..."]:
    """Computes `x @ w.T` in FP8 with scales of blocks, in the dtype of `x`.

    The backward pass needs `x` itself, so use `linear` within `fp8_remat`, which saves
    `x` in FP8 or recomputes it. Gradients have the dtypes of `x` and `w`.

    Args:
      x: Activations, bfloat16 or float32.
      w: Weights, [out, in] or [..., in], of any floating dtype.

    Raises:
      ValueError: If the contracted sizes differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.blockwise import linear
      >>> linear(jnp.zeros((2, 4), jnp.bfloat16), jnp.ones((3, 4)))
      Array([[0, 0, 0],
             [0, 0, 0]], dtype=bfloat16)
    """
    return in_rows(lambda x, w: _linear(x, w.reshape(-1, w.shape[-1])), x, w)


@jax.custom_vjp
def _linear(x, w):
    return _linear_fwd(x, w)[0]


@array_types.on_common_mesh
def _linear_fwd(x, w):
    groups, _ = _quantized(x, row="1x128")
    blocks, _ = _quantized(w, row="128x128")
    y = _matmul(groups, blocks, (x.shape[0], w.shape[0]), x.dtype)
    return once(y), (x, w)


@array_types.on_common_mesh
def _linear_bwd(residuals, dy):
    x, w = residuals
    # One matmul contracts the columns of dy with w, the other its tokens with x.
    by_columns, by_tokens = _quantized(dy, row="1x128", transposed="1x128")
    _, weights = _quantized(w, transposed="128x128")
    _, inputs = _quantized(x, transposed="128x128")
    dx = _matmul(by_columns, weights, x.shape, x.dtype)
    dw = _matmul(by_tokens, inputs, w.shape, w.dtype)
    return dx, dw


_linear.defvjp(_linear_fwd, _linear_bwd)


def _quantized(x: Float[Array, "r c"], **blocks: Block) -> Any:
    """Quantizes a padded array, its transpose or both; see `quantize_blocks`."""
    return kernels.quantize_blocks(_padded(x), **blocks)


def _padded(x: Float[Array, "r c"]) -> Float[Array, "r c"]:
    """Appends zeros to both axes, up to multiples of 128."""
    wide = x.astype(stored(x.dtype))
    short = [(0, -n % BLOCK) for n in x.shape]
    return jnp.pad(wide, short) if any(n for _, n in short) else wide


def _matmul(
    a: Scaled, b: Scaled, shape: tuple[int, int], dtype: DTypeLike
) -> Float[Array, "m n"]:
    """Computes `a @ b.T`, and cuts the padding off, to an array of this shape."""
    arrays = a.codes, b.codes, a.scale, b.scale
    y = kernels.matmul(*arrays, out_dtype=stored(dtype))
    return y[: shape[0], : shape[1]].astype(dtype)
