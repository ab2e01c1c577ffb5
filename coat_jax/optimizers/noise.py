"""Random bits for rounding that are a function of step, parameter and element.

Nobody passes a key, and nobody keeps one: a step that is replayed after a resume, or
computed on other devices, rounds as it did before.
"""

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

from pallas_kernels import rounding
from pallas_kernels.ops.adam.reference import GROUP, bits_of_elements
from pallas_kernels.rounding import hash32


def random_words(
    step: Int32[Array, ""], path: Any, like: Array, shape: tuple[int, ...]
) -> UInt32[Array, "... g"]:
    """Returns one random word for each group of 128 on the last axis of `shape`.

    Under jit a group's word depends on its place in the whole array, however that is
    sharded. Within `shard_map` it depends on the place in the shard and on the mesh
    axes over which `like` varies, and on no other: replicas stay equal to the bit.

    Args:
      step: The number of the step, which wraps around.
      path: Where the parameter is in its tree, a JAX key path without NNX variables.
      like: An array of the parameter's; says which manual mesh axes matter.
      shape: The parameter's shape.
    """
    groups = (*shape[:-1], -(-shape[-1] // GROUP)) if shape else (1,)
    # Behind a barrier the stream is an operand, and not a constant that would make the
    # code of each parameter another: alike ones are compiled once.
    stream = lax.optimization_barrier(stream_of(path, like))
    return rounding.random_words(seed_of(step), stream, groups)


def seed_of(step: Int32[Array, ""]) -> UInt32[Array, ""]:
    """Returns the seed of a step's random words."""
    return hash32(step.astype(jnp.uint32))


def stream_of(path: Any, like: Array) -> UInt32[Array, ""]:
    """Returns the number that tells a parameter's random words from those of others."""
    stream = jnp.asarray(_name(path))
    for axis in sorted(jax.typeof(like).manual_axis_type.varying):
        index = lax.axis_index(axis).astype(jnp.uint32)
        stream = hash32(stream ^ (index + jnp.uint32(zlib.crc32(axis.encode()))))
    return stream


def random_words_of_batch(
    step: Int32[Array, ""], paths: Sequence[Any], groups: Sequence[int]
) -> UInt32[Array, "g 1"]:
    """Returns `random_words` of several arrays, so many groups each, as one column.

    It compiles fastest where arrays of as many groups are side by side.
    """
    names, start, places = seed_of(step) + np.stack(list(map(_name, paths))), 0, []
    for count, same in itertools.groupby(groups):
        some = names[start : (start := start + len(list(same)))]
        places.append((some[:, None] + lax.iota(jnp.uint32, count)).reshape(-1, 1))
    return hash32(jnp.concatenate(places))


def _name(path: Any) -> np.uint32:
    return np.uint32(zlib.crc32(jax.tree_util.keystr(tuple(path)).encode()))


def random_bits(words: UInt32[Array, "... g"], shape: tuple[int, ...]) -> Array:
    """Returns 32 random bits for each element of `shape` from the words of its groups.

    They are those that the kernel of Adam's step has.
    """
    bits = bits_of_elements(words)
    bits = bits.reshape(*words.shape[:-1], words.shape[-1] * GROUP)
    return bits[..., : shape[-1]] if shape else bits[0]


def on_explicit_mesh(fn: Callable, like: Array, result: Any) -> Callable:
    """`fn` on a mesh with explicit axes, where it is XLA that cuts what it computes.

    Args:
      fn: A function of arrays.
      like: An array whose type says on which mesh.
      result: What `fn` returns, or arrays of the same types.
    """
    explicit = jax.typeof(like).sharding.mesh.explicit_axes
    if not explicit:
        return fn
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, result)
    return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=shardings)
