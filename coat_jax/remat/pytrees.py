"""Applies `fp8_remat` to callable pytrees, such as Equinox modules."""

from functools import partial, wraps
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from coat_jax.remat.classes import (
    Wrap,
    attributes_of,
    cached_class,
    members_of,
    method_names,
)
from coat_jax.remat.modules import over_nodes
from coat_jax.remat.options import Options
from coat_jax.remat.vjp import is_array


def is_pytree_module(x: Any) -> bool:
    """Returns whether an object is a callable pytree with arrays, not from Flax."""
    if isinstance(x, type | nnx.Pytree | nn.Module) or not callable(x):
        return False
    return is_pytree(x) and has_arrays(x)


def has_arrays(x: Any) -> bool:
    """Returns whether any leaf of a pytree is an array or a `jax.ShapeDtypeStruct`."""
    return any(map(has_shape, jax.tree.leaves(x)))


def has_shape(x: Any) -> bool:
    """Returns whether an object is an array or a `jax.ShapeDtypeStruct`."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def is_pytree(x: Any) -> bool:
    """Returns whether JAX flattens an object, so that it is not a leaf."""
    return not jax.tree_util.all_leaves([x])


def pytree_module(module: Any, options: Options, wrap: Wrap | None = None) -> Any:
    """Returns a callable pytree of the same leaves that saves FP8 residuals.

    The result is an object of a subclass. All arrays of the module are parameters.

    Args:
      module: A callable pytree with arrays.
      options: The options of `fp8_remat`.
      wrap: A function of the class and a method's name that returns the wrapped method,
        for all methods that users may call. By default only `__call__` is wrapped, by
        `over_nodes`.

    Raises:
      TypeError: If an object of a subclass cannot be made.
    """
    if isinstance(module, jax.tree_util.Partial):
        return _partial(module, options)
    cls = type(module)
    try:
        subclass = partial(_subclass, cls, options, wrap)
        light_class = cached_class(subclass, cls, options, wrap)
        light = recast(module, light_class)
        if not is_pytree(light):
            _register(cls, light_class)
    except (TypeError, ValueError, AttributeError) as error:
        name = cls.__name__
        raise TypeError(
            f"no subclass of the pytree class {name} can be made ({error}): wrap a "
            f"function of it, light = fp8_remat(lambda module, x: module(x)), and call "
            f"light({name.lower()}, x)"
        ) from error
    return light


def _partial(module: jax.tree_util.Partial, options: Options) -> jax.tree_util.Partial:
    """Returns a `Partial` with FP8 residuals; all bound arguments are parameters."""
    fn = module.func

    @wraps(fn)
    def call(bound, *args, **kwargs):
        return fn(*bound[0], *args, **{**bound[1], **kwargs})

    light = over_nodes(call, (0,), options)
    return jax.tree_util.Partial(light, (module.args, module.keywords))


def _subclass(cls: type, options: Options, wrap: Wrap | None) -> type:
    if wrap is None:
        # The module is the first argument, and the one with parameters.
        methods = {"__call__": over_nodes(cls.__call__, (0,), options)}
    else:
        methods = {name: wrap(cls, name) for name in method_names(cls)}
    members = members_of(cls, methods, (_unpickled, cls, options, wrap))
    return type(cls)(cls.__name__, (cls,), members)


def _unpickled(
    cls: type, options: Options, wrap: Wrap | None, attributes: dict[str, Any]
) -> Any:
    """Returns a module with these pickled attributes.

    Its class is made again, because pickle cannot find the class by its name.
    """
    return pytree_module(_new(cls, attributes), options, wrap)


def recast(x: Any, cls: type) -> Any:
    """Returns an object of class `cls` with the attributes of `x`."""
    return _new(cls, attributes_of(x))


def _new(cls: type, attributes: dict[str, Any]) -> Any:
    new = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(new, name, value)  # Frozen dataclasses have no other way.
    return new


def _register(cls: type, light: type) -> None:
    """Registers `light` as a pytree that JAX flattens like `cls`."""

    def flatten_with_keys(x):
        children, tree = one_level(recast(x, cls))
        return [(path[0], child) for path, child in children], tree

    def flatten(x):
        children, tree = one_level(recast(x, cls))
        return [child for _, child in children], tree

    def unflatten(tree, children):
        return recast(jax.tree.unflatten(tree, children), light)

    jax.tree_util.register_pytree_with_keys(
        light, flatten_with_keys, unflatten, flatten
    )


def one_level(x: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Returns the children of a pytree with their paths, and the tree structure."""
    return jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
