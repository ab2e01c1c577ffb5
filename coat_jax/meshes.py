"""Runs functions of arrays on meshes, with explicit or with automatic axes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import array_types


def on_explicit_mesh(fn: Callable, like: Array, result: Any) -> Callable:
    """Wraps `fn` so that explicit mesh axes are automatic within it.

    XLA then chooses the shardings of what `fn` computes between arguments and results.
    Without explicit axes `fn` is returned as it is.

    Args:
      fn: A function of arrays.
      like: An array with the mesh in its type.
      result: The result of `fn`, or a tree of arrays of the same types. The wrapped
        function's results get the shardings of these arrays; where an array is on no
        mesh, its result gets the sharding of `like`.

    Raises:
      ValueError: Raised by the wrapped function, if the sharding of an argument or a
        result is unreduced or reduced.
    """
    here = jax.typeof(like).sharding
    explicit = here.mesh.explicit_axes
    if not explicit:
        return fn
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, result)
    shardings = jax.tree.map(lambda s: here if s.mesh.empty else s, shardings)
    return _on_automatic_axes(fn, explicit, shardings)


def automatic(x: Array) -> Array:
    """Returns `x` for use in code in which its explicit mesh axes are automatic.

    `jax.sharding.auto_axes` converts its arguments in the same way.
    """
    here = jax.sharding.get_abstract_mesh()
    explicit = set(jax.typeof(x).sharding.mesh.explicit_axes)
    if explicit <= set(here.explicit_axes):
        return x
    return jax.sharding.reshard(x, P(*[None] * x.ndim))


def explicit(x: Array, sharding: jax.sharding.Sharding) -> Array:
    """Returns `x` with the explicit mesh axes of `sharding` in its type.

    `x` is resharded to `sharding` only if its type does not have these axes yet.
    """
    explicit = set(sharding.mesh.explicit_axes)
    if explicit <= set(jax.typeof(x).sharding.mesh.explicit_axes):
        return x
    return jax.sharding.reshard(x, sharding)


def whole(x: Array | None) -> Array | None:
    """Returns a small parameter that every device has, on explicit mesh axes.

    Products with tokens could not be split along the axes of both. The gradient is
    split like `x`. None is returned as it is.
    """
    if x is None:
        return None
    array = jnp.asarray(x)  # Variables of NNX have no type.
    sharding = jax.typeof(array).sharding
    if not any(sharding.spec):
        return x
    replicated = jax.NamedSharding(sharding.mesh, P(*[None] * array.ndim))
    return jax.sharding.reshard(array, replicated)


def on_explicit_tokens(fn: Callable, x: Array, results: Any) -> Callable:
    """Wraps `fn` like `on_explicit_mesh`, with results that are split like tokens.

    Within `shard_map` all arguments of `fn` vary over the same devices.

    Args:
      fn: A function of trees of arrays.
      x: An array of tokens with the mesh in its type.
      results: A tree with the structure of the results. Each leaf is the number of
        leading axes of a result that are axes of tokens. These axes are split like the
        leading axes of `x`, and all other axes of the result are not split.
    """
    where = jax.typeof(x).sharding
    if not (explicit := where.mesh.explicit_axes):
        return lambda *args: fn(*array_types.varying_alike(args))
    out = jax.tree.map(
        lambda tokens: jax.NamedSharding(where.mesh, P(*where.spec[:tokens])), results
    )
    return _on_automatic_axes(fn, explicit, out)


def of_tokens[**Args, Result](
    product: Callable[Args, Result],
) -> Callable[Args, Result]:
    """Wraps a product of tokens, for weights that an explicit mesh axis may split.

    Args:
      product: A function of tokens [*batch, k], then of other trees of arrays. Its
        result [*batch, ...] is split like the tokens; see `on_explicit_tokens`.
    """

    @functools.wraps(product)
    def wrapped(x, *trees):
        return on_explicit_tokens(product, x, x.ndim - 1)(x, *trees)

    return wrapped


def _on_automatic_axes(fn: Callable, axes: tuple[str, ...], out: Any) -> Callable:
    """Wraps a function so that mesh axes are automatic within it.

    The wrapped function raises a `ValueError` if the sharding of an argument or a
    result is unreduced or reduced, because XLA would not know of sums over devices
    that are still to be computed.
    """
    inner = jax.sharding.auto_axes(fn, axes=axes, out_sharding=out)

    @functools.wraps(fn)
    def wrapped(*args):
        of_args = [jax.typeof(x).sharding for x in jax.tree.leaves(args)]
        for sharding in (*of_args, *jax.tree.leaves(out)):
            if array_types.is_partial(sharding):
                raise ValueError(
                    "FP8 takes and returns arrays that are added up over all devices, "
                    f"got the sharding {sharding.spec}"
                )
        return inner(*args)

    return wrapped


def sharded_like(x: Array, y: Array) -> Array:
    """Returns `y`, resharded like `x` if `x` is on a mesh with explicit axes.

    Both arrays have the same shape. Quantization in groups drops the sharding of an
    axis if it would cut groups.
    """
    target = jax.typeof(x).sharding
    if not target.mesh.explicit_axes or jax.typeof(y).sharding == target:
        return y
    return jax.sharding.reshard(y, target)


def batch_shards(x: Array, batch_axes: str | tuple[str, ...] | None) -> int:
    """Returns the number of shards that a mesh splits the batch into.

    The number is 1 within `shard_map`, and if it does not divide the batch.

    Args:
      x: An array with the mesh in its type.
      batch_axes: The mesh axes that split the batch, if the mesh's axes are automatic.
        None means one shard then, because types do not say how arrays are split.
    """
    mesh = array_types.mesh_of(x)
    if mesh is None or mesh.manual_axes:
        return 1
    if mesh.explicit_axes:
        batch_axes, *_ = *jax.typeof(x).sharding.spec, None
    names = array_types.axis_names(batch_axes)
    shards = array_types.parts_of(mesh, names)
    return 1 if len(x) % shards else shards


def embedded(
    table: Float[Array, "vocab h"],
    tokens: Int[Array, "b s"],
    batch_axes: str | tuple[str, ...] | None,
    length_axis: str | None = None,
) -> Float[Array, "b s h"]:
    """Returns the rows of `table` at `tokens`, split like the tokens on a mesh.

    Args:
      table: The embedding.
      tokens: The indices of the rows.
      batch_axes: The mesh axes that split the batch, if the mesh's axes are automatic.
        If `length_axis` is None as well, None leaves the split to XLA.
      length_axis: The mesh axis that splits sequences, if automatic axes do.
    """
    mesh = array_types.mesh_of((table, tokens))
    if mesh is None or mesh.manual_axes:
        return table[tokens]
    if mesh.explicit_axes:
        batch, length = (*jax.typeof(tokens).sharding.spec, None, None)[:2]
        where = jax.NamedSharding(mesh, P(batch, length, None))
        return table.at[tokens].get(out_sharding=where)
    x = table[tokens]
    if batch_axes is None and length_axis is None:
        return x
    where = jax.NamedSharding(mesh, P(batch_axes, length_axis, None))
    return jax.lax.with_sharding_constraint(x, where)
