"""FP8 numbers: containers for codes and scales, and functions that round to codes."""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

NormKind = Literal["rms", "layer"]
# The number of elements of the smallest group. It is also the most elements of a group
# that a lane of a GPU holds.
GROUP = 16
TINY = float(jnp.finfo(jnp.float32).tiny)
_BF16_MAX = float(jnp.finfo(jnp.bfloat16).max)


class Scaled(NamedTuple):
    """FP8 codes of numbers `codes * scale`, with a scale per group or per token.

    Attributes:
      codes: The codes [..., n].
      scale: The scales: bfloat16 [..., ceil(n / group)], one per group on the last
        axis; or float32 [...], one per token.
    """

    codes: Float[Array, "... n"]
    scale: Float[Array, "..."]

    @property
    def group(self) -> int:
        """The number of elements of a group, if groups divide the last axis."""
        return self.codes.shape[-1] // max(self.scale.shape[-1], 1)


class Codes(NamedTuple):
    """FP8 codes with a per-tensor scale, and their transpose.

    Attributes:
      row: The codes [..., n]; None if they were not asked for.
      transposed: The same codes [n, tokens], or None. All leading axes are tokens.
      scale: The scale, a float32 scalar.
      largest: The amax of parts of the quantized array, float32 [k], or None. The
        kernel chooses the number k of parts.
    """

    row: Float[Array, "... n"] | None
    transposed: Float[Array, "n tokens"] | None
    scale: Float[Array, ""]
    largest: Float[Array, " k"] | None = None


def behind(scale: Float[Array, ""], after: Float[Array, "..."]) -> Float[Array, ""]:
    """Returns `scale` with a dependence on `after`, so that XLA computes `after` first.

    An optimization barrier is not enough, because it does not bind XLA's schedule.
    """
    # No number is NaN and zero at once, so `never` is False. XLA does not know that.
    first = after[tuple(slice(1) for _ in after.shape)].astype(jnp.float32)
    never = jnp.any(jnp.isnan(first) & (first == 0))
    return scale + never.astype(scale.dtype)


def magnitude(
    x: Float[Array, "..."], axis: int | tuple[int, ...] | None = None
) -> Array:
    """Computes the amax, max(|x|), of a float32 array along `axis`; NaN if `x` has NaN.

    The bits are compared as integers, since XLA's maximum of floats may overlook a NaN
    on CPUs.
    """
    largest = jnp.max(magnitude_bits(x), axis, initial=0)
    return floats(largest)


def float_bits(x: Float[Array, "..."]) -> Array:
    """Reinterprets float32 as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def floats(bits: Array) -> Float[Array, "..."]:
    """Reinterprets 32 bits as float32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def magnitude_bits(x: Float[Array, "..."]) -> Array:
    """Returns the bits of |x|; integers that compare like |x|, with NaN the largest."""
    return float_bits(x) & jnp.uint32(0x7FFFFFFF)


def group_scale(largest: Float[Array, "..."], top: float) -> Array:
    """Computes the scale of groups, amax / top, rounded to bfloat16, as float32.

    `largest` is the amax of each group, and `top` the largest code. The scale is
    clipped so that it and its reciprocal are normal, and `top * scale` fits bfloat16.
    It is NaN where the amax is not finite.
    """
    # XLA may remove a conversion to bfloat16 and back, but never this rounding.
    scale = lax.reduce_precision(largest * (1 / top), 8, 7)
    scale = jnp.clip(scale, TINY, largest_scale(top))
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def power_of_two_scale(
    largest: Float[Array, "..."], top: float, *, step: float = 0.0
) -> Array:
    """Computes the smallest power of two s for which largest / s rounds to <= `top`.

    The scale is float32, and NaN where the amax `largest` is not finite. `step` is the
    distance between codes around `top`, divided by the power of two below `top`. A
    number up to half this distance above `top` still rounds to `top`. Therefore the
    quantization of an array that is quantized already finds the same scale.
    """
    mantissa, exponent = math.frexp(top)
    # Let edge be the largest number that rounds to `top`. In integers: the exponent of
    # the scale is the difference of the exponents if mantissa(largest) is at most
    # mantissa(edge). Otherwise it is one more: adding `carry` overflows the mantissa.
    carry = (1 << 23) - 1 - int((2 * (mantissa + step / 4) - 1) * (1 << 23))
    bits = float_bits(largest) + jnp.uint32(carry)
    power = floats(bits & jnp.uint32(0x7F800000))
    scale = power * 2.0 ** (1 - exponent)
    return jnp.clip(scale, TINY, largest_scale(top, bits=1)) + largest * 0.0


def tensor_scale(largest: Float[Array, "..."], dtype: DTypeLike) -> Array:
    """Computes the per-tensor scale of an amax; see `power_of_two_scale`."""
    info = jnp.finfo(dtype)
    return power_of_two_scale(largest, float(info.max), step=float(info.eps))


def row_scale(largest: Float[Array, "..."], dtype: DTypeLike) -> Array:
    """Computes per-token scales, amax / code_max, in float32 from each token's amax.

    A scale is at least TINY, and NaN where the amax is not finite.
    """
    return jnp.maximum(largest * (1 / code_max(dtype)), TINY) + largest * 0.0


def on_last_axes(x: Float[Array, "..."], ndim: int) -> Float[Array, "..."]:
    """Returns `x` with axes of one element in front, so that it has `ndim` axes.

    JAX would add them itself, unless `jax_numpy_rank_promotion` forbids it.
    """
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def normal(x: Float[Array, "..."]) -> Array:
    """Replaces denormal float32 numbers by zeros of the same sign."""
    return jnp.where(jnp.abs(x) < TINY, x * 0.0, x)


def encode(x: Float[Array, "..."], scale: Array, dtype: DTypeLike) -> Array:
    """Computes the codes of x / scale, rounded to nearest even, and saturated."""
    x = x * reciprocal(scale)
    return jnp.clip(x, -code_max(dtype), code_max(dtype)).astype(dtype)


def reciprocal(scale: Float[Array, "..."]) -> Array:
    """Computes 1 / scale, correctly rounded for scales of 8 significant bits.

    All bfloat16 numbers have at most 8 significant bits. GPUs divide with an error in
    the last bit. The error, 1 - scale * guess, can be computed exactly: the guess is
    split into two halves, and the product of each half and the scale is exact.
    """
    guess = 1.0 / scale
    bits = float_bits(guess) & jnp.uint32(0xFFFFFF00)
    high = floats(bits)
    error = (1.0 - scale * high) - scale * (guess - high)
    return guess + guess * error


def code_max(dtype: DTypeLike) -> float:
    """Returns the largest number that an FP8 code of `dtype` stands for."""
    return float(jnp.finfo(dtype).max)


def largest_scale(top: float, bits: int = 8) -> float:
    """Returns the largest s such that top * s fits bfloat16 and 1 / s is normal.

    The number s has at most `bits` significant bits.
    """
    mantissa, exponent = math.frexp(min(_BF16_MAX / top, 2.0**125))
    return math.ldexp(math.floor(mantissa * 2**bits), exponent - bits)
