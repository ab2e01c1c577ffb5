"""The activations that FP8 matmuls read: an array, or a norm that a kernel computes."""

import jax
import jax.numpy as jnp

import pallas_kernels as kernels
from coat_jax.fp8.matmul import dtype_of, quantize_tensor, quantize_tokens
from coat_jax.fp8.prologue import Source
from coat_jax.quantization.array import scales_as_bits
from coat_jax.quantization.formats import E4M3
from coat_jax.remat.notes import Note
from pallas_kernels import Scaled
from pallas_kernels.numerics import GROUP

_GRADIENT = "the gradient of a norm"


def in_rows(source: Source) -> Source:
    """Returns a source with activations as [m, k], and parameters as [k] or [v, k].

    A parameter [v, k] has a row for each of v sequences, of m / v tokens each.
    """
    x, *params = source
    k = x.shape[-1]
    params = (
        c if c is None else c.reshape(-1) if c.size == k else c.reshape(-1, k)
        for c in params
    )
    return Source(x.reshape(-1, k), *params)


def quantized_source(source, norm):
    """Returns codes of activations with a scale per token, and what backward reads."""
    x, scale, bias = source
    if norm is None:
        # Kernels read bfloat16 in half the time, and E4M3 has fewer digits than that.
        return quantize_tokens(x), (x.astype(jnp.bfloat16), dtype_of(x))
    copies = norm.saves == "copies"
    modulated = _is_modulated(source)
    columns = Source(x) if modulated else source
    scaled = None if modulated else "row"
    with Note(f"{E4M3}, groups of {GROUP}", _GRADIENT).scope():
        out = kernels.norm(
            *columns, **norm.function._asdict(), scale=scaled, keep_groups=copies
        )
    codes = Scaled(out.y, out.scale)
    if modulated:
        codes = quantize_tokens(_modulated(out.y, scale, bias))
    # The matmuls of a forward pass that runs again read the codes.
    rows = norm.named(Scaled(norm.constrained(codes.codes), codes.scale))
    # An outer `fp8_remat` saves integers exactly.
    with Note(f"scales of groups of {GROUP}", _GRADIENT).scope():
        saved = jax.tree.map(scales_as_bits, out.groups) if copies else x
    return rows, (saved, scale, bias)


def source_gradient(saved, dy, y_scale, norm, add):
    """Returns the gradients of a norm's source, and transposed codes of its output.

    The gradient of the norm's input is added to `add`, unless that is None.
    """
    x, scale, bias = saved
    if norm.saves == "copies":
        x = jax.tree.map(scales_as_bits, x)
    if _is_modulated(saved):
        source = Source(x, scale, bias)
        return _modulated_backward(source, norm.constrained(dy), y_scale, norm, add)
    options, biased = norm.function._asdict(), bias is not None
    out = kernels.norm_grad(
        *(x, norm.constrained(dy), scale),
        **options,
        with_bias=biased,
        y_scale=None if biased else y_scale,
        add=add,
    )
    y = out.y
    if biased:
        # The kernel of the gradient does not add biases.
        y = kernels.norm(
            x, scale, bias, **options, scale=y_scale, copies="transposed"
        ).transposed
    dscale = None if scale is None else out.dweight.astype(scale.dtype)
    dbias = None if bias is None else out.dbias.astype(bias.dtype)
    return Source(out.dx, dscale, dbias), y


def _is_modulated(source):
    """Returns whether a parameter of a norm has rows for sequences."""
    return any(c is not None and c.ndim > 1 for c in source[1:])


def _modulated(z, scale, bias):
    """Returns z [m, k] times a scale plus a bias, either of which may be None."""
    y = z.astype(jnp.float32)
    for operation, c in ((jnp.multiply, scale), (jnp.add, bias)):
        if c is not None:
            rows = jnp.atleast_2d(c.astype(jnp.float32))[:, None]
            y = operation(y.reshape(len(rows), -1, z.shape[-1]), rows)
            y = y.reshape(z.shape)
    return y.astype(z.dtype)


def _modulated_backward(source, dy, y_scale, norm, add):
    """Returns the gradients of a norm's source, and transposed codes of its output.

    XLA multiplies and adds the rows of sequences; kernels compute the norm around it.
    """
    options = norm.function._asdict()
    z = kernels.norm(source.x, **options).y
    y, pullback = jax.vjp(_modulated, z, source.scale, source.bias)
    dz, dscale, dbias = pullback(dy.astype(y.dtype))
    dx = kernels.norm_grad(source.x, dz, **options, add=add).dx
    codes = quantize_tensor(y, E4M3, copies="transposed", scale=y_scale)
    return Source(dx, dscale, dbias), codes.transposed
