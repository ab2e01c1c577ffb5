"""Gradient scales of their own for each shard of the batch.

A per-tensor scale needs the amax of the whole tensor. If a mesh splits the batch, the
devices would wait for one another's amax several times a layer. Instead each shard is
quantized like a batch of its own, as microbatches are: backward maps over the shards.
The gradients of weights are added up in the end.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.layers.parts import Stream
from coat_jax.meshes import on_explicit_tokens
from pallas_kernels import placement


def by_shards(*mapped: bool) -> Callable[[Callable], Callable]:
    """Wraps the backward pass of a segment to map over the shards of the batch.

    The last arguments of the backward pass are residuals and cotangents. There is one
    `Stream` among the cotangents, and its scale has an entry for each shard, or is a
    scalar if there is only one. The first residual is the segment's parameters, and the
    first result their gradients. The other results are arrays of tokens and streams.
    Delayed scales are known before the pass, and shards have them in common.

    Args:
      *mapped: Whether each residual is a tree of arrays of tokens.
    """

    def wrap(backward):
        @placement.on_common_mesh
        @wraps(backward)
        def wrapped(*args):
            *options, residuals, cotangents = args
            run = partial(backward, *options)
            (scale,) = (x.scale for x in _leaves(cotangents) if isinstance(x, Stream))
            if scale.ndim and "amax" not in residuals[0]:
                grads, *rest = _mapped(run, mapped, scale.size, residuals, cotangents)
            else:
                grads, *rest = run(residuals, cotangents)
                rest = jax.tree.map(partial(_with_scales, scale.shape), rest, **_STREAM)
            return jax.tree.map(_stacked, grads, is_leaf=_is_list), *rest

        return wrapped

    return wrap


def _mapped(run: Callable, mapped: tuple, shards: int, residuals: Any, cotangents: Any):
    axes = tuple(0 if own else None for own in mapped)
    split = partial(jax.tree.map, partial(_split, shards), **_STREAM)
    given = zip(residuals, mapped, strict=True)
    residuals = tuple(split(x) if own else x for x, own in given)
    grads, *rest = jax.vmap(run, (axes, 0))(residuals, split(cotangents))
    return jax.tree.map(placement.total, grads), *jax.tree.map(_merged, rest, **_STREAM)


@jax.custom_vjp
def leave(stream: Stream) -> Float[Array, "b s h"]:
    """Returns the residual stream [b, s, h] behind the last segment.

    Backward computes the scales of the stream's gradient.
    """
    return stream.x


def _leave(stream):
    return stream.x, stream.scale if stream.scale.ndim else None


def _leave_grads(scale, dx):
    if scale is None:
        return (Stream.gradient(dx),)

    def gradient(dx):
        return _merged(jax.vmap(Stream.gradient)(_split(scale.size, dx)))

    return (on_explicit_tokens(gradient, dx, Stream(2, 1))(dx),)


leave.defvjp(_leave, _leave_grads)


def _split(shards: int, x: Array | Stream) -> Any:
    """Returns tokens [b, ...] as [shards, b / shards, ...]."""
    if isinstance(x, Stream):
        return Stream(_split(shards, x.x), x.scale)
    return x.reshape(shards, -1, *x.shape[1:])


def _merged(x: Array | Stream) -> Any:
    """Returns tokens [shards, b / shards, ...] as [b, ...]."""
    if isinstance(x, Stream):
        return Stream(_merged(x.x), x.scale)
    return x.reshape(-1, *x.shape[2:])


def _with_scales(shape: tuple[int, ...], x: Array | Stream) -> Array | Stream:
    if not isinstance(x, Stream):
        return x
    return Stream(x.x, jnp.broadcast_to(x.scale, shape))


def _stacked(gradient: Array | list[Array]) -> Array:
    return jnp.stack(gradient) if _is_list(gradient) else gradient


def _is_list(x: Any) -> bool:
    return isinstance(x, list)


_STREAM: dict[str, Any] = {"is_leaf": lambda x: isinstance(x, Stream)}


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, **_STREAM)
