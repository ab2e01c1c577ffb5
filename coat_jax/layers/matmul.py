"""FP8 matrix products whose residuals are FP8 (COAT, arXiv 2410.19313, section 5).

Operands are E4M3 and output gradients E5M2, in `linear` and `fp8_dot_general` each with
one scale a tensor, taken just in time. The backward pass reads the FP8 activations, as
the gradient of the weights wants them, and quantizes the weights again: nothing wide is
saved, and of the weights nothing but a scale lives between the passes.

Weights are [..., k], an output's in a row: forward multiplies with rows, which one pass
over the weights quantizes with a scale for each.
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
from coat_jax.quantization.array import E4M3, E5M2, Format, undifferentiated
from coat_jax.quantization.delayed import scale_of

# The layout of a weight that is contracted along its first axis, or along its last.
_LAYOUTS = ("transposed", "row")


def linear(
    x: Float[Array, "*batch k"], w: Float[Array, "... k"]
) -> Float[Array, "..."]:
    """The product of `x` and `w` with both in FP8, in the dtype of `x`.

    Saves the transposed E4M3 codes of `x`, and `w` by reference. Gradients have the
    dtypes of `x` and `w`.

    Args:
      x: Activations; BF16 or F32.
      w: Weights, [out, in] or [..., in]; any floating dtype.

    Raises:
      ValueError: If the contracted sizes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.matmul import linear
      >>> linear(jnp.ones((2, 4), jnp.bfloat16), jnp.ones((3, 4))).dtype
      dtype(bfloat16)
    """
    k = x.shape[-1]
    if w.ndim < 2 or w.shape[-1] != k:
        raise ValueError(
            f"x and w need [..., k] and [..., n, k], got {x.shape}, {w.shape}"
        )
    y = _product(x.reshape(-1, k), w, x.dtype, 1)
    return y.reshape(*x.shape[:-1], *w.shape[:-1])


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
    # `lax.dot_general` raises errors that name mismatched axes.
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
    product = partial(_product, dtype=jnp.dtype(dtype), contract=0)
    for _ in batch:
        product = jax.vmap(product)
    return product(a, b).reshape(expected.shape)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x, w, dtype, contract):
    """[m, k] times [k, n], or [..., k] where `contract` is 1, its outputs as one."""
    return _product_fwd(x, w, dtype, contract)[0]


@on_one_device
def _product_fwd(x, w, dtype, contract):
    xq = Codes.of(x, E4M3, copies="both")
    wq = Codes.of(_flat(w), E4M3, copies=_LAYOUTS[contract])
    y = _matmul(xq.row, wq.only, xq.scale, wq.scale, dtype=dtype)
    # An empty array carries the dtype of x to the backward pass.
    return once(y), (xq._replace(row=None), w, wq.scale, jnp.zeros(0, x.dtype))


@on_one_device
def _product_bwd(dtype, contract, residuals, dy):
    xq, w, w_scale, like = residuals
    gradient = Codes.of(dy, E5M2, copies="both")
    wq = Codes.of(_flat(w), E4M3, copies=_LAYOUTS[1 - contract], scale=w_scale)
    dx = _matmul(gradient.row, wq.only, gradient.scale, w_scale, dtype=like.dtype)
    a, b = (xq, gradient) if contract == 0 else (gradient, xq)
    dw = _matmul(a.transposed, b.transposed, a.scale, b.scale, dtype=w.dtype)
    return dx, dw.reshape(w.shape)


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
        after: Array | None = None,
    ) -> "Codes":
        """Quantizes `x` with the scale given, a history's, or that of its maximum.

        Not before there is `after`.
        """
        x = _numbers(x)
        if scale is None:
            scale = scale_of(
                format, history, lambda: kernels.Bound((kernels.maxima(x),))
            )
        how = {"copies": copies, "keep_maxima": history is not None, "after": after}
        codes = kernels.quantize_tensor(x, scale, dtype=format.dtype, **how)
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

    @property
    def only(self) -> Float[Array, "..."]:
        """The one copy that there is."""
        (copy,) = (x for x in (self.row, self.transposed) if x is not None)
        return copy


class Rows(NamedTuple):
    """E4M3 codes with a scale for each row.

    Attributes:
      codes: Codes [..., n].
      scale: float32 [...].
    """

    codes: Float[Array, "... n"]
    scale: Float[Array, "..."]

    @classmethod
    def of(cls, x: Float[Array, "... n"]) -> "Rows":
        """Quantizes `x`."""
        return cls(*kernels.quantize_rows(_numbers(x)))

    @property
    def bound(self) -> kernels.Bound:
        """An upper bound of all magnitudes."""
        return kernels.Bound((self.scale,), E4M3.max)


class Fp8Weight(NamedTuple):
    """A weight that was quantized before, for more than one pass.

    Where a weight is asked for this will do. Gradients are those of `value`.

    Attributes:
      value: The weight [..., k].
      rows: Its codes for forward [n, k], its output axes as one.
      transposed: Its codes for backward [k, n].
      scale: The scale of these.
    """

    value: Float[Array, "... k"]
    rows: Rows | None
    transposed: Float[Array, "k n"] | None
    scale: Float[Array, ""] | None

    @classmethod
    @on_one_device
    def of(cls, w: Float[Array, "... k"]) -> "Fp8Weight":
        """Quantizes a weight for forward and backward."""
        values = lax.stop_gradient(w)
        rows, _ = _forward_codes(values)
        (scale,) = tensor_scales(rows)
        return cls(w, rows, _backward_codes(values, scale), scale)


Weight = Float[Array, "... k"] | Fp8Weight


def tensor_scales(*rows: Rows | Array) -> tuple[Float[Array, ""], ...]:
    """Returns a per-tensor scale for each, which an array already is."""
    bounds = [x.bound for x in rows if isinstance(x, Rows)]
    found = iter(kernels.tensor_scales(*bounds))
    return tuple(next(found) if isinstance(x, Rows) else x for x in rows)


def product(
    x: Rows,
    w: Weight,
    dtype: DTypeLike,
    accumulator: Float[Array, "*batch n"] | None = None,
) -> tuple[Float[Array, "*batch n"], Rows | Float[Array, ""]]:
    """Activations times `w`, its output axes as one, and what has its scale.

    Args:
      x: Codes of activations [*batch, k].
      w: Weights.
      dtype: Of the product.
      accumulator: What it is added to.
    """
    multiply = partial(_matmul, dtype=dtype)
    y, scaled = _product_by(multiply, x, w, accumulator)
    return once(y), scaled


def product_heads(
    x: Rows,
    w: Weight,
    dtype: DTypeLike,
    angles: tuple[Float[Array, "s half"], Float[Array, "s half"]],
    num_kv_heads: int,
    copies: int = 1,
) -> tuple[tuple[Array, ...], Rows | Float[Array, ""]]:
    """`product` as queries, keys and values, which `matmul_heads` describes.

    Copies are for nothing but to be saved.
    """
    how = {"num_kv_heads": num_kv_heads, "out_dtype": dtype, "copies": copies}
    multiply = partial(kernels.matmul_heads, **how)
    heads, scaled = _product_by(multiply, x, w, *angles)
    return (*once(heads[:3]), *heads[3:]), scaled


def _product_by(multiply, x, w, *more):
    rows, scaled = _forward_codes(w)
    return multiply(x.codes, rows.codes, x.scale, rows.scale, *more), scaled


def input_gradient(
    dy: Codes,
    w: Weight,
    w_scale: Float[Array, ""],
    dtype: DTypeLike,
    after: Array | None = None,
    **how,
) -> Float[Array, "*batch k"] | tuple[Float[Array, "*batch k"], Float[Array, " parts"]]:
    """The gradient of a product's activations; `how` is as for `kernels.matmul`.

    Weights are not quantized before there is `after`.
    """
    codes = _backward_codes(w, w_scale, after)
    return _matmul(dy.row, codes, dy.scale, w_scale, dtype=dtype, **how)


def weight_gradient(
    x: Float[Array, "k tokens"], scale: Float[Array, ""], dy: Codes, w: Weight
) -> Weight:
    """The gradient of a product's weights, from transposed codes of its activations."""
    if isinstance(w, Fp8Weight):
        dw = weight_gradient(x, scale, dy, w.value)
        return Fp8Weight(dw, None, None, None)
    dw = _matmul(dy.transposed, x, dy.scale, scale, dtype=w.dtype)
    return dw.reshape(w.shape)


