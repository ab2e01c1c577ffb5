"""Sizes of arrays in bytes, and memory of this process's devices."""

import math
from typing import Any

import jax


def device_peak_bytes() -> int | None:
    """Returns the most bytes used at once on any local device; None if unknown."""
    return _largest("peak_bytes_in_use")


def device_limit_bytes() -> int | None:
    """Returns the most bytes that JAX may allocate on a device; None if unknown."""
    return _largest("bytes_limit")


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Returns whether an error of JAX reports that memory ran out."""
    # A CPU reports an error of the kind INTERNAL with these words.
    message = str(error)
    return "RESOURCE_EXHAUSTED" in message or "Out of memory allocating" in message


def tree_bytes(tree: Any) -> int:
    """Returns the size of all arrays of a tree in bytes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def shard_bytes(tree: Any) -> int:
    """Returns the bytes of a tree's arrays, or abstract arrays, on one device."""
    return sum(
        math.prod(shard_shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def shard_shape(x: Any) -> tuple[int, ...]:
    """Returns the shape of an array's shard on one device."""
    return x.sharding.shard_shape(x.shape)


def _largest(name: str) -> int | None:
    """Returns the largest value of a statistic over this process's devices, or None."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((counters[name] for counters in stats if name in counters), default=None)
