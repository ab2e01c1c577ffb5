"""Writes operations that JAX has had since version 0.12 in older ones.

`jnp.stack`, `jnp.unstack`, `jnp.tile` and loops over an array have operations of their
own there, which before were slices, joins and broadcasts. All that reads programs knows
the older ones alone.
"""

from collections.abc import Callable, Sequence
from functools import partial

from jax import lax
from jax.extend import core
from jaxtyping import Array


def in_older_ones(eqn: core.JaxprEqn) -> Callable[..., Sequence[Array]] | None:
    """Returns a function that computes an operation by older ones.

    Returns None if the operation is not a newer one.
    """
    function = _NEWER.get(eqn.primitive.name)
    return function and partial(function, **eqn.params)


def _stack(*arrays: Array, axis: int) -> list[Array]:
    return [lax.concatenate([lax.expand_dims(x, [axis]) for x in arrays], axis)]


def _unstack(x: Array, *, axis: int) -> list[Array]:
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]


def _tile(x: Array, *, reps: Sequence[int]) -> list[Array]:
    sizes = [size for pair in zip(reps, x.shape, strict=True) for size in pair]
    repeated = lax.broadcast_in_dim(x, sizes, range(1, len(sizes), 2))
    shape = [n * size for n, size in zip(reps, x.shape, strict=True)]
    return [lax.reshape(repeated, shape)]


_NEWER = {"stack": _stack, "tile": _tile, "unstack": _unstack}
