"""Quantizes the activations that FP8 matmuls read: an array or a norm's output."""

import jax
import jax.numpy as jnp

import pallas_kernels as kernels
from coat_jax.fp8.matmul import dtype_of, quantize_tokens
from coat_jax.fp8.prologue import Source
from coat_jax.quantization.array import scales_as_bits
from coat_jax.quantization.formats import E4M3
from coat_jax.remat.notes import Note
from pallas_kernels import Scaled
from pallas_kernels.numerics import GROUP

_GRADIENT = "the gradient of a norm"


def in_rows(source: Source) -> Source:
    """Reshapes a source to activations [m, k], and scale and bias [k] or [v, k].

    A scale or bias [v, k] has a row for each of v sequences, of m / v tokens each.
    """
    x, *params = source
    k = x.shape[-1]
    count = max((c.size // k for c in params if c is not None), default=1)

    def rows(c):
        if c is None or count == 1:
            return c if c is None else c.reshape(k)
        # A row that several sequences share is repeated for each of them.
        c = c.reshape(-1, 1, k)
        return jnp.broadcast_to(c, (len(c), count // len(c), k)).reshape(count, k)

    return Source(x.reshape(-1, k), *map(rows, params))


def quantized_source(source, norm):
    """Quantizes activations with a scale per token; also returns the residuals.

    Args:
      source: The activations, or the operands of the norm that computes them.
      norm: The `Prologue` of the norm, or None.

    Returns:
      The codes and scales of the activations; and the residuals: the activations and an
      empty array of their dtype, or the norm's input (or its FP8 copy), scale and bias.
    """
    x, scale, bias = source
    if norm is None:
        # Kernels read bfloat16 in half the time, and E4M3 is less precise than that.
        return quantize_tokens(x), (x.astype(jnp.bfloat16), dtype_of(x))
    copies = norm.saves == "copies"
    with Note(f"{E4M3}, groups of {GROUP}", _GRADIENT).scope():
        out = kernels.norm(
            _of_sequences(x, scale, bias),
            scale,
            bias,
            **norm.function._asdict(),
            scale="row",
            keep_groups=copies,
        )
    codes = Scaled(out.y.reshape(x.shape), out.scale.reshape(-1))
    # The matmuls of a recomputed forward pass read these codes.
    rows = norm.named(Scaled(norm.constrained(codes.codes), codes.scale))
    # Scales are saved as integers, which an outer `fp8_remat` saves exactly.
    with Note(f"scales of groups of {GROUP}", _GRADIENT).scope():
        saved = jax.tree.map(scales_as_bits, out.groups) if copies else x
    return rows, (saved, scale, bias)


def source_gradient(saved, dy, y_scale, norm, add):
    """Computes the gradients of a norm's input, scale and bias, as a `Source`.

    Args:
      saved: The norm's input or its FP8 copy, the norm's scale or None, and its bias or
        None.
      dy: The gradient of the norm's output, bfloat16.
      y_scale: The per-tensor scale of the norm's output.
      norm: The `Prologue` of the norm.
      add: A gradient to add to the input's gradient, bfloat16; None adds nothing.

    Returns:
      The gradients, and the transposed E4M3 codes of the norm's output, [k, tokens].
    """
    x, scale, bias = saved
    if norm.saves == "copies":
        x = jax.tree.map(scales_as_bits, x)
    x, upstream, add = (
        jax.tree.map(lambda x: _of_sequences(x, scale, bias), rows)
        for rows in (x, norm.constrained(dy), add)
    )
    out = kernels.norm_grad(
        x, upstream, scale, bias, **norm.function._asdict(), y_scale=y_scale, add=add
    )
    dscale = None if scale is None else out.dweight.astype(scale.dtype)
    dbias = None if bias is None else out.dbias.astype(bias.dtype)
    return Source(out.dx.reshape(dy.shape), dscale, dbias), out.y


def _of_sequences(x, scale, bias):
    """Reshapes rows [m, k] to [v, m / v, k] if scale or bias is [v, k]."""
    param = bias if scale is None else scale
    if param is None or param.ndim == 1:
        return x.reshape(-1, x.shape[-1])
    return x.reshape(len(param), -1, x.shape[-1])
