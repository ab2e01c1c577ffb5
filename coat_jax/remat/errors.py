"""Follows the errors of FP8 copies through the operations that read the copies.

An error is called small if it is small compared with the amax of a group, as the errors
of copies are. Operations that amplify errors need exact operands. Examples are
logarithms, exponentials other than exp(-x**2), and sums that may cancel, such as x - 30
if x is read from a copy. A sum cannot cancel if its operands have the same sign
everywhere, such as 1 and x**2. Sums of numbers and bounded functions, such as
`1 - tanh(x)`, have an error that is small compared with the bounds. Constants may be
added to an array that is centered and normalized, because the error is small compared
with the array's unit variance. A product has the errors of all its factors, so that the
power x**32 has 32 times the error of x. It may have few factors.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coat_jax.programs.primitives import (
    Kind,
    entry_of,
    has_pole,
    is_elementwise,
    is_layout,
    kind_of,
    variables,
)

_MAX_FACTORS = 4  # Enough for x**3 and the other operand of a gate.
_POSITIVE = frozenset({"abs", "erfc", "exp", "exp2", "logistic", "square"})
_ODD = frozenset({"erf", "tanh"})
_SAME_PLACES = (Kind.MARK, Kind.CAST)


class Sign(NamedTuple):
    """The sign of each element of an array: a factor times the signs of other arrays.

    Attributes:
      factor: 1 or -1.
      of: The other arrays, of the same shape. If there are none, all elements have the
        sign `factor`.
    """

    factor: int
    of: frozenset[core.Var] = frozenset()

    def times(self, other: "Sign") -> "Sign":
        """Returns the sign of a product; an array's sign times itself is 1."""
        return Sign(self.factor * other.factor, self.of ^ other.of)


class Known(NamedTuple):
    """A description of how an array is computed from saved arrays.

    Attributes:
      steps: The number of operations that compute it from saved arrays, not counting
        casts and changes of layout.
      constant: Whether the array follows from parameters and constants alone.
      copies: The FP8 copies that it depends on; empty if it is exact.
      sign: The sign of its elements, or None if it is unknown.
      number: The number that all of its elements equal, or None.
      is_bounded: Whether it is computed from numbers and bounded functions alone.
      factors: The number of copies that are multiplied in each element; squares count
        twice. Bounded functions do not count: a power of tanh(x) is large only where x
        is, and there the slope of tanh is small.
    """

    steps: int = 0
    constant: bool = True
    copies: frozenset[core.Var] = frozenset()
    sign: Sign | None = None
    number: float | None = None
    is_bounded: bool = False
    factors: int = 0

    @classmethod
    def of_copies(cls, copies: frozenset[core.Var]) -> "Known":
        """Returns the description of a copy, or of what a kernel computes from some."""
        return cls(0, False, copies, factors=1)

    @classmethod
    def of_number(cls, literal: core.Literal) -> "Known":
        """Returns the description of a literal, with its number if it is floating."""
        value = np.asarray(literal.val)
        if value.ndim or not jnp.issubdtype(literal.aval.dtype, jnp.floating):
            return cls()
        sign = Sign(-1 if value < 0 else 1)
        return cls(sign=sign, number=float(value), is_bounded=True)


def is_cheap(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation may be repeated in the backward pass."""
    return is_layout(eqn) or is_elementwise(eqn)


class Errors:
    """The errors of a program's operations on arrays that are computed from copies."""

    def __init__(
        self,
        makers: Mapping[core.Var, core.JaxprEqn],
        normalized: Container[core.Var],
        group: int,
    ):
        """Prepares to follow errors through a program.

        Args:
          makers: The operation that computes each variable.
          normalized: The centered arrays of unit variance; see `normalized_arrays`.
          group: The number of elements of a copy's group, which slices must not cut.
        """
        self._makers, self._normalized, self._group = makers, normalized, group

    def stay_small(
        self, eqn: core.JaxprEqn, position: int, operands: Sequence[Known]
    ) -> bool:
        """Returns whether the error of an operation's result is small; see the module.

        Args:
          eqn: The operation.
          position: The index of the result among the operation's results.
          operands: The descriptions of the operation's operands.
        """
        name, errors = eqn.primitive.name, entry_of(eqn).errors
        if self.factors(eqn, operands) > _MAX_FACTORS:
            return False
        if errors == "sum":
            return self._cannot_cancel(eqn, operands)
        if kind_of(eqn) is Kind.CUT:
            return _keeps_groups(eqn, position, self._group)
        if name == "convert_element_type":
            dtype = jnp.dtype(eqn.params["new_dtype"])
            return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
        if name == "integer_pow":
            return 1 <= eqn.params["y"] <= 3
        if name == "exp":
            return self._is_bell(eqn)
        if name in ("div", "select_n"):
            exact = operands[1] if name == "div" else operands[0]
            return not exact.copies
        return errors != "exact"

    def factors(self, eqn: core.JaxprEqn, operands: Sequence[Known]) -> int:
        """Returns the number of copies that are multiplied in a result's elements."""
        name = eqn.primitive.name
        factors = [operand.factors for operand in operands]
        if self.is_bounded(eqn, operands):
            return 0
        if name == "mul":
            return sum(factors)
        power = {"square": 2, "integer_pow": eqn.params.get("y")}.get(name, 1)
        return power * max(factors, default=0)

    def _cannot_cancel(self, eqn: core.JaxprEqn, operands: Sequence[Known]) -> bool:
        has_sign = eqn.primitive.name in ("add", "add_any")
        if has_sign and self.sign(eqn, operands):
            return True
        if all(operand.is_bounded for operand in operands):
            return True
        constants = [operand for operand in operands if operand.constant]
        if len(operands) != 2 or len(constants) != 1:
            return False
        (varying,) = (
            var
            for var, operand in zip(eqn.invars, operands, strict=True)
            if not operand.constant
        )
        return constants[0].number == 0 or varying in self._normalized

    def is_bounded(self, eqn: core.JaxprEqn, operands: Sequence[Known]) -> bool:
        """Returns whether the result of an operation on `operands` is bounded."""
        entry = entry_of(eqn)
        if entry.errors == "bounded" or self._is_bell(eqn):
            return True
        is_exact = entry.errors == "exact"
        return not is_exact and all(operand.is_bounded for operand in operands)

    def sign(self, eqn: core.JaxprEqn, operands: Sequence[Known]) -> Sign | None:
        """Returns the sign of a result's elements, or None if it is unknown."""
        name, kind = eqn.primitive.name, kind_of(eqn)
        if name in _POSITIVE:
            return Sign(1)
        signs = [
            result.sign
            or (Sign(1, frozenset({v})) if isinstance(v, core.Var) else None)
            for result, v in zip(operands, eqn.invars, strict=True)
        ]
        if None in signs:
            return None
        sign, *further = signs
        if kind is Kind.CAST and not _is_floating(eqn):
            return None  # No bool and no unsigned number is negative.
        if kind in _SAME_PLACES or name in _ODD:
            return sign
        if is_layout(eqn):
            return None if sign.of else sign  # Elements are in other places now.
        if name == "neg":
            return sign.times(Sign(-1))
        if name == "mul":
            return sign.times(*further)
        if name == "integer_pow":
            return sign if eqn.params["y"] % 2 else Sign(1)
        if name == "max":
            return Sign(1) if Sign(1) in signs else None
        if name in ("add", "add_any"):
            return sign if [sign] == further else None
        return None

    def _is_bell(self, eqn: core.JaxprEqn | None) -> bool:
        """Returns whether an operation is exp(-x**2), which is flat for large x."""
        for name in ("exp", "neg", "square"):
            if eqn is None or eqn.primitive.name != name:
                return False
            operand = eqn.invars[0]
            is_variable = isinstance(operand, core.Var)
            eqn = self._makers.get(operand) if is_variable else None
        return True


def _is_floating(eqn: core.JaxprEqn) -> bool:
    return jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)


