"""Adam's step on FP8 moments, in jnp."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8, UInt32

from pallas_kernels.reference.quantize import magnitude

GROUP = 128
_E4M3_MAX = 448.0
_TINY = float(jnp.finfo(jnp.float32).tiny)
_LOG2_RANGE = 16 * math.log2(_E4M3_MAX**2 / 2)


class Moments(NamedTuple):
    """Adam's moments of one parameter [..., n] in groups of 128 on the last axis.

    A group of nu stands for `s * 448 * (c / 448) ** (16 / k)`, one of mu for
    `sqrt(nu) * s * 448 * cbrt(c / 448)`.

    Attributes:
      mu: Codes of the first moment over the root of the second, e4m3 [..., n].
      mu_scale: s, bfloat16 [..., ceil(n / 128)].
      nu: Codes of the second moment, e4m3 [..., n].
      nu_scale: s, bfloat16 [..., ceil(n / 128)].
      nu_exponent: k, uint8 [..., ceil(n / 128)].
    """

    mu: Float[Array, "... n"]
    mu_scale: Float[Array, "... g"]
    nu: Float[Array, "... n"]
    nu_scale: Float[Array, "... g"]
    nu_exponent: UInt8[Array, "... g"]


class AdamScalars(NamedTuple):
    """What a step multiplies with; each a float or a float32 scalar.

    The update is (mu_weight * mu + grad_weight * g) over
    sqrt(nu_weight * nu + eps_root) + eps, and parameters become
    p - learning_rate * (update + decay * p).
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
    params: Float[Array, "... n"] | None = None,
    noise: UInt32[Array, "... g"] | None = None,
) -> tuple[Float[Array, "... n"], Moments]:
    """See `pallas_kernels.adam`."""
    at = AdamScalars(*(jnp.asarray(s, jnp.float32) for s in scalars))
    g = _split(grads).astype(jnp.float32)
    root, nu = _decode_nu(moments)
    mu = at.b1 * (_decode_mu(moments) * root) + (1 - at.b1) * g
    nu = at.b2 * nu + (1 - at.b2) * g * g
    denominator = jnp.sqrt(nu * at.nu_weight + at.eps_root) + at.eps
    update = (at.mu_weight * mu + at.grad_weight * g) / denominator
    mu = mu * lax.rsqrt(jnp.maximum(nu, _TINY))
    after = Moments(*_encode_mu(mu, grads.shape), *_encode_nu(nu, grads.shape))
    if params is None:
        return _merge(update, grads.shape).astype(grads.dtype), after
    p = _split(params).astype(jnp.float32)
    p = p - at.learning_rate * (update + at.decay * p)
    if noise is not None and params.dtype == jnp.bfloat16:
        return _merge(stochastic_bfloat16(p, noise), params.shape), after
    return _merge(p, params.shape).astype(params.dtype), after


def stochastic_bfloat16(
    x: Float[Array, "... g 128"], noise: UInt32[Array, "... g"]
) -> Array:
    """Rounds float32 up or down to bfloat16, in proportion to what is nearer.

    The random bits of element j of a group are `uniform16` of its noise.
    """
    j = lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
    up = uniform16(noise[..., None], j)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + up) & jnp.uint32(0xFFFF0000)
    rounded = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def uniform16(
    noise: UInt32[Array, "..."], j: UInt32[Array, "..."]
) -> UInt32[Array, "..."]:
    """16 random bits for element `j` of a group: a hash for 8 neighbours, times 8 odds.

    An odd multiple of a uniform word is as uniform, and the upper halves of several are
    next to independent unless the odds have a simple ratio. Hashes of 0, 1 and 2 do.
    """
    odd = hash32((j & jnp.uint32(7)) + jnp.uint32(32)) | jnp.uint32(1)
    return (hash32(noise + (j >> jnp.uint32(3))) * odd) >> jnp.uint32(16)


def hash32(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Mixes 32 bits into 32 ("lowbias32" of Ellis's hash prospector)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _decode_mu(moments: Moments) -> Array:
    codes = _split(moments.mu).astype(jnp.float32)
    top = moments.mu_scale.astype(jnp.float32)[..., None] * _E4M3_MAX
    return _decode(codes, top, 3.0)


def _decode_nu(moments: Moments) -> tuple[Array, Array]:
    """The second moment's root, and itself."""
    codes = _split(moments.nu).astype(jnp.float32)
    top = moments.nu_scale.astype(jnp.float32)[..., None] * _E4M3_MAX
    nu = _decode(codes, top, moments.nu_exponent[..., None].astype(jnp.float32) / 16)
    return jnp.sqrt(nu), nu


def _decode(codes: Array, top: Array, k: Array | float) -> Array:
    t = jnp.abs(codes) * (1 / _E4M3_MAX)
    x = jnp.maximum(jnp.exp2(jnp.log2(t) * (1 / k) + jnp.log2(top)), _TINY)
    return jnp.where(t == 0, 0.0, jnp.copysign(x, codes))


def _encode_mu(x: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    scale, top = _scale(x)
    return _codes(x, top, 3.0, shape), scale


def _encode_nu(x: Array, shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    scale, top = _scale(x)
    smallest = jnp.min(jnp.where(x < _TINY, jnp.inf, x), axis=-1)
    octaves = jnp.log2(top) - jnp.log2(smallest)
    spread = (octaves > 0) & jnp.isfinite(octaves)
    k = jnp.where(spread, jnp.clip(_LOG2_RANGE / octaves, 1, 255), 255).astype(
        jnp.uint8
    )
    return _codes(x, top, k[..., None].astype(jnp.float32) / 16, shape), scale, k


def _scale(x: Array) -> tuple[Array, Array]:
    """A group's scale as stored, and what its largest code stands for."""
    largest = magnitude(x, axis=-1)
    scale = lax.reduce_precision(largest * (1 / _E4M3_MAX), 8, 7)
    scale = jnp.where(jnp.isfinite(largest), jnp.clip(scale, _TINY, 2.0**119), jnp.nan)
    return scale.astype(jnp.bfloat16), scale * _E4M3_MAX


def _codes(x: Array, top: Array, k: Array | float, shape: tuple[int, ...]) -> Array:
    magnitude = jnp.abs(x)
    ratio = jnp.log2(magnitude) - jnp.log2(top)[..., None]
    t = jnp.where(magnitude < _TINY, 0.0, jnp.exp2(jnp.minimum(ratio, 0.0) * k))
    codes = jnp.copysign(t * _E4M3_MAX, x).astype(jnp.float8_e4m3fn)
    # Without the barrier XLA may cancel a conversion to 8 bits and back.
    return lax.optimization_barrier(_merge(codes, shape))


def _split(x: Array) -> Array:
    """[..., n] to [..., g, 128], with zeros behind a short last group."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % GROUP)]
    x = jnp.pad(x, padding) if padding[-1][1] else x
    return x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)


def _merge(groups: Array, shape: tuple[int, ...]) -> Array:
    """Undoes `_split` of an array of `shape`."""
    width = groups.shape[-2] * GROUP
    return groups.reshape(*shape[:-1], width)[..., : shape[-1]]
