"""Runs kernels on the parts of arrays that are sharded over the devices of a mesh.

XLA partitions jnp operations like their arrays, but cannot look into a kernel: it would
gather the operands on every device. An operation therefore names the axes of its
arrays, such as "b s k" and "n k" for a matmul. The names determine which axes may be
split, what each device computes on its part, and which results are summed. The types of
arrays say whether they are sharded at all. The number of devices of the process does
not.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import versions
from pallas_kernels.dispatch import views
from pallas_kernels.dispatch.array_types import mesh_of
from pallas_kernels.dispatch.parts import Call, leaves_of, shaped

# JAX primitives that may surround the kernel in an operation of this package.
_VIEWS = frozenset(
    {"broadcast_in_dim", "convert_element_type", "reshape", "reshard", "squeeze"}
    | {"transpose"}
)


def on_parts(operation: Any, *arrays: Any) -> Any:
    """Runs an operation on the part of its arrays that each device has.

    Args:
      operation: An `operations.Operation`.
      *arrays: Its arrays, which are sharded over a mesh that is not manual, or have
        types that do not tell whether XLA shards them.
    """

    @jax.custom_batching.custom_vmap
    def step(arrays):
        call, out = Call.of(operation, arrays)
        run = call.without_cuts(functools.partial(_partitioned, call), arrays, out)
        if (mesh := mesh_of(arrays)) and mesh.size == 1:
            run = call.on_one_device  # JAX would run the definition of a partition.
        return call.on_explicit_axes(run, arrays, out)

    @step.def_vmap
    def _(size, mapped, arrays):
        (mapped,) = mapped
        outer = _Mapped(operation, tuple(jax.tree.leaves(mapped)))
        operands = leaves_of(arrays, operation.axes(*outer.ones(arrays))[0])
        if all(
            x.own
            for x, is_mapped in zip(operands, outer.mapped, strict=True)
            if is_mapped
        ):
            # The arrays over which `vmap` maps are not read.
            out = on_parts(operation, *arrays)
            return out, jax.tree.map(lambda _: False, out)
        out = on_parts(outer, *arrays)
        return out, jax.tree.map(lambda _: True, out)

    return step(arrays)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """An operation that `vmap` maps over a first axis of its arrays.

    Devices can split this axis. A device that has a single element of it runs the
    operation itself.

    Attributes:
      operation: The operation without the axis.
      mapped: Whether each array has the axis.
    """

    operation: Any
    mapped: tuple[bool, ...]

    name = property(lambda self: self.operation.name)
    depth = property(lambda self: getattr(self.operation, "depth", 0) + 1)

    def __call__(self, *arrays: Any) -> Any:
        return self._over_all(self.operation, arrays)

    def kernel(self, *arrays: Any) -> Any:
        return self._over_all(self.operation.kernel, arrays)

    def reference(self, *arrays: Any) -> Any:
        return self._vmap(self.operation.reference, arrays)

    def obstacle(self, *arrays: Any) -> str | None:
        return self.operation.obstacle(*self.ones(arrays))

    def axes(self, *arrays: Any) -> tuple:
        examples, name = self.ones(arrays), f"vmap{self.depth}"
        operands, results = self.operation.axes(*examples)
        out = jax.eval_shape(self.operation.reference, *examples)
        pairs = zip(leaves_of(arrays, operands), self.mapped, strict=True)
        operands = [axes.mapped(name) if mapped else axes for axes, mapped in pairs]
        results = [axes.mapped(name) for axes in leaves_of(out, results)]
        trees = jax.tree.structure(arrays), jax.tree.structure(out)
        return trees[0].unflatten(operands), trees[1].unflatten(results)

    def ones(self, arrays: tuple) -> tuple:
        """Returns the arrays' shapes without the axis over which `vmap` maps."""
        leaves, tree = jax.tree.flatten(arrays)
        pairs = zip(leaves, self.mapped, strict=True)
        shapes = [x.shape[1:] if mapped else x.shape for x, mapped in pairs]
        return tree.unflatten(map(shaped, shapes, leaves))

    def _over_all(self, fn: Callable, arrays: tuple) -> Any:
        leaves, tree = jax.tree.flatten(arrays)
        pairs = list(zip(leaves, self.mapped, strict=True))
        if any(len(x) != 1 for x, mapped in pairs if mapped):
            return self._vmap(fn, arrays)
        out = fn(*tree.unflatten([x[0] if mapped else x for x, mapped in pairs]))
        return jax.tree.map(lambda x: x[None], out)

    def _vmap(self, fn: Callable, arrays: tuple) -> Any:
        axes = [0 if mapped else None for mapped in self.mapped]
        return jax.vmap(fn, jax.tree.structure(arrays).unflatten(axes))(*arrays)


