"""Reads programs, inlines their calls, and merges equal operations.

A program is a jaxpr, and an operation is an equation of a jaxpr.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from coat_jax.programs import newer
from coat_jax.programs.primitives import Operand, bodies_of, is_stateful, variables
from pallas_kernels import versions

# Calls that `written_out` inlines.
_CALLS = frozenset({"closed_call", "custom_jvp_call", "custom_vjp_call", "jit"})
Names = dict[core.Var, Operand]
_JAX = os.path.dirname(jax.__file__) + os.sep


class Graph:
    """A program with the operations that compute and read its variables.

    Attributes:
      program: The program, as JAX traced it.
      makers: The operation that computes each variable.
      readers: The operations that read each variable. For a result of the program, the
        program itself counts as a reader, too.
    """

    def __init__(self, program: core.Jaxpr):
        self.program = program
        self.makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}
        self.readers: dict[core.Var, list[Any]] = defaultdict(list)
        for reader in (*program.eqns, program):
            operands = program.outvars if reader is program else reader.invars
            for var in variables(operands):
                self.readers[var].append(reader)
        self._positions = {id(eqn): i for i, eqn in enumerate(program.eqns)}

    def position(self, eqn: core.JaxprEqn | None) -> int:
        """Returns the position of an operation in the program; -1 for None."""
        return -1 if eqn is None else self._positions[id(eqn)]

    def in_order(self, eqns: Iterable[core.JaxprEqn]) -> tuple[core.JaxprEqn, ...]:
        """Returns operations in the program's order, without repetition."""
        distinct = {id(eqn): eqn for eqn in eqns}
        return tuple(sorted(distinct.values(), key=self.position))

    def only_read_by(
        self, variables: Iterable[core.Var], eqns: Iterable[core.JaxprEqn]
    ) -> bool:
        """Returns whether all readers of `variables` are in `eqns`."""
        readers = {id(eqn) for eqn in eqns}
        return all(id(r) in readers for v in variables for r in self.readers[v])

    def following(self, sources: Iterable[core.Var]) -> set[core.Var]:
        """Returns the variables that depend on `sources` and constants alone.

        Results of stateful operations are left out.
        """
        follow = {*sources, *self.program.constvars}
        for eqn in self.program.eqns:
            if variables(eqn.invars) <= follow and not is_stateful(eqn):
                follow.update(eqn.outvars)
        return follow

    def needed_for(self, results: Iterable[core.Var]) -> set[int]:
        """Returns the `id`s of all operations that `results` are computed from."""
        needed, missing = set(), set(results)
        for eqn in reversed(self.program.eqns):
            if not missing.isdisjoint(eqn.outvars):
                needed.add(id(eqn))
                missing |= variables(eqn.invars)
        return needed


def read_in(jaxpr: core.Jaxpr) -> frozenset[core.Var]:
    """Returns the variables that operations read, or that a program returns.

    A jitted function reads an operand only if an operation within it does.
    """
    read = variables(jaxpr.outvars)
    for eqn in jaxpr.eqns:
        operands = eqn.invars
        if eqn.primitive.name == "jit":
            (body,) = bodies_of(eqn)
            within = read_in(body)
            pairs = zip(operands, body.invars, strict=True)
            operands = [operand for operand, v in pairs if v in within]
        read |= variables(operands)
    return frozenset(read)


def written_out(program: core.Jaxpr) -> core.Jaxpr:
    """Returns a program with its calls inlined, without effects and barriers.

    The variables stay the same, with one exception: if a call or a barrier returns a
    variable unchanged, this variable replaces the result.
    """
    program = inlined(program, lambda eqn: eqn.primitive.name in _CALLS)
    names: Names = {}
    eqns = []
    for eqn in program.eqns:
        invars = renamed(eqn.invars, names)
        if eqn.primitive.name == "optimization_barrier":
            names |= zip(eqn.outvars, invars, strict=True)
        else:
            eqns.append(eqn.replace(invars=invars, effects=versions.NO_EFFECTS))
    outvars = renamed(program.outvars, names)
    return program.replace(eqns=eqns, outvars=outvars, effects=versions.NO_EFFECTS)


