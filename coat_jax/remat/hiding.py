"""Finds the arrays in which large numbers hide others, such as masked scores of -1e9.

A group of an FP8 copy has the scale of its largest number. Next to a number that hides
others, the group's other numbers would become zero. Such an array has no copy: it is
computed again from the array before the large numbers, or saved as it is.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from coat_jax.programs.primitives import Operand, is_layout, number_of

# Next to a number of this size E4M3 has few digits for numbers around 1.
_LARGE = 1e4
_Signs = frozenset[int]
_NONE: _Signs = frozenset()
_BOTH: _Signs = frozenset({-1, 1})
_SUMS = frozenset({"add", "add_any", "sub"})
_UNBOUNDED = _SUMS | {"div", "mul"}


class _Numbers(NamedTuple):
    """The large numbers in an array.

    Attributes:
      uniform: The signs of the array's numbers if all are large, otherwise empty.
      hiding: The signs of the large numbers among others in the array.
      is_product: Whether the array has a large factor, so that its numbers may be large
        or zero.
    """

    uniform: _Signs = _NONE
    hiding: _Signs = _NONE
    is_product: bool = False


def hiding_arrays(program: core.Jaxpr) -> set[core.Var]:
    """Returns the arrays of a program in which numbers of the program hide others.

    They are selections between an array and a large number, as in
    `where(mask, x, -1e9)`, sums with such a selection or with a product of a large
    number, as in `x + (1 - mask) * -1e9`, and what is computed from them by functions
    without a bound.

    Args:
      program: A program with its calls inlined.
    """
    known: dict[core.Var, _Numbers] = {}

    def numbers(v: Operand) -> _Numbers:
        if isinstance(v, core.Literal):
            return _Numbers(uniform=_large(v))
        return known.get(v, _Numbers())

    for eqn in program.eqns:
        result = _of_result(eqn, list(map(numbers, eqn.invars)))
        if any(result):
            known |= dict.fromkeys(eqn.outvars, result)
    return {v for v, each in known.items() if each.hiding and not each.uniform}


def _of_result(eqn: core.JaxprEqn, operands: Sequence[_Numbers]) -> _Numbers:
    """Returns what is known of the large numbers in an operation's results."""
    name = eqn.primitive.name
    if is_layout(eqn):
        return operands[0]
    if name == "select_n":
        cases = [x.uniform for x in operands[1:]]
        hiding = _NONE.union(*cases, *(x.hiding for x in operands[1:]))
        return _Numbers(uniform=hiding if all(cases) else _NONE, hiding=hiding)
    hiding = _NONE.union(*(x.hiding for x in operands))
    products = [x for x in operands if x.is_product]
    if name in _SUMS and len(products) == 1:
        return _Numbers(hiding=_BOTH)
    if name == "mul" and (products or any(x.uniform for x in operands)):
        return _Numbers(hiding=_BOTH if hiding else _NONE, is_product=True)
    if not hiding:
        return _Numbers(is_product=name == "neg" and bool(products))
    if name in ("max", "min"):
        literals = [v for v in eqn.invars if isinstance(v, core.Literal)]
        is_cut = any(not _large(literal) for literal in literals)
        return _Numbers(
            hiding=hiding - {-1 if name == "max" else 1} if is_cut else hiding
        )
    if name == "neg":
        return _Numbers(hiding=frozenset(-sign for sign in hiding))
    if name in ("abs", "square"):
        return _Numbers(hiding=frozenset({1}))
    return _Numbers(hiding=_BOTH if name in _UNBOUNDED else _NONE)


def _large(literal: core.Literal) -> _Signs:
    """Returns the sign of a floating number if it is large, in a set."""
    aval = literal.aval
    if not jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating) or aval.shape:
        return _NONE
    number = number_of(literal)
    sign = int(math.copysign(1, number))
    return frozenset({sign}) if abs(number) >= _LARGE else _NONE
