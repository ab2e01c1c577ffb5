"""Random bits for rounding that are a function of step, parameter and element.

No key has to be passed or stored. A step that is repeated after a resume, or computed
on other devices, rounds as before.
"""

import contextlib
import contextvars
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

from pallas_kernels import rounding
from pallas_kernels.ops.adam.reference import GROUP, bits_of_elements
from pallas_kernels.rounding import hash32
from pallas_kernels.versions import varying_axes

_layer: contextvars.ContextVar[Array | None] = contextvars.ContextVar(
    "layer", default=None
)


@contextlib.contextmanager
def layer_of_stacks(layer: Int32[Array, ""]) -> Iterator[None]:
    """Makes random bits in this context depend on a layer's index in stacks of layers.

    Parameters [1, ...] of the layer get the random bits that they have in the stacks.

    Args:
      layer: The index of the parameters' layer in the stacks.
    """
    token = _layer.set(layer)
    try:
        yield
    finally:
        _layer.reset(token)


def random_words(
    step: Int32[Array, ""], stream: UInt32[Array, ""], shape: tuple[int, ...]
) -> UInt32[Array, "... g"]:
    """Returns one random word for each group of 128 on the last axis of `shape`.

    Under jit a group's word depends on the group's position in the whole array, however
    the array is sharded. Within `shard_map` it depends on the position in the shard.

    Args:
      step: The number of the step, which may wrap around.
      stream: The parameter's number; see `stream_of`.
      shape: The parameter's shape.
    """
    # The barrier makes the stream an operand. A constant would give each parameter its
    # own code, while similar parameters should share compiled code.
    stream = lax.optimization_barrier(stream)
    return rounding.random_words(seed_of(step), stream, _groups(shape))


def seed_of(step: Int32[Array, ""]) -> UInt32[Array, ""]:
    """Returns the seed of a step's random words."""
    return hash32(step.astype(jnp.uint32))


def stream_of(path: Any, like: Array) -> UInt32[Array, ""]:
    """Returns a number that is different for each parameter.

    Within `shard_map` it is also different for shards along the mesh axes over which
    `like` varies, and along no other axis. So replicas stay equal bit for bit. Within
    `layer_of_stacks` it includes the index of the layer's first group in the stack.

    Args:
      path: The parameter's position in its tree, a JAX key path without NNX variables.
      like: An array that belongs to the parameter, of its shape.
    """
    stream = jnp.asarray(_name(path))
    for axis in sorted(varying_axes(like)):
        index = lax.axis_index(axis).astype(jnp.uint32)
        stream = hash32(stream ^ (index + jnp.uint32(zlib.crc32(axis.encode()))))
    return stream + _groups_before(math.prod(_groups(like.shape)))


def _groups(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // GROUP)) if shape else (1,)


def _groups_before(groups: int) -> Array | np.uint32:
    """Returns the number of groups in earlier layers of a stack, 0 without a stack.

    Args:
      groups: The number of groups in one layer.
    """
    layer = _layer.get()
    if layer is None:
        return np.uint32(0)
    return layer.astype(jnp.uint32) * jnp.uint32(groups)


def random_words_of_batch(
    step: Int32[Array, ""], paths: Sequence[Any], groups: Sequence[int]
) -> UInt32[Array, "g 1"]:
    """Returns the `random_words` of several arrays as one column.

    It compiles fastest if arrays with the same number of groups are neighbours.

    Args:
      step: The number of the step.
      paths: The path of each array's parameter; see `stream_of`.
      groups: The number of groups of each array.
    """
    names, start, places = seed_of(step) + np.stack(list(map(_name, paths))), 0, []
    for count, same in itertools.groupby(groups):
        some = names[start : (start := start + len(list(same)))]
        some = some + _groups_before(count)
        columns = some[:, None] + lax.iota(jnp.uint32, count)[None]
        places.append(columns.reshape(-1, 1))
    return hash32(jnp.concatenate(places))


def _name(path: Any) -> np.uint32:
    return np.uint32(zlib.crc32(jax.tree_util.keystr(tuple(path)).encode()))


def random_bits(words: UInt32[Array, "... g"], shape: tuple[int, ...]) -> Array:
    """Returns 32 random bits for each element of `shape` from the words of its groups.

    The kernel of Adam's step computes the same bits.
    """
    bits = bits_of_elements(words)
    bits = bits.reshape(*words.shape[:-1], words.shape[-1] * GROUP)
    return bits[..., : shape[-1]] if shape else bits[0]
