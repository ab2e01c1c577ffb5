"""`fp8_remat` of functions of Flax objects, and of Linen and NNX modules."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import jax
from flax import linen as nn
from flax import nnx
from flax.core import lift

from coat_jax.remat.plan import Options
from coat_jax.remat.vjp import fp8_function

_CONTEXT = "fp8_remat"  # The tag of Flax's records of changes to NNX objects.


# Modules of one class are traced once if they are of one class when wrapped, too.
_CLASSES: WeakValueDictionary[Any, type[nnx.Module]] = WeakValueDictionary()


def nnx_class(cls: type[nnx.Module], options: Options) -> type[nnx.Module]:
    """Returns a subclass of an NNX module class whose call saves FP8 residuals.

    It is the same for the same options, except for a key.
    """
    if options.key is not None:
        return _new_nnx_class(cls, options)
    try:
        found = _CLASSES.get((cls, options))
    except TypeError:  # An option is not hashable.
        return _new_nnx_class(cls, options)
    if found is None:
        found = _CLASSES[cls, options] = _new_nnx_class(cls, options)
    return found


def _new_nnx_class(cls: type[nnx.Module], options: Options) -> type[nnx.Module]:
    call = over_nodes(cls.__call__, (), options)

    def reduce(self, protocol=None):
        return _unpickled, (cls, options, self.__getstate__())

    members = {"__call__": call, "__reduce_ex__": reduce, "__doc__": cls.__doc__}
    members |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    # Flax makes a class a strict pytree unless told otherwise.
    is_pytree = getattr(cls, "_pytree__is_pytree", True)
    return type(cls)(cls.__name__, (cls,), members, pytree=is_pytree)


def _unpickled(
    cls: type[nnx.Module], options: Options, state: dict[str, Any]
) -> nnx.Module:
    """Returns the module that was pickled; its class has no name of its own."""
    module = object.__new__(nnx_class(cls, options))
    module.__setstate__(state)
    return module


@dataclasses.dataclass(frozen=True)
class _Place:
    """A placeholder for the NNX object `number` among the arguments of a call."""

    number: int


def over_nodes(fn: Callable, argnums: Sequence[int], options: Options) -> Callable:
    """Applies `fp8_remat` to a function that may change NNX objects it is called with.

    The variables of the objects are parameters. Changes to the objects are written back
    to the caller's objects: values, new variables and static attributes. The exception
    are values of `nnx.Param` variables.
    """
    plain = fp8_function(fn, argnums, options)
    updating = _updating(fn, argnums, options)

    @wraps(fn)
    def call(*args, **kwargs):
        if args and isinstance(args[0], nn.Module) and args[0].scope is not None:
            return linen_method(fn, options)(*args, **kwargs)
        _check_closure(fn)
        for n in argnums:
            if not -len(args) <= n < len(args) and n != 0:
                raise ValueError(
                    f"params_argnums must name positional arguments, of which there "
                    f"are {len(args)}, got {n}"
                )
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        nodes = [leaf for leaf in leaves if _is_node(leaf)]
        if not nodes:
            return plain(*args, **kwargs)
        numbers = itertools.count()
        places = [_Place(next(numbers)) if _is_node(x) else x for x in leaves]
        placed, kwargs = jax.tree.unflatten(tree, places)
        return updating(nodes, *placed, **kwargs)

    return call


@dataclasses.dataclass(frozen=True)
class _Graph:
    """The structure of NNX objects, as one argument that is static."""

    graph: nnx.GraphDef


def _updating(fn: Callable, argnums: Sequence[int], options: Options) -> Callable:
    """Applies `fp8_remat` to a function of NNX objects, and updates the objects.

    The result takes the objects first, then the function's arguments with a `_Place`
    for each object.
    """

    def pure(params, rest, structure, *args, **kwargs):
        with nnx.merge_context(_CONTEXT, inner=True) as context:
            inner = context.merge(structure.graph, params, rest)
        args, kwargs = jax.tree.map(
            lambda x: inner[x.number] if isinstance(x, _Place) else x, (args, kwargs)
        )
        before_graph = nnx.graphdef(inner)
        before = {path: _value(x) for path, x in _variables(inner)}
        out = fn(*args, **kwargs)
        if nnx.graphdef(inner) == before_graph:
            # A value that was not set is the same object.
            changed = [
                (path, x)
                for path, x in _variables(inner)
                if not isinstance(x, nnx.Param) and _value(x) is not before[path]
            ]
            return out, None, nnx.from_flat_state(changed)
        with nnx.split_context(_CONTEXT) as context:
            graph_after, params_after, rest = context.split(inner, nnx.Param, ...)
        # Parameters would be copied if they were results.
        found = nnx.to_flat_state(params_after)
        new = [(path, x) for path, x in found if path not in before]
        return out, graph_after, (nnx.from_flat_state(new), rest)

    marked = (0, 1, *(n + 3 if n >= 0 else n for n in argnums))
    light = fp8_function(pure, marked, options)

    @nnx.update_context(_CONTEXT)
    def call(nodes, *args, **kwargs):
        with nnx.split_context(_CONTEXT) as context:
            graph, params, rest = context.split(nodes, nnx.Param, ...)
        out, graph_after, changed = light(params, rest, _Graph(graph), *args, **kwargs)
        if graph_after is not None:
            with nnx.merge_context(_CONTEXT, inner=False) as context:
                context.merge(graph_after, params, *changed)
        elif jax.tree.leaves(changed):
            nnx.update(nodes, changed)
        return out

    return call


def _variables(nodes: list[Any]) -> list[tuple[Any, Any]]:
    return list(nnx.to_flat_state(nnx.state(nodes)))


def _value(x: Any) -> Any:
    return x.get_raw_value() if isinstance(x, nnx.Variable) else x


def _check_closure(fn: Callable) -> None:
    """Raises TypeError if a function closes over a Linen module that is bound.

    Variables that the function makes of it would leak out of the trace.
    """
    for cell in getattr(fn, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, nn.Module) and value.scope is not None:
            raise TypeError(
                f"fp8_remat takes no function that closes over a bound Linen module, "
                f"as {fn.__qualname__} over {type(value).__name__}: make it a method, "
                "or give it the module as its first argument"
            )


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def linen_method(fn: Callable, options: Options) -> Callable:
    """Applies `fp8_remat` to a function whose first argument is a bound module."""
    return nn.transforms.lift_transform(_lifted, fn, options=options)


def linen_class(cls: type[nn.Module], options: Options) -> type[nn.Module]:
    """Returns a Linen module class of the same name that saves FP8 residuals."""
    light = nn.transforms.lift_transform(_lifted, cls, options=options)
    # Linen names submodules after their class, so the name keeps parameter paths.
    light.__name__ = cls.__name__
    return light


def linen_module(module: nn.Module, options: Options) -> nn.Module | Callable:
    """Returns a module with the same fields, or a function if `module` is bound."""
    if module.scope is not None:
        return _lifted_call(module, options)
    fields = [f.name for f in dataclasses.fields(module) if f.init]
    attributes = {name: getattr(module, name) for name in fields}
    return linen_class(type(module), options)(**attributes)


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
    """Applies `fp8_remat` to a function of a Linen scope, with variables as parameters.

    Calls that create parameters run `fn` unwrapped.
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
        found = any(x.get("params") for group in variable_groups for x in group)
        if mutable and not found:
            return run(variable_groups, rng_groups, *args, **kwargs)
        light = fp8_function(pure, (0, 1), options)
        return light(variable_groups, rng_groups, *args, **kwargs)

    return lift.pack(
        inner, (True,), (True,), (True,), name="fp8_remat", enable_kwargs=True
    )


def _without_params(collections: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in collections.items() if name != "params"}
