"""FP8 matmuls fused with operations before and after them, for `fp8_remat`.

A matmul has a prologue, which computes its activations (a norm, an activation, a gate),
and an epilogue (a bias, an array that is added). Kernels compute both. All matmuls that
read the same array are computed by one function, which quantizes the array once, with a
scale for each token.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.fp8.matmul import (
    checked,
    dtype_of,
    matmul_codes,
    once,
    quantize_tensor,
    tensor_scales,
)
from coat_jax.fp8.prologue import Source
from coat_jax.fp8.source import in_rows, quantized_source, source_gradient
from coat_jax.quantization.array import scales_as_bits
from coat_jax.quantization.delayed import delayed_scale
from coat_jax.quantization.formats import E4M3, E5M2
from coat_jax.remat.notes import Note
from pallas_kernels import Activation, Codes, Scaled
from pallas_kernels.dispatch import array_types
from pallas_kernels.numerics import GROUP

_GATE = "the gradient of a gate"
ACTIVATIONS: dict[Activation, Callable] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
}
# Upper bounds of the slope |activation'(x)|.
STEEPEST = {"silu": 1.1, "gelu": 1.13, "gelu_exact": 1.13}


def products(source, weights, other, *, norm, dtype, passes):
    """Multiplies activations [*batch, m, k] by each of the weights [*batch, k, n].

    In all functions of this module weights are of the class `Stored`.

    Args:
      source: A `Source` with the activations, or with the operands of the norm that
        computes the activations. Leading axes are merged into m if the weights have no
        batch axes.
      weights: Pairs of a weight, a `Stored`, and its bias [n] or None.
      other: An array to add to the result, if there is one weight; or None. It has as
        many elements as the result, in the same order.
      norm: The `Prologue` that computes the activations from `source`; None if `source`
        has the activations.
      dtype: The dtype of the results.
      passes: Whether to return the input of the norm as well, for other readers.

    Returns:
      A product for each weight, and with `passes` the norm's input as the last result.
    """
    source, weights, other = array_types.varying_alike((source, weights, other))
    product = partial(_products, norm=norm, dtype=dtype, passes=passes)
    if len(weights[0][0].shape) > 2:
        product = partial(product, other=None)
        return _batched(product, source.x)(source, weights)
    return product(in_rows(source), weights, _as_rows(other, weights[0]))


def _batched(product: Callable, x: Array) -> Callable:
    """Returns a matmul mapped by `vmap` over all axes of x but the last two."""
    for _ in range(x.ndim - 2):
        product = jax.vmap(product)
    return product


def _as_rows(x, weight):
    """Reshapes x to [m, n], the shape of a product with a weight [k, n].

    `weight` is a pair of a weight and its bias. If x is None, it returns None.
    """
    return None if x is None else x.reshape(-1, weight[0].shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _products(source, weights, other, norm, dtype, passes):
    """Multiplies x [m, k] by each of the weights [k, n], within `fp8_remat`.

    Each weight comes with a bias [n], which the kernel adds, or None. If `norm` is
    None, x is the source's array, otherwise it is the norm of this array. The forward
    pass quantizes x in one pass, with a scale for each token. The backward pass reads
    the source's array, which `fp8_remat` saves in FP8 or recomputes, or the FP8 copy of
    the norm's input that the norm's kernel writes, in groups of 16.

    If `other` [m, n] is not None, there is one matmul, and its kernel adds `other`.
    With `passes` the last result is the norm's input. The kernel of the norm's gradient
    adds the gradient of this result.
    """
    return _products_fwd(source, weights, other, norm, dtype, passes)[0]


@array_types.on_common_mesh
def _products_fwd(source, weights, other, norm, dtype, passes):
    rows, saved = quantized_source(source, norm)
    ys, of_weights = _forward(rows, weights, dtype, other)
    scales = tensor_scales(rows, *of_weights)
    results = *map(once, ys), *([source.x] if passes else [])
    weights, likes = zip(*((w, dtype_of(bias)) for w, bias in weights), strict=True)
    return results, (saved, weights, scales, likes, _marked(other))


@array_types.on_common_mesh
def _products_bwd(norm, dtype, passes, residuals, dys):
    *residuals, likes, adds = residuals
    *dys, dx = dys if passes else (*dys, None)
    gradients = [quantize_tensor(dy, E5M2, copies="both") for dy in dys]
    source, dws = _backward(residuals, gradients, norm, dx)
    dbiases = map(_bias_gradient, likes, dys)
    return source, tuple(zip(dws, dbiases, strict=True)), _if_marked(adds, dys[0])


def _bias_gradient(like, dy):
    if like is None:
        return None
    return jnp.sum(dy, axis=0, dtype=jnp.float32).astype(like.dtype)


def _marked(x):
    """Returns () for an array and None for None, to record in residuals which it is."""
    return None if x is None else ()


def _if_marked(mark, x):
    return None if mark is None else x


def _forward(rows, weights, dtype, add=None):
    """Multiplies codes by each of the weights.

    Each weight comes with its bias or None. `add` is an array that is added to each
    result, or None.

    Returns:
      The results, and an argument of `tensor_scales` for each weight.
    """
    ys, of_weights = [], []
    for w, bias in weights:
        wq = w.for_outputs()
        arrays = rows.codes, wq.codes, rows.scale, wq.scale, add
        ys.append(matmul_codes(*arrays, bias=bias, dtype=dtype))
        of_weights.append(wq if wq.scale.ndim else wq.scale)
    return ys, of_weights


def _backward(residuals, gradients, norm, add=None):
    """Computes the gradients of source and weights from codes of result gradients.

    `residuals` are the saved source, the weights, and the scales of both. `gradients`
    has the E5M2 codes of each result's gradient. `norm` is the `Prologue` of the norm,
    or None. `add` is an array to add to the gradient of the norm's input, or None.
    """
    saved, weights, (scale, *w_scales) = residuals
    dtype = saved[1].dtype if norm is None else jnp.bfloat16
    # `after` delays the computation of codes until just before they are read, so that
    # they are in memory for a shorter time.
    dx, last = None, gradients[-1].transposed
    for dy, w, w_scale in zip(gradients, weights, w_scales, strict=True):
        wq = w.for_inputs(w_scale, after=last)
        dx = matmul_codes(dy.row, wq, dy.scale, w_scale, dx, dtype=dtype)
    if norm is None:
        x, _ = saved
        xq = quantize_tensor(x, E4M3, copies="transposed", scale=scale, after=last)
        source, xq = Source(dx), xq.transposed
    else:
        source, xq = source_gradient(saved, dx, scale, norm, add)
    dws = [
        w.gradient(Scaled(xq, scale), Scaled(dy.transposed, dy.scale))
        for dy, w in zip(gradients, weights, strict=True)
    ]
    return source, tuple(dws)


_products.defvjp(_products_fwd, _products_bwd)


def gated_products(source, first, down, *, norm, activation, inner, dtype, adds):
    """Returns the result of `_gated_products` in a list.

    `source` may have any leading axes. The other arguments are as in `_gated_products`.
    """
    options = norm, activation, inner, dtype, adds
    operands = array_types.varying_alike((in_rows(source), first, down))
    return [_gated_products(*operands, *options)]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def _gated_products(source, first, down, norm, activation, inner, dtype, adds):
    """Multiplies activation(x @ gate) * (x @ up) by `down`, within `fp8_remat`.

    x is [m, k], as in `_products`. `first` has the weights gate and up [k, f], or one
    weight [k, 2 f] that holds both, gate first; one weight needs an `activation` that
    saves FP8 copies. The results of the first matmuls have the dtype `inner`. One
    kernel reads them. It writes the codes that the last matmul reads, and the FP8
    copies, in groups of 16, that the backward pass reads. `down` is a pair of a weight
    [f, n] and its bias [n] or None. With `adds` the last matmul adds the norm's input,
    and the kernel of the norm's gradient adds the gradient of the result.
    """
    return _gated_fwd(source, first, down, norm, activation, inner, dtype, adds)[0]


@array_types.on_common_mesh
def _gated_fwd(source, first, down, norm, activation, inner, dtype, adds):
    rows, saved = quantized_source(source, norm)
    results, of_first = _forward(rows, [(w, None) for w in first], inner)
    pair = tuple(results)
    if len(pair) == 1:
        pair = pair[0].reshape(len(pair[0]), 2, -1)
    a, operands = quantized_gate(pair, activation)
    (y,), of_down = _forward(a, (down,), dtype, source.x if adds else None)
    a_scale, down_scale, *scales = tensor_scales(a, *of_down, rows, *of_first)
    outer = saved, first, scales
    down, bias = down
    return once(y), (outer, operands, down, (a_scale, down_scale), dtype_of(bias))


def quantized_gate(operands, activation):
    """Computes a gate and quantizes its output, with a scale for each token.

    Args:
      operands: Gate and up, or the gate alone, as `pallas_kernels.gated` takes them.
      activation: The `Prologue` of the gate.

    Returns:
      The codes [tokens, f] and scales [tokens] of the output; and the arrays that the
      backward pass reads: FP8 copies of the operands in groups of 16 with their largest
      scales, or the operands, depending on `activation.saves`.
    """
    copies = activation.saves == "copies"
    with Note(f"{E4M3}, groups of {GROUP}", _GATE).scope():
        out = kernels.gated(
            operands, activation=activation.function, scale="row", keep_groups=copies
        )
    # Scales are saved as integers, which an outer `fp8_remat` saves exactly.
    with Note(f"scales of groups of {GROUP}", _GATE).scope():
        saved = operands
        if copies:
            saved = jax.tree.map(scales_as_bits, (out.groups, out.largest_scale))
    # The backward pass reads the inputs, and computes the gate again.
    return Scaled(activation.constrained(out.values), out.scale), activation.named(
        saved
    )


def _through(dy, w, w_scale, **options):
    """Computes the gradient of x [m, k] from the gradient `dy` [m, n] of `x @ w`.

    Returns:
      The FP8 codes of `dy`, and the gradient of x, as `matmul_codes` returns it with
      `options`.
    """
    gradient = quantize_tensor(dy, E5M2, copies="both")
    after = gradient.transposed
    wq = w.for_inputs(w_scale, after=after)
    scales = gradient.scale, w_scale
    return gradient, matmul_codes(gradient.row, wq, *scales, **options)


@array_types.on_common_mesh
def _gated_bwd(norm, activation, inner, dtype, adds, residuals, dy):
    outer, saved, down, (a_scale, down_scale), like = residuals
    gradient, (da, da_maxima) = _through(
        dy, down, down_scale, dtype=inner, keep_maxima=True
    )
    da = activation.constrained(da)
    if activation.saves == "copies":
        groups, largest_scale = jax.tree.map(scales_as_bits, saved)
        gradients, a = gate_gradient(
            groups, largest_scale, da, da_maxima, activation.function, a_scale
        )
        # A single gradient is a `Codes`, which is a tuple like a pair of gradients.
        gradients = [gradients] if isinstance(gradients, Codes) else gradients
    else:
        wide, a = _gate_gradient_of_arrays(saved, da, activation, a_scale)
        gradients = [quantize_tensor(dx, E5M2, copies="both") for dx in wide]
    d_down = down.gradient(
        Scaled(a, a_scale), Scaled(gradient.transposed, gradient.scale)
    )
    source, d_first = _backward(outer, gradients, norm, dy if adds else None)
    return source, d_first, (d_down, _bias_gradient(like, dy))


def _gate_gradient_of_arrays(operands, da, activation, a_scale):
    """Returns the gradients of a gate's operands, and transposed codes of its output.

    XLA computes both from the operands, which were saved or recomputed.
    """
    fn = ACTIVATIONS[activation.function]

    def product(gate, *up):
        wide = (x.astype(jnp.float32) for x in up)
        return math.prod(wide, start=fn(gate.astype(jnp.float32)))

    a, pullback = jax.vjp(product, *operands)
    codes = quantize_tensor(a, E4M3, copies="transposed", scale=a_scale)
    return pullback(da.astype(jnp.float32)), codes.transposed


_gated_products.defvjp(_gated_fwd, _gated_bwd)


def activated_product(x, w, other, *, activation, dtype):
    """Returns the result of `_activated_product` in a list.

    `x` and `other` may have any leading axes. The other arguments are as in
    `_activated_product`.
    """
    operands = x.reshape(-1, w[0].shape[0]), w, _as_rows(other, w)
    operands = array_types.varying_alike(operands)
    return [_activated_product(*operands, activation, dtype)]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _activated_product(x, w, other, activation, dtype):
    """Multiplies activation(x) [m, f] by w [f, n], within `fp8_remat`.

    `w` is a pair of a weight and its bias [n] or None. One kernel writes the codes that
    the matmul reads, and the FP8 copy of x, in groups of 16, that the backward pass
    reads. The matmul's kernel adds `other` [m, n] if it is not None.
    """
    return _activated_fwd(x, w, other, activation, dtype)[0]


@array_types.on_common_mesh
def _activated_fwd(x, w, other, activation, dtype):
    a, saved = quantized_gate((x,), activation)
    (y,), of_weight = _forward(a, (w,), dtype, other)
    a_scale, w_scale = tensor_scales(a, *of_weight)
    w, bias = w
    likes = dtype_of(x), dtype_of(bias)
    return once(y), (saved[0], w, (a_scale, w_scale), likes, _marked(other))


@array_types.on_common_mesh
def _activated_bwd(activation, dtype, residuals, dy):
    saved, w, (a_scale, w_scale), (like, of_bias), adds = residuals
    gradient, da = _through(dy, w, w_scale, dtype=like.dtype)
    da = activation.constrained(da)
    if activation.saves == "copies":
        out = kernels.gated_grad(
            jax.tree.map(scales_as_bits, saved),
            da,
            activation=activation.function,
            product_scale=a_scale,
        )
        (dx,), a = out.values, out.product
    else:
        (dx,), a = _gate_gradient_of_arrays((saved,), da, activation, a_scale)
    dw = w.gradient(Scaled(a, a_scale), Scaled(gradient.transposed, gradient.scale))
    return (
        dx.astype(like.dtype),
        (dw, _bias_gradient(of_bias, dy)),
        _if_marked(adds, dy),
    )


_activated_product.defvjp(_activated_fwd, _activated_bwd)


def gate_gradient(
    gate_up: Scaled | tuple[Scaled, Scaled],
    largest_scale: Float[Array, "..."],
    da: Array,
    da_maxima: Float[Array, " parts"],
    gate: Activation,
    a_scale: Float[Array, ""],
    history: Array | None = None,
) -> tuple[Any, Float[Array, "f tokens"]]:
    """Computes the gradients of gate and up, and recomputes the gate's output a.

    Without a `history` the scale follows from an upper bound of the amax:
    `amax(da) * amax(gate_up) * max|activation'|`. The exact amax would need another
    pass. E5M2 keeps its precision over 30 binades, so a loose bound costs nothing.

    Args:
      gate_up: The codes of gate and up in groups of 16, in one array or in two.
      largest_scale: The largest scale of the groups of each row.
      da: The gradient of a.
      da_maxima: The amax of each part of `da`.
      gate: The name of the activation.
      a_scale: The per-tensor scale of the codes of a.
      history: The amax history of the gradient, for a delayed scale; or None.

    Returns:
      The gradient [..., 2 f] as E5M2 codes with one scale and their transpose, or if
      `gate_up` is a pair, one gradient [..., f] for each of the two; and the transposed
      E4M3 codes of a with `a_scale`.
    """
    if history is not None:
        scale = delayed_scale(history, E5M2)
    else:
        # The amax of gate and up is at most the largest group scale times E4M3.max.
        factors = largest_scale, da_maxima
        bound = kernels.Bound(factors, E4M3.max * STEEPEST[gate])
        (scale,) = kernels.tensor_scales(bound, dtype=E5M2.dtype)
    out = kernels.gated_grad(
        gate_up,
        da,
        activation=gate,
        scale=scale,
        dtype=E5M2.dtype,
        product_scale=a_scale,
    )

    def codes(values):
        rows = values.reshape(*da.shape[:-1], -1)
        # A separate kernel transposes the codes. `da` is freed by now, so that the
        # backward pass needs no more memory at its peak than in BF16.
        both_codes = Codes(rows, kernels.transpose(rows), scale, out.largest)
        return both_codes if history is None else checked(both_codes)

    return jax.tree.map(codes, out.values), out.product
