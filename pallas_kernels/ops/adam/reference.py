"""Adam's step on FP8 moments, in jnp."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8, UInt32

from pallas_kernels.numerics import TINY, magnitude
from pallas_kernels.rounding import (
    UE4M4_SMALLEST,
    bend_of,
    element_bits,
    hash32,
    pack_ue4m4,
    stochastic_bfloat16,
    stochastic_float8,
    unpack_ue4m4,
)

GROUP = 128
MU_MAX = 448.0  # The largest number of E4M3.
NU_MAX = 464.0  # The largest number of UE4M4.
# Range expansion covers at most this many octaves of a group. An element that has had
# no gradient for long must not cost its neighbours their precision.
OCTAVES = 40
# The largest second moment that is stored. Without a limit a second moment would become
# infinite where the square of a gradient overflows.
LARGEST_NU = 2.0**110
MU_BEND = bend_of(3.0, mantissa=3)
_MU_ROOT = MU_MAX ** (1 / 3)
_LOG2_NU_RANGE = 16 * math.log2(NU_MAX / UE4M4_SMALLEST)
_FINITE = float(jnp.finfo(jnp.float32).max)


class Moments(NamedTuple):
    """Adam's moments of one parameter [..., n] in groups of 128 on the last axis.

    A code c of a group with scale s and exponent k stands for these numbers:

    - The second moment is `nu = s * 464 * (c / 464) ** (16 / k)`.
    - The first moment is `mu = sqrt(nu) * s * 448 * cbrt(c / 448)`.

    Attributes:
      mu: Codes c of mu / sqrt(nu), e4m3 [..., n].
      mu_scale: Scales s of mu / sqrt(nu), float32 [..., ceil(n / 128)].
      nu: Codes c of nu, UE4M4 stored as e4m3 [..., n].
      nu_scale: Scales s of nu, float32 [..., ceil(n / 128)].
      nu_exponent: Exponents k of nu, uint8 [..., ceil(n / 128)].
    """

    mu: Float[Array, "... n"]
    mu_scale: Float[Array, "... g"]
    nu: Float[Array, "... n"]
    nu_scale: Float[Array, "... g"]
    nu_exponent: UInt8[Array, "... g"]


class AdamScalars(NamedTuple):
    """The scalars of Adam's step; each is a float or a float32 scalar.

    For a gradient g and a parameter p:

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        numerator = mu_weight * mu + grad_weight * g
        update = numerator / (sqrt(nu_weight * nu + eps_root) + eps)
        p = p - learning_rate * (update + decay * p)
    """

    b1: Array | float
    b2: Array | float
    eps: Array | float
    eps_root: Array | float
    mu_weight: Array | float
    grad_weight: Array | float
    nu_weight: Array | float
    learning_rate: Array | float
    decay: Array | float


def adam(
    scalars: AdamScalars,
    grads: Float[Array, "... n"],
    moments: Moments,
    words: UInt32[Array, "... g"],
    params: Float[Array, "... n"] | None = None,
    salt: UInt32[Array, ""] | None = None,
) -> tuple[Float[Array, "... n"], Moments]:
    """Computes `pallas_kernels.adam` in jnp, with one random word for each group.

    With a salt, bfloat16 parameters are rounded stochastically.
    """
    at = AdamScalars(*(jnp.asarray(s, jnp.float32) for s in scalars))
    shape, g = grads.shape, split(grads).astype(jnp.float32)
    nu = _decode_nu(moments)
    mu = at.b1 * (_decode_mu(moments) * jnp.sqrt(nu)) + (1 - at.b1) * g
    nu = at.b2 * nu + (1 - at.b2) * (g * g)
    denominator = jnp.sqrt(nu * at.nu_weight + at.eps_root) + at.eps
    update = (at.mu_weight * mu + at.grad_weight * g) / denominator
    bits = bits_of_elements(words)
    after = Moments(
        *_encode_mu(mu * inverse_root(nu), bits, shape),
        *_encode_nu(jnp.minimum(nu, LARGEST_NU), bits, shape),
    )
    if params is None:
        return merge(update, shape).astype(grads.dtype), after
    p = split(params).astype(jnp.float32)
    p = p - at.learning_rate * (update + at.decay * p)
    if salt is not None and params.dtype == jnp.bfloat16:
        p = stochastic_bfloat16(p, bits_of_elements(hash32(words ^ salt)))
    return merge(p, shape).astype(params.dtype), after


def inverse_root(nu: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns 1 / sqrt(nu), the factor with which first moments are stored.

    The result is 0 if the second moment overflowed. The update is then zero too, as in
    optax.
    """
    return jnp.where(nu <= _FINITE, lax.rsqrt(jnp.maximum(nu, TINY)), 0.0)


