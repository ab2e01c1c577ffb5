"""Fingerprints of Python values, which tell whether a function must be traced again.

JAX traces a function once for the same types of arguments, even if other values that
the function reads have changed. A function that `fp8_remat` has wrapped may read values
that change between its calls, such as an attribute of an object that it closes over. A
fingerprint contains all of these values that can be found. A value that cannot be
searched has no fingerprint.
"""

import dataclasses
import enum
import functools
import types
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend import core

_DEPTH = 20  # The deepest nesting of values that is searched; a cycle has no end.
_ATOMS = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)
# Objects in which nothing changes.
_FIXED = (type, enum.Enum, types.ModuleType, types.CodeType, np.dtype)
# Other objects of these packages do not change either: meshes and tree structures.
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
_ARRAYS = (jax.Array, np.ndarray, np.generic)
# Objects that may change, and programs, of which each trace makes a new one.
_CHANGING = (*_ARRAYS, nnx.Pytree, nnx.Variable, core.Jaxpr, core.ClosedJaxpr)


class Neutral:
    """A base class of values that do not affect fingerprints.

    All objects of one subclass are equal.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class _UnknownError(Exception):
    """Raised for a value that has no fingerprint."""


def fingerprint(*values: Any) -> Hashable | None:
    """Returns a key that is equal for values from which the same programs are traced.

    Numbers that are equal and differ in type have different fingerprints. The key of a
    function contains its code, its defaults, and the values of the variables that it
    closes over and of the globals that it names. Functions among these globals are
    compared by identity.

    Returns None if a value may contain an array, or anything that cannot be compared.
    """
    try:
        fingerprints = tuple(_of(x, _DEPTH) for x in values)
        hash(fingerprints)
    except (_UnknownError, TypeError):
        return None
    return fingerprints


def _of(x: Any, depth: int) -> Hashable:
    kind = type(x)
    if kind in _ATOMS:
        return kind, repr(x)  # True equals 1, and 0.0 equals -0.0.
    if isinstance(x, _FIXED):
        return x
    if isinstance(x, Neutral):
        return kind
    if depth == 0 or isinstance(x, _CHANGING):
        raise _UnknownError
    if kind is types.FunctionType:
        return _of_function(x, depth)
    if kind is types.BuiltinFunctionType:
        return x.__name__, _of(x.__self__, depth - 1)
    if isinstance(x, set | frozenset):
        return kind, frozenset(_of(element, depth - 1) for element in x)
    if (parts := _parts(x)) is not None:
        return kind, tuple(_of(element, depth - 1) for element in parts)
    if _is_of_library(kind):
        return x
    raise _UnknownError


def _is_of_library(x: Any) -> bool:
    return str(x.__module__).partition(".")[0] in _LIBRARIES


def _parts(x: Any) -> Iterable[Any] | None:
    """Returns the values that `x` consists of, or None if that is not known."""
    if isinstance(x, types.MethodType):
        return x.__func__, x.__self__
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    attributes = getattr(x, "__dict__", {}).items()
    if isinstance(x, Mapping):
        return *x.items(), *attributes
    if isinstance(x, tuple | list):
        return *x, *attributes
    if dataclasses.is_dataclass(x):
        return attributes or [getattr(x, f.name) for f in dataclasses.fields(x)]
    return None


def _of_function(fn: types.FunctionType, depth: int) -> Hashable:
    parts = [fn.__defaults__, fn.__kwdefaults__]
    try:
        parts += [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:  # A variable has no value yet.
        raise _UnknownError from None
    fingerprints = [fn.__code__, *(_of(constant, depth - 1) for constant in parts)]
    if not _is_of_library(fn):
        named = (fn.__globals__.get(name) for name in _names(fn.__code__))
        is_function = types.FunctionType
        fingerprints += [
            x if type(x) is is_function else _of(x, depth - 1) for x in named
        ]
    return tuple(fingerprints)


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the global names that a code object, and code inside it, may read."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return *code.co_names, *(name for x in inner for name in _names(x))
