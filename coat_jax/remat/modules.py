"""Applies `fp8_remat` to Linen and NNX modules, and to functions of Flax objects."""

import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.core import lift

from coat_jax.remat.classes import (
    Wrap,
    cached_class,
    is_callable,
    members_of,
    method_names,
)
from coat_jax.remat.options import Options
from coat_jax.remat.vjp import fp8_function

_CONTEXT = "fp8_remat"  # The tag of Flax's records of changes to NNX objects.


def nnx_module(
    module: nnx.Pytree, options: Options, wrap: Wrap | None = None
) -> nnx.Pytree:
    """Returns a module that saves FP8 residuals and shares variables with `module`."""
    wrapped = object.__new__(nnx_class(type(module), options, wrap))
    vars(wrapped).update(vars(module))
    return wrapped


def nnx_class(
    cls: type[nnx.Pytree], options: Options, wrap: Wrap | None = None
) -> type[nnx.Pytree]:
    """Returns a subclass of an NNX module class that saves FP8 residuals when called.

    Equal options without a key give the same subclass.

    Args:
      cls: The class.
      options: The options of `fp8_remat`.
      wrap: A function of the class and a method's name that returns the wrapped method,
        for all methods that users may call. By default only `__call__` is wrapped, by
        `over_nodes`.

    Raises:
      TypeError: If `wrap` is None and the class has no `__call__`.
    """

    def subclass() -> type[nnx.Pytree]:
        if wrap is None:
            methods = {"__call__": over_nodes(cls.__call__, (), options)}
        else:
            methods = {name: wrap(cls, name) for name in method_names(cls)}
        members = members_of(cls, methods, (_unpickled, cls, options, wrap))
        # Flax makes a class a strict pytree unless told otherwise.
        is_pytree = getattr(cls, "_pytree__is_pytree", True)
        return type(cls)(cls.__name__, (cls,), members, pytree=is_pytree)

    if wrap is None and not is_callable(cls):
        raise TypeError(
            f"fp8_remat takes modules that are called, and {cls.__name__} has no "
            "__call__: wrap what it contains"
        )
    return cached_class(subclass, cls, options, wrap)


def _unpickled(
    cls: type[nnx.Pytree], options: Options, wrap: Wrap | None, state: dict[str, Any]
) -> nnx.Pytree:
    """Returns a module with the pickled attributes `state`.

    Its class is made again, because pickle cannot find the class by its name.
    """
    module = object.__new__(nnx_class(cls, options, wrap))
    module.__setstate__(state)
    return module


def over_nodes(fn: Callable, argnums: Sequence[int], options: Options) -> Callable:
    """Returns `fn` with FP8 residuals; `fn` may change NNX objects among its arguments.

    The positional arguments `argnums` are parameters, and so are the variables of NNX
    objects. Changes to the objects are written back to the caller's objects: values,
    new variables and static attributes, but not values of `nnx.Param` variables. The
    object of a bound method, and arguments that `functools.partial` has bound, count as
    arguments if any of them is a Flax object.
    """
    function, bound, keywords = unbound(fn)
    if any(map(_is_flax, jax.tree.leaves((bound, keywords), is_leaf=_is_flax))):
        light = over_nodes(function, argnums, options)
        return wraps(fn)(partial(light, *bound, **keywords))
    plain = fp8_function(fn, argnums, options)

    @wraps(fn)
    def call(*args, **kwargs):
        if args and isinstance(args[0], nn.Module) and args[0].scope is not None:
            return linen_method(fn, options)(*args, **kwargs)
        _check_closure(fn)
        args, kwargs = _by_position(fn, args, kwargs)
        for n in argnums:
            if not -len(args) <= n < len(args) and n != 0:
                raise ValueError(
                    f"params_argnums must name positional arguments, of which there "
                    f"are {len(args)}, got {n}"
                )
        if any(map(is_node, jax.tree.leaves((args, kwargs), is_leaf=is_node))):
            return _updating(fn, argnums, options, args, kwargs)
        return plain(*args, **kwargs)

    return call