def bits_of_elements(words: UInt32[Array, "... g"]) -> UInt32[Array, "... g 128"]:
    """Returns the random bits of all elements of groups of 128."""
    j = lax.broadcasted_iota(jnp.uint32, (*words.shape, GROUP), words.ndim)
    return element_bits(words[..., None], j)


def _decode_mu(moments: Moments) -> Array:
    codes = split(moments.mu).astype(jnp.float32)
    t = jnp.exp2(jnp.log2(jnp.abs(codes)) * (1 / 3))
    top = moments.mu_scale[..., None] * (MU_MAX / _MU_ROOT)
    return jnp.copysign(t * top, codes)


def _encode_mu(x: Array, bits: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    scale, top = _scale(x, MU_MAX)
    t = jnp.abs(x) * (_MU_ROOT / top)
    # t^3 is replaced by a linear function below the smallest code, 2^-9.
    cube = jnp.minimum(t * jnp.maximum(t * t, 1 / 64), MU_MAX)
    cube = stochastic_float8(
        cube, bits, mantissa=3, smallest_normal=2.0**-6, bend=MU_BEND
    )
    cube = jnp.copysign(jnp.minimum(cube, MU_MAX), x)
    return _stored(cube.astype(jnp.float8_e4m3fn), shape), scale


def _decode_nu(moments: Moments) -> Array:
    codes = unpack_ue4m4(split(moments.nu))
    root = 16 / moments.nu_exponent[..., None].astype(jnp.float32)
    t = jnp.exp2((jnp.log2(codes) - math.log2(NU_MAX)) * root)
    # Nonzero second moments stay nonzero, because the update may divide by them.
    top = moments.nu_scale[..., None] * NU_MAX
    return jnp.where(codes == 0, 0.0 * top, jnp.maximum(t * top, TINY))


def _encode_nu(
    x: Array, bits: Array, shape: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    scale, top = _scale(x, NU_MAX)
    smallest = jnp.min(jnp.where(x < TINY, jnp.inf, x), axis=-1, keepdims=True)
    octaves = jnp.minimum(-jnp.log2(smallest / top), OCTAVES)
    # This k maps the group's smallest number to the smallest code.
    k = jnp.clip(_LOG2_NU_RANGE / jnp.maximum(octaves, 1e-3), 1, 255)
    # A group of zeros gets 255.
    k = jnp.where(octaves > -jnp.inf, k, 255).astype(jnp.uint8)
    t = jnp.exp2(jnp.log2(x / top) * (k.astype(jnp.float32) / 16)) * NU_MAX
    t = jnp.clip(t, UE4M4_SMALLEST, NU_MAX)
    t = stochastic_float8(t, bits, mantissa=4, smallest_normal=UE4M4_SMALLEST)
    codes = jnp.where(x < TINY, 0.0, jnp.minimum(t, NU_MAX))
    return _stored(pack_ue4m4(codes), shape), scale, k[..., 0]


def _scale(x: Array, largest_code: float) -> tuple[Array, Array]:
    """Returns a group's scale, and the number that its largest code stands for."""
    largest = magnitude(x, axis=-1)
    scale = jnp.maximum(largest * (1 / largest_code), TINY) + largest * 0.0
    return scale, scale[..., None] * largest_code


def _stored(codes: Array, shape: tuple[int, ...]) -> Array:
    # Without the barrier XLA may cancel a conversion to 8 bits and back.
    return lax.optimization_barrier(merge(codes, shape))


def split(x: Array) -> Array:
    """Reshapes [..., n] to [..., g, 128], and pads a short last group with zeros."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % GROUP)]
    x = jnp.pad(x, padding) if padding[-1][1] else x
    return x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)


def merge(groups: Array, shape: tuple[int, ...]) -> Array:
    """Returns the array of `shape` that `split` has reshaped to `groups`."""
    width = groups.shape[-2] * GROUP
    return groups.reshape(*shape[:-1], width)[..., : shape[-1]]
