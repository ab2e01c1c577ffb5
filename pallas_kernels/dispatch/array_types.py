"""Reads from the types of arrays how these are sharded over the devices of a mesh.

On a mesh with automatic or explicit axes, a type contains the mesh. Within `shard_map`
it also contains the mesh axes over which the values differ.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from pallas_kernels import versions
from pallas_kernels.numerics import floats, magnitude_bits

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def mesh_of(arrays: Any) -> AbstractMesh | None:
    """Returns the mesh over which arrays may be sharded, or None.

    None means that any operation can run on the arrays as they are: they are on one
    device, or they are a device's own parts, within a `shard_map` over all axes of the
    mesh. A mesh of one device is returned only if it has explicit axes, because
    explicit axes restrict reshapes.
    """
    for x in jax.tree.leaves(arrays):
        mesh = jax.typeof(x).sharding.mesh
        if mesh.empty or is_manual(mesh):
            continue
        if mesh.size > 1 or mesh.explicit_axes:
            return mesh
    return None


def axis_names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the names of the mesh axes that split an axis of an array.

    Args:
      axes: The entry of a partition spec for the array's axis.
    """
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def unsplit(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Returns a sharding on the same mesh that replicates an array of `ndim` axes."""
    return sharding.update(spec=P(*[None] * ndim))


def is_partial(sharding: NamedSharding) -> bool:
    """Returns whether an array or its gradient is yet to be summed over devices.

    On explicit mesh axes an array may be `unreduced`. The gradient of a `reduced` array
    is `unreduced`.
    """
    return bool(sharding.spec.unreduced or sharding.spec.reduced)


def context_of(x: Array) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager under which operations accept `x`.

    It is needed within `jax.sharding.auto_axes` on a mesh with explicit axes: there the
    types of arrays have the same mesh with automatic axes.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or not jax.sharding.get_abstract_mesh().explicit_axes:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def on_common_mesh(fn: Callable) -> Callable:
    """Wraps `fn` so that its arguments first pass through `with_common_mesh`."""

    @functools.wraps(fn)
    def wrapped(*args):
        return fn(*with_common_mesh(args))

    return wrapped


def with_common_mesh[Tree](tree: Tree) -> Tree:
    """Writes the mesh of some arrays of a tree into the types of the others.

    The results of custom calls, such as cuDNN's attention, have types without a mesh.
    """
    leaves, structure = jax.tree.flatten(tree)
    mesh = mesh_of([x for x in leaves if isinstance(x, _ARRAYS)])
    if mesh is None or mesh.manual_axes or mesh.explicit_axes:
        return tree
    return structure.unflatten([_with_mesh(x, mesh) for x in leaves])


def _with_mesh(x: Any, mesh: AbstractMesh) -> Any:
    # A concrete array is already on its devices.
    if not isinstance(x, jax.core.Tracer) or not x.ndim:
        return x
    if not jax.typeof(x).sharding.mesh.empty:
        return x
    spec = P(*[P.UNCONSTRAINED] * x.ndim)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def varying_alike[Tree](tree: Tree, like: Any = None) -> Tree:
    """Casts all arrays of a tree to vary over the same mesh axes, in `shard_map`.

    After the cast, they vary over all mesh axes over which an array of `like` varies.
    If `like` is None, the tree takes its place.

    Within `shard_map` an array's type says over which mesh axes its values differ
    (unless `check_vma=False`). All arguments of a `custom_vjp` must vary over the same
    axes, because all gradients that it returns vary over the same axes. JAX sums
    gradients where needed.
    """
    leaves = jax.tree.leaves(tree if like is None else like)
    axes = frozenset().union(*map(varying_axes, leaves))
    if not axes:
        return tree

    def varying(x: Any) -> Any:
        missing = axes - varying_axes(x) if isinstance(x, _ARRAYS) else ()
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(varying, tree)


def alone(device: Any = None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which arrays belong to one device.

    Args:
      device: The abstract device to compile for; None means the current target.
    """
    device = device or jax.sharding.get_abstract_mesh().abstract_device
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def parts_of(mesh: Any, names: Iterable[str]) -> int:
    """Returns the number of parts into which mesh axes split an axis of an array."""
    return math.prod(mesh.shape[name] for name in names)


def largest_over(x: Array, axes: Sequence[str]) -> Array:
    """Returns the maximum of amaxes `x` over mesh axes, within `shard_map`."""
    # The bits of an amax compare like the amax, and NaN is the largest.
    return floats(lax.pmax(magnitude_bits(x), axes))


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes of a `shard_map` over which an array varies."""
    if not isinstance(x, _ARRAYS):
        return frozenset()
    return versions.varying_axes(x)


def unchecked_axes() -> frozenset[str]:
    """Returns the mesh axes of a `shard_map` with `check_vma=False`.

    Any array may vary over these axes, and its type does not say so.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    # The index of a device varies over its axis, if there are checks.
    return frozenset(name for name in axes if not varying_axes(lax.axis_index(name)))


def obstacle(arrays: Any) -> str | None:
    """Returns why no kernel can run on the arrays' mesh, or None if kernels can."""
    mesh = mesh_of(arrays)
    if mesh is None or not mesh.manual_axes:
        return None
    auto_axes = ", ".join(
        name for name in mesh.axis_names if name not in mesh.manual_axes
    )
    return f"shard_map leaves the axes {auto_axes} of the mesh to XLA"


def is_manual(mesh: AbstractMesh) -> bool:
    """Returns whether all axes of a mesh are manual, as within `shard_map`."""
    return bool(mesh.manual_axes) and mesh.are_all_axes_manual
