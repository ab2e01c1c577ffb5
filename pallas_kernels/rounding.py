"""Random bits that are functions of places, and rounding by them, in jnp.

A group of 128 neighbours has one random word, the hash of its place in the whole array
and of what is new in every step. Element j of the group has the word plus
j times an odd number: uniform like the word, anew in every step, and spread evenly over
the group, so that rounding errors of neighbours cancel rather than add up.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

# 2^32 over the golden ratio: its multiples are spread evenly modulo 2^32.
_STRIDE = 0x9E3779B9
_SIGN = 0x80000000
# The smallest magnitude of UE4M4, and what its last bit is in float32.
UE4M4_SMALLEST = 2.0**-6
_LAST_BIT = 1 << 19


def hash32(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Mixes 32 bits into 32 ("lowbias32" of Ellis's hash prospector)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns by how much places along each axis of an array are apart."""
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


def random_words(
    seed: UInt32[Array, ""],
    stream: UInt32[Array, ""],
    groups: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
) -> UInt32[Array, "..."]:
    """Returns one random word for each group of an array, `hash32(seed + stream + i)`.

    Args:
      seed: What is new in every step.
      stream: What tells one parameter from another.
      groups: The numbers of groups along each axis.
      strides: By how much the places i of groups along each axis are apart. None means
        those of the array itself; a part of an array has those of the whole, and the
        place of its first group in its `stream`.
    """
    place = seed + stream
    for axis, stride in enumerate(strides or row_major(groups)):
        index = lax.broadcasted_iota(jnp.uint32, groups, axis)
        place = place + index * jnp.uint32(stride & 0xFFFFFFFF)
    return hash32(place)


def element_bits(
    words: UInt32[Array, "..."], j: UInt32[Array, "..."]
) -> UInt32[Array, "..."]:
    """Returns 32 random bits for element `j` of a group that has the random `words`."""
    return words + j * jnp.uint32(_STRIDE)


def stochastic_bfloat16(
    x: Float[Array, "..."], bits: UInt32[Array, "..."]
) -> Float[Array, "..."]:
    """Rounds float32 to one of the two neighbours in bfloat16, the nearer the likelier.

    Args:
      x: The numbers, float32.
      bits: Random bits for each, of which the upper 16 are used.
    """
    raised = _bits(x) + (bits >> jnp.uint32(16))
    rounded = _floats(raised & jnp.uint32(0xFFFF0000))
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def stochastic_float8(
    x: Float[Array, "..."],
    bits: UInt32[Array, "..."],
    *,
    mantissa: int,
    smallest_normal: float,
    bend: Array | float = 0.0,
) -> Float[Array, "..."]:
    """Rounds float32 magnitudes to one of the two next numbers of a smaller format.

    The mean over random `bits` is `x`, to 2^(mantissa - 23) of the distance between the
    two. A number of the format stays what it is. Below the smallest normal number steps
    stay what they are above it, as denormal numbers do.

    Args:
      x: Magnitudes, float32, at most the format's largest.
      bits: 32 random bits for each.
      mantissa: The number of stored bits of the format's mantissa.
      smallest_normal: The smallest normal number of the format, a power of two.
      bend: What makes the mean right of a root of `x`; see `bend_of`.

    Returns:
      Numbers of the format, float32.
    """
    # Adding the smallest normal number makes denormal numbers normal, so that the
    # random bits below the mantissa have the same place in all.
    offset = jnp.where(x < smallest_normal, smallest_normal, 0.0)
    raised = _bits(x + offset)
    if not (isinstance(bend, float) and bend == 0):
        part = (raised >> jnp.uint32(8 - mantissa)) & jnp.uint32(0x7FFF)
        part = jnp.where(x < smallest_normal, jnp.uint32(0), part)
        square = (part * (jnp.uint32(0x8000) - part)).astype(jnp.float32)
        raised = raised + (square * (bend * 2.0 ** (-7 - mantissa))).astype(jnp.uint32)
    raised = raised + (bits >> jnp.uint32(9 + mantissa))
    kept = jnp.uint32(0xFFFFFFFF << (23 - mantissa) & 0xFFFFFFFF)
    return _floats(raised & kept) - offset


def bend_of(power: Array | float, mantissa: int) -> Array | float:
    """Returns what makes the mean of stored numbers right of their roots.

    Range expansion stores x^k, and c^(1/k) is read. That is concave: if c is rounded up
    with the right probability for x^k, what is read is less than x on average, for
    k = 3 by 0.015% of x in each step, which takes a seventh from an average of 1,000
    steps. So between two codes, a part f of the way from one to the next, the
    probability is `f + f * (1 - f) * bend`, which is right of the root to the second
    order. The mantissa of x, on which that depends too, counts with its mean.
    """
    return 0.375 * (1 - 1 / power) * 2.0**-mantissa


def pack_ue4m4(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the float8_e4m3fn codes of numbers of UE4M4, given as float32.

    UE4M4 is E4M3 for numbers that have no sign: the sign's bit is the fourth and last
    of the mantissa. The numbers are 0 and 2^-6 to 464, without denormal ones.
    """
    bits = _bits(x)
    sign = (bits << jnp.uint32(12)) & jnp.uint32(_SIGN)
    # The last bit is zero afterwards, so that the conversion has nothing to round.
    return _floats((bits & jnp.uint32(~_LAST_BIT & 0xFFFFFFFF)) | sign).astype(
        jnp.float8_e4m3fn
    )


def unpack_ue4m4(codes: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the numbers, float32, that codes of `pack_ue4m4` stand for."""
    bits = _bits(codes.astype(jnp.float32))
    last = (bits >> jnp.uint32(12)) & jnp.uint32(_LAST_BIT)
    return _floats((bits & jnp.uint32(~_SIGN & 0xFFFFFFFF)) | last)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _floats(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.float32)
