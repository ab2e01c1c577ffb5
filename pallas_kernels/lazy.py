"""Packages with names that are imported when they are first read.

Python documents both parts: `__getattr__` of a module (PEP 562), and a module of a
subclass of `types.ModuleType`, by its `__class__`.
"""

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

# Modules of JAX import one another in rings. Threads that enter a ring at two places
# would fail, so JAX is whole before a first name is read.
import jax.numpy  # noqa: F401


class _Lazy(types.ModuleType):
    """A package that imports a public name when it is first read.

    Attributes:
      __homes__: The module of each name, and the name in that module.
    """

    __homes__: Mapping[str, tuple[str, str]]

    def __getattr__(self, name: str) -> Any:
        """Imports a name."""
        if name not in self.__homes__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, attribute = self.__homes__[name]
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, but for a subpackage that has a public name.

        Python's import sets `coat_jax.fp8` to the package, and it is the function.
        """
        if name in self.__homes__ and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Lists the names, imported or not."""
        return sorted({*super().__dir__(), *self.__homes__})


def attach(package: str, names: Mapping[str, str]) -> None:
    """Lets a package import names when they are first read.

    Args:
      package: The package's name, `__name__` in its `__init__.py`.
      names: The names of each module, separated by spaces; "Tuning:NormTuning" is the
        name in the module and the name in the package, where these differ.

    Examples:
      >>> import coat_jax as coat
      >>> coat.fp8_adamw.__module__  # Imported here, if nothing has read it before.
      'coat_jax.optimizers.adam'
    """
    homes = {}
    for module, words in names.items():
        for word in words.split():
            attribute, _, name = word.partition(":")
            homes[name or attribute] = module, attribute
    sys.modules[package].__dict__["__homes__"] = homes
    sys.modules[package].__class__ = _Lazy
