"""FP8 matrix products whose residuals are FP8 (COAT, arXiv 2410.19313, section 5).

Operands are E4M3 and output gradients E5M2, each with one scale a tensor, taken just in
time. The backward pass reads the FP8 activations, as the gradient of the weights wants
them, and quantizes the weights again: nothing wide is saved, and of the weights nothing
but a scale lives between the passes.
"""

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.devices import on_one_device
from coat_jax.quantized import E4M3, E5M2, Format, undifferentiated
from coat_jax.scaling import scale_of


def linear(
    x: Float[Array, "*batch k"], w: "Float[Array, 'in_features ...'] | Fp8Weight"
) -> Float[Array, "..."]:
    """The product of `x` and `w` with both in FP8, in the dtype of `x`.

    Saves the transposed E4M3 codes of `x`, and `w` by reference. Gradients have the
    dtypes of `x` and `w`.

    Args:
      x: Activations; BF16 or F32.
      w: Weights, [in, out] or [in, ...]; any floating dtype. Or with their codes.

    Raises:
      ValueError: If the contracted sizes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.linear import linear
      >>> linear(jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3))).dtype
      dtype(bfloat16)
    """
    shape = value_of(w).shape
    if len(shape) < 2 or x.shape[-1] != shape[0]:
        raise ValueError(f"x and w need [..., k] and [k, ...], got {x.shape}, {shape}")
    y = _product(x.reshape(-1, x.shape[-1]), w, x.dtype)
    return y.reshape(*x.shape[:-1], *shape[1:])


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
      TypeError: If dimensions do not go together.

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
    # Whose errors name axes that do not go together.
    expected = jax.eval_shape(partial(lax.dot_general, lhs, rhs, dimension_numbers))
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = _remaining(lhs.ndim, lhs_contract, lhs_batch)
    rhs_free = _remaining(rhs.ndim, rhs_contract, rhs_batch)
    a = lax.transpose(lhs, (*lhs_batch, *lhs_free, *lhs_contract))
    b = lax.transpose(rhs, (*rhs_batch, *rhs_contract, *rhs_free))
    batch = [lhs.shape[i] for i in lhs_batch]
    rows = [lhs.shape[i] for i in lhs_free]
    cols = [rhs.shape[i] for i in rhs_free]
    depth = math.prod(lhs.shape[i] for i in lhs_contract)
    if not depth:
        return jnp.zeros(expected.shape, dtype)
    a = a.reshape(*batch, math.prod(rows), depth)
    b = b.reshape(*batch, depth, math.prod(cols))
    product = partial(_product, dtype=jnp.dtype(dtype))
    for _ in batch:
        product = jax.vmap(product)
    return product(a, b).reshape(expected.shape)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, w, dtype):
    """[m, k] times [k, ...], its features flattened to [m, n]."""
    return _product_fwd(x, w, dtype)[0]


@on_one_device
def _product_fwd(x, w, dtype):
    xq = Codes.of(x, E4M3, copies="both")
    y, wq = product(xq.row, xq.scale, w, dtype)
    # Of the dtype of x nothing but the dtype is kept.
    return y, (xq._replace(row=None), w, wq.scale, jnp.zeros(0, x.dtype))


@on_one_device
def _product_bwd(dtype, residuals, dy):
    xq, w, w_scale, like = residuals
    gradient = Codes.of(dy, E5M2, copies="both")
    dx = input_gradient(gradient, w, w_scale, like.dtype)
    return dx, weight_gradient(xq.transposed, xq.scale, gradient, w)


_product.defvjp(_product_fwd, _product_bwd)


class Codes(NamedTuple):
    """FP8 codes with one scale, as a product's operands; None where not wanted.

    Attributes:
      row: Codes [..., n].
      transposed: The same codes [n, tokens]; tokens are all leading axes.
      scale: A power of two, float32; NaN where numbers were not finite.
      largest: The largest magnitude of the numbers, float32, where the scale is a
        delayed one.
    """

    row: Float[Array, "... n"] | None
    transposed: Float[Array, "n tokens"] | None
    scale: Float[Array, ""]
    largest: Float[Array, ""] | None = None

    @classmethod
    def of(
        cls,
        x: Float[Array, "... n"],
        format: Format,
        *,
        copies: Literal["row", "transposed", "both"],
        scale: Float[Array, ""] | None = None,
        history: Float[Array, " length"] | None = None,
    ) -> "Codes":
        """Quantizes `x` with the scale given, a history's, or that of its maximum."""
        x = _numbers(x)
        if scale is None:
            scale = scale_of(format, history, lambda: kernels.maxima(x))
        codes = kernels.quantize_tensor(
            x, scale, dtype=format.dtype, copies=copies, keep_maxima=history is not None
        )
        return cls.found(codes.row, codes.transposed, scale, codes.largest)

    @classmethod
    def found(
        cls,
        row: Array | None,
        transposed: Array | None,
        scale: Float[Array, ""],
        maxima: Float[Array, " k"] | None,
    ) -> "Codes":
        """Codes, and with a delayed scale the maxima, which are known only now.

        Infinities saturated then. That they were there the scale says.
        """
        if maxima is None:
            return cls(row, transposed, scale)
        largest = jnp.max(maxima, initial=0.0)
        scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
        return cls(row, transposed, scale, largest)


