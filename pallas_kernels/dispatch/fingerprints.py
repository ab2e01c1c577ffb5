"""Fingerprints of traced programs, which are the same in every process.

Two programs have the same fingerprint only if they run the same operations with the
same parameters on arrays of the same types. The names of variables, line numbers and
paths do not count.
"""

import enum
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Types of values that are the same if they print the same.
_WRITTEN = (
    *(type(None), bool, int, float, str, bytes, enum.Enum, np.dtype),
    *(jax.tree_util.PyTreeDef, jax.sharding.Sharding, jax.sharding.AbstractMesh),
    jax.sharding.Mesh,
)
# Attributes that say where an object comes from, and what it has computed before.
_ORIGINS = {"debug_info", "name_and_src_info", "_hash", "__weakref__", "__dict__"}
# Parameters of operations that only transformations read.
_UNREAD = {"custom_vmap_call": {"rule"}}


class UnknownError(Exception):
    """Raised for a value that has no fingerprint, such as a function."""


def fingerprint(program: core.ClosedJaxpr) -> bytes:
    """Returns the fingerprint of a program, 32 bytes.

    Raises:
      UnknownError: If an operation has a parameter of an unknown type.
    """
    return _Reader().digest(program)


class _Reader:
    """Computes the digests of values, of each object only once."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[Any, bytes]] = {}

    def digest(self, x: Any) -> bytes:
        if id(x) not in self._digests:
            hashed = hashlib.sha256(_name(type(x)).encode())
            for part in self._parts(x):
                # Parts have lengths, so that they cannot run into one another.
                hashed.update(len(part).to_bytes(8) + part)
            # The object stays alive, so that no other object gets its id.
            self._digests[id(x)] = x, hashed.digest()
        return self._digests[id(x)][1]

    def _parts(self, x: Any) -> Iterator[bytes]:
        """Yields all that distinguishes a value from others of its type."""
        if isinstance(x, _WRITTEN):
            yield repr(x).encode()
        elif isinstance(x, np.ndarray | np.generic):
            yield from (str(x.dtype).encode(), repr(x.shape).encode(), x.tobytes())
        elif isinstance(x, type):
            yield _name(x).encode()
        elif isinstance(x, core.Jaxpr | core.ClosedJaxpr):
            yield from self._program(x)
        elif isinstance(x, dict):
            yield from sorted(self.digest(k) + self.digest(v) for k, v in x.items())
        elif isinstance(x, set | frozenset):
            yield from sorted(map(self.digest, x))
        elif isinstance(x, tuple | list):
            yield from map(self.digest, x)
        else:
            for name in _attributes(x):
                yield name.encode()
                yield self.digest(getattr(x, name))

    def _program(self, program: Any) -> Iterator[bytes]:
        """Yields the operations of a program; variables are numbered in their order."""
        for constant in getattr(program, "consts", ()):
            # JAX leaves tracers for which the operation has operands.
            if not isinstance(constant, jax.core.Tracer):
                yield self.digest(constant)
        jaxpr = getattr(program, "jaxpr", program)
        numbers: dict[Any, int] = {}

        def operand(x: Any) -> bytes:
            if isinstance(x, core.Literal):
                return self.digest(x.val) + self.digest(x.aval)
            return numbers[x].to_bytes(8)

        def result(x: core.Var) -> bytes:
            numbers[x] = len(numbers)
            return self.digest(x.aval)

        yield from map(result, [*jaxpr.constvars, *jaxpr.invars])
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            yield name.encode()
            yield from map(operand, eqn.invars)
            yield from map(result, eqn.outvars)
            for key in sorted(eqn.params.keys() - _UNREAD.get(name, set())):
                yield key.encode() + self.digest(eqn.params[key])
        yield from map(operand, jaxpr.outvars)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _attributes(x: Any) -> list[str]:
    """Returns the names of an object's attributes.

    Raises:
      UnknownError: If the object is a function, of a class that is not written in
        Python, or of neither JAX nor this package.
    """
    kind = type(x)
    slots = [vars(base).get("__slots__") for base in kind.__mro__]
    slots = [[x] if isinstance(x, str) else x for x in slots if x is not None]
    is_known = kind.__module__.split(".")[0] in ("jax", "pallas_kernels")
    if callable(x) or not is_known or not (slots or hasattr(x, "__dict__")):
        raise UnknownError(f"a {_name(kind)} has no fingerprint")
    names = set(itertools.chain(*slots, getattr(x, "__dict__", ())))
    return sorted(name for name in names - _ORIGINS if hasattr(x, name))
