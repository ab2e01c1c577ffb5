"""FP8 moments on more than one device.

A moment's codes have its parameter's shape and its sharding. Groups run along the last
axis. If a device's part of this axis consists of whole groups of 128, a step moves
nothing between devices.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from coat_jax.optimizers.moment import Moment
from coat_jax.optimizers.places import field_of, fields_of
from coat_jax.optimizers.trees import boxed, broadcast, is_quantized, unboxed
from coat_jax.quantization.array import QuantizedArray, quantize_moment
from coat_jax.quantization.granularity import PerGroup
from pallas_kernels.dispatch.array_types import axis_names, parts_of, varying_alike


def opt_state_sharding(
    tx: optax.GradientTransformation, params_abstract: Any, params_sharding: Any
) -> Any:
    """Returns the shardings of an optimizer's state, given the parameters' shardings.

    An array at a parameter's path and with its shape, such as a moment or an
    accumulated gradient, has the parameter's sharding. The scales and exponents of FP8
    moments have this sharding without the mesh axes that would cut groups of the last
    axis. All other arrays are replicated on every device.

    Pass these shardings and the parameters' to a jitted step as `out_shardings`, too.
    Otherwise XLA pairs donated arrays with any results of the same shape and dtype, not
    with their next values, and must copy the arrays that it mixed up.

    Args:
      tx: Any optimizer: `fp8_adamw` by itself, in a chain, masked, and so on.
      params_abstract: The parameters, or the shape and dtype of each.
      params_sharding: A tree of `NamedSharding` with the structure of the parameters,
        or a prefix of it.

    Returns:
      A tree of shardings with the structure of `tx.init(params)`.

    Raises:
      ValueError: If a leaf of `params_sharding` is not a `NamedSharding`, if there is
        no leaf, or if the leaves have several meshes.

    Warns:
      UserWarning: If a device's part of a last axis does not consist of whole groups,
        so that each step moves that parameter's moments between devices.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> sharding = jax.NamedSharding(mesh, jax.P("data"))
      >>> params = {"w": jax.device_put(jnp.ones((64, 128)), sharding)}
      >>> tx = coat.fp8_adamw(1e-3)
      >>> shardings = coat.opt_state_sharding(tx, params, sharding)
      >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
      >>> state[0].mu["w"].codes.sharding.spec
      P('data',)
    """
    trees = unboxed(params_abstract), unboxed(params_sharding)
    by_path, mesh = _shardings_by_path(*trees)

    def of(path, leaf):
        field, place = field_of(tuple(path), leaf.shape, by_path, fields)
        if field is not None:
            return moment_sharding(leaf, by_path[place].sharding)
        return jax.tree.map(lambda _: NamedSharding(mesh, P()), leaf)

    state = jax.eval_shape(tx.init, params_abstract)
    pure = unboxed(state)
    fields = dict(fields_of(pure))
    found = jax.tree_util.tree_map_with_path(of, pure, is_leaf=is_quantized)
    return boxed(found, state)


def _shardings_by_path(params: Any, shardings: Any) -> tuple[dict, jax.sharding.Mesh]:
    """Returns each parameter's shape and sharding by its path, and their mesh."""

    def sharded(sharding, param):
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"params_sharding takes jax.NamedSharding(mesh, spec), got {sharding!r}"
            )
        return jax.ShapeDtypeStruct(
            jnp.shape(param), jnp.result_type(param), sharding=sharding
        )

    of_params = broadcast(shardings, params, name="params_sharding")
    tree = jax.tree.map(sharded, of_params, params)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    meshes = {leaf.sharding.mesh for _, leaf in leaves}
    if len(meshes) != 1:
        raise ValueError(f"params_sharding must name one mesh, got {len(meshes)}")
    return {tuple(path): leaf for path, leaf in leaves}, meshes.pop()


def zeros_like(
    param: Any, moment: Moment | None, granularity: PerGroup, dtype: DTypeLike
) -> Any:
    """Returns a moment of zeros for a parameter, on the parameter's devices.

    Within `shard_map` it varies over the same mesh axes as the parameter. If `moment`
    is None, the result is an array of `dtype` that is not quantized.
    """
    if moment is None:
        return jnp.zeros_like(param, dtype)

    zero = _zero(moment, granularity)
    like = _of_shape(zero, jnp.shape(param))
    sharding = _sharding_of(param)
    if sharding is None:
        zeros = jax.tree.map(lambda z, t: jnp.full(t.shape, z, t.dtype), zero, like)
    else:
        zeros = jax.tree.map(
            lambda z, t, s: jnp.full(t.shape, z, t.dtype, device=s),
            zero,
            like,
            moment_sharding(like, sharding),
        )
    return varying_alike(zeros, param)


