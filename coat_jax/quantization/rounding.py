"""Stochastic rounding to 8-bit floating formats, and random bits for it."""

import jax
import jax.numpy as jnp
import ml_dtypes
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt32

from pallas_kernels.rounding import bend_of, stochastic_float8


def stochastic_round(
    x: Float[Array, "..."],
    noise: UInt32[Array, "..."],
    dtype: DTypeLike,
    power: Array | float = 1.0,
) -> Float[Array, "..."]:
    """Rounds each float32 number at random to one of the two neighbouring codes.

    The nearer code is more likely: the mean over random `noise` is `x`, up to a
    millionth of the distance between the codes. A number that a code stands for does
    not change. Numbers must not exceed the largest code.

    Args:
      x: The numbers, float32.
      noise: 32 random bits for each number, of which the upper 20 are used (21 for
        E5M2).
      dtype: The dtype of the codes, such as `float8_e4m3fn`.
      power: The k of range expansion, if `x` holds magnitudes to the power k. The mean
        of x ** (1 / k) is then right instead of the mean of x.

    Returns:
      Numbers that codes stand for, float32.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax.quantization.rounding import stochastic_round
      >>> noise = jax.random.bits(jax.random.key(0), 1000)
      >>> y = stochastic_round(jnp.full(1000, 9.25), noise, jnp.float8_e4m3fn)
      >>> sorted(set(y.tolist()))
      [9.0, 10.0]
    """
    info = ml_dtypes.finfo(dtype)
    rounded = stochastic_float8(
        jnp.abs(x),
        noise,
        mantissa=info.nmant,
        smallest_normal=float(info.smallest_normal),
        bend=bend_of(power, info.nmant),
    )
    return jnp.where(jnp.isfinite(x), jnp.copysign(rounded, x), x)


def random_bits(key: Key[Array, ""], shape: tuple[int, ...], like: Array) -> Array:
    """Returns 32 random bits for each element of `shape`.

    On a mesh with explicit axes the bits are sharded like `like`.
    """
    sharding = jax.typeof(like).sharding
    explicit = sharding.mesh.explicit_axes
    return jax.random.bits(
        key, shape, jnp.uint32, out_sharding=sharding if explicit else None
    )
