"""FP8 matmuls that save FP8 residuals (COAT, arXiv 2410.19313, section 5).

Operands are E4M3 and output gradients are E5M2. In `linear` and `fp8_dot_general` each
of these arrays has a per-tensor scale, computed just in time. The FP8 activations are
saved in the layout that the matmul of the weight gradient reads. The backward pass
quantizes the weights again, so that only a scale is saved for each weight.

In the FP8 flow, the layers of the recipes "coat" and "coat_max", weights are [..., k],
and forward matmuls take one scale per output feature. An output feature is one row, so
one pass over the weights quantizes them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.meshes import of_tokens
from coat_jax.quantization.array import undifferentiated
from coat_jax.quantization.delayed import delayed_scale
from coat_jax.quantization.formats import E4M3, E5M2, Format
from pallas_kernels import Codes, Scaled
from pallas_kernels.checks import WIDE
from pallas_kernels.dispatch import array_types

# The copy of a weight that forward reads, by `contract`: 0 if the weight's first axis
# is contracted, 1 if its last axis is. Backward reads the other copy.
_LAYOUTS = ("transposed", "row")


def linear(
    x: Float[Array, "*batch k"], w: Float[Array, "... k"]
) -> Float[Array, "..."]:
    """Computes `x @ w.T` with both operands in FP8, in the dtype of `x`.

    The transposed E4M3 codes of `x` are saved, and `w` is saved by reference. Gradients
    have the dtypes of `x` and `w`.

    Args:
      x: Activations, bfloat16 or float32.
      w: Weights, [out, in] or [..., in], of any floating dtype.

    Raises:
      ValueError: If the contracted sizes differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.fp8.matmul import linear
      >>> linear(jnp.ones((2, 4), jnp.bfloat16), jnp.ones((3, 4))).dtype
      dtype(bfloat16)
    """
    return in_rows(lambda x, w: fp8_matmul(x, w, x.dtype, 1), x, w)


def in_rows(
    multiply: Callable[..., Float[Array, "m n"]],
    x: Float[Array, "*batch k"],
    w: Float[Array, "... k"],
    *more: Array,
) -> Float[Array, "..."]:
    """Computes `x @ w.T` by `multiply`, with the leading axes of `x` merged to m rows.

    Args:
      multiply: A function of rows [m, k], the weights and `more` that returns the
        product [m, n]. The weights' output axes are merged to n.
      x: The activations.
      w: The weights.
      *more: Further arrays that `multiply` takes.

    Returns:
      The products [*batch, *o], where o are the output axes of `w`.

    Raises:
      ValueError: If the contracted sizes differ.
    """
    check_contracted(x, w)
    k = x.shape[-1]

    @of_tokens
    def product(x, w, *more):
        y = multiply(x.reshape(-1, k), w, *more)
        return y.reshape(*x.shape[:-1], *w.shape[:-1])

    return product(x, w, *more)


def check_contracted(x: Float[Array, "*batch k"], w: Float[Array, "... k"]) -> None:
    """Raises ValueError if contracted sizes differ or `w` has fewer than two axes."""
    if w.ndim < 2 or w.shape[-1:] != x.shape[-1:]:
        raise ValueError(
            f"x and w need [..., k] and [..., n, k], got {x.shape}, {w.shape}"
        )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fp8_matmul(x, w, dtype, contract):
    """Multiplies x [m, k] by a weight in FP8, and returns the product [m, n].

    If `contract` is 0, w is [k, n]. If `contract` is 1, w is [..., k], and its output
    axes are merged to n. The product has the given dtype.
    """
    return _fp8_matmul_fwd(x, w, dtype, contract)[0]


@array_types.on_common_mesh
def _fp8_matmul_fwd(x, w, dtype, contract):
    layout = _LAYOUTS[contract]
    xq = quantize_tensor(x, E4M3, copies="both")
    wq = quantize_tensor(w.reshape(-1, w.shape[-1]), E4M3, copies=layout)
    y = matmul_codes(xq.row, getattr(wq, layout), xq.scale, wq.scale, dtype=dtype)
    return once(y), (xq._replace(row=None), w, wq.scale, dtype_of(x))


@array_types.on_common_mesh
def _fp8_matmul_bwd(dtype, contract, residuals, dy):
    xq, w, w_scale, like = residuals
    layout = _LAYOUTS[1 - contract]
    gradient = quantize_tensor(dy, E5M2, copies="both")
    rows = w.reshape(-1, w.shape[-1])
    wq = quantize_tensor(rows, E4M3, copies=layout, scale=w_scale)
    dx = matmul_codes(
        gradient.row, getattr(wq, layout), gradient.scale, w_scale, dtype=like.dtype
    )
    a, b = (xq, gradient) if contract == 0 else (gradient, xq)
    dw = matmul_codes(a.transposed, b.transposed, a.scale, b.scale, dtype=w.dtype)
    return dx, dw.reshape(w.shape)


fp8_matmul.defvjp(_fp8_matmul_fwd, _fp8_matmul_bwd)


def quantize_tensor(
    x: Float[Array, "... n"],
    format: Format,
    *,
    copies: Literal["row", "transposed", "both"],
    merge: bool = True,
    scale: Float[Array, ""] | None = None,
    history: Float[Array, " length"] | None = None,
    after: Array | None = None,
) -> Codes:
    """Quantizes `x` with one scale, and returns row-major or transposed codes or both.

    Args:
      x: The array.
      format: The format of the codes.
      copies: The codes to return.
      merge: Whether the transpose is [n, tokens]. If not, it has all axes of `x`, the
        last one first.
      scale: The scale, if there is no `history`; None means a scale from the amax of
        `x`.
      history: The amax history that a delayed scale follows from, or None.
      after: An array that must be computed before the codes, or None.
    """
    x = quantizable(x)
    if history is not None:
        scale = delayed_scale(history, format)
    elif scale is None:
        bound = kernels.Bound((kernels.maxima(x),))
        (scale,) = kernels.tensor_scales(bound, dtype=format.dtype)
    codes = kernels.quantize_tensor(
        x,
        scale,
        dtype=format.dtype,
        copies=copies,
        merge=merge,
        keep_maxima=history is not None,
        after=after,
    )
    return codes if history is None else checked(codes)


def checked(codes: Codes) -> Codes:
    """Returns the codes, with NaN as their scale if their amax is not finite.

    A delayed scale is chosen before the amax is known, so infinities saturate. The
    scale NaN makes the results of matmuls NaN.
    """
    largest = jnp.max(codes.largest, initial=0.0)
    scale = jnp.where(jnp.isfinite(largest), codes.scale, jnp.nan)
    return codes._replace(scale=scale, largest=largest)


def quantize_tokens(x: Float[Array, "... n"], after: Array | None = None) -> Scaled:
    """Quantizes `x` to E4M3 with one scale per token, or per output feature.

    `after` is an array that must be computed before the codes.
    """
    return kernels.quantize_rows(quantizable(x), after=after)


class Fp8Weight(NamedTuple):
    """A weight that is quantized beforehand, for more than one pass.

    Functions that take a weight also take an `Fp8Weight`. The gradient of an
    `Fp8Weight` is an `Fp8Weight` with the gradient of `value`, and with None in the
    other fields.

    Attributes:
      value: The unquantized weight [..., k].
      rows: The codes [n, k] for the forward pass, with one scale per output feature.
        Output axes are merged.
      transposed: The codes [k, ...] for the backward pass.
      scale: The per-tensor scale of `transposed`.
    """

    value: Float[Array, "... k"]
    rows: Scaled | None
    transposed: Float[Array, "k ..."] | None
    scale: Float[Array, ""] | None

    @classmethod
    def of(cls, w: Float[Array, "... k"]) -> "Fp8Weight":
        """Quantizes a weight for the forward and the backward pass."""
        values = lax.stop_gradient(w)
        rows, _ = _forward_codes(values, None)
        (scale,) = tensor_scales(rows)
        return cls(w, rows, _backward_codes(values, scale), scale)


Weight = Float[Array, "... k"] | Fp8Weight


def tensor_scales(*of: Scaled | Array) -> tuple[Float[Array, ""], ...]:
    """Returns a per-tensor scale, float32, for each argument.

    An argument is a per-tensor scale, which is returned as it is, or codes with a scale
    per row. The amax of an array with a scale per row is taken to be its largest scale
    times the largest number of E4M3.
    """
    scaled = [x for x in of if isinstance(x, Scaled)]
    bounds = (kernels.Bound((x.scale,), E4M3.max) for x in scaled)
    scales = iter(kernels.tensor_scales(*bounds))
    return tuple(next(scales) if isinstance(x, Scaled) else x for x in of)


def product(
    x: Scaled,
    w: Weight,
    dtype: DTypeLike,
    accumulator: Float[Array, "*batch n"] | None = None,
    after: Array | None = None,
) -> tuple[Float[Array, "*batch n"], Scaled | Float[Array, ""]]:
    """Computes `x @ w.T + accumulator`, with output axes of `w` merged to n.

    Args:
      x: The codes of activations [*batch, k].
      w: The weight [..., k].
      dtype: The dtype of the result.
      accumulator: An array that is added.
      after: An array that is computed before the weight is quantized.

    Returns:
      The result, and an argument of `tensor_scales` for the scale of `w` in the
      backward pass.
    """
    multiply = partial(matmul_codes, dtype=dtype)
    y, scaled = _product_by(multiply, x, w, accumulator, after=after)
    return once(y), scaled


def product_heads(
    x: Scaled,
    w: Weight,
    dtype: DTypeLike,
    angles: tuple[Float[Array, "s half"], Float[Array, "s half"]],
    num_kv_heads: int,
    keep_copies: bool,
) -> tuple[tuple[Array, ...], Scaled | Float[Array, ""]]:
    """Computes `product`, and splits it into queries, keys and values with RoPE.

    Args:
      x: The codes of activations [*batch, k].
      w: The weight [..., k]; its output axes have the columns of all heads.
      dtype: The dtype of the results.
      angles: The cosines and sines of RoPE's angles.
      num_kv_heads: The number of key heads.
      keep_copies: Whether to return queries, keys and values twice. The second copies
        should only be saved: the barrier of `once` is on the first ones alone.

    Returns:
      Queries, keys and values, perhaps followed by their copies; and an argument of
      `tensor_scales` for the scale of `w` in the backward pass.
    """
    options = {"num_kv_heads": num_kv_heads, "out_dtype": dtype}
    multiply = partial(kernels.matmul_heads, **options, copies=1 + keep_copies)
    heads, scaled = _product_by(multiply, x, w, *angles)
    return (*once(heads[:3]), *heads[3:]), scaled


def _product_by(multiply, x, w, *more, after=None):
    rows, scaled = _forward_codes(w, after)
    return multiply(x.codes, rows.codes, x.scale, rows.scale, *more), scaled


def input_gradient(
    dy: Codes,
    w: Weight,
    w_scale: Float[Array, ""],
    dtype: DTypeLike,
    after: Array | None = None,
    keep_maxima: bool = False,
) -> Float[Array, "*batch k"] | tuple[Float[Array, "*batch k"], Float[Array, " parts"]]:
    """Computes the gradient of a matmul's activations, `dy @ w`.

    Args:
      dy: The codes of the result's gradient.
      w: The weight.
      w_scale: The per-tensor scale to quantize the weight with.
      dtype: The dtype of the gradient.
      after: An array that must be computed before the weight is quantized, or None.
      keep_maxima: Whether to return the amax of each part of the gradient as well.
    """
    codes = _backward_codes(w, w_scale, after)
    arrays = dy.row, codes, dy.scale, w_scale
    return matmul_codes(*arrays, dtype=dtype, keep_maxima=keep_maxima)


def weight_gradient(
    x: Float[Array, "k tokens"], scale: Float[Array, ""], dy: Codes, w: Weight
) -> Weight | list[Array]:
    """Computes the gradient of a matmul's weights, `dy.transposed @ x.T`.

    `x` holds the transposed codes of the activations, and `scale` is their scale. The
    gradient has the shape and dtype of `w`. On a mesh, if `w` has more than two axes,
    the result is a list with a gradient for each element of the first axis. Devices
    reduce and scatter each of them separately, because its shards are contiguous in
    memory.
    """
    if isinstance(w, Fp8Weight):
        dw = weight_gradient(x, scale, dy, w.value)
        return Fp8Weight(dw, None, None, None)
    # The output axes of `w` are not merged, because a mesh may split the last of them.
    gradient = dy.transposed.reshape(*w.shape[:-1], -1)
    multiply = partial(matmul_codes, dtype=w.dtype)
    if gradient.ndim == 2 or array_types.mesh_of(gradient) is None:
        return multiply(gradient, x, dy.scale, scale)
    return [multiply(half, x, dy.scale, scale) for half in gradient]


def dtype_of(x: Array | None) -> Array | None:
    """Returns an empty array with the dtype of `x`, for residuals, or None for None."""
    return None if x is None else jnp.zeros(0, x.dtype)


def once[Result](result: Result) -> Result:
    """Returns `result`, and keeps the matmul that computes it from running twice.

    In a loop XLA fuses a matmul with the operation that stacks its results, and runs it
    again for other readers. XLA does not fuse across this function's barrier.
    """
    return lax.optimization_barrier(result)


def _forward_codes(
    w: Weight, after: Array | None
) -> tuple[Scaled, Scaled | Float[Array, ""]]:
    """Returns forward-pass codes of a weight, and an argument of `tensor_scales`.

    The per-tensor scale that follows from this argument is for `_backward_codes`.
    """
    if isinstance(w, Fp8Weight):
        return w.rows, w.scale
    codes, scale = quantize_tokens(w, after)
    rows = Scaled(codes.reshape(-1, codes.shape[-1]), scale.reshape(-1))
    return rows, rows


def _backward_codes(
    w: Weight, scale: Array, after: Array | None = None
) -> Float[Array, "k ..."]:
    """Returns transposed codes of weights, for the gradient of activations."""
    if isinstance(w, Fp8Weight):
        return w.transposed
    codes = quantize_tensor(
        w, E4M3, copies="transposed", merge=False, scale=scale, after=after
    )
    return codes.transposed


def quantizable(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `x` in a dtype that kernels quantize; differentiating it is an error."""
    x = undifferentiated(x)
    return x.astype(stored(x.dtype))


