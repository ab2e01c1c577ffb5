"""Decides which arrays can have FP8 copies, and in which groups they are quantized."""

import math

import jax
import jax.numpy as jnp

from coat_jax.programs.primitives import size_of

# Quantizing a smaller residual saves too few bytes to pay for two more operations.
MIN_SIZE = 4096
TOO_SMALL = f"fewer than {MIN_SIZE} elements"
# Scales of shorter rows would take too many bytes. For such rows the last axis is
# merged with axes before it, except the first axis. Rows of one element are statistics.
_MIN_ROW_BYTES = 16
MIN_STATISTIC = 16  # The fewest elements of a row that has statistics.
_MERGED = 16  # The least length of an axis that several axes are merged into.
# Arrays that only matmuls read get groups of up to `_MAX_GROUP` elements. A longer row
# must then be a multiple of `_SHARES` groups, so that devices can share it without
# cutting a group.
_MAX_GROUP = 128
_SHARES = 8


def why_not_fp8(aval: jax.core.ShapedArray) -> str | None:
    """Returns the reason why an array of this shape and dtype has no copy, or None."""
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return "complex numbers"
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return "no floating numbers"
    if is_narrow(aval):
        return "8 bits already"
    if aval.dtype.itemsize == 8:
        return "float64, whose range scales do not have"
    if size_of(aval) < MIN_SIZE:
        return TOO_SMALL
    if not isinstance(aval.shape[-1], int):
        return "rows of unknown length"
    if _is_short(aval) and not merged_axes(aval):
        return f"rows of less than {_MIN_ROW_BYTES} bytes"
    return None


def is_narrow(aval: jax.core.ShapedArray) -> bool:
    """Returns whether an array has floating numbers of 8 bits, as codes do."""
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize == 1


def _is_short(aval: jax.core.ShapedArray) -> bool:
    return aval.shape[-1] * aval.dtype.itemsize < _MIN_ROW_BYTES


def merged_axes(aval: jax.core.ShapedArray) -> tuple[int, ...]:
    """Returns the lengths of the last axes that a copy merges, or () if it merges none.

    Axes are merged if the last axis is too short for groups. A copy of attention's
    probabilities [batch, queries, keys, heads] then takes as many bytes as a copy in
    the order [batch, heads, queries, keys].
    """
    *leading, last = aval.shape
    if last == 1 or not _is_short(aval):
        return ()
    explicit = aval.sharding.spec if aval.sharding.mesh.explicit_axes else ()
    for count in range(2, len(leading) + 1):
        axes = aval.shape[-count:]
        if not all(isinstance(n, int) for n in axes) or any(explicit[-count:]):
            return ()
        if math.prod(axes) >= _MERGED:
            return axes
    return ()


def group_of_products(row: int, group: int) -> int:
    """Returns the group size for rows of `row` elements that only matmuls read.

    Matmuls are as accurate with larger groups; even one scale per tensor would do
    (COAT, section 5.1). But the amax of a tensor takes another pass over the array, and
    over all devices that share it.
    """
    if row <= _MAX_GROUP:
        return max(_MAX_GROUP, group)
    sizes = [_MAX_GROUP >> i for i in range(3)]
    fitting = [size for size in sizes if size > group and row % (_SHARES * size) == 0]
    return max(fitting, default=group)
