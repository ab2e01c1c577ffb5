"""Random bits computed from positions in an array, and stochastic rounding, in jnp.

A group of 128 neighbours has one random word. The word is a hash of the group's
position in the whole array and of a seed that is new in every step. Element j of the
group gets the word plus j times an odd number. These bits are uniform like the word and
new in every step. They are spread evenly over the group, so that rounding errors of
neighbours cancel rather than add up.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from pallas_kernels.numerics import float_bits, floats

# The number is 2^32 / golden ratio. Its multiples are spread evenly modulo 2^32.
_STRIDE = 0x9E3779B9
_SIGN = 0x80000000
UE4M4_SMALLEST = 2.0**-6  # The smallest nonzero number of UE4M4.
_LAST_BIT = 1 << 19  # The last mantissa bit of UE4M4, as a bit of float32.


def hash32(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Hashes 32-bit words to 32-bit words ("lowbias32" of Ellis's hash prospector)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the row-major strides of an array of `shape`, in elements."""
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


def random_words(
    seed: UInt32[Array, ""],
    stream: UInt32[Array, ""],
    groups: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
) -> UInt32[Array, "..."]:
    """Returns one random word for each group of an array, `hash32(seed + stream + i)`.

    Args:
      seed: A number that is new in every step.
      stream: A number that is different for each parameter.
      groups: The number of groups along each axis.
      strides: The distance between the positions i of neighbouring groups along each
        axis. None means row-major strides. A part of an array takes the strides of the
        whole array, and its `stream` includes the position of its first group.
    """
    counter = seed + stream
    for axis, stride in enumerate(strides or row_major(groups)):
        index = lax.broadcasted_iota(jnp.uint32, groups, axis)
        counter = counter + index * jnp.uint32(stride & 0xFFFFFFFF)
    return hash32(counter)


def element_bits(
    words: UInt32[Array, "..."], j: UInt32[Array, "..."]
) -> UInt32[Array, "..."]:
    """Returns 32 random bits for element `j` of a group that has the random `words`."""
    return words + j * jnp.uint32(_STRIDE)


def stochastic_bfloat16(
    x: Float[Array, "..."], bits: UInt32[Array, "..."]
) -> Float[Array, "..."]:
    """Rounds float32 to one of its two neighbours in bfloat16, the nearer more often.

    Args:
      x: The numbers, float32.
      bits: A random word for each number, of which the upper 16 bits are used.
    """
    raised = float_bits(x) + (bits >> jnp.uint32(16))
    rounded = floats(raised & jnp.uint32(0xFFFF0000))
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def stochastic_float8(
    x: Float[Array, "..."],
    bits: UInt32[Array, "..."],
    *,
    mantissa: int,
    smallest_normal: float,
    bend: Array | float = 0.0,
) -> Float[Array, "..."]:
    """Rounds float32 magnitudes to one of the two nearest numbers of a smaller format.

    Without `bend`, the mean over random `bits` is `x`, up to 2^(mantissa - 23) of the
    distance between these two numbers. Numbers of the format do not change. Below the
    smallest normal number the distance is the same as just above it, as for denormal
    numbers.

    Args:
      x: Magnitudes, float32, at most the format's largest number.
      bits: 32 random bits for each magnitude.
      mantissa: The number of stored bits of the format's mantissa.
      smallest_normal: The smallest normal number of the format, a power of two.
      bend: A correction that makes the mean of a root of `x` right; see `bend_of`.

    Returns:
      Numbers of the format, float32.
    """
    # Adding the smallest normal number makes denormal numbers normal. The bits below
    # the mantissa then have the same place in all numbers.
    offset = jnp.where(x < smallest_normal, smallest_normal, 0.0)
    raised = float_bits(x + offset)
    if not (isinstance(bend, float) and bend == 0):
        # Add f * (1 - f) * bend of the distance, where x is at a fraction f of it.
        fraction = (raised >> jnp.uint32(8 - mantissa)) & jnp.uint32(0x7FFF)
        fraction = jnp.where(x < smallest_normal, jnp.uint32(0), fraction)
        square = (fraction * (jnp.uint32(0x8000) - fraction)).astype(jnp.float32)
        raised = raised + (square * (bend * 2.0 ** (-7 - mantissa))).astype(jnp.uint32)
    raised = raised + (bits >> jnp.uint32(9 + mantissa))
    mask = jnp.uint32(0xFFFFFFFF << (23 - mantissa) & 0xFFFFFFFF)
    return floats(raised & mask) - offset


def bend_of(power: Array | float, mantissa: int) -> Array | float:
    """Returns the correction that makes the decoded numbers right on average.

    Range expansion stores x^k as a code c, and reads c^(1/k). This root is concave: if
    c is rounded so that its mean is x^k, the number read is less than x on average. For
    k = 3 it is less by 0.015% of x in each step, which takes a seventh from an average
    of 1,000 steps. Let x^k be between two codes, at a fraction f of the way from the
    lower to the upper code. It is then rounded up with the probability
    `f + f * (1 - f) * bend`, for which the mean of the root is right to second order.
    The exact correction also depends on the mantissa of x. Its mean is used here.
    """
    return 0.375 * (1 - 1 / power) * 2.0**-mantissa


def pack_ue4m4(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the float8_e4m3fn codes that store numbers of UE4M4, given as float32.

    UE4M4 is E4M3 for numbers without a sign: the sign bit is the fourth and last bit of
    the mantissa. Its numbers are 0 and 2^-6 to 464. There are no denormal numbers.
    """
    bits = float_bits(x)
    sign = (bits << jnp.uint32(12)) & jnp.uint32(_SIGN)
    # The fourth bit moves to the sign, so that the conversion has nothing to round.
    return floats((bits & jnp.uint32(~_LAST_BIT & 0xFFFFFFFF)) | sign).astype(
        jnp.float8_e4m3fn
    )


def unpack_ue4m4(codes: Float[Array, "..."]) -> Float[Array, "..."]:
    """Decodes the codes of `pack_ue4m4` to float32."""
    bits = float_bits(codes.astype(jnp.float32))
    last = (bits >> jnp.uint32(12)) & jnp.uint32(_LAST_BIT)
    return floats((bits & jnp.uint32(~_SIGN & 0xFFFFFFFF)) | last)
