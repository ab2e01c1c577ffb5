"""Finds the gates of gated MLPs: activation(gate) * up between FP8 matmuls.

A gate is found by its arithmetic, not by the names of functions. Casts between floating
dtypes, such as those that Flax inserts, and reshapes do not count: the kernels compute
gates in float32 and round once.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from coat_jax.remat.programs import variables, written_out
from pallas_kernels import Activation

_ACTIVATIONS: dict[Activation, Callable] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}
_CALLS = frozenset({"custom_jvp_call", "jit"})
_MOVES = frozenset({"convert_element_type", "copy", "reshape"})
_FUNCTIONS = frozenset({"erf", "erfc", "logistic", "tanh"})
_ARITHMETIC = frozenset({"add", "div", "integer_pow", "mul", "neg", "square", "sub"})
_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
# Gates have less arithmetic, and smaller powers.
_MAX_STEPS = 16
_MAX_FACTORS = 8


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


class _Term(NamedTuple):
    """A product of a number and factors, which are sorted.

    A factor is the name of a variable, a function of a term, or a sum of two terms.
    """

    number: float
    factors: tuple[tuple[Any, ...], ...] = ()


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
        known = _MOVES | _FUNCTIONS | _ARITHMETIC | _CALLS
        if eqn is None or eqn.primitive.name not in known or len(eqns) > 2 * _MAX_STEPS:
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
        term = _term(written_out(part), {gate: "gate", up: "up"})
        if activation := _known().get(term):
            return Gate(activation, gate, up, tuple(between))
    return None


@functools.cache
def _known() -> dict[_Term | None, Activation]:
    """Returns the activations of gates, by the gates' arithmetic in each dtype."""
    found = {}
    for activation, fn in _ACTIVATIONS.items():
        for dtype in _DTYPES:
            x = jax.ShapeDtypeStruct((), dtype)
            traced = jax.make_jaxpr(lambda gate, up, fn=fn: fn(gate) * up)(x, x)
            program = written_out(traced.jaxpr)
            names = dict(zip(program.invars, ("gate", "up"), strict=True))
            found[_term(program, names)] = activation
    return found


def _term(program: core.Jaxpr, names: Mapping[core.Var, str]) -> _Term | None:
    """Returns the result of a program of named variables; None if it is unknown."""
    terms: dict[core.Var, _Term | None] = {
        var: _Term(1.0, ((name,),)) for var, name in names.items()
    }
    if len(program.eqns) > 2 * _MAX_STEPS:
        return None
    steps = 0
    for eqn in program.eqns:
        operands = [
            _Term(float(v.val)) if isinstance(v, core.Literal) else terms.get(v)
            for v in eqn.invars
        ]
        steps += eqn.primitive.name not in _MOVES
        term = None if None in operands else _result(eqn, operands)
        if term is None or steps > _MAX_STEPS or len(term.factors) > _MAX_FACTORS:
            return None
        terms[eqn.outvars[0]] = term
    return terms.get(program.outvars[0])


def _result(eqn: core.JaxprEqn, operands: list[_Term]) -> _Term | None:
    """Returns the result of an operation, or None if it is no part of a known gate."""
    name, (x, *others) = eqn.primitive.name, operands
    if eqn.outvars[0].aval.dtype not in _DTYPES:
        return None
    if name in _MOVES:
        return None if eqn.params.get("sharding") else x
    if name in _FUNCTIONS:
        return _Term(1.0, ((name, x),))
    if name in ("add", "sub"):
        (y,) = others
        if name == "sub":
            y = _multiplied(_Term(-1.0), y)
        return _Term(1.0, (("sum", *sorted((x, y), key=repr)),))
    if name == "integer_pow":
        power = eqn.params["y"]
        return _multiplied(*[x] * power) if 1 <= power <= _MAX_FACTORS else None
    if name == "div":
        (y,) = others
        if y.factors or not y.number:
            return None
        return _multiplied(x, _Term(1 / y.number))
    if name == "mul":
        return _multiplied(x, *others)
    if name == "square":
        return _multiplied(x, x)
    return _multiplied(_Term(-1.0), x) if name == "neg" else None


def _multiplied(*terms: _Term) -> _Term:
    number = functools.reduce(lambda a, b: a * b, (term.number for term in terms))
    factors = sorted((f for term in terms for f in term.factors), key=repr)
    # Products of the same numbers in another order differ in the last digits.
    return _Term(float(f"{number:.6g}"), tuple(factors))