def once(result):
    """Keeps a matmul whose result is read and saved from running twice.

    In a loop XLA fuses a matmul with the operation that stacks its results, and runs it
    again for other readers. XLA does not fuse across this barrier.
    """
    return lax.optimization_barrier(result)


def _forward_codes(w: Weight) -> tuple[Rows, Rows | Float[Array, ""]]:
    """Codes of weights for forward, and what has the scale of those for backward."""
    if isinstance(w, Fp8Weight):
        return w.rows, w.scale
    rows = Rows.of(_flat(w))
    return rows, rows


def _backward_codes(
    w: Weight, scale: Array, after: Array | None = None
) -> Float[Array, "k n"]:
    """Codes of weights for the gradient of activations."""
    if isinstance(w, Fp8Weight):
        return w.transposed
    how = {"copies": "transposed", "scale": scale, "after": after}
    return Codes.of(_flat(w), E4M3, **how).transposed


def _flat(w: Float[Array, "... k"]) -> Float[Array, "n k"]:
    return w.reshape(-1, w.shape[-1])


def _numbers(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `x` in bfloat16 or float32, and forbids to differentiate it."""
    x = undifferentiated(x)
    return x if x.dtype in (jnp.bfloat16, jnp.float32) else x.astype(jnp.float32)


def _matmul(*arrays, dtype, **how):
    if dtype in (jnp.bfloat16, jnp.float32):
        return kernels.matmul(*arrays, out_dtype=dtype, **how)
    return kernels.matmul(*arrays, out_dtype=jnp.float32, **how).astype(dtype)


def _remaining(ndim: int, *taken) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if not any(i in axes for axes in taken))
