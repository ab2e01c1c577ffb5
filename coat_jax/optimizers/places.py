"""Finds the parameter that an array of an optimizer's state belongs to."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from coat_jax.optimizers.moment import KNOWN

Path = tuple[Any, ...]
# Fields of the state of `optax.inject_hyperparams`. Their leaves may have the names of
# parameters, but belong to no parameter.
_HYPERPARAMETERS = ("hyperparams", "hyperparams_states")


def fields_of(tree: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yields the path of each named tuple's field, and the name of the tuple's type."""
    children, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    for key, child in children:
        if child is not tree:
            if hasattr(tree, "_fields"):
                yield (*path, *key), type(tree).__name__
            yield from fields_of(child, (*path, *key))


def field_of(
    path: Path, shape: tuple[int, ...], params: Mapping[Path, Any], fields: Mapping
) -> tuple[Path | None, Path]:
    """Splits a leaf's path into the path of a state's field and a parameter's path.

    The parameter must have the leaf's shape. A split at a field that `KNOWN` lists is
    preferred, because parameters may be in a container with fields of the same names as
    a state's. Otherwise the split with the longest path of a parameter is taken. If no
    split fits, the field is None and the parameter's path is ().

    Args:
      path: The path of the leaf in the state.
      shape: The shape of the leaf.
      params: The parameters by their paths.
      fields: The state's `fields_of`, as a dict.
    """
    found = []
    for end in range(len(path) + 1):
        field, place = path[:end], path[end:]
        if place in params and jnp.shape(params[place]) == shape:
            found.append((field, place))
    for field, place in found:
        is_attribute = field and isinstance(field[-1], GetAttrKey)
        if is_attribute and field[-1].name in KNOWN.get(fields.get(field), ()):
            return field, place
    return found[0] if found else (None, ())


def owner_of(
    path: Path, params: Collection[Path], fields: Mapping, param_fields: Mapping
) -> Path | None:
    """Returns the path of the parameter that a leaf of a state belongs to, or None.

    The parameter's path is the longest suffix of the leaf's path that is the path of a
    parameter. Each key of the suffix must be a field of the same type of named tuple in
    the state and in the parameters, or a field of none in both. Shapes are not
    compared, because factored moments have other shapes than their parameters. Leaves
    within the hyperparameters of `optax.inject_hyperparams` belong to no parameter.

    Args:
      path: The path of the leaf in the state.
      params: The paths of the parameters.
      fields: The state's `fields_of`, as a dict.
      param_fields: The parameters' `fields_of`, as a dict.
    """
    for start in range(len(path) + 1):
        param_path = path[start:]
        names = (getattr(key, "name", None) for key in path[:start])
        if any(name in _HYPERPARAMETERS for name in names):
            return None
        if param_path in params and all(
            fields.get(path[: start + end]) == param_fields.get(param_path[:end])
            for end in range(1, len(param_path) + 1)
        ):
            return param_path
    return None
