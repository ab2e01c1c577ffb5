"""Removes reshapes around kernels from a program.

A kernel takes the address of an array. Whether the program has the array as [rows, n]
or as [groups, 128] makes no difference to the kernel. But each reshape between two
kernels is an instruction of the compiled program, and the time of some of XLA's passes
grows with the square of the number of instructions.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from pallas_kernels.dispatch import custom_calls, lowering

# Calls that are inlined, with the parameter that holds their jaxpr. `vmap` never maps
# the inlined program, so the rules of `custom_vmap` are not needed.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_vmap_call": "call"}
_RESHAPES = {"reshape", "squeeze", "broadcast_in_dim", "expand_dims"}
_BARRIER = "optimization_barrier"


@dataclasses.dataclass(eq=False)
class _Value:
    """An array of a program.

    Attributes:
      aval: Its shape and dtype.
      of: The array that this one is a reshape of; None if this one is computed.
    """

    aval: Any
    of: "_Value | None" = None

    @property
    def root(self) -> "_Value":
        """The array in memory: this one, or the array that this one is a reshape of."""
        return self if self.of is None else self.of.root


@dataclasses.dataclass(frozen=True)
class _Step:
    """An operation of a program with its calls inlined.

    Attributes:
      eqn: The equation of the jaxpr.
      takes: The operands: `_Value`s and literals.
      returns: The results.
    """

    eqn: Any
    takes: list[Any]
    returns: list[_Value]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    def run(self, operands: Sequence[Any], types: Sequence[Any]) -> Sequence[Any]:
        """Runs the operation; if it is a kernel, its results have the given `types`."""
        bound = self.eqn.primitive.get_bind_params(self.eqn.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        if self.name == lowering.KERNEL.name:
            params = params | {"results": tuple(types)}
        with self.eqn.ctx.manager:  # The context has the mesh, among others.
            out = self.eqn.primitive.bind(*functions, *operands, **params)
        return out if self.eqn.primitive.multiple_results else [out]


def without_reshapes(fn: Callable) -> Callable:
    """Wraps `fn`, so that its kernels take arrays without reshapes before and after.

    The results do not change. `fn` takes and returns trees of arrays.
    """

    def run(*args):
        program, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        arrays = [*program.consts, *jax.tree.leaves(args)]
        steps: list[_Step] = []
        takes = [_Value(x.aval) for x in program.jaxpr.invars]
        consts = [_Value(x.aval) for x in program.jaxpr.constvars]
        returns = list(_inlined(program.jaxpr, [*consts, *takes], steps))
        types = _types(steps, returns)
        values = dict(zip((*consts, *takes), arrays, strict=True))

        def in_memory(x: Any) -> Any:
            return values[x.root] if _is_value(x) else x.val

        def read(x: Any, aval: Any) -> Any:
            return custom_calls.viewed(in_memory(x), aval) if _is_value(x) else x.val

        for step in steps:
            result_types = [types.get(x, x.aval) for x in step.returns]
            if step.name == lowering.KERNEL.name:
                operands = list(map(in_memory, step.takes))
            else:
                operand_types = [x.aval for x in step.takes]
                if step.name == _BARRIER:
                    operand_types = result_types
                operands = list(map(read, step.takes, operand_types))
            values |= zip(step.returns, step.run(operands, result_types), strict=True)
        leaves = [read(x, x.aval) for x in returns]
        return jax.tree.structure(out).unflatten(leaves)

    return run


def _is_value(x: Any) -> bool:
    return isinstance(x, _Value)


def _inlined(
    jaxpr: core.Jaxpr, arguments: Sequence[Any], steps: list[_Step]
) -> Iterator[Any]:
    """Appends the operations of a program to `steps`, and yields the results.

    Calls are inlined. The result of a reshape is a `_Value` that refers to the reshaped
    array; there is no step for it.
    """
    names = (*jaxpr.constvars, *jaxpr.invars)
    values = dict(zip(names, arguments, strict=True))

    def read(x):
        return x if isinstance(x, core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        takes = list(map(read, eqn.invars))
        name = eqn.primitive.name
        if name in _CALLS and not (called := eqn.params[_CALLS[name]]).consts:
            returns = list(_inlined(called.jaxpr, takes, steps))
        elif _is_reshape(eqn) and _is_value(takes[0]):
            returns = [_Value(eqn.outvars[0].aval, takes[0])]
        else:
            returns = [_Value(x.aval) for x in eqn.outvars]
            steps.append(_Step(eqn, takes, returns))
        values |= zip(eqn.outvars, returns, strict=True)
    return map(read, jaxpr.outvars)


def _is_reshape(eqn: Any) -> bool:
    """Returns whether an operation changes an array's type but not its memory."""
    name, (out, *_) = eqn.primitive.name, eqn.outvars
    if name == "transpose":
        axes = eqn.params["permutation"]
        long = [axis for axis in axes if eqn.invars[0].aval.shape[axis] > 1]
        return long == sorted(long)
    if name == "bitcast_convert_type":
        return eqn.invars[0].aval.shape == out.aval.shape
    if name not in _RESHAPES or len(eqn.invars) > 1:
        return False
    if eqn.params.get("dimensions") and name == "reshape":
        return False
    return math.prod(eqn.invars[0].aval.shape) == math.prod(out.aval.shape)


def _types(steps: Sequence[_Step], returns: Sequence[Any]) -> dict[_Value, Any]:
    """Returns the type that each result of a kernel or a barrier is read as.

    It is the type of the operand in the next step that reads the result. Kernels do not
    count as readers, because they take arrays of any shape.
    """
    types: dict[_Value, Any] = {}

    def reads(x: Any, aval: Any) -> None:
        if _is_value(x):
            types.setdefault(x.root, aval)

    for x in returns:
        reads(x, x.aval)
    for step in reversed(steps):
        if step.name == _BARRIER:
            for x, out in zip(step.takes, step.returns, strict=True):
                if _is_value(x):
                    types.setdefault(out, types.get(x.root, x.root.aval))
                reads(x, types.get(out, out.aval))
        elif step.name != lowering.KERNEL.name:
            for x in step.takes:
                reads(x, x.aval)
    results = {
        x
        for step in steps
        if step.name in (_BARRIER, lowering.KERNEL.name)
        for x in step.returns
    }
    return {x: aval for x, aval in types.items() if x in results}
