"""FP8 moments on more than one device.

A moment's codes have its parameter's shape and its sharding. Groups run along the last
axis. If a device's part of this axis consists of whole groups of 128, a step moves
nothing between devices. XLA's partitioner finds this out for plain JAX operations. It
cannot look into a kernel, so `partitioned_adam` tells it how to shard the kernel.
"""

import dataclasses
import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

import pallas_kernels
from coat_jax.devices import has_kernel
from coat_jax.optimizers.blocks import adam_in_blocks, has_blocks
from coat_jax.optimizers.moment import Moment
from coat_jax.optimizers.places import field_of, fields_of
from coat_jax.optimizers.trees import boxed, is_quantized, unboxed
from coat_jax.quantization.array import PerGroup, QuantizedArray, quantize_moment
from pallas_kernels import AdamScalars, Moments, dispatch
from pallas_kernels.ops.adam.reference import GROUP
from pallas_kernels.rounding import row_major


def opt_state_sharding(
    tx: optax.GradientTransformation, params_abstract: Any, params_sharding: Any
) -> Any:
    """Returns the shardings of an optimizer's state, given those of the parameters.

    An array with a parameter's place and shape, such as a moment or an accumulated
    gradient, has the parameter's sharding. The scales and exponents of FP8 moments have
    it, too, if each device holds whole groups of the last axis. All other arrays are
    replicated on every device.

    Also pass these shardings and the parameters' to a jitted step as `out_shardings`.
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

    Example:
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

    def spread(sharding, params):
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"params_sharding takes jax.NamedSharding(mesh, spec), got {sharding!r}"
            )
        return jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(jnp.shape(p), p.dtype, sharding=sharding),
            params,
        )

    spread_out = jax.tree.map(spread, shardings, params)
    leaves, _ = jax.tree_util.tree_flatten_with_path(spread_out)
    meshes = {leaf.sharding.mesh for _, leaf in leaves}
    if len(meshes) != 1:
        raise ValueError(f"params_sharding must name one mesh, got {len(meshes)}")
    return {tuple(path): leaf for path, leaf in leaves}, meshes.pop()


def zeros_like(
    param: Any, moment: Moment | None, granularity: PerGroup, dtype: DTypeLike
) -> Any:
    """Returns a moment of zeros for a parameter, on the parameter's devices.

    If `moment` is None the moment is an array of `dtype`.
    """
    if moment is None:
        return jnp.zeros_like(param, dtype)

    zero = _zero(moment, granularity)
    like = _of_shape(zero, jnp.shape(param))
    sharding = getattr(param, "sharding", None)
    if not isinstance(getattr(sharding, "mesh", None), jax.sharding.Mesh):
        return jax.tree.map(lambda z, t: jnp.full(t.shape, z, t.dtype), zero, like)
    return jax.tree.map(
        lambda z, t, s: jnp.full(t.shape, z, t.dtype, device=s),
        zero,
        like,
        moment_sharding(like, sharding),
    )


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


def _of_whole_groups(
    sharding: NamedSharding, shape: tuple[int, ...], size: int
) -> NamedSharding:
    """Returns `sharding` without the mesh axes that would split groups."""
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    axes = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],) if spec[-1] else ()
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
    return math.prod(sharding.mesh.shape[a] for a in jax.tree.leaves(tuple(axes)))


def partitioned_adam(
    scalars: AdamScalars,
    grads: Float[Array, "... n"],
    moments: Moments,
    seed: UInt32[Array, ""],
    stream: UInt32[Array, ""],
    params: Float[Array, "... n"] | None = None,
    salt: UInt32[Array, ""] | None = None,
) -> tuple[Float[Array, "... n"], Moments]:
    """Computes `pallas_kernels.adam` on each device for its part of the arrays."""
    arrays = grads, moments, seed, stream, params, salt
    mesh = jax.sharding.get_abstract_mesh()
    alone = jax.device_count() == 1
    # A block of an array that lies on several devices would have to be gathered.
    if not has_kernel() and alone and not mesh.manual_axes and has_blocks(grads.shape):
        return adam_in_blocks(AdamScalars(*map(jnp.float32, scalars)), *arrays)
    if not has_kernel() or alone:
        return pallas_kernels.adam(scalars, *arrays)
    if mesh.manual_axes and not mesh.are_all_axes_manual:
        # custom_partitioning does not get the mesh in a partly manual shard_map.
        with dispatch.without_kernels("the mesh is manual in part"):
            return pallas_kernels.adam(scalars, *arrays)
    # Python numbers, such as a decay of 0, stay constants that the kernel can use.
    known = tuple(s if isinstance(s, int | float) else None for s in scalars)
    traced = [jnp.float32(s) for s, k in zip(scalars, known, strict=True) if k is None]
    groups = moments.mu_scale.shape
    strides = row_major(groups)
    # The position of a group is the sum of its entries in `places`, one per axis. They
    # are sharded like the groups, so a part's first entries give its first position.
    places = tuple(
        jnp.arange(length, dtype=jnp.uint32) * jnp.uint32(stride & 0xFFFFFFFF)
        for length, stride in zip(groups, strides, strict=True)
    )

    @jax.custom_batching.sequential_vmap
    def step(*arrays):
        return _partitioned(*arrays, known, strides)

    return step(traced, *arrays, places)


def _adam(
    traced, grads, moments, seed, stream, params, salt, places, known, strides
) -> tuple[Array, Moments]:
    traced = iter(traced)
    scalars = AdamScalars(*(next(traced) if s is None else s for s in known))
    stream = stream + sum(place[0] for place in places)
    return pallas_kernels.adam(
        scalars, grads, moments, seed, stream, params, salt, strides=strides
    )


def _partition(known, strides, mesh, args, results):
    """Lets each device compute its part of the step.

    All arrays get the sharding of the array that is split into the most parts.
    """
    _, grads, moments, _, _, params, _, _ = args
    arrays = [moments.mu, moments.nu, grads] + ([] if params is None else [params])
    most = max((x.sharding for x in arrays), key=lambda s: _count(s, s.spec))
    sharding = _of_whole_groups(most, grads.shape, GROUP)
    everywhere = NamedSharding(mesh, P())
    operands = jax.tree.map(lambda x: sharding if x.ndim else everywhere, args[:-1])
    spec = [*sharding.spec, *[None] * (grads.ndim - len(sharding.spec))]
    operands = *operands, tuple(NamedSharding(mesh, P(axis)) for axis in spec)
    results = jax.tree.map(lambda _: sharding, results)
    step = functools.partial(_adam, known=known, strides=strides)
    return mesh, step, results, operands


def _sharding_rule(known, strides, mesh, operands, results):
    """Returns the rule by which Shardy shards the kernel's arrays.

    Arrays share all axes. The last axis is split by whole groups: within a group all
    elements must be on one device.
    """
    shape = operands[known.count(None)].shape
    several = shape[-1] > GROUP and shape[-1] % GROUP == 0
    leading = [f"a{axis}" for axis in range(len(shape) - 1)]

    def last(array):
        if array.shape[-1] != shape[-1]:
            return "g"
        return "(g e)" if several else "n"

    def axes(array):
        return " ".join([*leading, last(array)]) if array.shape else ""

    places = [*leading, last(operands[-1])]
    rule = ", ".join([*map(axes, operands[: -len(places)]), *places])
    rule += " -> " + ", ".join(map(axes, results))
    if several:
        return rule, {"need_replication_factors": ("e",), "e": GROUP}
    local = ("n", "g") if "g" in rule else ("n",)
    return rule, {"need_replication_factors": local}


_partitioned = custom_partitioning(_adam, static_argnums=(8, 9))
_partitioned.def_partition(_partition, sharding_rule=_sharding_rule)
_partitioned = jax.jit(_partitioned, static_argnums=(8, 9))