def normalized_arrays(
    program: core.Jaxpr,
    statistics: Collection[core.Var],
    constants: Container[core.Var],
) -> set[core.Var]:
    """Returns the outputs of norms that subtract a mean, such as layer norm.

    These are products of a centered array, such as x - mean(x), of the inverse of a
    statistic, such as 1 / std(x), and of constants. The numbers of a centered array are
    spread around zero, so a constant that is added, such as a bias, cannot cancel all
    of them.

    Args:
      program: A program with its calls inlined.
      statistics: The results of reductions of rows, and arrays of the same size that
        are computed from them.
      constants: Parameters, and arrays that are computed from parameters alone.
    """
    makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}
    factors, inverse = set(statistics), set()
    centered, normalized = set(), set()
    for eqn in program.eqns:
        name = eqn.primitive.name
        varying = {v for v in variables(eqn.invars) if v not in constants}
        unnormalized, by = varying - factors, varying & factors
        if varying and not unnormalized and is_cheap(eqn):
            factors.update(eqn.outvars)
            poles = (v for i, v in enumerate(eqn.invars) if has_pole(eqn, i))
            if by & inverse or by & variables(poles):
                inverse.update(eqn.outvars)
        elif len(unnormalized) != 1:
            continue
        elif name == "sub" and by and by == variables(eqn.invars[1:]):
            if _is_centered(*eqn.invars, makers, constants):
                centered.update(eqn.outvars)
        elif name == "mul" and by and by <= inverse and unnormalized <= centered:
            normalized.update(eqn.outvars)
        elif is_layout(eqn) or (name == "mul" and not by and not _is_square(eqn)):
            for kind in (centered, normalized):
                if unnormalized <= kind:
                    kind.update(eqn.outvars)
    return normalized


def _is_square(eqn: core.JaxprEqn) -> bool:
    """Returns whether a product multiplies an array by itself."""
    return eqn.invars[0] is eqn.invars[1]


def _is_centered(
    array: core.Var,
    mean: core.Var,
    makers: Mapping[core.Var, core.JaxprEqn],
    constants: Container[core.Var],
) -> bool:
    """Returns whether `mean` is computed from a sum of the elements of `array`."""

    def unmoved(var):
        while (eqn := makers.get(var)) and is_layout(eqn) and variables(eqn.invars):
            var = eqn.invars[0]
        return var

    sums = [mean]
    for var in sums:
        eqn = makers.get(var)
        if eqn is None or kind_of(eqn) is Kind.REDUCTION:
            is_sum = eqn is not None and eqn.primitive.name == "reduce_sum"
            return is_sum and unmoved(eqn.invars[0]) is unmoved(array)
        sums += [v for v in variables(eqn.invars) if v not in constants]
    return False


def _keeps_groups(eqn: core.JaxprEqn, position: int, group: int) -> bool:
    """Returns whether result `position` of a slice cuts no group of the last axis."""
    full_size = eqn.invars[0].aval.shape[-1]
    size = eqn.outvars[position].aval.shape[-1]
    if full_size == size:
        return True
    if eqn.primitive.name == "split":
        start, stride = sum(eqn.params["sizes"][:position]), 1
    else:
        start = eqn.params["start_indices"][-1]
        stride = (eqn.params["strides"] or [1])[-1]
    return stride == 1 and start % group == size % group == full_size % group == 0
