"""Finds the arrays that follow elementwise, or by layout, from saved arrays.

The backward pass recomputes these arrays, also from FP8 copies. Their errors stay as
small as those of the copies: small beside the amax of a group. Operations that amplify
errors are not computed from copies. These are logarithms, exponentials other than
exp(-x**2), and sums that may cancel, such as x - 30 of a copy of x. A sum cannot cancel
if its operands have the same sign everywhere, as 1 and x**2 do. Sums of numbers and
bounded functions, such as 1 - tanh(x), have a small error beside these bounds. To a
normalized array constants may be added: the error is small beside its unit variance.
"""

from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Sequence,
)
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coat_jax.remat.programs import variables
from coat_jax.remat.trace import all_eqns, does_work, size_of

# Layout operations do not change values.
_CUTS = frozenset({"slice", "split"})
_MOVES = _CUTS | {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
_CONVERSIONS = frozenset(
    {
        *("convert_element_type", "copy", "name", "reduce_precision", "stop_gradient"),
        *("pcast", "pvary", "reshard", "sharding_constraint"),
    }
)
# Sums are computed from copies only where nothing can cancel.
_SUMS = frozenset({"add", "add_any", "one_minus_square", "sub"})
_POSITIVE = frozenset({"abs", "erfc", "exp", "exp2", "logistic", "square"})
_ODD = frozenset({"erf", "tanh"})
# Functions with bounded results may always be computed from copies.
_SATURATING = frozenset({"erf", "erfc", "logistic", "tanh"})
# Arithmetic that does not amplify errors may always be computed from copies.
_GENTLE = frozenset({"abs", "clamp", "max", "min", "mul", "neg", "square"})
# Operations that need exact operands, with the exceptions in `_stays_close`.
_OF_EXACT = frozenset(
    {
        *("div", "integer_pow", "pow", "rsqrt", "select_n", "sqrt"),
        *("cos", "exp", "exp2", "expm1", "log", "log1p", "sin"),
        *("and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or"),
    }
)
_CHEAP = _MOVES | _CONVERSIONS | _SUMS | _SATURATING | _GENTLE | _OF_EXACT
# Limit on the operations that are repeated for one array.
_MAX_STEPS = 32


class Sign(NamedTuple):
    """The sign of each element of an array: a factor times the signs of other arrays.

    Attributes:
      factor: 1 or -1.
      of: The arrays, of the same shape. If it is empty, all elements have one sign.
    """

    factor: int
    of: frozenset[core.Var] = frozenset()

    def times(self, other: "Sign") -> "Sign":
        """Returns the sign of a product; an array's sign times itself is 1."""
        return Sign(self.factor * other.factor, self.of ^ other.of)


class Known(NamedTuple):
    """The way in which an array follows from saved arrays.

    Attributes:
      steps: The number of operations on the way, without layout and conversions.
      constant: True if the array follows from parameters and constants alone.
      copies: The FP8 copies that it depends on; empty if it is exact.
      sign: The sign of its elements, if something is known of it.
      number: The number of the program that all its elements are, if there is one.
      is_bounded: Whether it is computed of numbers and bounded functions alone.
    """

    steps: int = 0
    constant: bool = True
    copies: frozenset[core.Var] = frozenset()
    sign: Sign | None = None
    number: float | None = None
    is_bounded: bool = False

    @classmethod
    def of_number(cls, literal: core.Literal) -> "Known":
        """Describes a number of a program."""
        value = np.asarray(literal.val)
        if value.ndim or not jnp.issubdtype(literal.aval.dtype, jnp.floating):
            return cls()
        sign = Sign(-1 if value < 0 else 1)
        return cls(sign=sign, number=float(value), is_bounded=True)


class Derivation:
    """The arrays of a program that follow from its saved arrays.

    Attributes:
      known: The way in which each of these arrays follows.
    """

    def __init__(
        self,
        program: core.Jaxpr,
        constants: Iterable[core.Var | core.Literal],
        statistics: Collection[core.Var],
        group: int,
    ):
        """Starts with the arrays that follow from `constants`.

        Args:
          program: A program whose calls are inlined.
          constants: Parameters, and arrays that are recomputed from parameters.
          statistics: The results of reductions of rows, and what follows in their size.
          group: The number of elements of a copy's group, which slices must not cut.
        """
        self._group = group
        self._makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}
        self._readers = defaultdict(list)
        order = *program.invars, *self._makers
        self._order = {var: place for place, var in enumerate(order)}
        self.known = dict.fromkeys(variables(constants), Known())
        self.known |= dict.fromkeys(program.constvars, Known())
        for eqn in program.eqns:
            operands = variables(eqn.invars)
            for var in operands:
                self._readers[var].append(eqn)
            if self.known.keys() >= operands and not _does_work(eqn):
                self.known |= dict.fromkeys(eqn.outvars, self._constant(eqn))
        self._normalized = _normalized(program, statistics, self.known.keys())

    def _constant(self, eqn: core.JaxprEqn) -> Known:
        """Describes the results of an operation on constants."""
        if eqn.primitive.name in _MOVES | _CONVERSIONS:
            operand = self._operand(eqn.invars[0], {})
            if operand.number is not None:
                return operand
        return Known()

    def keep(self, wanted: Iterable[core.Var]) -> set[core.Var]:
        """Adds arrays that are kept unquantized, and the arrays that follow.

        Returns those that must be saved: not those that are others moved or converted.
        """
        saved = set()
        for var in sorted(wanted, key=self._order.__getitem__):
            known = self.known.get(var)
            if known and not (known.constant or known.steps):
                continue
            saved.add(var)
            if not known:
                self.known |= self._following(var, Known(constant=False))
        return saved

    def compute(self, var: core.Var, copies: frozenset[core.Var]) -> None:
        """Adds `var`, which a kernel computes from FP8 copies, and what follows."""
        self.known |= self._following(var, Known(0, False, copies))

    def copy(
        self, wanted: Iterable[core.Var], may_copy: Callable[[core.Var], bool]
    ) -> list[core.Var]:
        """Chooses FP8 copies from which all of `wanted` follow, and returns them.

        Args:
          wanted: The arrays that must follow.
          may_copy: A function that tells whether another array may be copied.
        """
        copied, wanted = [], sorted(set(wanted), key=self._order.__getitem__)
        for var in wanted:
            if var in self.known:
                continue
            missing = [v for v in wanted if v not in self.known]
            sources = (
                (source, found)
                for source, found in self._sources(var)
                if source is var or may_copy(source)
            )
            # Among equal candidates `max` returns the first, which is nearest to var.
            source, found = max(sources, key=partial(self._use, missing))
            self.known |= found
            copied.append(source)
        return copied

    def _use(
        self, missing: Iterable[core.Var], candidate: tuple[core.Var, dict]
    ) -> tuple[int, int, bool]:
        """Rates a copy by elements saved, arrays replaced, and precision."""
        source, found = candidate
        sizes = [size_of(var.aval) for var in missing if var in found]
        maker = self._makers.get(source)
        # Rounding a result near its bound, such as 1 for tanh, loses the slope there.
        saturates = maker is not None and maker.primitive.name in _SATURATING
        precise = len(sizes) == 1 or not saturates
        return sum(sizes) - size_of(source.aval), len(sizes), precise

    def _sources(self, var: core.Var) -> Iterator[tuple[core.Var, dict]]:
        """Yields the candidates for a copy from which `var` follows, nearest first.

        The first candidate is `var`. The next is the only unknown operand of the
        operation that computes it, and so on. Each comes with the arrays that follow
        from it.
        """
        source = var
        while True:
            found = self._following(source, Known(0, False, frozenset({source})))
            if var not in found:
                return
            yield source, found
            eqn = self._makers.get(source)
            unknown = variables(eqn.invars if eqn else ()) - self.known.keys()
            if len(unknown) != 1:
                return
            (source,) = unknown

    def _following(self, var: core.Var, known: Known) -> dict[core.Var, Known]:
        """Returns the arrays that follow from `var` and the known arrays."""
        found, behind = {var: known}, [var]
        for source in behind:
            for eqn in self._readers[source]:
                for position, out in enumerate(eqn.outvars):
                    if out in self.known or out in found:
                        continue
                    if result := self._result(eqn, position, found):
                        found[out] = result
                        behind.append(out)
        return found

    def _result(
        self, eqn: core.JaxprEqn, position: int, found: dict[core.Var, Known]
    ) -> Known | None:
        """Returns the way in which a result of an operation follows, or None."""
        name = eqn.primitive.name
        if name not in _CHEAP:
            return None
        operands = [self._operand(v, found) for v in eqn.invars]
        if None in operands:
            return None
        copies = frozenset().union(*(k.copies for k in operands))
        if copies and not self._stays_close(eqn, position, operands):
            return None
        steps = sum(k.steps for k in operands) + (name not in _MOVES | _CONVERSIONS)
        if steps > _MAX_STEPS:
            return None
        return Known(
            steps,
            all(k.constant for k in operands),
            copies,
            self._sign(eqn, operands),
            is_bounded=name in _SATURATING
            or (name == "exp" and self._is_bell(eqn))
            or (name not in _OF_EXACT and all(k.is_bounded for k in operands)),
        )

    def _operand(
        self, operand: core.Var | core.Literal, found: dict[core.Var, Known]
    ) -> Known | None:
        if isinstance(operand, core.Literal):
            return Known.of_number(operand)
        return found.get(operand) or self.known.get(operand)

    def _sign(self, eqn: core.JaxprEqn, operands: Sequence[Known]) -> Sign | None:
        """Returns the sign of a result's elements, if something is known of it."""
        name = eqn.primitive.name
        signs = [
            k.sign or (Sign(1, frozenset({v})) if isinstance(v, core.Var) else None)
            for k, v in zip(operands, eqn.invars, strict=True)
        ]
        if name in _POSITIVE:
            return Sign(1)
        if None in signs:
            return None
        sign, *others = signs
        if name in _MOVES:
            # Elements are in other places now.
            return None if sign.of else sign
        if name in _CONVERSIONS | _ODD:
            return sign
        if name == "neg":
            return sign.times(Sign(-1))
        if name == "mul":
            return sign.times(*others)
        if name == "integer_pow":
            return sign if eqn.params["y"] % 2 else Sign(1)
        if name == "max":
            return Sign(1) if Sign(1) in signs else None
        if name in ("add", "add_any"):
            return sign if [sign] == others else None
        return None

    def _stays_close(
        self, eqn: core.JaxprEqn, position: int, operands: Sequence[Known]
    ) -> bool:
        """Returns whether a result's error stays small beside the amax of a group."""
        name = eqn.primitive.name
        if name in _SUMS:
            one_sign = name in ("add", "add_any") and self._sign(eqn, operands)
            if one_sign or all(k.is_bounded for k in operands):
                return True
            pairs = list(zip(operands, eqn.invars, strict=True))
            varying = [v for k, v in pairs if not k.constant]
            zeros = all(k.number == 0 for k in operands if k.constant)
            alone = len(varying) == 1 and len(operands) == 2
            return alone and (zeros or varying[0] in self._normalized)
        if name in _CUTS:
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
        return name not in _OF_EXACT

    def _is_bell(self, eqn: core.JaxprEqn) -> bool:
        """Returns whether an exponential is exp(-x**2), which is flat for large x."""
        for name in ("neg", "square"):
            eqn = self._makers.get(eqn.invars[0])
            if eqn is None or eqn.primitive.name != name:
                return False
        return True


