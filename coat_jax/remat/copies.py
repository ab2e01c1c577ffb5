"""FP8 copies of arrays, made and read by kernels where those can run.

They are what `coat.quantize` and `coat.dequantize` compute, to the bit. On more than
one GPU each device runs the kernels on its part of an array: groups run along the last
axis, and where a part holds whole groups nothing moves between devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, UInt32

import pallas_kernels
from coat_jax.devices import has_kernel
from coat_jax.quantization.array import Format, PerGroup, QuantizedArray, quantize
from pallas_kernels import Groups, dispatch

_WIDE = (jnp.bfloat16, jnp.float32)


def fp8_copy(
    x: Float[Array, "... n"],
    *,
    format: Format,
    granularity: PerGroup,
    noise: UInt32[Array, "... n"] | None = None,
) -> QuantizedArray:
    """`coat.quantize`, by a kernel where it can run."""
    group = min(granularity.size, x.shape[-1])
    if noise is not None or not _fits(x.shape, x.dtype, format, group):
        return quantize(x, format=format, granularity=granularity, noise=noise)
    codes, scale = _placed(_quantize, (x,), _Spec(format.dtype, group))
    return QuantizedArray(
        codes=codes,
        scale=scale,
        exponent=None,
        format=format,
        granularity=granularity,
        dtype=jnp.dtype(x.dtype),
    )


def read_copy(q: QuantizedArray, *, fused: bool = False) -> Float[Array, "... n"]:
    """`coat.dequantize`, by a kernel where it can run and XLA should not fuse it."""
    group = min(q.granularity.size, q.shape[-1])
    if not _fits(q.shape, q.dtype, q.format, group):
        return q.dequantize()
    spec = _Spec(q.dtype, group, "reference" if fused else None)
    return _placed(_dequantize, (q.codes, q.scale), spec)


def _fits(shape: tuple[int, ...], dtype: Any, format: Format, group: int) -> bool:
    """Whether `pallas_kernels` has the operation, as a kernel or in jnp."""
    return format.table is None and dtype in _WIDE and shape[-1] % group == 0


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What an operation computes: dtype of the result, elements of a group."""

    dtype: Any
    group: int
    implementation: dispatch.Implementation | None = None


def _quantize(x: Array, spec: _Spec) -> tuple[Array, Array]:
    how = {"group": spec.group, "implementation": spec.implementation}
    return tuple(pallas_kernels.quantize_groups(x, dtype=spec.dtype, **how))


def _dequantize(codes: Array, scale: Array, spec: _Spec) -> Array:
    return pallas_kernels.dequantize_groups(
        Groups(codes, scale), dtype=spec.dtype, implementation=spec.implementation
    )


def _placed(operation: Callable, arrays: tuple[Array, ...], spec: _Spec) -> Any:
    """Runs an operation where its arrays are."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and not mesh.are_all_axes_manual:
        # custom_partitioning is not told the mesh in a partly manual shard_map.
        spec = dataclasses.replace(spec, implementation="reference")
    kernel = has_kernel() and spec.implementation is None
    if kernel and jax.device_count() > 1 and not mesh.manual_axes:
        operation = _PARTITIONED[operation]
    step = _of_explicit(functools.partial(operation, spec=spec), spec.group)
    return _in_batches(step)(*arrays)


def _of_explicit(step: Callable, group: int) -> Callable:
    """Leaves explicit mesh axes to the partitioner: results lie as what they are of."""

    def wrapped(*arrays):
        where = jax.typeof(arrays[0]).sharding
        if not where.mesh.explicit_axes:
            return step(*arrays)
        groups = _of_whole_groups(where, arrays[0].shape, group)
        shardings = (where, groups) if len(arrays) == 1 else where
        axes = where.mesh.explicit_axes
        return jax.sharding.auto_axes(step, axes=axes, out_sharding=shardings)(*arrays)

    return wrapped


def _of_whole_groups(
    sharding: NamedSharding, shape: tuple[int, ...], group: int
) -> NamedSharding:
    """`sharding` with the last axis on every device if it is cut within groups."""
    axes = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    sizes = sharding.mesh.shape
    parts = math.prod(sizes[name] for name in jax.tree.leaves((axes[-1],)))
    if shape[-1] % (group * parts) == 0:
        return sharding
    return NamedSharding(sharding.mesh, P(*axes[:-1], None))


def _in_batches(fn: Callable) -> Callable:
    """`vmap` of the result is `fn` of all batches at once: rows are independent."""
    batched = jax.custom_batching.custom_vmap(fn)

    @batched.def_vmap
    def _(axis_size, in_batched, *arrays):
        del axis_size, in_batched  # Codes and scales have a batch axis both or none.
        out = batched(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return batched


def _partition(operation, spec, mesh, args, results):
    """Each device has whole groups, or the whole of the last axis."""
    sharding = _of_whole_groups(args[0].sharding, args[0].shape, spec.group)

    def here(*arrays):
        # Within a device's part there is no mesh.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return operation(*arrays, spec)

    results, args = (jax.tree.map(lambda _: sharding, tree) for tree in (results, args))
    return mesh, here, results, args


def _sharding_rule(spec, mesh, operands, results):
    """Arrays share all axes, the last by whole groups; within groups all is local."""
    n = max(x.shape[-1] for x in (*operands, *results))
    # Of fewer groups than devices along an axis none can be a device's.
    several = all(n // spec.group % size == 0 for size in mesh.shape.values())

    def axes(array):
        if array.shape[-1] == n:
            return "... (g e)" if several else "... n"
        return "... g"

    rule = " -> ".join(", ".join(map(axes, side)) for side in (operands, results))
    if several:
        return rule, {"need_replication_factors": ("e",), "e": spec.group}
    return rule, {"need_replication_factors": ("n", "g")}


def _with_partitions(operation: Callable) -> Callable:
    arrays = operation.__code__.co_argcount - 1
    partitioned = custom_partitioning(operation, static_argnums=(arrays,))
    partitioned.def_partition(
        functools.partial(_partition, operation), sharding_rule=_sharding_rule
    )
    return jax.jit(partitioned, static_argnames=("spec",))


_PARTITIONED = {op: _with_partitions(op) for op in (_quantize, _dequantize)}
