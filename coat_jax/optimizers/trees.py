"""Trees of boxed parameters and of moments, and messages on where two trees differ.

A box is an NNX variable, or Linen's metadata of a parameter such as `nn.Partitioned`.
`nnx.Optimizer` finds the arrays of its state by their paths, and `nn.get_sharding`
shards what is in a box by the box's names. So a quantized moment of a boxed parameter
is not boxed itself, but its codes and scales are, each with a spec that fits it.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.quantization.array import QuantizedArray
from pallas_kernels.dispatch.array_types import axis_names

# Names under which NNX variables have their partition spec.
_SPECS = ("out_sharding", "sharding_names", "sharding")


def is_quantized(leaf: Any) -> bool:
    """Returns whether a leaf is a moment in 8 bits; for use as `is_leaf`."""
    return isinstance(leaf, QuantizedArray)


def is_box(x: Any) -> bool:
    """Returns whether a node is an NNX variable or a box of Linen, for `is_leaf`."""
    return is_variable(x) or isinstance(x, _flax("core.meta", "AxisMetadata"))


def is_variable(x: Any) -> bool:
    """Returns whether a node is a variable of NNX."""
    return isinstance(x, _flax("nnx", "Variable"))


def _is_partitioned(x: Any) -> bool:
    return isinstance(x, _flax("core.meta", "Partitioned"))


def _flax(module: str, name: str) -> tuple[type, ...]:
    """Returns a class of Flax in a tuple, which is empty if Flax is not imported.

    Objects of Flax exist only if Flax is imported, so this module need not import it.
    """
    imported = sys.modules.get(f"flax.{module}")
    return () if imported is None else (getattr(imported, name),)


def unboxed(tree: Any) -> Any:
    """Returns a tree with arrays in place of boxes."""

    def unbox(x):
        if is_variable(x):
            return unboxed(x.get_raw_value())
        if _is_partitioned(x):  # Its constraint is for the whole value.
            return x.unbox(apply_constraint=False)
        return x.unbox() if is_box(x) else x

    return jax.tree.map(unbox, tree, is_leaf=is_box)


def boxed(tree: Any, like: Any) -> Any:
    """Returns a tree with its arrays in boxes where `like` has boxes."""
    return jax.tree.map(
        lambda box, x: _in_box(box, x) if is_box(box) else x, like, tree, is_leaf=is_box
    )


def in_boxes(inner_state: Any, boxes: dict[tuple, Any]) -> Any:
    """Puts the arrays of a state into boxes like the boxes of their parameters.

    Args:
      inner_state: The state.
      boxes: Parameters or gradients by their paths.
    """
    if not any(map(is_box, boxes.values())):
        return inner_state
    leaves, treedef = jax.tree.flatten_with_path(inner_state, is_leaf=is_quantized)

    def put(path, leaf):
        for start in range(1, len(path) + 1):
            found = boxes.get(path[start:])
            if is_box(found) and jnp.shape(jax.tree.leaves(found)[0]) == leaf.shape:
                return _in_box(found, leaf)
        return leaf

    return treedef.unflatten([put(path, leaf) for path, leaf in leaves])


def _in_box(box: Any, x: Any) -> Any:
    """Puts an array, or each array of a quantized moment, into a box like `box`."""
    if not is_quantized(x):
        return _replaced(box, x)
    scale, exponent = x.scale, x.exponent
    return dataclasses.replace(
        x,
        codes=_replaced(box, x.codes),
        scale=_of_groups(box, scale, x),
        exponent=None if exponent is None else _of_groups(box, exponent, x),
    )


def _replaced(box: Any, x: Any) -> Any:
    return box.replace(x) if is_variable(box) else box.replace_boxed(x)


def _of_groups(box: Any, x: Any, moment: QuantizedArray) -> Any:
    """Puts an array with an element for each group into a box like `box`.

    The last axis has the parameter's spec if all devices hold whole groups of it.
    """
    if _is_partitioned(box):
        names = _spec_of_groups(box.names, moment)
        return box.replace(value=x, names=names)
    if not is_variable(box):
        return box.replace_boxed(x)
    found = box.get_metadata()
    specs = {name: found[name] for name in _SPECS if found.get(name) is not None}
    changed = {name: _spec_of_groups(spec, moment) for name, spec in specs.items()}
    return box.replace(x, **changed)


def _spec_of_groups(spec: Any, moment: QuantizedArray) -> Any:
    """Returns the spec of a moment's scales: the parameter's, if groups stay whole.

    If mesh axes cut groups of the last axis, or if no mesh in context has these mesh
    axes, the spec of the last axis is None.
    """
    if len(spec) < len(moment.shape) or spec[-1] is None:
        return spec
    names = axis_names(spec[-1])
    sizes = jax.sharding.get_abstract_mesh().shape
    if all(name in sizes for name in names):
        parts = math.prod(sizes[name] for name in names)
        if moment.shape[-1] % (parts * moment.granularity.size) == 0:
            return spec
    entries = (*spec[:-1], None)
    return entries if type(spec) is tuple else type(spec)(*entries)


def by_path(tree: Any, is_leaf: Callable | None = None) -> dict[tuple, Any]:
    """Returns a dict from the paths of a tree's leaves to the leaves."""
    return dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf))


def check_structure(
    tree: Any,
    like: Any,
    *,
    name: str,
    is_leaf: Callable[[Any], bool],
    like_name: str = "`like`",
) -> None:
    """Raises ValueError unless `tree` has the structure of `like`.

    The message calls the trees `name` and `like_name`, and names a place where their
    structures differ.
    """
    found, expected = (jax.tree.structure(t, is_leaf=is_leaf) for t in (tree, like))
    if found == expected:
        return
    paths, wanted = (_paths(t, is_leaf) for t in (tree, like))
    for path in sorted(wanted - paths):
        raise ValueError(f"{name} has no {path}, which {like_name} has")
    for path in sorted(paths - wanted):
        raise ValueError(f"{name} has {path}, which {like_name} has not")
    raise ValueError(
        f"{name} must have the structure {expected} of {like_name}, got {found}"
    )


def broadcast(prefix: Any, params: Any, *, name: str) -> Any:
    """Returns a tree with a value of `prefix` for each parameter.

    Args:
      prefix: A tree with the structure of the parameters, or with a prefix of it.
      params: The parameters.
      name: The name of `prefix` in messages.

    Raises:
      ValueError: If `prefix` has another structure. The message names a place.
    """
    try:
        return jax.tree.broadcast(prefix, params)
    except ValueError as error:
        starts, paths = map(by_path, (prefix, params))
        for path in paths:
            if not any(path[: len(start)] == start for start in starts):
                missing = jax.tree_util.keystr(path)
                raise ValueError(f"{name} has nothing for params{missing}") from error
        for start in starts:
            if not any(path[: len(start)] == start for path in paths):
                surplus = jax.tree_util.keystr(start)
                raise ValueError(f"{name} has {surplus}, and params has not") from error
        structures = jax.tree.structure(params), jax.tree.structure(prefix)
        raise ValueError(
            f"{name} must have the structure {structures[0]} of params, got "
            f"{structures[1]}"
        ) from error


def _paths(tree: Any, is_leaf: Callable[[Any], bool]) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path) or "single leaf" for path, _ in leaves}