def _sharding_of(param: Any) -> NamedSharding | None:
    """Returns a parameter's sharding on a mesh, or None if it is unknown.

    Under jit it is known on explicit mesh axes alone, because types contain it there.
    """
    if isinstance(param, jax.core.Tracer):
        sharding = jax.typeof(param).sharding
    else:
        sharding = getattr(param, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    is_known = isinstance(mesh, jax.sharding.Mesh) or getattr(mesh, "explicit_axes", ())
    return sharding if is_known else None


def nbytes(moment: Moment, granularity: PerGroup, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a moment in 8 bits, for a parameter of this shape."""
    like = _of_shape(_zero(moment, granularity), shape)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like))


@functools.cache
def _zero(moment: Moment, granularity: PerGroup) -> QuantizedArray:
    """Returns the code, scale and exponent of a moment of zeros, as NumPy scalars."""
    with jax.ensure_compile_time_eval():
        q = quantize_moment(
            jnp.zeros((1,), jnp.float32),
            format=moment.format,
            granularity=granularity,
            power=moment.power,
            noise=None,
        )
    return jax.tree.map(lambda x: np.asarray(x)[0], q)


def _of_shape(zero: QuantizedArray, shape: tuple[int, ...]) -> QuantizedArray:
    """Returns the shapes and dtypes of a moment's arrays for a parameter of `shape`."""
    groups = (*shape[:-1], -(-shape[-1] // zero.granularity.size))

    def like(x, shape):
        return None if x is None else jax.ShapeDtypeStruct(shape, x.dtype)

    return dataclasses.replace(
        zero,
        codes=like(zero.codes, shape),
        scale=like(zero.scale, groups),
        exponent=like(zero.exponent, groups),
    )


def moment_sharding(moment: Any, sharding: NamedSharding) -> Any:
    """Returns the shardings of a moment's arrays, given its parameter's sharding."""
    if not is_quantized(moment):
        return sharding
    groups = _of_whole_groups(sharding, moment.shape, moment.granularity.size)
    exponent = None if moment.exponent is None else groups
    return dataclasses.replace(moment, codes=sharding, scale=groups, exponent=exponent)


def on_mesh_of(param: Any, moment: Any) -> Any:
    """Returns a moment with the explicit mesh axes of its parameter in its type.

    A moment that is on a mesh already, or has another shape, is returned as it is.
    Without `jax.set_mesh` a jitted `init` makes moments on one device, because zeros
    do not depend on parameters.

    Args:
      param: The parameter, or its gradient.
      moment: The moment, or any other node of the optimizer's state.
    """
    sharding, pure = jax.typeof(param).sharding, unboxed(moment)
    if not sharding.mesh.explicit_axes or jnp.shape(pure) != jnp.shape(param):
        return moment
    arrays, treedef = jax.tree.flatten(moment)
    if not all(jax.typeof(x).sharding.mesh.empty for x in arrays):
        return moment
    shardings = jax.tree.leaves(moment_sharding(pure, sharding))
    return treedef.unflatten(map(jax.sharding.reshard, arrays, shardings))


def _of_whole_groups(
    sharding: NamedSharding, shape: tuple[int, ...], size: int
) -> NamedSharding:
    """Returns `sharding` without the mesh axes that split groups, after a warning."""
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    axes = axis_names(spec[-1])
    whole = axes
    while (parts := _count(sharding, whole)) > 1 and shape[-1] % (size * parts):
        whole = whole[:-1]
    if whole == axes:
        return sharding
    warnings.warn(
        f"a parameter of shape {shape} has the spec {sharding.spec}, which cuts the "
        f"last axis into {_count(sharding, axes)} parts that are no multiples of "
        f"{size}: each optimizer step moves its gradient and moments between devices",
        stacklevel=2,
    )
    return NamedSharding(sharding.mesh, P(*spec[:-1], whole or None))


def _count(sharding: NamedSharding, axes: Any) -> int:
    """Returns the number of parts into which the mesh axes in `axes` split an array."""
    return parts_of(sharding.mesh, jax.tree.leaves(tuple(axes)))