class Fp8Weight(NamedTuple):
    """A weight that was quantized before, for more than one pass, or has its scale.

    Where a weight is asked for this will do, and what it has is not computed again.
    Gradients are those of `value`.

    Attributes:
      value: The weight [k, ...].
      codes: Its E4M3 codes [k, n] and [n, k], its output axes as one; or their scale
        alone.
    """

    value: Float[Array, "k ..."]
    codes: Codes

    @classmethod
    @on_one_device
    def of(cls, w: Float[Array, "k ..."]) -> "Fp8Weight":
        """Quantizes a weight in both layouts that products take."""
        values = lax.stop_gradient(w).reshape(w.shape[0], -1)
        return cls(w, Codes.of(values, E4M3, copies="both"))

    @classmethod
    @on_one_device
    def scaled(cls, w: Float[Array, "k ..."]) -> "Fp8Weight":
        """Takes the scale of a weight, and leaves its codes to the products."""
        values = _numbers(lax.stop_gradient(w))
        scale = scale_of(E4M3, None, lambda: kernels.maxima(values))
        return cls(w, Codes(None, None, scale))


Weight = Float[Array, "k ..."] | Fp8Weight


def value_of(w: Weight) -> Float[Array, "k ..."]:
    """The weight itself."""
    return w.value if isinstance(w, Fp8Weight) else w


def product(
    codes: Float[Array, "*batch k"],
    scale: Float[Array, "..."],
    w: Weight,
    dtype: DTypeLike,
    accumulator: Float[Array, "*batch n"] | None = None,
    history: Float[Array, " length"] | None = None,
) -> tuple[Float[Array, "*batch n"], Codes]:
    """E4M3 codes times `w`, its output axes as one, and how `w` was quantized.

    Args:
      codes: Of activations.
      scale: Theirs: one, or one a token [*batch].
      w: Weights.
      dtype: Of the product.
      accumulator: What it is added to.
      history: Of maxima of `w`, if its scale is a delayed one.

    Returns:
      The product, and the weight's scale and maximum, without its codes.
    """
    multiply = partial(_matmul, dtype=dtype)
    y, weight = _product_by(multiply, codes, scale, w, history, accumulator)
    return once(y), weight


def product_heads(
    codes: Float[Array, "b s k"],
    scale: Float[Array, "b s"],
    w: Weight,
    dtype: DTypeLike,
    angles: tuple[Float[Array, "s half"], Float[Array, "s half"]],
    num_kv_heads: int,
    history: Float[Array, " length"] | None = None,
    copies: int = 1,
) -> tuple[tuple[Array, ...], Codes]:
    """`product` as queries, keys and values, which `matmul_heads` describes.

    Copies are for nothing but to be saved.
    """
    how = {"num_kv_heads": num_kv_heads, "out_dtype": dtype, "copies": copies}
    multiply = partial(kernels.matmul_heads, **how)
    heads, weight = _product_by(multiply, codes, scale, w, history, *angles)
    return (*once(heads[:3]), *heads[3:]), weight


def _product_by(multiply, codes, scale, w, history, *more):
    columns = _weight_codes(w, "transposed", history=history)
    y = multiply(codes, columns.transposed, scale, columns.scale, *more)
    return y, columns._replace(row=None, transposed=None)


def input_gradient(
    dy: Codes,
    w: Weight,
    w_scale: Float[Array, ""],
    dtype: DTypeLike,
    **how,
) -> Float[Array, "*batch k"] | tuple[Float[Array, "*batch k"], Float[Array, " parts"]]:
    """The gradient of a product's activations; `how` is as for `kernels.matmul`."""
    rows = _weight_codes(w, "row", scale=w_scale).row
    return _matmul(dy.row, rows, dy.scale, w_scale, dtype=dtype, **how)


def weight_gradient(
    x: Float[Array, "k tokens"], scale: Float[Array, ""], dy: Codes, w: Weight
) -> Weight:
    """The gradient of a product's weights, from transposed codes of its activations."""
    value = value_of(w)
    dw = _matmul(x, dy.transposed, scale, dy.scale, dtype=value.dtype)
    dw = dw.reshape(value.shape)
    return Fp8Weight(dw, None) if isinstance(w, Fp8Weight) else dw


def once(result):
    """What products return, where it is read and may be saved for backward as well.

    In a loop XLA fuses a product with what stacks its results, and runs it again for
    other readers; not behind this barrier.
    """
    return lax.optimization_barrier(result)


def behind(scale: Float[Array, ""], array: Float[Array, "..."]) -> Float[Array, ""]:
    """`scale` as something that depends on `array`, which XLA therefore computes first.

    XLA computes early what it can, and a barrier does not bind its schedule.
    """
    first = array.reshape(-1)[:1].astype(jnp.float32)
    never = jnp.any(jnp.isnan(first) & (first == 0))
    return scale + never.astype(scale.dtype)


def _weight_codes(w: Weight, copies: Literal["row", "transposed"], **how) -> Codes:
    if isinstance(w, Fp8Weight):
        if getattr(w.codes, copies) is not None:
            return w.codes
        how = {"scale": w.codes.scale} | how
        w = w.value
    return Codes.of(w.reshape(w.shape[0], -1), E4M3, copies=copies, **how)


def _numbers(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """What is quantized: bfloat16 or float32, and nothing that is differentiated."""
    x = undifferentiated(x)
    return x if x.dtype in (jnp.bfloat16, jnp.float32) else x.astype(jnp.float32)


def _matmul(*arrays, dtype, **how):
    if dtype in (jnp.bfloat16, jnp.float32):
        return kernels.matmul(*arrays, out_dtype=dtype, **how)
    return kernels.matmul(*arrays, out_dtype=jnp.float32, **how).astype(dtype)


def _remaining(ndim: int, *taken) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if not any(i in axes for axes in taken))
