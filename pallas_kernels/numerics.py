"""Numbers in 8 bits: containers of codes, scales, rounding to codes."""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

NormKind = Literal["rms", "layer"]
GROUP = 16  # Elements of the smallest group, and the most of a lane.
TINY = float(jnp.finfo(jnp.float32).tiny)
_BF16_MAX = float(jnp.finfo(jnp.bfloat16).max)


class Groups(NamedTuple):
    """Numbers `codes * scale`, with one scale for each group on the last axis.

    Attributes:
      codes: FP8 codes [..., n].
      scale: bfloat16 [..., ceil(n / group)].
    """

    codes: Float[Array, "... n"]
    scale: Float[Array, "... g"]

    @property
    def group(self) -> int:
        """Elements of a group, if groups divide the last axis."""
        return self.codes.shape[-1] // max(self.scale.shape[-1], 1)


class Copies(NamedTuple):
    """FP8 codes of one scale, as they are and transposed; None where not wanted.

    Attributes:
      row: Codes [..., n].
      transposed: The same codes [n, tokens], leading axes being one axis of tokens.
      largest: Largest magnitudes of parts of what was quantized, float32 [k]; how many
        there are is the kernel's choice.
    """

    row: Float[Array, "... n"] | None = None
    transposed: Float[Array, "n tokens"] | None = None
    largest: Float[Array, " k"] | None = None


def behind(scale: Float[Array, ""], after: Float[Array, "..."]) -> Float[Array, ""]:
    """`scale` as something that depends on `after`, which XLA therefore computes first.

    A barrier does not bind its schedule.
    """
    first = after.reshape(-1)[:1].astype(jnp.float32)
    never = jnp.any(jnp.isnan(first) & (first == 0))
    return scale + never.astype(scale.dtype)


def magnitude(
    x: Float[Array, "..."], axis: int | tuple[int, ...] | None = None
) -> Array:
    """The largest magnitude; NaN where there is a NaN.

    Among integers, since XLA's maximum of floats may overlook a NaN on CPUs.
    """
    largest = jnp.max(magnitude_bits(x), axis, initial=0)
    return lax.bitcast_convert_type(largest, jnp.float32)


def magnitude_bits(x: Float[Array, "..."]) -> Array:
    """Bits of float32 that compare as magnitudes do, a NaN's above all."""
    return lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF)


def group_scale(largest: Float[Array, "..."], top: float) -> Array:
    """The scale of groups of codes up to `top`, as bfloat16 stores it, in float32."""
    # Unlike a conversion, XLA never takes this rounding to bfloat16 away.
    scale = lax.reduce_precision(largest * (1 / top), 8, 7)
    scale = jnp.clip(scale, TINY, largest_scale(top))
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def power_of_two_scale(
    largest: Float[Array, "..."], top: float, *, step: float = 0.0
) -> Array:
    """The smallest power of two at which `largest` rounds to `top` or less, in float32.

    NaN where `largest` is not finite. `step` is that of codes around `top`, over the
    power of two below it: what is half of one above `top` still rounds to it, so that
    quantizing twice finds the same scale.
    """
    mantissa, exponent = math.frexp(top)
    # In integers: with mantissa(largest) <= mantissa(edge) the exponents' difference is
    # enough, else one more, which the addition carries over.
    carry = (1 << 23) - 1 - int((2 * (mantissa + step / 4) - 1) * (1 << 23))
    bits = lax.bitcast_convert_type(largest, jnp.uint32) + jnp.uint32(carry)
    power = lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)
    scale = power * 2.0 ** (1 - exponent)
    return jnp.clip(scale, TINY, largest_scale(top, bits=1)) + largest * 0.0


def row_scale(largest: Float[Array, "..."], dtype: DTypeLike) -> Array:
    """The float32 scale of rows whose largest magnitudes these are."""
    return jnp.maximum(largest * (1 / code_max(dtype)), TINY) + largest * 0.0


def normal(x: Float[Array, "..."]) -> Array:
    """Float32 with zeros of their sign in the place of denormals."""
    return jnp.where(jnp.abs(x) < TINY, x * 0.0, x)


def encode(x: Float[Array, "..."], scale: Array, dtype: DTypeLike) -> Array:
    """Codes of x / scale, rounded to nearest even, and saturated."""
    x = x * reciprocal(scale)
    return jnp.clip(x, -code_max(dtype), code_max(dtype)).astype(dtype)


def reciprocal(scale: Float[Array, "..."]) -> Array:
    """1 / scale, correctly rounded for numbers of 8 bits and so for powers of two.

    GPUs divide with an error of a bit. Of a reciprocal's two halves, multiplied by such
    numbers, the error can be told exactly.
    """
    guess = 1.0 / scale
    bits = lax.bitcast_convert_type(guess, jnp.uint32) & jnp.uint32(0xFFFFFF00)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    error = (1.0 - scale * high) - scale * (guess - high)
    return guess + guess * error


def code_max(dtype: DTypeLike) -> float:
    """The largest number that a code stands for."""
    return float(jnp.finfo(dtype).max)


def largest_scale(top: float, bits: int = 8) -> float:
    """The largest s such that top * s fits bfloat16, and 1 / s is normal."""
    mantissa, exponent = math.frexp(min(_BF16_MAX / top, 2.0**125))
    return math.ldexp(math.floor(mantissa * 2**bits), exponent - bits)
