"""`jax.lax.dot_general` in FP8, for the layers of other libraries.

Operands have per-tensor scales, as in `matmul.linear`. Within `fp8_remat` the matmuls
of one array are merged; see `coat_jax.remat.merge`.
"""

import math
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import pallas_kernels as kernels
from coat_jax.layers.flow import gate_gradient
from coat_jax.layers.matmul import (
    dtype_of,
    fp8_matmul,
    matmul_codes,
    once,
    quantize_tensor,
    quantize_tokens,
    tensor_scales,
)
from coat_jax.meshes import on_explicit_mesh
from coat_jax.quantization.array import scales_as_bits
from coat_jax.quantization.formats import E4M3, E5M2
from coat_jax.remat import merge
from coat_jax.remat.norms import Source
from coat_jax.remat.notes import Note
from pallas_kernels import Scaled, array_types, dispatch
from pallas_kernels.numerics import GROUP

_GATE, _NORM = "the gradient of a gate", "the gradient of a norm"


def fp8_dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: jax.sharding.Sharding | P | None = None,
) -> Float[Array, "..."]:
    """Computes `jax.lax.dot_general` in FP8.

    Pass it as `dot_general=` to `nn.Dense` or `nnx.Linear`. It takes any dimension
    numbers. With batch dimensions every batch entry has its own scale. `lhs` is saved
    in FP8, and `rhs`, the weights, by reference. Within `fp8_remat` several matmuls of
    one `lhs` are merged, tokens have a scale each, and `fp8_remat` decides whether
    `lhs` is saved or recomputed.

    Args:
      lhs: The activations.
      rhs: The weights.
      dimension_numbers: The dimension numbers of `jax.lax.dot_general`.
      precision: Ignored, because FP8 matmuls have only one precision.
      preferred_element_type: The dtype of the result; by default the promoted dtype of
        `lhs` and `rhs`.
      out_sharding: The sharding of the result on a mesh with explicit axes.

    Raises:
      ValueError: If an operand is not floating.
      TypeError: If the dimension numbers do not fit the operands.

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
    # `lax.dot_general` checks the dimension numbers, and its errors name the axes.
    expected = jax.eval_shape(
        partial(lax.dot_general, lhs, rhs, dimension_numbers, out_sharding=out_sharding)
    )
    if jax.typeof(lhs).sharding.mesh.explicit_axes:
        # XLA shards the codes and scales; types say how arguments and results lie.
        fn = partial(
            fp8_dot_general,
            dimension_numbers=dimension_numbers,
            preferred_element_type=dtype,
        )
        return on_explicit_mesh(fn, lhs, expected)(lhs, rhs)
    lhs, rhs = array_types.varying_alike((lhs, rhs))
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = [i for i in range(lhs.ndim) if i not in (*lhs_contract, *lhs_batch)]
    rhs_free = [i for i in range(rhs.ndim) if i not in (*rhs_contract, *rhs_batch)]
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
    product = _mergeable(jnp.dtype(dtype), (a.ndim, b.ndim))
    # `explain` counts calls, also of functions that JAX has traced before.
    with dispatch.counted():
        return product(a, b).reshape(expected.shape)


@cache
def _mergeable(dtype: jnp.dtype, ranks: tuple[int, int]) -> Callable:
    """Returns the matmul [*batch, m, k] x [*batch, k, n] with results of a dtype.

    It is jitted, and `fp8_remat` finds its forms by its name.
    """

    def call(x, w):
        return _batched(partial(fp8_matmul, dtype=dtype, contract=0), x)(x, w)

    call.__name__ = "_".join(("fp8_dot_general", *map(str, ranks)))
    others = (_gated, _activated) if ranks == (2, 2) else ()
    merge.FORMS[call.__name__] = merge.Forms(_dots, *others)
    return jax.jit(call)


def _dots(source, weights, other, norm, dtype, passes):
    """Multiplies activations [*batch, m, k] by each of the weights [*batch, k, n].

    Each weight comes with a bias [n] or None. Activations of a norm are its output,
    with leading axes merged to m. So are those of `other`, which is added unless it is
    None.
    """
    source, weights, other = array_types.varying_alike((source, weights, other))
    product = partial(_products, norm=norm, dtype=dtype, passes=passes)
    if weights[0][0].ndim > 2:
        product = partial(product, other=None)
        return _batched(product, source.x)(source, weights)
    return product(_in_rows(source), weights, _as_rows(other))


def _batched(product: Callable, x: Array) -> Callable:
    """Maps a matmul over all axes of x but the last two."""
    for _ in range(x.ndim - 2):
        product = jax.vmap(product)
    return product


def _in_rows(source: Source) -> Source:
    """Returns a source with its activations as [m, k], and its parameters as [k]."""
    x, *columns = source
    columns = (None if c is None else c.reshape(-1) for c in columns)
    return Source(_as_rows(x), *columns)


def _as_rows(x):
    return None if x is None else x.reshape(-1, x.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _products(source, weights, other, norm, dtype, passes):
    """Multiplies x [m, k] by each of the weights [k, n], within `fp8_remat`.

    Each weight comes with a bias [n] or None, which the kernel adds. Here x is the
    source's array or, unless `norm` is None, its norm. A token's codes have a scale of
    their own in forward, where one pass over the array writes them. Backward reads the
    array, which `fp8_remat` saves in FP8 or recomputes, or the copy that the norm's
    kernel writes, in groups of 16.

    The kernel of the only matmul adds `other` [m, n], unless it is None. With `passes`
    the last result is the norm's input. Whoever reads it there, its gradient is added
    in the kernel of the norm's gradient.
    """
    return _products_fwd(source, weights, other, norm, dtype, passes)[0]


@array_types.on_common_mesh
def _products_fwd(source, weights, other, norm, dtype, passes):
    rows, saved = _read(source, norm)
    ys, w_scales = _forward(rows, weights, dtype, other)
    scales = *tensor_scales(rows), *w_scales
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
    """Returns a tree without leaves that tells whether there is an array x."""
    return None if x is None else ()


def _if_marked(mark, x):
    return None if mark is None else x


def _read(source, norm):
    """Returns codes of activations with a scale per token, and what backward reads."""
    x, scale, bias = source
    if norm is None:
        # Kernels read bfloat16 in half the time, and E4M3 has fewer digits than that.
        return quantize_tokens(x), (x.astype(jnp.bfloat16), dtype_of(x))
    with Note(f"{E4M3}, groups of {GROUP}", _NORM).scope():
        out = kernels.norm(*source, **norm._asdict(), scale="row", keep_groups=True)
    # An outer `fp8_remat` saves integers exactly.
    with Note(f"scales of groups of {GROUP}", _NORM).scope():
        groups = jax.tree.map(scales_as_bits, out.groups)
    return Scaled(out.y, out.scale), (groups, scale, bias)


def _forward(rows, weights, dtype, add=None):
    """Multiplies codes by each of the weights; also returns the weights' scales.

    Each weight comes with a bias or None. `add` is an array that is added to each
    result, or None.
    """
    ys, scales = [], []
    for w, bias in weights:
        wq = quantize_tensor(w, E4M3, copies="transposed")
        arrays = rows.codes, wq.transposed, rows.scale, wq.scale, add
        ys.append(matmul_codes(*arrays, bias=bias, dtype=dtype))
        scales.append(wq.scale)
    return ys, scales


def _backward(residuals, gradients, norm, add=None):
    """Returns the gradients of a source and of the weights, from codes of results'.

    `add` is another gradient of the norm's input, or None.
    """
    saved, weights, (scale, *w_scales) = residuals
    dtype = saved[1].dtype if norm is None else jnp.bfloat16
    # `after` delays codes until they are read, which are in memory until then.
    dx, last = None, gradients[-1].transposed
    for dy, w, w_scale in zip(gradients, weights, w_scales, strict=True):
        wq = quantize_tensor(w, E4M3, copies="row", scale=w_scale, after=last)
        dx = matmul_codes(dy.row, wq.row, dy.scale, w_scale, dx, dtype=dtype)
    if norm is None:
        x, _ = saved
        xq = quantize_tensor(x, E4M3, copies="transposed", scale=scale, after=last)
        source, xq = Source(dx), xq.transposed
    else:
        source, xq = _norm_backward(saved, dx, scale, norm, add)
    dws = [
        matmul_codes(xq, dy.transposed, scale, dy.scale, dtype=w.dtype)
        for dy, w in zip(gradients, weights, strict=True)
    ]
    return source, tuple(dws)


def _norm_backward(saved, dy, y_scale, norm, add):
    """Returns the gradients of a norm's source, and transposed codes of its output.

    The gradient of the norm's input is added to `add`, unless that is None.
    """
    copies, scale, bias = saved
    groups, options = jax.tree.map(scales_as_bits, copies), norm._asdict()
    biased = bias is not None
    out = kernels.norm_grad(
        groups, dy, scale, **options,
        with_bias=biased, y_scale=None if biased else y_scale, add=add,
    )  # fmt: skip
    y = out.y
    if biased:
        # The kernel of the gradient does not add biases.
        y = kernels.norm(
            groups, scale, bias, **options, scale=y_scale, copies="transposed"
        ).transposed
    dscale = None if scale is None else out.dweight.astype(scale.dtype)
    dbias = None if bias is None else out.dbias.astype(bias.dtype)
    return Source(out.dx, dscale, dbias), y


_products.defvjp(_products_fwd, _products_bwd)


def _gated(source, gate, up, down, *, norm, activation, inner, dtype, adds):
    """Computes `_gated_products` of a source with any leading axes."""
    options = norm, activation, inner, dtype, adds
    operands = array_types.varying_alike((_in_rows(source), gate, up, down))
    return _gated_products(*operands, *options)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def _gated_products(source, gate, up, down, norm, activation, inner, dtype, adds):
    """Multiplies activation(x @ gate) * (x @ up) by `down`, within `fp8_remat`.

    x is [m, k], as in `_products`, and weights are [k, f] and [f, n]. The results of
    the first matmuls have the dtype `inner`. One kernel reads both: it writes the codes
    that the last matmul reads, and the copies of both, in groups of 16, that backward
    reads. `down` is a weight with a bias [n] or None. With `adds` the last matmul adds
    the norm's input, and the norm's gradient that of the result.
    """
    return _gated_fwd(source, gate, up, down, norm, activation, inner, dtype, adds)[0]


@array_types.on_common_mesh
def _gated_fwd(source, gate, up, down, norm, activation, inner, dtype, adds):
    rows, saved = _read(source, norm)
    pair, w_scales = _forward(rows, ((gate, None), (up, None)), inner)
    out, copies = _gate(tuple(pair), activation)
    a = Scaled(out.values, out.scale)
    (y,), (down_scale,) = _forward(a, (down,), dtype, source.x if adds else None)
    scale, a_scale = tensor_scales(rows, a)
    outer = saved, (gate, up), (scale, *w_scales)
    down, bias = down
    return once(y), (outer, copies, down, (a_scale, down_scale), dtype_of(bias))


def _gate(operands, activation):
    """Returns the gate's output in rows, and the copies that backward reads."""
    with Note(f"{E4M3}, groups of {GROUP}", _GATE).scope():
        out = kernels.gated(
            operands, activation=activation, scale="row", keep_groups=True
        )
    # An outer `fp8_remat` saves integers exactly.
    with Note(f"scales of groups of {GROUP}", _GATE).scope():
        return out, jax.tree.map(scales_as_bits, (out.groups, out.largest_scale))


