"""Gated activations with FP8 inputs and outputs, in jnp."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.numerics import GROUP, Scaled, encode, magnitude, row_scale
from pallas_kernels.ops.quantize.groups import groups_in_jnp, numbers_in_jnp
from pallas_kernels.ops.quantize.tensor import transpose_in_jnp

# activation(gate) = gate * factor(gate). The factor is sigmoid(gate) for "silu", and
# sigmoid(GELU * (gate + GELU_CUBIC * gate**3)) for "gelu", which is GELU's tanh form.
# For "gelu_exact" it is the standard normal distribution function.
Activation = Literal["silu", "gelu", "gelu_exact"]

GELU = math.sqrt(8 / math.pi)
GELU_CUBIC = 0.044715
# Beyond this gate the sigmoid of "gelu" is 0 or 1, while the cube may be infinite.
GELU_MAX = 32.0


# Gate and up: one array [..., 2, f], or two arrays [..., 1, f]; or only the gate's.
Operands = tuple[Scaled | Float[Array, "... parts f"], ...]
# Gate and up in separate arrays, or the gate alone.
Apart = tuple[Any, ...]


class Gated(NamedTuple):
    """Outputs of `gated` [..., f], or of `gated_grad` [..., 2, f] for gate and up.

    If gate and up, or the gate alone, were given as a tuple of arrays [..., f], their
    gradients and groups are tuples of arrays [..., f], too.

    Attributes:
      values: The values, bfloat16 or FP8 codes; None if only the transpose was wanted.
      transposed: The transpose of the codes, [f, tokens], or [2 f, tokens] for
        gradients.
      scale: The per-token scales of `values`, float32 [...], with scale="row".
      largest: The amax of parts of the values, float32 [k], unless scale="row" or the
        values are a tuple of two. The kernel chooses k.
      groups: Gate and up [..., 2, f] in groups of 16.
      largest_scale: The largest group scale of each token, float32 [...].
      product: The output of `gated`, which only `gated_grad` returns: transposed
        float8_e4m3fn codes [f, tokens], or bfloat16 [..., f].
    """

    values: Float[Array, "..."] | Apart | None = None
    transposed: Float[Array, "n tokens"] | Apart | None = None
    scale: Float[Array, "..."] | None = None
    largest: Float[Array, " k"] | None = None
    groups: Scaled | Apart | None = None
    largest_scale: Float[Array, "..."] | None = None
    product: Float[Array, "..."] | None = None


def gated(
    operands: Operands,
    *,
    activation: Activation,
    scale: Float[Array, ""] | Literal["row"] | None,
    dtype: DTypeLike,
    row: bool,
    transposed: bool,
    keep_groups: bool,
) -> Gated:
    """Computes `pallas_kernels.gated` in jnp.

    Args:
      operands: Gate and up, as `Operands` says.
      activation: The activation of the gate.
      scale: The per-tensor scale, "row" for scales of tokens, or None for bfloat16.
      dtype: The dtype of the codes.
      row: Whether to return the codes [..., f].
      transposed: Whether to return the transpose of the codes.
      keep_groups: Whether to return gate and up in groups of 16, as a tuple with an
        element for each operand. Only scale="row" returns them.
    """
    gate, *up = _decoded(operands)
    factor, _ = activation_of(gate, activation)
    y = _product(gate * factor, up)
    if isinstance(scale, str):
        scale = row_scale(magnitude(y, axis=-1), dtype)
        codes = lax.optimization_barrier(encode(y, scale[..., None], dtype))
        out = Gated(codes, scale=scale)
        if not keep_groups:
            return out
        quantize = functools.partial(groups_in_jnp, dtype=jnp.float8_e4m3fn, group=16)
        groups = tuple(map(quantize, operands))
        largest = [
            magnitude(q.scale.astype(jnp.float32), axis=(-1, -2)) for q in groups
        ]
        largest = functools.reduce(jnp.maximum, largest)
        return out._replace(groups=groups, largest_scale=largest)
    return _encoded(y, scale, dtype, row, transposed)


def gated_grad(
    operands: Operands,
    dy: Float[Array, "... f"],
    *,
    activation: Activation,
    scale: Float[Array, ""] | None,
    dtype: DTypeLike,
    row: bool,
    transposed: bool,
    product_scale: Float[Array, ""] | None,
    keep_product: bool,
) -> Gated:
    """Computes `pallas_kernels.gated_grad` in jnp.

    Returned values, and their transposes, are tuples with an array for each operand.
    `row` and `transposed` say which of them to return.
    """
    gate, *up = _decoded(operands)
    factor, slope = activation_of(gate, activation)
    dy = dy.astype(jnp.float32)
    grads = _product(dy, up) * slope, *[dy * (gate * factor) for _ in up]
    if len(operands) == 1:
        grads = (jnp.stack(grads, axis=-2),)
    else:
        grads = tuple(jnp.expand_dims(grad, -2) for grad in grads)
    out = joined(
        [_encoded(grad, scale, dtype, row, transposed=False) for grad in grads]
    )
    if transposed:
        codes = (encode(grad, scale, dtype) for grad in grads)
        flat = (x.reshape(-1, x.shape[-2] * x.shape[-1]) for x in codes)
        out = out._replace(transposed=tuple(map(transpose_in_jnp, flat)))
    if product_scale is None and not keep_product:
        return out
    y = _product(gate * factor, up)
    if keep_product:
        return out._replace(product=y.astype(jnp.bfloat16))
    product = _encoded(y, product_scale, jnp.float8_e4m3fn, row=False, transposed=True)
    return out._replace(product=product.transposed)


def joined(parts: Sequence[Gated]) -> Gated:
    """Returns the outputs of parts as one `Gated`; values and transposes are tuples.

    The amax is returned only if there is a single part.
    """

    def every(name):
        found = tuple(getattr(own, name) for own in parts)
        return None if found[0] is None else found

    largest = parts[0].largest if len(parts) == 1 else None
    return Gated(every("values"), every("transposed"), largest=largest)


def _encoded(y, scale, dtype, row, transposed):
    if scale is None:
        largest = lax.reduce_precision(magnitude(y), 8, 7)
        return Gated(values=y.astype(jnp.bfloat16), largest=largest[None])
    codes = lax.optimization_barrier(encode(y, scale, dtype))
    return Gated(
        codes if row else None,
        transpose_in_jnp(codes) if transposed else None,
        largest=magnitude(y)[None],
    )


def _product(y: Array, up: Sequence[Array]) -> Array:
    """Returns y * up, or y if there is no up."""
    return functools.reduce(lax.mul, up, y)


def _decoded(operands: Operands) -> list[Array]:
    return [
        part
        for x in operands
        for part in jnp.unstack(
            numbers_in_jnp(x, dtype=jnp.float32, group=GROUP)
            if isinstance(x, Scaled)
            else x.astype(jnp.float32),
            axis=-2,
        )
    ]


def activation_of(gate: Array, activation: Activation) -> tuple[Array, Array]:
    """Returns factor = activation(gate) / gate, and activation'(gate)."""
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
