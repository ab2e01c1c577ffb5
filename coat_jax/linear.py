"""FP8 matrix products whose residuals are FP8 (COAT, arXiv 2410.19313, section 5).

Operands are E4M3 and output gradients E5M2, each with one scale a tensor, taken just in
time. The backward pass reads the FP8 activations and quantizes the weights again, so
nothing wide is saved and no second copy of a weight lives between the passes.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.quantized import E4M3, E5M2, Format, PerTensor, QuantizedArray, quantize


def linear(
    x: Float[Array, "*batch k"], w: Float[Array, "in_features ..."]
) -> Float[Array, "..."]:
    """The product of `x` and `w` with both in FP8, in the dtype of `x`.

    Saves the E4M3 codes of `x`, and `w` by reference. The gradients of `x` and `w` have
    their dtypes.

    Args:
      x: Activations; BF16 or F32.
      w: Weights, [in, out] or [in, ...]; any floating dtype.

    Raises:
      ValueError: If the contracted sizes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.linear import linear
      >>> linear(jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3))).dtype
      dtype(bfloat16)
    """
    if w.ndim < 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"x and w need [..., k] and [k, ...], got {x.shape}, {w.shape}"
        )
    y = _product(x.reshape(-1, x.shape[-1]), w, x.dtype)
    return y.reshape(*x.shape[:-1], *w.shape[1:])


def fp8_dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    **_,
) -> Float[Array, "..."]:
    """`jax.lax.dot_general` in FP8: pass as `dot_general=` to `nn.Dense`, `nnx.Linear`.

    Takes any dimension numbers; with batch dimensions every batch entry has a scale of
    its own. `lhs` is saved in FP8 and `rhs`, the weights, by reference.

    Args:
      lhs: Activations.
      rhs: Weights.
      dimension_numbers: As in `jax.lax.dot_general`.
      precision: Ignored: FP8 has one.
      preferred_element_type: Dtype of the result; the promoted dtype by default.

    Raises:
      ValueError: If an operand is not floating.

    Example:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> layer = nn.Dense(8, dtype=jnp.bfloat16, dot_general=coat.fp8_dot_general)
      >>> params = layer.init(jax.random.key(0), jnp.ones((2, 4)))
      >>> layer.apply(params, jnp.ones((2, 4))).shape
      (2, 8)
    """
    del precision
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating, got dtype {operand.dtype}")
    dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = _remaining(lhs.ndim, lhs_contract, lhs_batch)
    rhs_free = _remaining(rhs.ndim, rhs_contract, rhs_batch)
    a = lax.transpose(lhs, (*lhs_batch, *lhs_free, *lhs_contract))
    b = lax.transpose(rhs, (*rhs_batch, *rhs_contract, *rhs_free))
    batch = [lhs.shape[i] for i in lhs_batch]
    rows = [lhs.shape[i] for i in lhs_free]
    cols = [rhs.shape[i] for i in rhs_free]
    depth = math.prod(lhs.shape[i] for i in lhs_contract)
    a = a.reshape(*batch, math.prod(rows), depth)
    b = b.reshape(*batch, depth, math.prod(cols))
    product = partial(_product, dtype=jnp.dtype(dtype))
    for _ in batch:
        product = jax.vmap(product)
    return product(a, b).reshape(*batch, *rows, *cols)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, w, dtype):
    """[m, k] times [k, ...], its features flattened to [m, n]."""
    return _product_fwd(x, w, dtype)[0]


def _product_fwd(x, w, dtype):
    xq = _per_tensor(x, E4M3)
    return _matmul(xq, _matrix(w), (1, 0), dtype), (xq, w)


def _product_bwd(dtype, residuals, dy):
    xq, w = residuals
    dyq = _per_tensor(dy, E5M2)
    dx = _matmul(dyq, _matrix(w), (1, 1), xq.dtype)
    dw = _matmul(xq, dyq, (0, 0), w.dtype)
    return dx, dw.reshape(w.shape)


_product.defvjp(_product_fwd, _product_bwd)


def _matrix(w: Array) -> QuantizedArray:
    return _per_tensor(w.reshape(w.shape[0], -1), E4M3)


def _per_tensor(x: Array, format: Format) -> QuantizedArray:
    return quantize(x, format=format, granularity=PerTensor())


def _matmul(
    a: QuantizedArray, b: QuantizedArray, contract: tuple[int, int], dtype: DTypeLike
) -> Array:
    """Contracts one axis of each; accumulates in float32 and returns `dtype`.

    Scales are powers of two, so scaling the product in `dtype` is exact, and XLA folds
    it into the cuBLASLt call.
    """
    wide = dtype if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    dims = (((contract[0],), (contract[1],)), ((), ()))
    y = lax.dot_general(a.codes, b.codes, dims, preferred_element_type=wide)
    return (y * (a.scale * b.scale).astype(wide)).astype(dtype)


def _remaining(ndim: int, *taken) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if not any(i in axes for axes in taken))
