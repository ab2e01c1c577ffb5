"""Joins small arrays into one array, to compile and run one kernel instead of many.

Adam's step on quantized moments consists of two hundred operations. Compiling them for
each parameter of a model would take a minute. Compiling optax's Adam takes two seconds.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

# The size of the largest array that is joined, in elements. Joining copies arrays.
_LARGEST = 2**22


def batches(arrays: Sequence[Any], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Returns lists of indices of arrays to compute together; large arrays stay alone.

    Args:
      arrays: The arrays. Arrays on a mesh stay alone, since joining would move them.
      key: A function of an array's index. Arrays of equal keys are grouped.
    """
    found: dict[Hashable, list[int]] = {}
    for j, x in enumerate(arrays):
        together = math.prod(x.shape) <= _LARGEST and jax.typeof(x).sharding.mesh.empty
        found.setdefault(("together", key(j)) if together else j, []).append(j)
    return list(found.values())


def join(arrays: Sequence[Array], group: int) -> Array:
    """Joins arrays [..., n] into one array [groups, group].

    Each row of n elements is cut into groups of length `group`; a short last group is
    padded with zeros.
    """

    def rows(x):
        short = -x.shape[-1] % group
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]) if short else x
        return x.reshape(-1, group)

    # Codes are joined as integers, because a CPU has no FP8 and would convert twice.
    dtype = arrays[0].dtype
    return as_dtype(
        jnp.concatenate([rows(as_dtype(x, stored_dtype(dtype))) for x in arrays]), dtype
    )


def starts(counts: Sequence[int]) -> list[Array]:
    """Returns the index of each array's first group in the joined array, for `part`.

    The indices have passed a barrier, so that XLA takes them as operands, not as
    constants, and compiles slices of the same shape to one kernel.
    """
    first = [0, *itertools.accumulate(counts)][:-1]
    return lax.optimization_barrier([jnp.int32(start) for start in first])


def part(
    x: Array, shapes: Sequence[tuple[int, ...]], at: Sequence[Array]
) -> list[Array]:
    """Cuts arrays of these shapes out of a joined array; their groups begin at `at`."""
    group, dtype = x.shape[-1], x.dtype
    x, zero, parts = as_dtype(x, stored_dtype(dtype)), jnp.int32(0), []
    for (*leading, n), start in zip(shapes, at, strict=True):
        groups = -(-n // group)
        size = (math.prod(leading) * groups, group)
        rows = lax.dynamic_slice(x, (start, zero), size, allow_negative_indices=False)
        rows = rows.reshape(*leading, groups * group)
        parts.append(as_dtype(rows if groups * group == n else rows[..., :n], dtype))
    return parts


def stored_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype in which arrays of `dtype` are joined: uint8 for FP8 codes."""
    return jnp.dtype(jnp.uint8) if dtype.itemsize == 1 else dtype


def as_dtype(x: Array, dtype: jnp.dtype) -> Array:
    """Reinterprets the bits of `x` as an array of `dtype`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
