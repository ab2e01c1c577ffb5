"""Small arrays, side by side as one: compiled once, and one kernel instead of many.

A step of Adam on quantized moments is two hundred operations. Compiled anew for each
of a model's parameters they would take a minute, and optax's Adam takes two seconds.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

# Larger arrays are left alone: putting them side by side would copy them.
_LARGEST = 2**22


def batches(arrays: Sequence[Any], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Returns the places of arrays that can be computed together, large ones alone.

    Args:
      arrays: Arrays; those on a mesh stay alone, since side by side they would move.
      key: Gives for a place what those have in common that are together.
    """
    found: dict[Hashable, list[int]] = {}
    for j, x in enumerate(arrays):
        together = math.prod(x.shape) <= _LARGEST and jax.typeof(x).sharding.mesh.empty
        found.setdefault(("together", key(j)) if together else j, []).append(j)
    return list(found.values())


def join(arrays: Sequence[Array], group: int) -> Array:
    """Arrays [..., n] as one, [groups, group], padded where a last group is short."""

    def rows(x):
        short = -x.shape[-1] % group
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]) if short else x
        return x.reshape(-1, group)

    # The codes move as integers. A CPU has no FP8 and would convert them twice.
    dtype = arrays[0].dtype
    return _as(jnp.concatenate([rows(_as(x, _stored(dtype))) for x in arrays]), dtype)


def starts(counts: Sequence[int]) -> list[Array]:
    """Returns the index at which each of these groups starts, in order, for `part`.

    Behind a barrier a start is an operand: slices of one shape are one kernel.
    """
    first = [0, *itertools.accumulate(counts)][:-1]
    return lax.optimization_barrier([jnp.int32(start) for start in first])


def part(
    x: Array, shapes: Sequence[tuple[int, ...]], at: Sequence[Array]
) -> list[Array]:
    """Undoes `join` of arrays of these shapes, which start there."""
    group, dtype = x.shape[-1], x.dtype
    x, zero, parts = _as(x, _stored(dtype)), jnp.int32(0), []
    for (*leading, n), start in zip(shapes, at, strict=True):
        groups = -(-n // group)
        size = (math.prod(leading) * groups, group)
        rows = lax.dynamic_slice(x, (start, zero), size, allow_negative_indices=False)
        rows = rows.reshape(*leading, groups * group)
        parts.append(_as(rows if groups * group == n else rows[..., :n], dtype))
    return parts


def _stored(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.uint8) if dtype.itemsize == 1 else dtype


def _as(x: Array, dtype: jnp.dtype) -> Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