def _by_position(
    fn: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call, by position where names give the positions."""
    try:
        # The function that a wrapper wraps may have another signature.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # Some functions in C have none.
        return args, kwargs
    positional, named = list(args), dict(kwargs)
    for parameter in [*signature.parameters.values()][len(args) :]:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            break
        if parameter.name not in named:
            break
        positional.append(named.pop(parameter.name))
    return tuple(positional), named


def unbound(fn: Callable) -> tuple[Callable, tuple[Any, ...], dict[str, Any]]:
    """Returns a function, and the positional and keyword arguments bound to it."""
    if isinstance(fn, types.MethodType):
        return fn.__func__, (fn.__self__,), {}
    if type(fn) is partial:
        inner, bound, keywords = unbound(fn.func)
        return inner, (*bound, *fn.args), keywords | fn.keywords
    return fn, (), {}


def _is_flax(x: Any) -> bool:
    return is_node(x) or (isinstance(x, nn.Module) and x.scope is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments:
    """The structure of arguments that contain NNX objects.

    Attributes:
      fn: The function of the arguments.
      graph: The structure of the objects.
      tree: The tree structure of all arguments, in which an object is a leaf.
      types: The tree as text, which tells equal values of different types apart.
      is_node: Whether each leaf of `tree` is an NNX object.
    """

    fn: Callable
    graph: nnx.GraphDef
    tree: Any
    types: str
    is_node: tuple[bool, ...]

    def call(self, nodes: Sequence[Any], other_leaves: Sequence[Any]) -> Any:
        """Calls the function with these objects and other leaves."""
        of_nodes, of_leaves = iter(nodes), iter(other_leaves)
        leaves = [next(of_nodes if node else of_leaves) for node in self.is_node]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.fn(*args, **kwargs)


def _updating(
    fn: Callable,
    argnums: Sequence[int],
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function with FP8 residuals, and updates NNX objects among its arguments.

    Returns:
      The result of the function.
    """
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    nodes = [x for x in leaves if is_node(x)]
    other_leaves = [x for x in leaves if not is_node(x)]
    with nnx.update_context(_CONTEXT):
        with nnx.split_context(_CONTEXT) as context:
            graph, params, state = context.split(nodes, nnx.Param, ...)
        structure = _Arguments(
            fn=fn,
            graph=graph,
            tree=tree,
            types=str(tree),
            is_node=tuple(map(is_node, leaves)),
        )
        marked = {n + len(args) if n < 0 else n for n in argnums}
        paths = [
            p for p, _ in jax.tree.leaves_with_path((args, kwargs), is_leaf=is_node)
        ]
        names = _Paths(paths, structure.is_node)
        light = fp8_function(
            partial(_pure, structure), (0, 1, *names.positions(marked)), options, names
        )
        out, graph_after, changed = light(params, state, *other_leaves)
        if graph_after is not None:
            with nnx.merge_context(_CONTEXT, inner=False) as context:
                context.merge(graph_after, params, *changed)
        elif jax.tree.leaves(changed):
            nnx.update(nodes, changed)
    return out


class _Paths:
    """A map from paths in the arguments of `_pure` to paths in the user's arguments."""

    def __init__(self, paths: Sequence[Any], nodes: Sequence[bool]):
        self._nodes = [path for path, node in zip(paths, nodes, strict=True) if node]
        self._others = [p for p, node in zip(paths, nodes, strict=True) if not node]

    def positions(self, argnums: Collection[int]) -> list[int]:
        """Returns which arguments of `_pure` are leaves of the user's `argnums`."""
        return [
            position + 2
            for position, (group, argument, *_) in enumerate(self._others)
            if group.idx == 0 and argument.idx in argnums
        ]

    def __call__(self, path: Any) -> Any:
        _, argument, *inner = path
        if argument.idx >= 2:
            return self._others[argument.idx - 2]
        return *self._nodes[inner[0].key], *inner[1:]


def _pure(structure: _Arguments, params: Any, state: Any, *leaves: Any) -> Any:
    """Calls a function of NNX objects, and returns the changes to the objects.

    Returns:
      The function's result; the objects' structure after the call, or None if it is
      unchanged; and the new values of variables. Values of `nnx.Param` variables are
      returned only for new variables, and then in a state of their own.
    """
    with nnx.merge_context(_CONTEXT, inner=True) as context:
        inner = context.merge(structure.graph, params, state)
    before_graph = nnx.graphdef(inner)
    values_before = {path: _value(x) for path, x in _variables(inner)}
    out = structure.call(inner, leaves)
    if nnx.graphdef(inner) == before_graph:
        # A value that was not set is the same object.
        changed = [
            (path, x)
            for path, x in _variables(inner)
            if not isinstance(x, nnx.Param) and _value(x) is not values_before[path]
        ]
        return out, None, nnx.from_flat_state(changed)
    with nnx.split_context(_CONTEXT) as context:
        graph_after, params_after, state = context.split(inner, nnx.Param, ...)
    # Parameters would be copied if they were results.
    new = [(p, x) for p, x in nnx.to_flat_state(params_after) if p not in values_before]
    return out, graph_after, (nnx.from_flat_state(new), state)


def _variables(nodes: list[Any]) -> list[tuple[Any, Any]]:
    return list(nnx.to_flat_state(nnx.state(nodes)))


def _value(x: Any) -> Any:
    return x.get_raw_value() if isinstance(x, nnx.Variable) else x


def _check_closure(fn: Callable) -> None:
    """Raises TypeError if a function closes over a Linen module that is bound.

    Variables that the module makes in the function would leak out of the trace.
    """
    for cell in getattr(fn, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, nn.Module) and value.scope is not None:
            raise TypeError(
                f"fp8_remat takes no function that closes over a bound Linen module, "
                f"as {fn.__qualname__} over {type(value).__name__}: make it a method, "
                "or give it the module as its first argument"
            )


def is_node(x: Any) -> bool:
    """Returns whether a value is an NNX object."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def linen_method(fn: Callable, options: Options) -> Callable:
    """Returns `fn`, a function of a bound Linen module, with FP8 residuals."""
    return nn.transforms.lift_transform(_lifted, fn, options=options)


def linen_class(cls: type[nn.Module], options: Options) -> type[nn.Module]:
    """Returns a Linen module class of the same name that saves FP8 residuals."""
    light = nn.transforms.lift_transform(_lifted, cls, options=options)
    # Linen names submodules after their class, so the name keeps parameter paths.
    light.__name__ = cls.__name__
    return light


def linen_module(module: nn.Module, options: Options) -> nn.Module | Callable:
    """Returns a module with the same fields that saves FP8 residuals.

    If `module` is bound, a function is returned instead.
    """
    if module.scope is not None:
        return _lifted_call(module, options)
    return linen_class(type(module), options)(**fields_of(module))


def fields_of(module: nn.Module) -> dict[str, Any]:
    """Returns the arguments with which a Linen module was constructed, by name."""
    fields = (f.name for f in dataclasses.fields(module) if f.init)
    return {name: getattr(module, name) for name in fields}


def _lifted_call(module: nn.Module, options: Options) -> Callable:
    def apply(module, args, kwargs):
        return module(*args, **kwargs)

    def transform(fn, scopes, *args):
        return _lifted(fn, options=options)(scopes, *args)

    def call(*args, **kwargs):
        lift_direct = nn.transforms.lift_direct_transform
        return lift_direct(transform, (apply,), module, args, kwargs)

    return call


def _lifted(fn: Callable, *, options: Options) -> Callable:
    """Returns `fn`, a function of a Linen scope, with FP8 residuals.

    The variables of the scope are parameters. Calls that create parameters run `fn`
    unwrapped.
    """

    def inner(scope_fn, repack_fn, variable_groups, rng_groups, *args, **kwargs):
        def run(variable_groups, rng_groups, *args, **kwargs):
            scope = scope_fn(variable_groups, rng_groups)
            return fn(scope, *args, **kwargs), repack_fn(scope)

        def pure(*args, **kwargs):
            # Parameters would be copied if they were results.
            out, groups = run(*args, **kwargs)
            return out, [[_without_params(x) for x in group] for group in groups]

        # Calls that create parameters are not differentiated. `nn.scan` must also see
        # that the parameters which its steps share do not depend on other values.
        scopes = jax.tree.leaves(scope_fn(variable_groups, rng_groups))
        mutable = any(scope.is_mutable_collection("params") for scope in scopes)
        has_params = any(x.get("params") for group in variable_groups for x in group)
        if mutable and not has_params:
            return run(variable_groups, rng_groups, *args, **kwargs)
        light = fp8_function(pure, (0, 1), options)
        return light(variable_groups, rng_groups, *args, **kwargs)

    return lift.pack(
        inner, (True,), (True,), (True,), name="fp8_remat", enable_kwargs=True
    )


def _without_params(collections: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in collections.items() if name != "params"}