def is_plain_call(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation calls a jitted function that has no options.

    Options are shardings, layouts and options of the compiler.
    """
    if eqn.primitive.name != "jit":
        return False
    params = eqn.params
    shardings = *params["in_shardings"], *params["out_shardings"]
    layouts = *params["in_layouts"], *params["out_layouts"]
    is_placed = any(isinstance(s, jax.sharding.Sharding) for s in shardings)
    return not (is_placed or any(layouts) or params["compiler_options_kvs"])


def inlined(
    program: core.Jaxpr, is_call: Callable[[core.JaxprEqn], bool]
) -> core.Jaxpr:
    """Returns a program with the operations inlined that `is_call` selects.

    Each of these operations must contain one program, which is inlined unless it has
    constants. Operations that JAX has had since version 0.12 are written in older ones;
    see `newer`.
    """
    names: Names = {}
    eqns = _inlined(program, names, is_call)
    return program.replace(eqns=eqns, outvars=renamed(program.outvars, names))


def embedded(
    body: core.Jaxpr,
    invars: Sequence[Operand],
    outvars: Sequence[core.Var],
    is_call: Callable[[core.JaxprEqn], bool] = lambda eqn: False,
) -> tuple[list[core.JaxprEqn], Names]:
    """Returns the operations of a program, renamed for use within another program.

    Args:
      body: The program. It has no constants.
      invars: The operands of the other program that `body` is applied to.
      outvars: The variables of the other program that take the results of `body`.
      is_call: A function that tells which operations to inline.

    Returns:
      The operations, and a map from each of `outvars` that no operation computes to its
      replacement: one of `invars`, a literal, or another one of `outvars`.
    """
    names: Names = dict(zip(body.invars, invars, strict=True))
    names |= {v: core.Var(v.aval) for eqn in body.eqns for v in eqn.outvars}
    eqns = _inlined(body, names, is_call)
    computed = {v for eqn in eqns for v in eqn.outvars}
    replaced: Names = {}
    passed: Names = {}
    for out, result in zip(outvars, renamed(body.outvars, names), strict=True):
        new = (
            isinstance(result, core.Var)
            and result in computed
            and result not in replaced
        )
        if new and not versions.is_dropped(out):
            replaced[result] = out
        else:
            passed[out] = renamed([result], replaced)[0]
    eqns = [
        eqn.replace(
            invars=renamed(eqn.invars, replaced), outvars=renamed(eqn.outvars, replaced)
        )
        for eqn in eqns
    ]
    return eqns, passed


def with_replaced(
    program: core.Jaxpr, replaced: Mapping[int, Sequence[core.JaxprEqn]]
) -> core.Jaxpr:
    """Returns a program with some of its operations replaced.

    `replaced` maps the `id` of an operation to the operations that take its place.
    """
    eqns = [new for eqn in program.eqns for new in replaced.get(id(eqn), [eqn])]
    return program.replace(eqns=eqns)


def in_place_of(
    eqn: core.JaxprEqn,
    fn: Callable[..., Any],
    operands: Sequence[Operand],
    results: Sequence[core.Var],
) -> list[core.JaxprEqn]:
    """Returns operations that compute `fn`, with the context and the place of `eqn`.

    Args:
      eqn: The operation that they replace.
      fn: A function of arrays like `operands`, which closes over no arrays.
      operands: The arguments of `fn`, in the program of `eqn`.
      results: The variables of this program that get the results of `fn`.

    Raises:
      ValueError: If `fn` closes over arrays.
    """
    with eqn.ctx.manager:
        closed = jax.make_jaxpr(fn)(*(v.aval for v in operands))
    if closed.consts:
        shapes = [np.shape(x) for x in closed.consts]
        raise ValueError(f"a rewritten operation closes over arrays of shapes {shapes}")
    eqns, _ = embedded(closed.jaxpr, operands, results)
    return [new.replace(source_info=eqn.source_info) for new in eqns]


def _inlined(
    program: core.Jaxpr, names: Names, is_call: Callable[[core.JaxprEqn], bool]
) -> list[core.JaxprEqn]:
    """Returns the operations of a program, inlined and renamed as in `names`.

    Results of inlined calls are added to `names`.
    """
    eqns = []
    for eqn in program.eqns:
        invars = renamed(eqn.invars, names)
        outvars = renamed(eqn.outvars, names)
        if in_older_ones := newer.in_older_ones(eqn):
            eqns += in_place_of(eqn, in_older_ones, invars, outvars)
            continue
        body = next(versions.bodies_in_params(eqn.params)) if is_call(eqn) else None
        if body is None or body.constvars:
            eqns.append(eqn.replace(invars=invars, outvars=outvars))
            continue
        inner, passed = embedded(body, invars, outvars, is_call)
        eqns += [_placed(each, eqn) for each in inner]
        for old, new in zip(eqn.outvars, outvars, strict=True):
            names[old] = passed.get(new, new)
    return eqns


def _placed(eqn: core.JaxprEqn, call: core.JaxprEqn) -> core.JaxprEqn:
    """Returns an operation of a called function with the call's traceback if need be.

    The tracebacks in functions of JAX, such as `jax.nn.silu`, do not lead to the call.
    """
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    if any(not frame.file_name.startswith(_JAX) for frame in frames):
        return eqn
    of_call = call.source_info.traceback
    return eqn.replace(source_info=eqn.source_info.replace(traceback=of_call))


def renamed(operands: Iterable[Operand], names: Mapping[core.Var, Operand]) -> list:
    """Returns the operands, with each variable in `names` replaced."""
    return [names.get(v, v) if isinstance(v, core.Var) else v for v in operands]


def deduplicated(program: core.Jaxpr) -> core.Jaxpr:
    """Returns a program in which equal operations on the same operands run once.

    Stateful operations stay, and so do operations with parameters that cannot be
    compared. Functions with a `jax.custom_vjp` stay as well, because their backward
    pass need not be linear: the sum of two clipped gradients is not the clipped sum.
    Slices that take a whole array, which indexing makes before jax 0.10, are replaced
    by the array.
    """
    names: Names = {}
    results: dict[Any, list[core.Var]] = {}
    eqns = []
    for eqn in program.eqns:
        eqn = eqn.replace(invars=renamed(eqn.invars, names))
        if _is_whole_slice(eqn):
            names |= zip(eqn.outvars, eqn.invars, strict=True)
            continue
        key = None if is_stateful(eqn) or _has_backward(eqn) else _key(eqn)
        first = None if key is None else results.get(key)
        if first is None or any(map(versions.is_dropped, first)):
            eqns.append(eqn)
            if key is not None:
                results[key] = eqn.outvars
        else:
            names |= zip(eqn.outvars, first, strict=True)
    return program.replace(eqns=eqns, outvars=renamed(program.outvars, names))


def _is_whole_slice(eqn: core.JaxprEqn) -> bool:
    is_slice = eqn.primitive.name == "slice"
    return is_slice and eqn.outvars[0].aval.shape == eqn.invars[0].aval.shape


def _has_backward(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is, or contains, a `jax.custom_vjp` function."""
    if eqn.primitive.name.startswith("custom_vjp_call"):
        return True
    bodies = versions.bodies_in_params(eqn.params)
    return any(_has_backward(inner) for body in bodies for inner in body.eqns)


def _key(eqn: core.JaxprEqn) -> Any:
    """Returns a key that is equal for equal operations, or None if it has no hash."""
    operands = [_literal(v) if isinstance(v, core.Literal) else v for v in eqn.invars]
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    # Some contexts, such as a device to compute on, have no equality of their own.
    key = eqn.primitive, tuple(operands), params, repr(eqn.ctx)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _literal(literal: core.Literal) -> tuple:
    return literal.aval, np.asarray(literal.val).tobytes()


def dependences(
    program: core.Jaxpr, operands: Sequence[frozenset[int]]
) -> list[frozenset[int]]:
    """Returns the set of indices on which each result of a program depends.

    Args:
      program: The program.
      operands: The set of indices on which each argument depends.
    """
    program = written_out(program)
    reads = dict(zip(program.invars, operands, strict=True))

    def of(x: Operand) -> frozenset[int]:
        return frozenset() if isinstance(x, core.Literal) else reads.get(x, frozenset())

    for eqn in program.eqns:
        values = [of(x) for x in eqn.invars]
        results = [frozenset().union(*values)] * len(eqn.outvars)
        if eqn.primitive.name == "cond":
            which, *others = values
            branches = [dependences(body, others) for body in bodies_of(eqn)]
            results = [which.union(*each) for each in zip(*branches, strict=True)]
        reads.update(zip(eqn.outvars, results, strict=True))
    return [of(x) for x in program.outvars]
