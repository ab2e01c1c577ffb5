"""The parts of an operation's arrays that each device computes with.

The names of the arrays' axes determine which mesh axes may split the arrays, which
parts a device gathers first, and how devices' results are added up or reduced.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from pallas_kernels.dispatch.array_types import alone, axis_names, largest_over, mesh_of
from pallas_kernels.dispatch.axes import Axes
from pallas_kernels.numerics import magnitude

Specs = Sequence[Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Call:
    """An operation, and the axes of all arrays that one call takes and returns.

    Attributes:
      operation: The operation that is called.
      operands: The axes of each array that the operation takes.
      results: The axes of each of its results.
      single: The names of axes of length 1.
    """

    operation: Any
    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    single: frozenset[str] = frozenset()

    @classmethod
    def of(cls, operation: Any, arrays: tuple) -> tuple["Call", Any]:
        """Returns the call of an operation on arrays, and the shapes of its results."""
        operands, results = operation.axes(*arrays)
        shapes = jax.tree.map(_untyped, arrays)
        out = jax.eval_shape(operation.reference, *shapes)
        axes = tuple(leaves_of(arrays, operands)), tuple(leaves_of(out, results))
        call = cls(operation, *axes)
        lengths = call._lengths([x.shape for x in jax.tree.leaves((arrays, out))])
        single = frozenset(name for name, length in lengths.items() if length == 1)
        return dataclasses.replace(call, single=single), out

    def reference(self, arrays: tuple) -> Any:
        """Computes the operation in jnp, and reduces each amax to one element."""
        return self._with_amax(self.operation.reference(*arrays))

    def on_one_device(self, arrays: tuple) -> Any:
        """Computes the operation with its kernel; each amax becomes one element."""
        return self._with_amax(self.operation.kernel(*arrays))

    def part(
        self,
        arrays: tuple,
        mesh: Mesh,
        split: Mapping,
        operand_specs: Specs,
        result_specs: Specs,
    ) -> Any:
        """Computes one device's part of the results from its parts of the arrays.

        Args:
          arrays: The device's parts of the operands.
          mesh: The mesh.
          split: The mesh axes over which each named axis is split.
          operand_specs: The partition specs of the operands.
          result_specs: The partition specs that are requested for the results.
        """
        # The arrays are one device's parts, to which no mesh applies. Sums over devices
        # would be on the axes of `jax.set_mesh`, if these are explicit.
        with alone(mesh.abstract_mesh.abstract_device):
            gathered = self._gathered(arrays, split, operand_specs)
            arrays = self._added_once(gathered, split)
            out = self._with_amax(self.operation(*arrays))
            leaves, tree = jax.tree.flatten(out)
            specs = self.specs(self.results, split, result_specs)
            complete = [
                _reduced(x, axes, split, spec)
                for x, axes, spec in zip(leaves, self.results, specs, strict=True)
            ]
        return tree.unflatten(complete)

    def _gathered(self, arrays: tuple, split: Mapping, operand_specs: Specs) -> tuple:
        """Gathers the parts of arrays that are split further than their names say."""
        leaves, tree = jax.tree.flatten(arrays)
        for j, (axes, spec) in enumerate(
            zip(self.operands, operand_specs, strict=True)
        ):
            if axes.gathered and (further := _further(axes, split, spec)):
                leaves[j] = lax.all_gather(leaves[j], further, axis=0, tiled=True)
        return tree.unflatten(leaves)

    def _added_once(self, arrays: tuple, split: Mapping) -> tuple:
        """Replaces an array that is added to a sum by zeros on all devices but one."""
        leaves, tree = jax.tree.flatten(arrays)
        for j, axes in enumerate(self.operands):
            if axes.added and (summed := _missing(axes, split)):
                first = lax.axis_index(summed) == 0
                leaves[j] = jnp.where(first, leaves[j], 0)
        return tree.unflatten(leaves)

    def _with_amax(self, out: Any) -> Any:
        leaves, tree = jax.tree.flatten(out)
        pairs = zip(leaves, self.results, strict=True)
        return tree.unflatten(
            [_amax(x, axes) if axes.reduced == "max" else x for x, axes in pairs]
        )

    def split(
        self, sizes: Mapping[str, int], shapes: Sequence[tuple], specs: Specs
    ) -> dict[str, tuple[str, ...]]:
        """Returns the mesh axes over which each named axis is split.

        Args:
          sizes: The sizes of the mesh's axes.
          shapes: The shapes of operands and results.
          specs: The partition specs of operands and results. Specs at the end may be
            missing if they are not known.
        """
        unsplit = self._whole()
        lengths, requested = self._lengths(shapes), {}
        for axes, spec in zip((*self.operands, *self.results), specs, strict=False):
            if axes.own:
                continue
            for names, parts in zip(axes.merged, spec, strict=False):
                if parts and names[0] not in unsplit:
                    requested.setdefault(names[0], axis_names(parts))
        parts_of, used = {}, set()
        for name, parts in requested.items():
            parts = tuple(part for part in parts if part not in used)
            while parts and lengths[name] % math.prod(map(sizes.get, parts)):
                parts = parts[:-1]
            parts_of[name] = parts
            used.update(parts)
        return parts_of

    def specs(
        self, arrays: tuple[Axes, ...], split: Mapping, requested: Specs = ()
    ) -> list[P]:
        """Returns the partition specs of operands or results.

        A sum over devices is reduce-scattered if the requested spec splits it.

        Args:
          arrays: The axes of each operand, or of each result.
          split: The mesh axes over which each named axis is split.
          requested: The partition specs that are requested for the arrays.
        """
        specs = []
        for j, axes in enumerate(arrays):
            if axes.own:
                specs.append(P(*requested[j]))
                continue
            spec = [split.get(names[0]) or None for names in axes.merged]
            if axes.gathered and requested and _further(axes, split, requested[j]):
                spec[-1] = requested[j][-1]
            if axes.reduced == "sum" and j < len(requested):
                spec = _scattered(spec, axes, split, requested[j])
            specs.append(P(*spec))
        return specs

    def on_explicit_axes(self, run: Callable, arrays: tuple, out: Any) -> Any:
        """Calls `run(arrays)` with any explicit mesh axes made automatic.

        `out` has the shapes of the results.
        """
        mesh = mesh_of(arrays)
        if mesh is None or not mesh.explicit_axes:
            return run(arrays)
        specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(arrays)]
        shapes = [x.shape for x in jax.tree.leaves((arrays, out))]
        split = self.split(mesh.shape, shapes, specs)
        specs = self.specs(self.results, split)
        results = [NamedSharding(mesh, spec) for spec in specs]
        results = jax.tree.structure(out).unflatten(results)
        axes = mesh.explicit_axes
        return jax.sharding.auto_axes(run, axes=axes, out_sharding=results)(arrays)

    def without_cuts(self, run: Callable, arrays: tuple, out: Any) -> Callable:
        """Wraps `run(arrays)` so that XLA splits no axis over a part of a mesh axis.

        XLA would do so where a reshape makes a short axis out of a long one, such as an
        axis of two heads out of columns that four devices split. JAX cannot express
        this sharding, and fails to compile.

        Args:
          run: A function of arrays on automatic mesh axes.
          arrays: The arrays.
          out: The shapes of the results.
        """
        mesh = mesh_of(arrays)
        if mesh is None:
            return run
        sizes = [size for size in mesh.shape.values() if size > 1]
        lengths = self._lengths([x.shape for x in jax.tree.leaves((arrays, out))])
        cut = {
            name
            for name, length in lengths.items()
            if name != "_"
            and all(length % size for size in sizes)
            and any(math.gcd(length, size) > 1 for size in sizes)
        }
        if not cut:
            return run

        def wrapped(arrays: tuple) -> Any:
            mesh = mesh_of(arrays)  # Results of kernels have types without one.

            def placed(tree: Any, axes: tuple[Axes, ...]) -> Any:
                leaves, structure = jax.tree.flatten(tree)
                pairs = zip(leaves, axes, strict=True)
                return structure.unflatten([_uncut(x, a, cut, mesh) for x, a in pairs])

            return placed(run(placed(arrays, self.operands)), self.results)

        return wrapped

    def rule(self) -> tuple[str, dict[str, Any]]:
        """Returns the operation's sharding rule for Shardy, and the rule's options."""
        unsplit = self._whole()
        is_whole_of: dict[str, bool] = {}  # In the order of the rule, as JAX requires.

        def name(axis: str) -> str:
            axis = f"u{len(is_whole_of)}" if axis == "_" else axis
            is_whole_of.setdefault(axis, axis[0] == "u" or axis in unsplit)
            return axis

        def text(axes: Axes) -> str:
            # Shardy takes no factors of size 1 in merged axes.
            merged = [
                [n for n in m if n not in self.single] or m[:1] for m in axes.merged
            ]
            words = [" ".join(map(name, names)) for names in merged]
            return " ".join(f"({word})" if " " in word else word for word in words)

        sides = [", ".join(map(text, side)) for side in (self.operands, self.results)]
        sizes = {k: v for axes in self.operands + self.results for k, v in axes.sizes}
        used = tuple(axis for axis, is_whole in is_whole_of.items() if is_whole)
        return " -> ".join(sides), {"need_replication_factors": used, **sizes}

    def _whole(self) -> set[str]:
        """Returns the names of axes that are never split."""
        arrays = self.operands + self.results
        return {"_"} | {n for axes in arrays for m in axes.merged for n in m[1:]}

    def _lengths(self, shapes: Sequence[tuple]) -> dict[str, int]:
        every = (*self.operands, *self.results)
        lengths = dict(pair for axes in every for pair in axes.sizes)
        for axes, shape in zip(every, shapes, strict=False):
            for names, length in zip(axes.merged, shape, strict=True):
                if len(names) == 1:
                    lengths[names[0]] = length
        return lengths


def leaves_of(tree: Any, axes: Any) -> Iterable[Axes]:
    """Yields the axes of each leaf; `axes` is a tree like `tree`, or a prefix of it."""
    if tree is None:
        return
    if isinstance(axes, Axes):
        yield from [axes] * len(jax.tree.leaves(tree))
        return
    for x, axes_of_leaf in zip(tree, axes, strict=True):
        yield from leaves_of(x, axes_of_leaf)


def _uncut(x: Array, axes: Axes, cut: Collection[str], mesh: AbstractMesh) -> Array:
    """Returns `x` with a sharding constraint under which no axis in `cut` is split.

    Axes named "_" are not split either, except for the last axis of a gathered array.
    XLA chooses how the other axes are split. Arrays without an axis in `cut` stay as
    they are.

    Args:
      x: The array.
      axes: The names of its axes.
      cut: The names of axes not to split.
      mesh: The mesh.
    """
    firsts = [names[0] for names in axes.merged]
    if axes.own or cut.isdisjoint(firsts):
        return x
    spec = [None if n == "_" or n in cut else P.UNCONSTRAINED for n in firsts]
    if axes.gathered:
        spec[-1] = P.UNCONSTRAINED
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def _amax(x: Array, axes: Axes) -> Array:
    """Computes the amax over the unnamed axes of an array; each keeps one element."""
    named = sum(name != "_" for (name, *_) in axes.merged)
    unnamed = tuple(range(named, x.ndim))
    return magnitude(x, unnamed).reshape(*x.shape[:named], *(1 for _ in unnamed))


def _further(axes: Axes, split: Mapping, spec: Sequence) -> tuple[str, ...]:
    """Returns the mesh axes in `spec` that split the last axis further than `split`.

    Returns () if there are none, or if they cannot be added to the axes in `split`.
    """
    if len(spec) < len(axes.merged) or not spec[-1]:
        return ()
    *leading, last = [split.get(names[0], ()) for names in axes.merged]
    parts = axis_names(spec[-1])
    further = parts[len(last) :]
    if parts[: len(last)] != last or set(further) & set(itertools.chain(*leading)):
        return ()
    return further


def _scattered(spec: list, axes: Axes, split: Mapping, requested: Sequence) -> list:
    """Returns the spec of a sum after it is reduce-scattered as `requested`.

    Returns `spec` itself if the sum cannot be scattered like that.
    """
    summed = _missing(axes, split)
    for j, parts in enumerate(requested):
        if parts and not spec[j] and set(axis_names(parts)) <= set(summed):
            return [*spec[:j], axis_names(parts), *spec[j + 1 :]]
    return spec


def _missing(axes: Axes, split: Mapping) -> tuple[str, ...]:
    """Returns the mesh axes that split other arrays, but not an array with `axes`."""
    names_of_result = {names[0] for names in axes.merged}
    return tuple(
        x for name, parts in split.items() if name not in names_of_result for x in parts
    )


def _reduced(x: Array, axes: Axes, split: Mapping, spec: P) -> Array:
    missing = _missing(axes, split)
    if not missing or axes.reduced is None:
        return x
    if axes.reduced == "max":
        return largest_over(x, missing)
    for j, parts in enumerate(spec):
        if parts and set(axis_names(parts)) <= set(missing):
            x = lax.psum_scatter(x, parts, scatter_dimension=j, tiled=True)
            missing = tuple(name for name in missing if name not in axis_names(parts))
    return lax.psum(x, missing) if missing else x


def _untyped(x: Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, without its mesh."""
    return shaped(x.shape, x)


def shaped(shape: tuple[int, ...], like: Array) -> jax.ShapeDtypeStruct:
    """Returns a `ShapeDtypeStruct` of this shape with the dtype of `like`."""
    return jax.ShapeDtypeStruct(shape, like.dtype)