def _through(dy, w, w_scale, **options):
    """Returns codes of a result's gradient, and the gradient of what `w` multiplies."""
    gradient = quantize_tensor(dy, E5M2, copies="both")
    after = gradient.transposed
    wq = quantize_tensor(w, E4M3, copies="row", scale=w_scale, after=after)
    scales = gradient.scale, w_scale
    return gradient, matmul_codes(gradient.row, wq.row, *scales, **options)


@array_types.on_common_mesh
def _gated_bwd(norm, activation, inner, dtype, adds, residuals, dy):
    outer, copies, down, (a_scale, down_scale), like = residuals
    groups, largest_scale = jax.tree.map(scales_as_bits, copies)
    gradient, (da, da_maxima) = _through(
        dy, down, down_scale, dtype=inner, keep_maxima=True
    )
    pair, a = gate_gradient(groups, largest_scale, da, da_maxima, activation, a_scale)
    d_down = matmul_codes(
        a, gradient.transposed, a_scale, gradient.scale, dtype=down.dtype
    )
    source, (d_gate, d_up) = _backward(outer, pair, norm, dy if adds else None)
    return source, d_gate, d_up, (d_down, _bias_gradient(like, dy))


_gated_products.defvjp(_gated_fwd, _gated_bwd)


def _activated(x, w, other, *, activation, dtype):
    """Computes `_activated_product` of arrays with any leading axes."""
    operands = x.reshape(-1, w[0].shape[0]), w, _as_rows(other)
    operands = array_types.varying_alike(operands)
    return _activated_product(*operands, activation, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _activated_product(x, w, other, activation, dtype):
    """Multiplies activation(x) [m, f] by w [f, n], within `fp8_remat`.

    `w` is a weight with a bias [n] or None. One kernel writes the codes that the matmul
    reads, and the copy of x, in groups of 16, that backward reads. The matmul's kernel
    adds `other` [m, n], unless it is None.
    """
    return _activated_fwd(x, w, other, activation, dtype)[0]


@array_types.on_common_mesh
def _activated_fwd(x, w, other, activation, dtype):
    out, copies = _gate((x,), activation)
    a = Scaled(out.values, out.scale)
    (y,), (w_scale,) = _forward(a, (w,), dtype, other)
    (a_scale,) = tensor_scales(a)
    w, bias = w
    likes = dtype_of(x), dtype_of(bias)
    return once(y), (copies[0], w, (a_scale, w_scale), likes, _marked(other))


@array_types.on_common_mesh
def _activated_bwd(activation, dtype, residuals, dy):
    copies, w, (a_scale, w_scale), (like, of_bias), adds = residuals
    gradient, da = _through(dy, w, w_scale, dtype=like.dtype)
    out = kernels.gated_grad(
        jax.tree.map(scales_as_bits, copies),
        da,
        activation=activation,
        product_scale=a_scale,
    )
    dw = matmul_codes(
        out.product, gradient.transposed, a_scale, gradient.scale, dtype=w.dtype
    )
    (dx,) = out.values
    return (
        dx.astype(like.dtype),
        (dw, _bias_gradient(of_bias, dy)),
        _if_marked(adds, dy),
    )


_activated_product.defvjp(_activated_fwd, _activated_bwd)
