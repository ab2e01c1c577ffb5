"""Dynamic range expansion (COAT, arXiv 2410.19313, section 4.2).

A group whose magnitudes span a ratio R uses little of a format that spans D. Raising
magnitudes to the power k = log(D) / log(R) stretches the group over the format before
it is rounded, and the power 1/k undoes that. A group's own k is kept in sixteenths, as
one byte.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

_STEPS = 16


def exponent(
    largest: Float[Array, "..."], smallest: Float[Array, "..."], dynamic_range: float
) -> UInt8[Array, "..."]:
    """The k, in sixteenths, that maps a group onto `dynamic_range`.

    Args:
      largest: The group's largest magnitude; 0 for a group of zeros.
      smallest: Its smallest non-zero magnitude; not below the smallest normal float32.
      dynamic_range: D, the ratio of magnitudes to fill.

    Returns:
      floor(16 log2(D) / log2(largest / smallest)), between 1 (k = 1/16) and 255 (k just
      below 16). A group of equal, zero or non-finite magnitudes has 255.
    """
    octaves = jnp.log2(largest) - jnp.log2(smallest)
    steps = _STEPS * math.log2(dynamic_range) / octaves
    spread = (octaves > 0) & jnp.isfinite(octaves)
    return jnp.where(spread, jnp.clip(steps, 1, 255), 255).astype(jnp.uint8)


def power(steps: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The power that k in sixteenths stands for."""
    return steps.astype(jnp.float32) * (1 / _STEPS)


def expand(
    x: Float[Array, "..."], largest: Float[Array, "..."], k: Float[Array, "..."] | float
) -> Float[Array, "..."]:
    """Computes (|x| / largest) ** k, in [0, 1].

    In logarithms, since the ratio alone may be below the smallest float32.
    """
    return jnp.exp2(jnp.minimum(jnp.log2(jnp.abs(x)) - jnp.log2(largest), 0.0) * k)


def contract(
    t: Float[Array, "..."], largest: Float[Array, "..."], k: Float[Array, "..."] | float
) -> Float[Array, "..."]:
    """Computes largest * t ** (1 / k), for t in [0, 1].

    For t > 0 it is at least the smallest normal float32, since less may be taken as 0.
    """
    # In logarithms, since t ** (1 / k) alone may be below the smallest float32. That of
    # float32's largest number rounds to 128, whose power is infinite.
    exponent = jnp.log2(t) * (1 / k) + jnp.log2(largest)
    x = jnp.exp2(jnp.minimum(exponent, 128 - 2.0**-16))
    x = jnp.maximum(x, jnp.finfo(jnp.float32).tiny)
    return jnp.where(t == 0, 0.0 * largest, x)  # NaN stays NaN.
