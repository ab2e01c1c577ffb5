"""Reads programs, inlines their calls, and merges equal operations."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

# Calls that `written_out` inlines.
_CALLS = frozenset(
    {"checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit"}
)
Operand = core.Var | core.Literal
Names = dict[core.Var, Operand]


def variables(operands: Iterable[Operand]) -> set[core.Var]:
    """Returns the operands that are variables; literals are not hashable."""
    return {v for v in operands if isinstance(v, core.Var)}


class Uses(NamedTuple):
    """The operations that compute and read the variables of a program.

    Attributes:
      program: The program.
      makers: The operation that computes each variable, unless it is opaque.
      readers: The operations that read each variable, and the program for its results.
      places: The place of each operation in the program, by its identity.
      made: The place of the operation that computes each variable.
    """

    program: core.Jaxpr
    makers: dict[core.Var, core.JaxprEqn]
    readers: dict[core.Var, list[Any]]
    places: dict[int, int]
    made: dict[core.Var, int]

    @classmethod
    def of(
        cls, program: core.Jaxpr, is_opaque: Callable[[core.JaxprEqn], bool]
    ) -> "Uses":
        """Returns the uses of a program's variables."""
        readers = defaultdict(list)
        for reader in (*program.eqns, program):
            operands = program.outvars if reader is program else reader.invars
            for var in variables(operands):
                readers[var].append(reader)
        between = (eqn for eqn in program.eqns if not is_opaque(eqn))
        return cls(
            program,
            {var: eqn for eqn in between for var in eqn.outvars},
            readers,
            {id(eqn): place for place, eqn in enumerate(program.eqns)},
            {v: place for place, eqn in enumerate(program.eqns) for v in eqn.outvars},
        )

    def only_in(
        self,
        eqns: Sequence[core.JaxprEqn],
        calls: Sequence[core.JaxprEqn],
        besides: Collection[core.Var] = (),
    ) -> bool:
        """Returns whether nothing but `eqns` and `calls` reads what `eqns` compute.

        `besides` are variables that others may read.
        """
        own = {id(eqn) for eqn in (*eqns, *calls)}
        made = (v for eqn in eqns for v in eqn.outvars if v not in besides)
        return all(id(reader) in own for v in made for reader in self.readers[v])


def written_out(program: core.Jaxpr, calls: Collection[str] = _CALLS) -> core.Jaxpr:
    """Returns a program with its calls inlined, and without effects.

    Variables of the program keep their names, except those that a call only passes on.
    `calls` names the operations that are inlined.
    """
    program = inlined(program, lambda eqn: eqn.primitive.name in calls)
    eqns = [eqn.replace(effects=core.no_effects) for eqn in program.eqns]
    return program.replace(eqns=eqns, effects=core.no_effects)


def part_of(
    program: core.Jaxpr,
    invars: Sequence[core.Var],
    outvar: core.Var,
    eqns: Sequence[core.JaxprEqn],
) -> core.Jaxpr:
    """Returns the program of some operations of a program.

    Jitted functions are inlined. Calls with derivative rules of their own are not.
    """
    part = program.replace(
        invars=list(invars),
        outvars=[outvar],
        eqns=list(eqns),
        debug_info=program.debug_info.with_unknown_names(),
    )
    return written_out(part, calls={"jit"})


def keeps_order(reshape: core.JaxprEqn) -> bool:
    """Returns whether a reshape keeps the elements in their order in memory.

    Others transpose first, as `jnp.ravel(x, order="F")` does.
    """
    axes = reshape.params["dimensions"]
    return axes is None or tuple(axes) == tuple(range(reshape.invars[0].aval.ndim))


def inlined(
    program: core.Jaxpr, is_call: Callable[[core.JaxprEqn], bool]
) -> core.Jaxpr:
    """Returns a program with those operations inlined that `is_call` accepts.

    Each contains one program. It stays as it is if that program has constants.
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
    """Returns the operations of a program, as they stand within another one.

    Args:
      body: The program. It has no constants.
      invars: Its arguments, in the other program.
      outvars: Variables of the other program, which its results get.
      is_call: A function that tells which operations to inline.

    Returns:
      The operations, and new names of those `outvars` whose results are arguments,
      literals or the same as another one.
    """
    names: Names = dict(zip(body.invars, invars, strict=True))
    names |= {v: core.Var(v.aval) for eqn in body.eqns for v in eqn.outvars}
    eqns = _inlined(body, names, is_call)
    made = {v for eqn in eqns for v in eqn.outvars}
    given: Names = {}
    passed: Names = {}
    for out, result in zip(outvars, renamed(body.outvars, names), strict=True):
        new = isinstance(result, core.Var) and result in made and result not in given
        if new and not isinstance(out, core.DropVar):
            given[result] = out
        else:
            passed[out] = renamed([result], given)[0]
    eqns = [
        eqn.replace(
            invars=renamed(eqn.invars, given), outvars=renamed(eqn.outvars, given)
        )
        for eqn in eqns
    ]
    return eqns, passed


def _inlined(
    program: core.Jaxpr, names: Names, is_call: Callable[[core.JaxprEqn], bool]
) -> list[core.JaxprEqn]:
    """Returns the operations of a program, with variables renamed as in `names`."""
    eqns = []
    for eqn in program.eqns:
        invars = renamed(eqn.invars, names)
        outvars = renamed(eqn.outvars, names)
        body = next(core.jaxprs_in_params(eqn.params)) if is_call(eqn) else None
        if body is None or body.constvars:
            eqns.append(eqn.replace(invars=invars, outvars=outvars))
            continue
        inner, passed = embedded(body, invars, outvars, is_call)
        eqns.extend(inner)
        for old, new in zip(eqn.outvars, outvars, strict=True):
            names[old] = passed.get(new, new)
    return eqns


def renamed(operands: Iterable[Operand], names: Mapping[core.Var, Operand]) -> list:
    """Returns operands with those variables renamed that `names` has."""
    return [names.get(v, v) if isinstance(v, core.Var) else v for v in operands]


def deduplicated(program: core.Jaxpr) -> core.Jaxpr:
    """Returns a program that computes nothing twice from the same operands.

    Stateful operations stay, and those with parameters that cannot be compared.
    """
    names: Names = {}
    found: dict[Any, list[core.Var]] = {}
    eqns = []
    for eqn in program.eqns:
        eqn = eqn.replace(invars=renamed(eqn.invars, names))
        key = None if is_stateful(eqn) else _key(eqn)
        first = None if key is None else found.get(key)
        if first is None or any(isinstance(v, core.DropVar) for v in first):
            eqns.append(eqn)
            if key is not None:
                found[key] = eqn.outvars
        else:
            names |= zip(eqn.outvars, first, strict=True)
    return program.replace(eqns=eqns, outvars=renamed(program.outvars, names))


def is_stateful(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation may give something else when it is repeated."""
    if eqn.effects or eqn.primitive.name == "rng_uniform":
        return True
    bodies = core.jaxprs_in_params(eqn.params)
    return any(is_stateful(inner) for body in bodies for inner in body.eqns)


def _key(eqn: core.JaxprEqn) -> Any:
    """Returns what two equal operations have in common, or None if it is unknown."""
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
