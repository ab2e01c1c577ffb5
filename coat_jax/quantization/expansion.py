"""Dynamic range expansion (COAT, arXiv 2410.19313, section 4.2).

A group of magnitudes that span a ratio R uses little of a format that spans D. Raising
the magnitudes to the power k = log(D) / log(R) stretches the group over the format
before rounding. The power 1/k undoes this. A group's own k is stored as one byte, in
units of 1/16.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

_STEPS = 16


def exponent(
    largest: Float[Array, "..."], smallest: Float[Array, "..."], dynamic_range: float
) -> UInt8[Array, "..."]:
    """Computes the k, in sixteenths, that maps a group onto `dynamic_range`.

    Args:
      largest: The group's amax; 0 for a group of zeros.
      smallest: The group's smallest nonzero magnitude; at least the smallest normal
        float32.
      dynamic_range: The ratio D of magnitudes to fill.

    Returns:
      floor(16 log2(D) / log2(largest / smallest)), clipped to between 1 (k = 1/16) and
      255 (k just below 16). A group of equal, zero or non-finite magnitudes has 255.
    """
    octaves = jnp.log2(largest) - jnp.log2(smallest)
    steps = _STEPS * math.log2(dynamic_range) / octaves
    spread = (octaves > 0) & jnp.isfinite(octaves)
    return jnp.where(spread, jnp.clip(steps, 1, 255), 255).astype(jnp.uint8)


def power(steps: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Returns k as a float32 number, for k given in sixteenths."""
    return steps.astype(jnp.float32) * (1 / _STEPS)


def expand(
    x: Float[Array, "..."], largest: Float[Array, "..."], k: Float[Array, "..."] | float
) -> Float[Array, "..."]:
    """Computes (|x| / largest) ** k, in [0, 1].

    It is computed in logarithms, since the ratio may be below the smallest float32.
    """
    return jnp.exp2(jnp.minimum(jnp.log2(jnp.abs(x)) - jnp.log2(largest), 0.0) * k)


def contract(
    t: Float[Array, "..."], largest: Float[Array, "..."], k: Float[Array, "..."] | float
) -> Float[Array, "..."]:
    """Computes largest * t ** (1 / k), for t in [0, 1].

    For t > 0 the result is at least the smallest normal float32, since backends may
    take smaller numbers as 0.
    """
    # Logarithms are needed, since t ** (1 / k) may be below the smallest float32. The
    # log2 of float32's largest number rounds to 128, and 2**128 would be infinite.
    exponent = jnp.log2(t) * (1 / k) + jnp.log2(largest)
    x = jnp.exp2(jnp.minimum(exponent, 128 - 2.0**-16))
    x = jnp.maximum(x, jnp.finfo(jnp.float32).tiny)
    return jnp.where(t == 0, 0.0 * largest, x)  # The product keeps NaN.