def _normalized(
    program: core.Jaxpr,
    statistics: Collection[core.Var],
    constants: Container[core.Var],
) -> set[core.Var]:
    """Returns the arrays that are products with statistics of rows, and constants."""
    factors, normalized = set(statistics), set()
    for eqn in program.eqns:
        name, operands = eqn.primitive.name, variables(eqn.invars)
        varying = {v for v in operands if v not in constants}
        if varying and varying <= factors and name in _CHEAP:
            factors.update(eqn.outvars)
        elif name == "mul" and (varying & factors or varying & normalized):
            if len(varying - factors - normalized) <= (not varying & normalized):
                normalized.update(eqn.outvars)
        elif name in _MOVES | _CONVERSIONS and varying & normalized:
            normalized.update(eqn.outvars)
    return normalized


def _does_work(eqn: core.JaxprEqn) -> bool:
    return any(map(does_work, all_eqns([eqn])))


def _keeps_groups(eqn: core.JaxprEqn, position: int, group: int) -> bool:
    """Returns whether a slice takes whole groups of the last axis and nothing else."""
    (*_, whole), (*_, part) = eqn.invars[0].aval.shape, eqn.outvars[position].aval.shape
    if whole == part:
        return True
    if eqn.primitive.name == "split":
        start, stride = sum(eqn.params["sizes"][:position]), 1
    else:
        start = eqn.params["start_indices"][-1]
        stride = (eqn.params["strides"] or [1])[-1]
    return stride == 1 and start % group == part % group == whole % group == 0
