"""Finds the masks of attention: boolean arrays that are combined by "and"."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coat_jax.fusion.axes import MOVES, Axis, MismatchError, Sizes, before, of_operand
from coat_jax.programs.graph import Graph
from coat_jax.programs.primitives import Kind, Operand, kind_of, variables

# Masks that are constants are evaluated with arrays of so many elements at most.
_MOST_EVALUATED = 2**25
_SIMPLE = frozenset({Kind.CAST, Kind.VIEW, Kind.SPREAD, Kind.CUT, Kind.ELEMENTWISE})


class Mask(NamedTuple):
    """A mask, or one of several masks that are combined by "and".

    Attributes:
      array: A variable of booleans.
      axes: The labels of its axes.
      negated: Whether the array is true where a key is hidden.
      shown: The elements if they are constant, true where a key is not hidden. An axis
        along which they repeat has length one.
    """

    array: core.Var
    axes: Sequence[Axis]
    negated: bool
    shown: np.ndarray | None = None

    @property
    def labels(self) -> list[int]:
        """The labels of all axes."""
        return [label for axis in self.axes for label in axis]

    def always_shows(self, key: Axis) -> bool:
        """Returns whether the mask is constant and shows each query at least one key.

        `key` is the axis of keys.
        """
        if self.shown is None or key not in self.axes:
            return False
        return bool(self.shown.any(axis=list(self.axes).index(key)).all())

    def is_causal(self, query: int, key: int) -> bool:
        """Returns whether the mask hides the keys after each query, and nothing else.

        Args:
          query: The label of the positions of queries.
          key: The label of the positions of keys.
        """
        if self.shown is None:
            return False
        varying = [
            axis for axis, n in zip(self.axes, self.shown.shape, strict=True) if n > 1
        ]
        if sorted(varying) != sorted([(query,), (key,)]):
            return False
        shown = self.shown.squeeze()
        if varying == [(key,), (query,)]:
            shown = shown.T
        is_square = shown.shape[0] == shown.shape[1]
        return is_square and np.array_equal(shown, np.tri(len(shown), dtype=bool))


def masks_of(
    var: Operand, axes: Sequence[Axis], sizes: Sizes, graph: Graph, *, negated: bool
) -> list[Mask]:
    """Returns masks that are all true exactly where an array of booleans is true.

    Args:
      var: The array, or a number.
      axes: The labels of its axes.
      sizes: The size of each label.
      graph: The program that computes it.
      negated: Whether the array is to be negated first.

    Raises:
      MismatchError: If a reshape has merged axes of a mask to an axis with one label,
        or the mask hides all keys.
    """
    while (eqn := graph.makers.get(var) if isinstance(var, core.Var) else None) and (
        operand := _same(eqn, graph)
    ) is not None:
        if eqn.primitive.name == "not":
            negated = not negated
        elif eqn.primitive.name in MOVES | {"broadcast_in_dim"}:
            axes = before(eqn, axes, sizes)
        var = operand
    if isinstance(var, core.Literal):
        # A literal that is an array cannot be an operand; a number may hide all keys.
        if np.ndim(var.val) or bool(var.val) == negated:
            raise MismatchError
        return []
    if eqn is not None and eqn.primitive.name == ("or" if negated else "and"):
        return [
            mask
            for v in eqn.invars
            for mask in masks_of(v, of_operand(v, axes), sizes, graph, negated=negated)
        ]
    shown = _constant(var, graph)
    if shown is None:
        return [Mask(var, axes, negated)]
    shown ^= negated
    for axis in range(shown.ndim):
        first = shown.take([0], axis)
        if np.array_equal(np.broadcast_to(first, shown.shape), shown):
            shown = first
    return [] if shown.all() else [Mask(var, axes, negated, shown)]


def _same(eqn: core.JaxprEqn, graph: Graph) -> Operand | None:
    """Returns the boolean operand that an operation moves, casts or negates, or None.

    Comparisons of cast booleans with zero count as casts.
    """
    name = eqn.primitive.name
    operand = eqn.invars[0] if eqn.invars else None
    if name == "ne" and isinstance(eqn.invars[1], core.Literal):
        # A mask of numbers, which were booleans.
        maker = graph.makers.get(operand) if isinstance(operand, core.Var) else None
        is_cast = maker is not None and maker.primitive.name == "convert_element_type"
        if is_cast and maker.invars[0].aval.dtype == jnp.bool_:
            zero = eqn.invars[1].val
            return maker.invars[0] if np.ndim(zero) == 0 and zero == 0 else None
        return None
    if operand is None or operand.aval.dtype != jnp.bool_:
        return None
    return operand if name in MOVES | {"broadcast_in_dim", "not"} else None


def _constant(var: core.Var, graph: Graph) -> np.ndarray | None:
    """Returns the elements of a variable that follows from no input, or None."""
    needed = graph.needed_for([var])
    eqns = [eqn for eqn in graph.program.eqns if id(eqn) in needed]
    computed = {v for eqn in eqns for v in eqn.outvars}
    read = {v for eqn in eqns for v in variables(eqn.invars)}
    if not eqns or not read <= computed or not all(map(_is_simple, eqns)):
        return None
    values: dict[core.Var, jax.Array] = {}
    with jax.ensure_compile_time_eval():
        for eqn in eqns:
            operands = [
                v.val if isinstance(v, core.Literal) else values[v] for v in eqn.invars
            ]
            result = eqn.primitive.bind(*operands, **eqn.params)
            results = result if eqn.primitive.multiple_results else [result]
            values |= zip(eqn.outvars, results, strict=True)
        return np.array(values[var], bool)


def _is_simple(eqn: core.JaxprEqn) -> bool:
    sizes = [v.aval.size for v in eqn.outvars]
    is_small = all(isinstance(n, int) and n <= _MOST_EVALUATED for n in sizes)
    return is_small and (eqn.primitive.name == "iota" or kind_of(eqn) in _SIMPLE)
