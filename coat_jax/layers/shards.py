"""Backward passes over the shards of a batch, and the order of collective operations.

A per-tensor scale needs the amax of the whole tensor. If a mesh splits the batch, the
devices would wait for one another's amax several times a layer. Instead each shard's
gradients are quantized with scales of their own, like the gradients of microbatches:
the backward pass maps over the shards. The gradients of weights are summed in the end.

Devices gather codes of weights and scatter gradients while they compute something else.
XLA may start a collective operation as soon as its operand is known, but at times
starts it only when its result is needed. `Stream.token` determines when that is.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.layers.parts import Stream
from coat_jax.meshes import on_explicit_tokens
from pallas_kernels.dispatch import array_types, exchange


def by_shards(
    *mapped: bool, known: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that maps a segment's backward pass over the batch's shards.

    The last arguments of the backward pass are residuals and cotangents. There is one
    `Stream` among the cotangents, and its scale has an entry for each shard, or is a
    scalar if there is only one shard. The first residual is the segment's parameters,
    and the first result is their gradients, which are summed over shards and then cast
    to the dtypes of the parameters. The other results are arrays of tokens and streams.
    Delayed scales are known before the pass and are the same for all shards, so that
    the pass is not mapped.

    Args:
      *mapped: For each residual, whether it is a tree of arrays of tokens, which are
        divided among the shards.
      known: Whether the token of the resulting stream is known only when the sums of
        weight gradients are known.
    """

    def wrap(backward):
        @array_types.on_common_mesh
        @wraps(backward)
        def wrapped(*args):
            *options, residuals, cotangents = args
            run = partial(backward, *options)
            stream = stream_of(cotangents)
            if stream.scale.ndim and "amax" not in residuals[0]:
                grads, *rest = _over_shards(run, mapped, residuals, cotangents)
            else:
                grads, *rest = run(residuals, cotangents)
            return finished(residuals[0], stream, grads, rest, known)

        return wrapped

    return wrap


def finished(
    params: Any, stream: Stream, grads: Any, streams: list[Any], in_order: bool = True
) -> tuple[Any, ...]:
    """Returns a segment's gradients in the form of the arguments of its forward pass.

    Args:
      params: The parameters.
      stream: The gradient of the stream that the segment returned.
      grads: The gradients of parameters, added up over devices.
      streams: The other gradients, arrays and streams.
      in_order: Whether the token of the stream is known only when `grads` are known.
    """
    shape, token = stream.scale.shape, stream.token
    if in_order and token is not None:
        matrices = (x for x in jax.tree.leaves(grads) if x.ndim > 1)
        for gradient in matrices:
            token = exchange.ready(token, gradient)
    grads = {name: _finished(g, params[name]) for name, g in grads.items()}

    def of_devices(x: Any) -> Any:
        if not isinstance(x, Stream):
            return x
        return Stream(x.x, jnp.broadcast_to(x.scale, shape), token)

    return grads, *map(of_devices, streams)


def over_shards(fn: Callable[[Array], Any], stream: Stream) -> Any:
    """Applies a function of tokens [b, s, h] to each shard of a stream.

    The results of the shards are concatenated along their first axis, which is the
    batch, or an axis with one value for each shard.
    """
    if not stream.scale.ndim:
        return fn(stream.x)
    return _map(_merged, jax.vmap(fn)(_split(stream.scale.size, stream.x)))


def _over_shards(run: Callable, mapped: tuple, residuals: Any, cotangents: Any) -> Any:
    split = partial(_split, stream_of(cotangents).scale.size)
    given = zip(residuals, mapped, strict=True)
    residuals = tuple(_map(split, x) if own else x for x, own in given)
    axes = tuple(0 if own else None for own in mapped)
    cotangents = _map(split, cotangents)
    of_cotangents = _map(_axes, cotangents)
    grads, *rest = jax.vmap(run, (axes, of_cotangents))(residuals, cotangents)
    return jax.tree.map(exchange.total, grads), *_map(_merged, rest)


@jax.custom_vjp
def leave(stream: Stream) -> Float[Array, "b s h"]:
    """Returns the residual stream [b, s, h] after the last segment.

    The backward pass computes the scales of the stream's gradient.
    """
    return stream.x


def _leave(stream):
    return stream.x, stream.scale if stream.scale.ndim else None


def _leave_grads(scale, dx):
    if scale is None:
        return (Stream.gradient(dx),)

    def gradient(dx):
        found = _merged(jax.vmap(Stream.gradient)(_split(scale.size, dx)))
        return found._replace(token=jnp.zeros(()))

    return (on_explicit_tokens(gradient, dx, Stream(2, 1, 0))(dx),)


leave.defvjp(_leave, _leave_grads)


def _split(shards: int, x: Array | Stream) -> Any:
    """Returns tokens [b, ...] as [shards, b / shards, ...]."""
    if isinstance(x, Stream):
        return x._replace(x=_split(shards, x.x))
    return x.reshape(shards, -1, *x.shape[1:])


def _merged(x: Array | Stream) -> Any:
    """Returns tokens [shards, b / shards, ...] as [b, ...]."""
    if isinstance(x, Stream):
        return x._replace(x=_merged(x.x))
    return x.reshape(-1, *x.shape[2:])


def _axes(x: Array | Stream) -> Any:
    """Returns `vmap`'s `in_axes` for an array or a stream; shards share the token."""
    return Stream(0, 0, None) if isinstance(x, Stream) else 0


def _finished(gradient: Any, param: Any) -> Any:
    """Returns a parameter's gradient in the parameter's shape and dtype."""
    gradient = jax.tree.map(_stacked, gradient, is_leaf=_is_list)
    return gradient.astype(param.dtype) if hasattr(param, "dtype") else gradient


def _stacked(gradient: Array | list[Array]) -> Array:
    return jnp.stack(gradient) if _is_list(gradient) else gradient


def _is_list(x: Any) -> bool:
    return isinstance(x, list)


def _map(fn: Callable, tree: Any) -> Any:
    """Applies `fn` to each array and each stream of a tree."""
    return jax.tree.map(fn, tree, is_leaf=_is_stream)


def stream_of(tree: Any) -> Stream:
    """Returns the only stream in a tree."""
    (found,) = filter(_is_stream, jax.tree.leaves(tree, is_leaf=_is_stream))
    return found


def _is_stream(x: Any) -> bool:
    return isinstance(x, Stream)
