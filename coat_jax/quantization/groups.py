"""Reshapes of arrays that put the elements of a group next to each other on axes."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from pallas_kernels.dispatch import array_types


def split(x: Array, block: tuple[int, ...]) -> Array:
    """Reshapes [n0, n1, ...] to [n0 / b0, b0, n1 / b1, b1, ...], padded with zeros."""
    axes = groups_and_lengths(x.shape, block)
    padding = [(0, -n % b) for n, (_, b) in zip(x.shape, axes, strict=True)]
    x, sharding = _of_whole_groups(x, axes)
    if any(after for _, after in padding):
        x = jnp.pad(x, padding)
    shape = [d for axis in axes for d in axis]
    return jnp.reshape(x, shape, out_sharding=sharding)


def groups_and_lengths(
    shape: tuple[int, ...], block: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Returns the number of groups and the length of a group, on each axis."""
    # The minimum of a symbolic length, as in `jax.export`, cannot be computed.
    sizes = zip(shape, block, strict=True)
    lengths = [1 if b == 1 else max(min(n, b), 1) for n, b in sizes]
    return [((n + -n % b) // b, b) for n, b in zip(shape, lengths, strict=True)]


def _of_whole_groups(
    x: Array, axes: Sequence[tuple[int, int]]
) -> tuple[Array, NamedSharding | None]:
    """Reshards an array so that no explicit mesh axis cuts groups.

    Args:
      x: The array.
      axes: The number of groups and the length of a group, on each axis.

    Returns:
      The array, and the sharding of what `split` returns, None without explicit axes.
    """
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes:
        return x, None
    whole, reshaped = [], []
    for (groups, _), entry in zip(axes, sharding.spec, strict=True):
        names = array_types.axis_names(entry)
        while groups > 1 and groups % array_types.parts_of(sharding.mesh, names):
            names = names[:-1]
        entry = entry if names == array_types.axis_names(entry) else names or None
        whole.append(entry)
        reshaped += (entry, None) if groups > 1 else (None, entry)
    if P(*whole) != sharding.spec:
        x = jax.sharding.reshard(x, sharding.update(spec=P(*whole)))
    return x, sharding.update(spec=P(*reshaped))


def merge(groups: Array, shape: tuple[int, ...]) -> Array:
    """Returns the array of `shape` that `split` has reshaped to `groups`."""
    sharding = jax.typeof(groups).sharding
    explicit = bool(sharding.mesh.explicit_axes)
    if explicit:
        spec = sharding.spec
        entries = [a or b for a, b in zip(spec[::2], spec[1::2], strict=True)]
        sharding = sharding.update(spec=P(*entries))
    x = jnp.reshape(
        groups,
        [math.prod(groups.shape[i : i + 2]) for i in range(0, groups.ndim, 2)],
        out_sharding=sharding if explicit else None,
    )
    return x[tuple(slice(n) for n in shape)] if x.shape != shape else x


def broadcastable(scale: Array) -> Array:
    """Reshapes [g0, g1, ...] to [g0, 1, g1, 1, ...], to broadcast against `split`."""
    return scale.reshape([d for n in scale.shape for d in (n, 1)])