def stored(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype in which kernels store a result of a floating dtype."""
    return dtype if dtype in WIDE else jnp.float32


def matmul_codes(
    a: Float[Array, "... k"],
    b: Float[Array, "n *k"],
    a_scale: Array,
    b_scale: Array,
    add: Float[Array, "... n"] | None = None,
    *,
    bias: Float[Array, " n"] | None = None,
    dtype: DTypeLike,
    keep_maxima: bool = False,
) -> Any:
    """Computes `(a * a_scale) @ (b * b_scale).T + bias + add` from FP8 codes.

    It calls `kernels.matmul`, which supports fewer dtypes.

    Args:
      a: The codes of the first operand.
      b: The codes of the second operand. All axes after the first one are contracted.
      a_scale: The scale of `a`, a scalar or one per row.
      b_scale: The scale of `b`, a scalar or one per row.
      add: An array to add, of any floating dtype, or None.
      bias: A number to add to each column, of any floating dtype, or None.
      dtype: The floating dtype of the result.
      keep_maxima: Whether to return the amax of each part of the result as well.
    """
    out_dtype = stored(dtype)
    add = None if add is None else add.astype(out_dtype)
    bias = None if bias is None else bias.astype(jnp.float32)
    options = {"bias": bias, "out_dtype": out_dtype, "keep_maxima": keep_maxima}
    out = kernels.matmul(a, b, a_scale, b_scale, add, **options)
    if not keep_maxima:
        return out.astype(dtype)
    return out[0].astype(dtype), out[1]
