"""Where two trees differ, in words."""

from collections.abc import Callable
from typing import Any

import jax


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
