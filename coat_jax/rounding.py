"""Stochastic rounding to 8-bit floating formats, and the random bits of any."""

import jax
import jax.numpy as jnp
import ml_dtypes
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt32

# A number's distance from the code below it is exact to this many bits of a step.
_BITS = 20


def stochastic_round(
    x: Float[Array, "..."], noise: UInt32[Array, "..."], dtype: DTypeLike
) -> Float[Array, "..."]:
    """Rounds float32 numbers to one of the two codes next to them, by chance.

    The nearer a code the likelier it is: the mean over random `noise` is `x`, to a
    millionth of the distance between the codes. A number that a code stands for stays
    what it is. Numbers beyond the largest code are not for this function.

    Args:
      x: The numbers, float32.
      noise: 32 random bits for each; the upper 20 are used.
      dtype: The codes' dtype, such as `float8_e4m3fn`.

    Returns:
      Numbers that codes stand for, float32.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax.rounding import stochastic_round
      >>> noise = jax.random.bits(jax.random.key(0), 1000)
      >>> y = stochastic_round(jnp.full(1000, 9.25), noise, jnp.float8_e4m3fn)
      >>> sorted(set(y.tolist()))
      [9.0, 10.0]
    """
    info = ml_dtypes.finfo(dtype)
    # The exponent of the least bit of the code: that of x, or of all denormals.
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    exponent = jnp.maximum((bits >> 23) - 127, info.minexp) - info.nmant
    uniform = (noise >> (32 - _BITS)).astype(jnp.float32) * 2.0**-_BITS
    steps = jnp.floor(jnp.abs(x) * _power_of_two(-exponent) + uniform)
    rounded = jnp.copysign(steps * _power_of_two(exponent), x)
    return jnp.where(jnp.isfinite(x), rounded, x)


def random_bits(key: Key[Array, ""], shape: tuple[int, ...], like: Array) -> Array:
    """32 random bits an element, sharded as `like` is where types say how."""
    sharding = jax.typeof(like).sharding
    explicit = sharding.mesh.explicit_axes
    return jax.random.bits(
        key, shape, jnp.uint32, out_sharding=sharding if explicit else None
    )


def _power_of_two(exponent: Array) -> Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
