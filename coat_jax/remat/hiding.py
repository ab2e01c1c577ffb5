"""Finds the arrays in which large numbers hide others, such as masked scores of -1e9.

A group of an FP8 copy has the scale of its largest number. If this number is very
large, it hides the others: they would become zero. Arrays with hidden numbers are not
copied. They are recomputed from the arrays before the large numbers were added or
selected, or they are saved unquantized.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from coat_jax.programs.primitives import Operand, entry_of, is_layout, real_number_of

# Next to a number of this size E4M3 has few digits for numbers around 1.
_LARGE = 1e4
_Signs = frozenset[int]
_NONE: _Signs = frozenset()
_BOTH: _Signs = frozenset({-1, 1})
_SUMS = frozenset({"add", "add_any", "sub"})
# Operations that move numbers of several operands into one result.
_JOINS = frozenset(
    {"concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "scatter"}
    | {"select_n", "sort"}
)


class _Numbers(NamedTuple):
    """The large numbers in an array.

    Attributes:
      number: The number that all elements equal, or None.
      factor: The number that a mask is multiplied by, if the array is the product of
        the two, such as `(1 - mask) * -1e9`; or None.
      hiding: The signs of the large numbers that hide other numbers in the array.
      is_rare: Whether the array is a condition that is true only for infinities.
    """

    number: float | None = None
    factor: float | None = None
    hiding: _Signs = _NONE
    is_rare: bool = False

    @property
    def large(self) -> _Signs:
        """The signs of the array's large numbers."""
        if _is_large(self.number):
            return frozenset({int(math.copysign(1, self.number))})
        return _BOTH if _is_large(self.factor) else self.hiding


def hiding_arrays(program: core.Jaxpr) -> set[core.Var]:
    """Returns the arrays of a program in which numbers of the program hide others.

    These are selections between an array and a large number, such as
    `where(mask, x, -1e9)`; sums with a selection of this kind, or with a mask times a
    large number, such as `x + (1 - mask) * -1e9`; and arrays that unbounded functions
    compute from them.

    Args:
      program: A program with its calls inlined.
    """
    # Any argument may be a mask.
    numbers_of = {var: _Numbers(factor=1.0) for var in program.invars}

    def look_up(v: Operand) -> _Numbers:
        if isinstance(v, core.Literal):
            return _Numbers(number=real_number_of(v))
        return numbers_of.get(v, _Numbers())

    for eqn in program.eqns:
        operands = list(map(look_up, eqn.invars))
        if len(operands) == len(eqn.outvars):  # Each result follows from one operand.
            results = [_of_result(eqn, [x]) for x in operands]
        else:
            results = [_of_result(eqn, operands)] * len(eqn.outvars)
        numbers_of |= zip(eqn.outvars, results, strict=True)
    return {var for var, each in numbers_of.items() if each.hiding}


def _of_result(eqn: core.JaxprEqn, operands: Sequence[_Numbers]) -> _Numbers:
    """Returns the large numbers in an operation's result.

    `operands` has the large numbers in each operand.
    """
    name = eqn.primitive.name
    if is_layout(eqn):
        (x,) = operands[:1]
        is_mask = not jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
        return _Numbers(factor=1.0) if is_mask and x.number is None else x
    if name in _JOINS:
        conditions = operands[:1] if name == "select_n" else []
        cases = operands[len(conditions) :]
        if any(condition.is_rare for condition in conditions):
            return _Numbers(hiding=_NONE.union(*(x.hiding for x in cases)))
        return _Numbers(hiding=_NONE.union(*(x.large for x in cases)))
    if name == "eq":
        return _Numbers(is_rare=any(math.isinf(x.number or 0) for x in operands))
    sizes = [x.number if x.factor is None else x.factor for x in operands]
    hiding = _NONE.union(*(x.hiding for x in operands))
    if name in _SUMS:
        if None not in sizes:  # A mask minus a number, for one.
            return _Numbers(factor=max(map(abs, sizes)))
        is_hidden = any(_is_large(x.factor) for x in operands)
        return _Numbers(hiding=_BOTH if is_hidden or hiding else _NONE)
    if name in ("div", "mul"):
        factor = None
        if None not in sizes and sum(x.factor is None for x in operands):
            a, b = sizes
            factor = a * b if name == "mul" else a / b if b else math.inf
        return _Numbers(factor=factor, hiding=_BOTH if hiding else _NONE)
    if name in ("clamp", "max", "min"):
        bounds = [x.number for x in operands if x.number is not None]
        is_cut = any(not _is_large(bound) for bound in bounds)
        cut = {"clamp": _BOTH, "max": {-1}, "min": {1}}[name] if is_cut else _NONE
        return _Numbers(hiding=hiding - cut)
    if name == "neg":
        (x,) = operands
        factor = None if x.factor is None else -x.factor
        return _Numbers(factor=factor, hiding=frozenset(-sign for sign in hiding))
    if name in ("abs", "square") and hiding:
        return _Numbers(hiding=frozenset({1}))
    entry = entry_of(eqn)
    return _Numbers(factor=1.0 if entry and entry.errors == "bounded" else None)


def _is_large(number: float | None) -> bool:
    return number is not None and abs(number) >= _LARGE