def in_jnp(operation: Any, *arrays: Any) -> Any:
    """Runs an operation's reference in jnp on arrays with explicit mesh axes."""
    call, out = Call.of(operation, arrays)
    return call.on_explicit_axes(call.reference, arrays, out)


def _partition(call: Call, mesh: Mesh, args: Any, results: Any) -> tuple:
    operands, result_types = jax.tree.leaves(args), jax.tree.leaves(results)
    specs = [x.sharding.spec for x in (*operands, *result_types)]
    shapes = [x.shape for x in (*operands, *result_types)]
    split = call.split(mesh.shape, shapes, specs)
    wanted_specs = specs[len(operands) :]

    def placed(tree: Any, specs: Sequence[P]) -> Any:
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        return jax.tree.unflatten(jax.tree.structure(tree), shardings)

    taken_specs = call.specs(call.operands, split, specs)
    (operand_specs,) = placed(args, taken_specs)
    returned = placed(results, call.specs(call.results, split, wanted_specs))
    specs = tuple(taken_specs), tuple(wanted_specs)
    return (
        mesh,
        _part(call, mesh, tuple(split.items()), *specs),
        returned,
        (operand_specs,),
    )


# XLA asks for the parts of each operation of a program. JAX traces a function once.
@functools.lru_cache(maxsize=4096)
def _part(
    call: Call,
    mesh: Mesh,
    split: tuple[tuple[str, tuple[str, ...]], ...],
    operand_specs: tuple[P, ...],
    result_specs: tuple[P, ...],
) -> Callable:
    """Returns the function that computes one device's part, cached by arguments."""

    def part(arrays: tuple) -> Any:
        return call.part(arrays, mesh, dict(split), operand_specs, result_specs)

    return views.without_reshapes(part)


def _rule(call: Call, mesh: Mesh, operands: Any, results: Any) -> tuple:
    del mesh, operands, results  # The names of the axes say it all.
    return call.rule()


def operation_of(params: Mapping[str, Any]) -> str | None:
    """Returns the name of the operation of this package that a primitive runs, or None.

    Args:
      params: The parameters of the primitive in an equation of a jaxpr.
    """
    if name := getattr(params.get("launch"), "name", None):
        return name
    match params.get("static_args"):
        case (Call() as call, *_):
            return call.operation.name
    # `custom_vmap`, which has a call and a rule, is around each operation.
    if not {"call", "rule"} <= params.keys():
        return None
    names = [
        name for body in versions.bodies_in_params(params) for name in _work_of(body)
    ]
    return names[0] if len(names) == 1 else None


def _work_of(program: core.Jaxpr) -> Iterator[str | None]:
    """Yields the name of each operation of this package in a program.

    Yields None for each other equation that does more than change an array's view.
    """
    for eqn in program.eqns:
        if eqn.primitive.name == "jit":
            for body in versions.bodies_in_params(eqn.params):
                yield from _work_of(body)
        elif eqn.primitive.name not in _VIEWS:
            yield operation_of(eqn.params)


@functools.partial(custom_partitioning, static_argnums=(0,))
def _operation(call: Call, arrays: tuple) -> Any:
    return call.reference(arrays)


_operation.def_partition(_partition, sharding_rule=_rule)
_partitioned = jax.jit(_operation, static_argnums=0)
