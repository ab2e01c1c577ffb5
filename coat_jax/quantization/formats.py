"""8-bit formats: the numbers that codes stand for, and rounding to codes."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, UInt32

from coat_jax.quantization.rounding import stochastic_round
from pallas_kernels.numerics import TINY
from pallas_kernels.rounding import (
    UE4M4_SMALLEST,
    pack_ue4m4,
    stochastic_float8,
    unpack_ue4m4,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """An 8-bit format for numbers in [-max, max], or in [0, max] if it has no sign.

    Attributes:
      name: The name of the format in reports.
      dtype: The dtype of the codes.
      max: The largest magnitude that a code stands for.
      dynamic_range: The ratio of magnitudes onto which range expansion maps a group
        (COAT, section 4.2: max**2 / 2 for a floating format).
      power: The exponent k of range expansion that is best for normally distributed
        numbers.
      table: The 256 values of the codes in ascending order; None for a floating format.
      signed: Whether the format has negative numbers. UE4M4 and LOG8 do not have them.
        UE4M4's codes are E4M3 codes in which the sign bit is a fourth bit of the
        mantissa.
    """

    name: str
    dtype: jnp.dtype
    max: float
    dynamic_range: float
    power: float
    table: tuple[float, ...] | None = None
    signed: bool = True

    @property
    def smallest(self) -> float:
        """The smallest magnitude above zero that a code stands for."""
        if self.table is not None:
            return min(value for value in self.table if value > 0)
        if not self.signed:
            return UE4M4_SMALLEST
        return float(ml_dtypes.finfo(self.dtype).smallest_subnormal)

    def encode(
        self,
        x: Float[Array, "..."],
        noise: UInt32[Array, "..."] | None = None,
        power: Array | float = 1.0,
    ) -> Array:
        """Rounds numbers to codes and saturates; NaN stays NaN in floating formats.

        Args:
          x: The numbers, float32. Formats without a sign take negative numbers as zero.
          noise: 32 random bits for each number, for stochastic rounding to one of the
            two neighbouring codes; the mean is the number itself. None rounds to the
            nearest code. A tie goes to the even code, in a table to the lower value, in
            UE4M4 to the higher value.
          power: The k of range expansion, if `x` holds magnitudes to the power k. With
            `noise`, rounding to formats with a sign then keeps the mean of
            x ** (1 / k).
            Formats without a sign are for averages of squares. These move by a small
            part of the distance between codes, so that no correction is made; the means
            are off by 1%.
        """
        x = jnp.clip(x, -self.max if self.signed else 0.0, self.max)
        if self.table is not None:
            return self._in_table(x, noise, power)
        if not self.signed:
            return self._in_ue4m4(x, noise)
        if noise is not None:
            x = stochastic_round(x, noise, self.dtype, power)
            x = jnp.clip(x, -self.max, self.max)
        return x.astype(self.dtype)

    def _in_table(self, x: Array, noise: Array | None, power: Array | float) -> Array:
        values = np.asarray(self.table, np.float32)
        if noise is None:
            index = jnp.searchsorted((values[1:] + values[:-1]) / 2, x)
            return index.astype(self.dtype)
        below = jnp.searchsorted(values[1:-1], x, side="right")
        table = jnp.asarray(values)
        low, high = table[below], table[below + 1]
        if self.signed:
            # This shift makes the mean of x ** (1 / power) right to second order.
            over = jnp.where(jnp.abs(x) < self.smallest, jnp.inf, x)
            x = x + (x - low) * (high - x) / over * ((1 - 1 / power) / 2)
        uniform = (noise >> 8).astype(jnp.float32) * 2.0**-24
        return (below + (x - low > uniform * (high - low))).astype(self.dtype)

    def _in_ue4m4(self, x: Array, noise: Array | None) -> Array:
        half = jnp.uint32(0x80000000)
        rounded = stochastic_float8(
            jnp.maximum(x, self.smallest),
            half if noise is None else noise,
            mantissa=4,
            smallest_normal=self.smallest,
        )
        # Numbers of at least half the smallest code stay above zero, since an update
        # may divide by them.
        zero = x < (self.smallest / 2 if noise is None else TINY)
        return pack_ue4m4(jnp.where(zero, 0.0, jnp.minimum(rounded, self.max)))

    def decode(self, codes: Array) -> Float[Array, "..."]:
        """Returns the float32 values that codes stand for."""
        if self.table is not None:
            return jnp.asarray(self.table, jnp.float32)[codes.astype(jnp.int32)]
        return codes.astype(jnp.float32) if self.signed else unpack_ue4m4(codes)

    def __repr__(self) -> str:
        return self.name


def _float_format(name: str, dtype, power: float) -> Format:
    top = float(ml_dtypes.finfo(dtype).max)
    return Format(
        name=name,
        dtype=jnp.dtype(dtype),
        max=top,
        dynamic_range=top * top / 2,
        power=power,
    )


def dynamic_exponents(fraction_bits: int) -> tuple[float, ...]:
    """Returns the magnitudes of dynamic exponent codes (8-bit optimizers, fig. 2).

    A code has a unary exponent, and a linear fraction in the bits that are left, which
    are `fraction_bits` for the largest exponent. With e leading zeros, the magnitude is
    10**-e times the midpoint of one of 2**(fraction_bits - e) equal parts of [0.1, 1].
    The two remaining codes are 0 and 1.
    """
    magnitudes = [
        10.0**-exponent * (0.1 + 0.9 * (step + 0.5) / 2 ** (fraction_bits - exponent))
        for exponent in range(7)
        for step in range(2 ** (fraction_bits - exponent))
    ]
    return tuple(sorted([*magnitudes, 0.0, 1.0]))


E4M3 = _float_format("E4M3", jnp.float8_e4m3fn, power=3.0)
E5M2 = _float_format("E5M2", jnp.float8_e5m2, power=5.5)
UE4M4 = Format(
    name="UE4M4",
    dtype=jnp.dtype(jnp.float8_e4m3fn),
    max=464.0,
    dynamic_range=464.0 / UE4M4_SMALLEST,
    power=3.0,
    signed=False,
)
# A sign bit leaves six bits of fraction. No code stands for -1.
_DE8 = dynamic_exponents(6)
_DE8_TABLE = tuple(sorted([*_DE8, *(-m for m in _DE8 if 0 < m < 1)]))
DE8 = Format(
    name="DE8",
    dtype=jnp.dtype(jnp.uint8),
    max=1.0,
    dynamic_range=1.0 / min(v for v in _DE8_TABLE if v > 0),
    power=2.75,
    table=_DE8_TABLE,
)
# LOG8 has sixteen codes per octave. Range expansion fits them to each group's range.
LOG8 = Format(
    name="LOG8",
    dtype=jnp.dtype(jnp.uint8),
    max=1.0,
    dynamic_range=2.0 ** (254 / 16),
    power=3.0,
    table=(0.0, *(2.0 ** ((code - 255) / 16) for code in range(1, 256))),
    signed=False,
)
