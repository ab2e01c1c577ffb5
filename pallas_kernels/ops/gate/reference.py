"""Gated activations between FP8 arrays, in jnp."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.numerics import Groups, encode, magnitude, row_scale
from pallas_kernels.ops.quantize.reference import (
    copies,
    dequantize_groups,
    quantize_groups,
)

# All multiply the gate with a share of it: the first two with a sigmoid, "gelu" being
# GELU's tanh form, and "gelu_exact" with the normal distribution's.
Activation = Literal["silu", "gelu", "gelu_exact"]

GELU = math.sqrt(8 / math.pi)
GELU_CUBIC = 0.044715
# What is beyond is 0 or 1 to a sigmoid, while its cube may be infinite.
GELU_MAX = 32.0


class Gated(NamedTuple):
    """A gated product [..., f], or the gradients [..., 2, f] of gate and up.

    Attributes:
      values: bfloat16, or FP8 codes; None if only the transpose was wanted.
      transposed: The same codes [f, tokens], or [2 f, tokens] of gradients.
      scale: With a scale for each row, that of `values`, float32 [...].
      largest: Otherwise largest magnitudes of parts of the values, float32 [k]; how
        many there are is the kernel's choice.
      groups: Gate and up, [..., 2, f], in groups of 16.
      largest_scale: The largest scale of a row's groups, float32 [...].
      product: With gradients, float8_e4m3fn codes of the product, [f, tokens].
    """

    values: Float[Array, "..."] | None = None
    transposed: Float[Array, "n tokens"] | None = None
    scale: Float[Array, "..."] | None = None
    largest: Float[Array, " k"] | None = None
    groups: Groups | None = None
    largest_scale: Float[Array, "..."] | None = None
    product: Float[Array, "f tokens"] | None = None


def gated(
    gate_up: Groups | Float[Array, "... 2 f"],
    *,
    activation: Activation,
    scale: Float[Array, ""] | Literal["row"] | None,
    dtype: DTypeLike,
    row: bool,
    transposed: bool,
    keep_groups: bool,
) -> Gated:
    """See `pallas_kernels.gated`."""
    gate, up = _decoded(gate_up)
    factor, _ = _activation(gate, activation)
    y = gate * factor * up
    if isinstance(scale, str):
        scale = row_scale(magnitude(y, axis=-1), dtype)
        codes = lax.optimization_barrier(encode(y, scale[..., None], dtype))
        out = Gated(codes, scale=scale)
        if not keep_groups:
            return out
        groups = quantize_groups(gate_up, dtype=jnp.float8_e4m3fn, group=16)
        largest = magnitude(groups.scale.astype(jnp.float32), axis=(-1, -2))
        return out._replace(groups=groups, largest_scale=largest)
    return _encoded(y, scale, dtype, row, transposed)


def gated_grad(
    gate_up: Groups,
    dy: Float[Array, "... f"],
    *,
    activation: Activation,
    scale: Float[Array, ""] | None,
    dtype: DTypeLike,
    row: bool,
    transposed: bool,
    product_scale: Float[Array, ""] | None,
) -> Gated:
    """See `pallas_kernels.gated_grad`."""
    gate, up = _decoded(gate_up)
    factor, slope = _activation(gate, activation)
    dy = dy.astype(jnp.float32)
    grads = jnp.stack([dy * up * slope, dy * (gate * factor)], axis=-2)
    out = _encoded(grads, scale, dtype, row, transposed=False)
    if transposed:
        codes = encode(grads, scale, dtype).reshape(-1, 2 * grads.shape[-1])
        codes = copies(codes, row=False, transposed=True)
        out = out._replace(transposed=codes.transposed)
    if product_scale is None:
        return out
    y = gate * factor * up
    product = _encoded(y, product_scale, jnp.float8_e4m3fn, row=False, transposed=True)
    return out._replace(product=product.transposed)


def _encoded(y, scale, dtype, row, transposed):
    if scale is None:
        largest = lax.reduce_precision(magnitude(y), 8, 7)
        return Gated(values=y.astype(jnp.bfloat16), largest=largest[None])
    codes = lax.optimization_barrier(encode(y, scale, dtype))
    wanted = copies(codes, row=row, transposed=transposed)
    return Gated(wanted.row, wanted.transposed, largest=magnitude(y)[None])


def _decoded(gate_up: Groups | Array) -> tuple[Array, Array]:
    if isinstance(gate_up, Groups):
        both = dequantize_groups(gate_up, dtype=jnp.float32)
    else:
        both = gate_up.astype(jnp.float32)
    return both[..., 0, :], both[..., 1, :]


def _activation(gate: Array, activation: Activation) -> tuple[Array, Array]:
    """What the gate is multiplied with, and the product's derivative."""
    if activation == "silu":
        factor = jax.nn.sigmoid(gate)
        return factor, factor + gate * (factor * (1 - factor))
    if activation == "gelu_exact":
        factor = jax.scipy.stats.norm.cdf(gate)
        return factor, factor + gate * jax.scipy.stats.norm.pdf(gate)
    x = jnp.clip(gate, -GELU_MAX, GELU_MAX)
    factor = jax.nn.sigmoid(GELU * (x + GELU_CUBIC * x * x * x))
    slope = GELU * (1 + 3 * GELU_CUBIC * x * x)
    return factor, factor + x * slope * (factor * (1 - factor))
