"""Finds the arrays that can be recomputed from saved arrays by cheap operations.

An array *follows* from others if elementwise operations and changes of layout compute
it from them alone. The backward pass recomputes such arrays, so that they need not be
saved. It recomputes from FP8 copies, too, where errors of the results stay as small as
errors of the copies; see `coat_jax.remat.errors`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from jax.extend import core

from coat_jax.programs.primitives import (
    all_eqns,
    does_work,
    entry_of,
    is_layout,
    size_of,
    variables,
)
from coat_jax.remat.errors import Errors, Known, is_cheap, normalized_arrays
from coat_jax.remat.hiding import hiding_arrays

# Limit on the operations that are repeated for one array.
_MAX_STEPS = 32


class Derivation:
    """The arrays of a program that follow from its saved arrays.

    Attributes:
      hiding: The arrays in which large numbers hide others. They are not copied.
      known: The arrays that follow. The entry of an array says, for example, how many
        operations compute it, and from which copies.
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
          program: A program with its calls inlined, without constants.
          constants: Parameters, and arrays that are recomputed from parameters.
          statistics: The results of reductions of rows, and arrays of the same size
            that are computed from them.
          group: The number of elements of a copy's group, which slices must not cut.
        """
        self._makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}
        self._readers = defaultdict(list)
        order = *program.invars, *self._makers
        self._order = {var: position for position, var in enumerate(order)}
        self.known = dict.fromkeys(variables(constants), Known())
        for eqn in program.eqns:
            operands = variables(eqn.invars)
            for var in operands:
                self._readers[var].append(eqn)
            if self.known.keys() >= operands and not _does_work(eqn):
                self.known |= dict.fromkeys(eqn.outvars, self._constant(eqn))
        normalized = normalized_arrays(program, statistics, self.known.keys())
        self._errors = Errors(self._makers, normalized, group)
        self.hiding = hiding_arrays(program)

    def _constant(self, eqn: core.JaxprEqn) -> Known:
        """Returns the entry for `known` of an operation on constants."""
        if is_layout(eqn):
            operand = self._operand(eqn.invars[0], {})
            if operand.number is not None:
                return operand
        return Known()

    def keep(self, arrays: Iterable[core.Var]) -> set[core.Var]:
        """Adds arrays that are saved unquantized to the known ones.

        Arrays that can be computed from them alone become known, too. Returns the
        arrays that must be saved. An array need not be saved if moving or converting
        another saved array gives it.
        """
        saved = set()
        for var in sorted(arrays, key=self._order.__getitem__):
            provenance = self.known.get(var)
            if provenance and not (provenance.constant or provenance.steps):
                continue
            saved.add(var)
            if not provenance:
                self.known |= self._following(var, Known(constant=False))
        return saved

    def smallest_view(
        self, var: core.Var, may_save: Callable[[core.Var], bool]
    ) -> core.Var:
        """Returns the smallest array from which moving and converting make `var`.

        It is `var` itself unless others that `may_save` allows have fewer bytes; of the
        smallest ones it is the first in the program.
        """
        smallest, eqn = var, self._makers.get(var)
        while eqn is not None and is_layout(eqn):
            source = eqn.invars[0]
            if not isinstance(source, core.Var):
                break
            size = _bytes_of(source)
            if size < _bytes_of(var) and size <= _bytes_of(smallest):
                smallest = source if may_save(source) else smallest
            eqn = self._makers.get(source)
        return smallest

    def compute(self, var: core.Var, copies: frozenset[core.Var]) -> None:
        """Adds `var`, which a kernel computes from `copies`, and what follows."""
        self.known |= self._following(var, Known.of_copies(copies))

    def copy(
        self, targets: Iterable[core.Var], may_copy: Callable[[core.Var], bool]
    ) -> tuple[list[core.Var], set[core.Var]]:
        """Chooses FP8 copies from which `targets` follow.

        Args:
          targets: The arrays that must follow.
          may_copy: A function that tells whether another array may be copied.

        Returns:
          The arrays to copy, and the targets that must be saved as they are.
        """
        copied, targets = [], sorted(set(targets), key=self._order.__getitem__)
        wide: set[core.Var] = set()
        for var in targets:
            if var in self.known:
                continue
            missing = [v for v in targets if v not in self.known]
            sources = [
                (source, following)
                for source, following in self._sources(var)
                if source not in self.hiding and (source is var or may_copy(source))
            ]
            if sources:
                # `max` returns the first of equal candidates, the nearest to var.
                source, following = max(sources, key=partial(self._use, missing))
                copied.append(source)
            else:
                following = self._following(var, Known(constant=False))
                wide.add(var)
            self.known |= following
        return copied, wide

    def _use(
        self, missing: Iterable[core.Var], candidate: tuple[core.Var, dict]
    ) -> tuple[int, int, bool]:
        """Returns a rating of a candidate for a copy, which is larger for better ones.

        Args:
          missing: The arrays that do not follow from saved arrays yet.
          candidate: An array, and all arrays that follow from a copy of it.

        Returns:
          The number of elements that need not be saved if the copy is, the number of
          arrays in `missing` that follow from the copy, and whether it is precise
          enough for all of these.
        """
        source, following = candidate
        sizes = [size_of(var.aval) for var in missing if var in following]
        maker = self._makers.get(source)
        # Rounding a result near its bound, such as 1 for tanh, loses the slope there.
        entry = None if maker is None else entry_of(maker)
        saturates = entry is not None and entry.errors == "bounded"
        precise = len(sizes) == 1 or not saturates
        return sum(sizes) - size_of(source.aval), len(sizes), precise

    def _sources(self, var: core.Var) -> Iterator[tuple[core.Var, dict]]:
        """Yields the candidates for a copy from which `var` follows, nearest first.

        The first candidate is `var`. The next is the only unknown operand of the
        operation that computes it, and so on. An array from which `var` does not follow
        is passed over: 1 - tanh(x)**2 follows from x, but not from tanh(x). Each
        candidate comes with the arrays that follow from it.
        """
        source = var
        for _ in range(_MAX_STEPS):
            following = self._following(source, Known.of_copies(frozenset({source})))
            if var in following:
                yield source, following
            eqn = self._makers.get(source)
            if eqn is None or not is_cheap(eqn):
                return
            unknown = variables(eqn.invars) - self.known.keys()
            if len(unknown) != 1:
                return
            (source,) = unknown

    def _following(self, var: core.Var, provenance: Known) -> dict[core.Var, Known]:
        """Returns what follows from `var` together with the known arrays.

        Args:
          var: An array that would be saved.
          provenance: The entry of `var` for `known`.

        Returns:
          The new arrays, `var` among them, each with its entry for `known`.
        """
        following, queue = {var: provenance}, [var]
        for source in queue:
            for eqn in self._readers[source]:
                for position, out in enumerate(eqn.outvars):
                    if out in self.known or out in following:
                        continue
                    if result := self._result(eqn, position, following):
                        following[out] = result
                        queue.append(out)
        return following

    def _result(
        self, eqn: core.JaxprEqn, position: int, following: dict[core.Var, Known]
    ) -> Known | None:
        """Returns the entry for `known` of a result; None if it does not follow.

        Args:
          eqn: The operation.
          position: The index of the result among the operation's results.
          following: Arrays that count as known in addition to `known`.
        """
        if not is_cheap(eqn):
            return None
        operands = [self._operand(v, following) for v in eqn.invars]
        if None in operands:
            return None
        copies = frozenset().union(*(k.copies for k in operands))
        if copies and not self._errors.stay_small(eqn, position, operands):
            return None
        steps = sum(k.steps for k in operands) + (not is_layout(eqn))
        if steps > _MAX_STEPS:
            return None
        return Known(
            steps=steps,
            constant=all(k.constant for k in operands),
            copies=copies,
            sign=self._errors.sign(eqn, operands),
            is_bounded=self._errors.is_bounded(eqn, operands),
            factors=self._errors.factors(eqn, operands),
        )

    def _operand(
        self, operand: core.Var | core.Literal, following: dict[core.Var, Known]
    ) -> Known | None:
        if isinstance(operand, core.Literal):
            return Known.of_number(operand)
        return following.get(operand) or self.known.get(operand)


def _does_work(eqn: core.JaxprEqn) -> bool:
    return any(map(does_work, all_eqns([eqn])))


def _bytes_of(var: core.Var) -> int:
    return size_of(var.aval) * var.aval.dtype.itemsize
