"""Finds the gates of gated MLPs: activation(gate) * up between FP8 matmuls.

In an MLP without a gate it is activation(x) before an FP8 matmul.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from coat_jax.remat.formulas import (
    DTYPES,
    KNOWN,
    MAX_STEPS,
    Role,
    Term,
    arguments_of,
    before_casts,
    is_number,
    term_of,
)
from coat_jax.remat.programs import part_of, variables, written_out
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
    part = part_of(program, found, product, between)
    for gate, up in (found, found[::-1]):
        if activation := _known(2).get(_term(part, gate, up)):
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

    def role_of(operand: core.Var) -> Role:
        return "inner" if is_number(operand, makers) else "argument"

    for x, _, eqns in arguments_of(y, makers, places, role_of):
        if x.aval.dtype not in DTYPES or x.aval.size != y.aval.size:
            continue
        term = _term(part_of(program, [x], y, eqns), x)
        if activation := _known(1).get(term):
            before, own = before_casts(x, makers), {id(eqn) for eqn in eqns}
            alone = all(id(reader) in own for reader in readers[x])
            if before is not x:
                alone = alone and len(readers[before]) == 1
            return Activated(activation, before, eqns) if alone else None
    return None


@functools.cache
def _known(operands: int) -> dict[Term | None, Activation]:
    """Returns the activations by their arithmetic in each dtype.

    It is that of the gate alone, or with two operands of the gate times up.
    """
    found = {}
    for activation, fn in _ACTIVATIONS.items():
        for dtype in DTYPES:

            def product(gate, *up, fn=fn):
                return math.prod(up, start=fn(gate))

            arrays = [jax.ShapeDtypeStruct((), dtype)] * operands
            program = written_out(jax.make_jaxpr(product)(*arrays).jaxpr)
            found[_term(program, *program.invars)] = activation
    return found


def _term(program: core.Jaxpr, *operands: core.Var) -> Term | None:
    """Returns the arithmetic of a gate's operands: the gate, and up if there is one."""
    pairs = zip(operands, ("gate", "up"), strict=False)
    return term_of(program, {v: (name, "elements") for v, name in pairs}, width=None)
