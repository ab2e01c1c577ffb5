"""Packages that import their public names lazily, when a name is first read.

Python documents both mechanisms: `__getattr__` of a module (PEP 562), and assignment of
a subclass of `types.ModuleType` to a module's `__class__`.
"""

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

# Modules of JAX import one another in cycles. Threads that enter a cycle at two places
# would fail, so JAX is imported completely before a first name is read.
import jax.numpy  # noqa: F401


class _Lazy(types.ModuleType):
    """A package that imports each of its public names when the name is first read.

    Attributes:
      __homes__: A mapping from each public name to the module that defines it, and its
        name there.
    """

    __homes__: Mapping[str, tuple[str, str]]

    def __getattr__(self, name: str) -> Any:
        """Imports a public name, and keeps its value as an attribute."""
        if name not in self.__homes__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, attribute = self.__homes__[name]
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, unless a subpackage would replace a public name.

        For example, Python would replace the public function `coat_jax.fp8` when it
        imports the subpackage of the same name.
        """
        if name in self.__homes__ and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Lists the package's attributes, and its public names, imported or not."""
        return sorted({*super().__dir__(), *self.__homes__})


def attach(package: str, names: Mapping[str, str]) -> None:
    """Makes a package import its public names when they are first read.

    Args:
      package: The package's name, `__name__` in its `__init__.py`.
      names: A mapping from each module to the public names that it defines, separated
        by spaces. "Tuning:NormTuning" is the name in the module and the name in the
        package, if these differ.

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
