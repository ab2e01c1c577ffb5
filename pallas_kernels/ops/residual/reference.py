"""Sums of two arrays, quantized, in jnp."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.numerics import Groups
from pallas_kernels.ops.quantize.reference import (
    maxima,
    quantize_groups,
    quantize_tensor,
)


class Summed(NamedTuple):
    """A sum, and what was quantized of it; None where not wanted.

    Attributes:
      total: The sum [..., n], in the dtype of what was added.
      groups: The sum in groups.
      row: FP8 codes [..., n] of the sum, of one scale.
      transposed: The same codes [n, tokens].
      largest: Largest magnitudes of parts of the sum, float32 [k]; how many there are
        is the kernel's choice.
    """

    total: Float[Array, "... n"]
    groups: Groups | None = None
    row: Float[Array, "... n"] | None = None
    transposed: Float[Array, "n tokens"] | None = None
    largest: Float[Array, " k"] | None = None


def add_quantize_groups(
    x: Float[Array, "... n"], y: Float[Array, "... n"], *, dtype: DTypeLike, group: int
) -> Summed:
    """See `pallas_kernels.add_quantize_groups`."""
    total = _sum(x, y)
    groups = quantize_groups(total, dtype=dtype, group=group)
    return Summed(total.astype(x.dtype), groups=groups)


def add_quantize_tensor(
    x: Float[Array, "... n"],
    y: Float[Array, "... n"],
    scale: Float[Array, ""],
    *,
    dtype: DTypeLike,
    row: bool,
    transposed: bool,
) -> Summed:
    """See `pallas_kernels.add_quantize_tensor`."""
    total = _sum(x, y)
    codes = quantize_tensor(total, scale, dtype=dtype, row=row, transposed=transposed)
    return Summed(
        total.astype(x.dtype),
        row=codes.row,
        transposed=codes.transposed,
        largest=maxima(total),
    )


def _sum(x: Array, y: Array) -> Array:
    """The sum as x's dtype has it, in float32."""
    total = x.astype(jnp.float32) + y.astype(jnp.float32)
    # Unlike a conversion, XLA never takes this rounding to bfloat16 away.
    return lax.reduce_precision(total, 8, 7) if x.dtype == jnp.bfloat16 else total
