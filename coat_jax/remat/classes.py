"""Makes subclasses of module classes, with wrapped methods."""

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from flax import linen as nn
from flax import nnx

from coat_jax.remat.options import Options

REBUILD = "_fp8_rebuild"  # The attribute with the argument `rebuild` of `members_of`.
# A function of a class and a method's name, which returns the wrapped method.
Wrap = Callable[[type, str], Callable]

# Wrapped modules are traced once only if they are of one class.
_CLASSES: WeakValueDictionary[Any, type] = WeakValueDictionary()


def cached_class(
    subclass: Callable[[], type], cls: type, options: Options, wrap: Wrap | None
) -> type:
    """Returns `subclass()`, called once for equal `cls`, `options` and `wrap`.

    Later calls return the class that the first call returned, unless the options have a
    key or cannot be hashed.
    """
    if options.key is not None:
        return subclass()
    try:
        light = _CLASSES.get((cls, options, wrap))
    except TypeError:  # An option is not hashable.
        return subclass()
    if light is None:
        light = _CLASSES[cls, options, wrap] = subclass()
    return light


def members_of(
    cls: type, methods: dict[str, Callable], rebuild: tuple[Any, ...]
) -> dict[str, Any]:
    """Returns the members of a subclass that has the name of `cls` and wrapped methods.

    Args:
      cls: The class.
      methods: The wrapped methods, by name.
      rebuild: A function and its first arguments. Objects of the subclass unpickle as
        `rebuild[0](*rebuild[1:], state)`, where `state` has the object's attributes.
    """

    def reduce(self, protocol=None):
        function, *arguments = rebuild
        return function, (*arguments, attributes_of(self))

    members = {**methods, "__reduce_ex__": reduce, "__doc__": cls.__doc__}
    members |= {REBUILD: rebuild}
    return members | {"__module__": cls.__module__, "__qualname__": cls.__qualname__}


def attributes_of(x: Any) -> dict[str, Any]:
    """Returns an object's attributes by name, from its slots and its `__dict__`."""
    slots = [getattr(cls, "__slots__", ()) for cls in type(x).__mro__]
    names = [
        n for names in slots for n in ((names,) if isinstance(names, str) else names)
    ]
    names = [n for n in names if n not in ("__dict__", "__weakref__") and hasattr(x, n)]
    return {name: getattr(x, name) for name in names} | getattr(x, "__dict__", {})


def is_callable(cls: type) -> bool:
    """Returns whether the objects of a class can be called."""
    return any("__call__" in vars(base) for base in cls.__mro__)


def method_names(cls: type) -> list[str]:
    """Returns the names of the methods that users of a module class may call.

    `__call__` is the only special method among them. Generator functions, coroutine
    functions and the methods of Flax's base classes are left out.
    """
    bases = nnx.Pytree, nnx.Module, nn.Module
    return [
        name
        for name, method in inspect.getmembers(cls)
        if (name == "__call__" and is_callable(cls))
        or not (
            name.startswith("__")
            or not _is_method(inspect.getattr_static(cls, name))
            or inspect.isgeneratorfunction(method)
            or inspect.iscoroutinefunction(method)
            or any(getattr(base, name, None) is method for base in bases)
        )
    ]


def _is_method(member: Any) -> bool:
    """Returns whether a member is a function, or a descriptor that wraps one."""
    if inspect.isfunction(member):
        return True
    is_wrapped = callable(member) and hasattr(member, "__wrapped__")
    return is_wrapped and hasattr(type(member), "__get__")
