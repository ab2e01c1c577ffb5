"""FP8 copies of arrays, quantized and dequantized by kernels where kernels can run.

The results equal those of `coat.quantize` and `coat.dequantize` bit by bit. With
several GPUs each device runs the kernels on its part of an array. Groups lie along the
last axis, so no data moves between devices if every part holds whole groups.
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
from coat_jax.quantization.array import PerGroup, QuantizedArray, quantize
from coat_jax.quantization.formats import Format
from pallas_kernels import Scaled, dispatch

_WIDE = (jnp.bfloat16, jnp.float32)


def fp8_copy(
    x: Float[Array, "... n"],
    *,
    format: Format,
    granularity: PerGroup,
    noise: UInt32[Array, "... n"] | None = None,
) -> QuantizedArray:
    """Computes `coat.quantize`, with a kernel where it can run.

    Per group of `granularity.size` neighbours on the last axis:

      scale = amax / format.max, in bfloat16
      codes = x / scale, in the format

    With `noise`, which rounds stochastically, amax is multiplied by 1 + 2**-8 so that
    no code saturates. Kernels do not take noise.
    """
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
    """Computes `coat.dequantize`, with a kernel where it can run.

    The result is decode(codes) * scale, computed in float32 and cast to `q.dtype`.
    With `fused` no kernel runs: XLA dequantizes as part of the operations that read the
    result.
    """
    group = min(q.granularity.size, q.shape[-1])
    if not _fits(q.shape, q.dtype, q.format, group):
        return q.dequantize()
    spec = _Spec(q.dtype, group, "reference" if fused else None)
    return _placed(_dequantize, (q.codes, q.scale), spec)


def _fits(shape: tuple[int, ...], dtype: Any, format: Format, group: int) -> bool:
    """Returns whether `pallas_kernels` supports the operation, by kernel or in jnp."""
    return format.table is None and dtype in _WIDE and shape[-1] % group == 0


@dataclasses.dataclass(frozen=True)
class _Spec:
    """The static parameters of an operation.

    Attributes:
      dtype: The dtype of the codes, or of the dequantized array.
      group: The number of elements of a group.
      implementation: The implementation; None means the kernel where it can run.
    """

    dtype: Any
    group: int
    implementation: dispatch.Implementation | None = None


def _quantize(x: Array, spec: _Spec) -> tuple[Array, Array]:
    groups = pallas_kernels.quantize_groups(
        x, dtype=spec.dtype, group=spec.group, implementation=spec.implementation
    )
    return tuple(groups)


def _dequantize(codes: Array, scale: Array, spec: _Spec) -> Array:
    return pallas_kernels.dequantize_groups(
        Scaled(codes, scale), dtype=spec.dtype, implementation=spec.implementation
    )


def _placed(operation: Callable, arrays: tuple[Array, ...], spec: _Spec) -> Any:
    """Runs an operation on the devices that hold its arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and not mesh.are_all_axes_manual:
        # In a partly manual shard_map custom_partitioning does not get the mesh.
        spec = dataclasses.replace(spec, implementation="reference")
    kernel = has_kernel() and spec.implementation is None
    if kernel and jax.device_count() > 1 and not mesh.manual_axes:
        operation = _PARTITIONED[operation]
    step = _of_explicit(functools.partial(operation, spec=spec), spec.group)
    return _in_batches(step)(*arrays)


def _of_explicit(step: Callable, group: int) -> Callable:
    """Makes explicit mesh axes automatic for `step`.

    The results take the sharding of the first array. If that sharding cuts groups, the
    last axis of the scales is replicated.
    """

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
    """Returns `sharding`, with the last axis replicated if `sharding` cuts groups."""
    axes = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    sizes = sharding.mesh.shape
    parts = math.prod(sizes[name] for name in jax.tree.leaves((axes[-1],)))
    if shape[-1] % (group * parts) == 0:
        return sharding
    return NamedSharding(sharding.mesh, P(*axes[:-1], None))


def _in_batches(fn: Callable) -> Callable:
    """Makes `vmap` of `fn` call `fn` once on the whole batch.

    This is correct because no group crosses a leading axis.
    """
    batched = jax.custom_batching.custom_vmap(fn)

    @batched.def_vmap
    def _(axis_size, in_batched, *arrays):
        del axis_size, in_batched  # Codes and scales are always batched together.
        out = batched(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return batched


def _partition(operation, spec, mesh, args, results):
    """Gives each device whole groups, or the whole last axis."""
    sharding = _of_whole_groups(args[0].sharding, args[0].shape, spec.group)

    def here(*arrays):
        # The arrays are one device's parts, to which no mesh applies.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return operation(*arrays, spec)

    results, args = (jax.tree.map(lambda _: sharding, tree) for tree in (results, args))
    return mesh, here, results, args


def _sharding_rule(spec, mesh, operands, results):
    """Returns the sharding rule: all arrays are cut alike, and never within a group.

    Factor g counts the groups of the last axis and e the elements of a group.
    """
    n = max(x.shape[-1] for x in (*operands, *results))
    # The last axis can be cut only if every mesh axis divides the number of groups.
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
