"""Finds the gates of gated MLPs: activation(gate) * up between FP8 matmuls.

In an MLP without a gate it is activation(x) before an FP8 matmul.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from coat_jax.remat.formulas import (
    DTYPES,
    KNOWN,
    MAX_STEPS,
    Term,
    before_casts,
    term_of,
)
from coat_jax.remat.programs import variables, written_out
from pallas_kernels import Activation

_ACTIVATIONS: dict[Activation, Callable] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}


class Gate(NamedTuple):
    """The gate of a gated MLP.

    Attributes:
      activation: The activation.
      gate: The variable that it is applied to.
      up: The variable that the result is multiplied with.
      eqns: The operations that compute the product from these variables.
    """

    activation: Activation
    gate: core.Var
    up: core.Var
    eqns: tuple[core.JaxprEqn, ...]


def gate_of(
    product: core.Var,
    program: core.Jaxpr,
    makers: Mapping[core.Var, core.JaxprEqn],
    readers: Mapping[core.Var, Collection[Any]],
    sources: Collection[core.Var],
) -> Gate | None:
    """Returns the gate that computes `product` from two of `sources`, or None.

    Args:
      product: A variable.
      program: The program that computes it.
      makers: The operation that computes each variable.
      readers: The operations that read each variable, and the program for its results.
        Nothing but the gate may read its two sources.
      sources: The results of matmuls.
    """
    eqns: dict[int, core.JaxprEqn] = {}
    found, behind = [], [product]
    for var in behind:
        if var in sources:
            found.append(var)
            continue
        eqn = makers.get(var)
        if eqn is None or eqn.primitive.name not in KNOWN or len(eqns) > 2 * MAX_STEPS:
            return None
        eqns[id(eqn)] = eqn
        behind += [v for v in variables(eqn.invars) if v not in behind]
    if len(found) != 2 or any(v.aval.shape != product.aval.shape for v in found):
        return None
    if any(id(reader) not in eqns for v in behind[1:] for reader in readers[v]):
        return None
    between = [eqn for eqn in program.eqns if id(eqn) in eqns]
    part = program.replace(
        invars=found,
        outvars=[product],
        eqns=between,
        debug_info=program.debug_info.with_unknown_names(),
    )
    for gate, up in (found, found[::-1]):
        term = _term(written_out(part), gate, up)
        if activation := _known().get(term):
            return Gate(activation, gate, up, tuple(between))
    return None


class Activated(NamedTuple):
    """An activation without a gate.

    Attributes:
      activation: The activation.
      x: The variable that it is applied to.
      eqns: The operations that compute it.
    """

    activation: Activation
    x: core.Var
    eqns: tuple[core.JaxprEqn, ...]


def activation_of(
    y: core.Var,
    program: core.Jaxpr,
    makers: Mapping[core.Var, core.JaxprEqn],
    readers: Mapping[core.Var, Collection[Any]],
    places: Mapping[int, int],
) -> Activated | None:
    """Returns the activation that computes `y` from one variable, or None.

    Args:
      y: A variable.
      program: The program that computes it.
      makers: The operation that computes each variable.
      readers: The operations that read each variable. Nothing but the activation may
        read its argument.
      places: The place of each operation in the program, by its identity.
    """
    free, taken = {y}, {}
    while len(taken) < 2 * MAX_STEPS:
        last = max(free, key=lambda v: places.get(id(makers.get(v)), -1))
        behind = [last]
        for var in behind:
            eqn = makers.get(var)
            if eqn is None or eqn.primitive.name not in KNOWN:
                return None
            taken[id(eqn)] = eqn
            for operand in variables(eqn.invars):
                maker = makers.get(operand)
                is_number = maker is not None and not variables(maker.invars)
                (behind.append if is_number else free.add)(operand)
            free.difference_update(eqn.outvars)
        if len(free) > 1:
            continue
        (x,) = free
        eqns = tuple(sorted(taken.values(), key=lambda eqn: places[id(eqn)]))
        if activation := _activation(y, x, program, eqns):
            before = before_casts(x, makers)
            alone = all(id(reader) in taken for reader in readers[x])
            if before is not x:
                alone = alone and len(readers[before]) == 1
            return Activated(activation, before, eqns) if alone else None
    return None


def _activation(
    y: core.Var, x: core.Var, program: core.Jaxpr, eqns: tuple[core.JaxprEqn, ...]
) -> Activation | None:
    """Returns the activation that operations compute of `x`, or None."""
    if x.aval.dtype not in DTYPES or x.aval.size != y.aval.size:
        return None
    part = program.replace(
        invars=[x],
        outvars=[y],
        eqns=list(eqns),
        debug_info=program.debug_info.with_unknown_names(),
    )
    term = term_of(written_out(part), {x: ("gate", "elements")}, width=None)
    return _known_alone().get(term)


@functools.cache
def _known_alone() -> dict[Term | None, Activation]:
    """Returns the activations by their arithmetic in each dtype."""
    found = {}
    for activation, fn in _ACTIVATIONS.items():
        for dtype in DTYPES:
            traced = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((), dtype))
            program = written_out(traced.jaxpr)
            (x,) = program.invars
            term = term_of(program, {x: ("gate", "elements")}, width=None)
            found[term] = activation
    return found


@functools.cache
def _known() -> dict[Term | None, Activation]:
    """Returns the activations of gates, by the gates' arithmetic in each dtype."""
    found = {}
    for activation, fn in _ACTIVATIONS.items():
        for dtype in DTYPES:
            x = jax.ShapeDtypeStruct((), dtype)
            traced = jax.make_jaxpr(lambda gate, up, fn=fn: fn(gate) * up)(x, x)
            program = written_out(traced.jaxpr)
            found[_term(program, *program.invars)] = activation
    return found


def _term(program: core.Jaxpr, gate: core.Var, up: core.Var) -> Term | None:
    names = {gate: ("gate", "elements"), up: ("up", "elements")}
    return term_of(program, names, width=None)
