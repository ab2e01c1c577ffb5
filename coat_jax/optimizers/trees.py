"""Trees of NNX variables and of moments, and messages on where two trees differ.

`nnx.Optimizer` finds the arrays of its state by their paths. So a quantized moment of a
variable is not a variable itself, but its codes and scales are.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from coat_jax.quantization.array import QuantizedArray


def is_quantized(leaf: Any) -> bool:
    """Returns whether a moment is in 8 bits; the `is_leaf` of trees of moments."""
    return isinstance(leaf, QuantizedArray)


def boxed(tree: Any, like: Any) -> Any:
    """Undoes `nnx.as_pure`: puts arrays into variables where `like` has variables."""
    return jax.tree.map(
        lambda box, x: jax.tree.map(box.replace, x) if is_variable(box) else x,
        like,
        tree,
        is_leaf=is_variable,
    )


def in_variables(inner_state: Any, boxes: dict[tuple, Any]) -> Any:
    """Puts the arrays of a state that belong to a variable into such a variable.

    Args:
      inner_state: The state.
      boxes: Parameters or gradients by their paths.
    """
    if not any(map(is_variable, boxes.values())):
        return inner_state
    leaves, treedef = jax.tree.flatten_with_path(inner_state, is_leaf=is_quantized)

    def put(path, leaf):
        for start in range(1, len(path) + 1):
            found = boxes.get(path[start:])
            if is_variable(found) and jnp.shape(found.get_value()) == leaf.shape:
                return jax.tree.map(found.replace, leaf)
        return leaf

    return treedef.unflatten([put(path, leaf) for path, leaf in leaves])


def is_variable(x: Any) -> bool:
    """Returns whether a node is an NNX variable; the `is_leaf` of trees of them."""
    return isinstance(x, nnx.Variable)


def by_path(tree: Any, is_leaf: Callable | None = None) -> dict[tuple, Any]:
    """Returns the leaves of a tree by their paths."""
    return dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf))


def check_structure(
    tree: Any, like: Any, *, name: str, is_leaf: Callable[[Any], bool]
) -> None:
    """Raises ValueError, naming a place, unless `tree` has the structure of `like`."""
    found, expected = (jax.tree.structure(t, is_leaf=is_leaf) for t in (tree, like))
    if found == expected:
        return
    paths, wanted = (_paths(t, is_leaf) for t in (tree, like))
    for path in sorted(wanted - paths):
        raise ValueError(f"{name} has no {path}, which its counterpart has")
    for path in sorted(paths - wanted):
        raise ValueError(f"{name} has {path}, which its counterpart has not")
    raise ValueError(f"{name} must have the structure {expected}, got {found}")


def _paths(tree: Any, is_leaf: Callable[[Any], bool]) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path) or "single leaf" for path, _ in leaves}
