"""Finds the gates of gated MLPs: activation(gate) * up between FP8 matmuls."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from coat_jax.remat.formulas import DTYPES, KNOWN, MAX_STEPS, Term, term_of
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
