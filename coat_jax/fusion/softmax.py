"""Finds the softmax of scores in a program, and the scores' scale and masks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coat_jax.fusion.algebra import before_casts
from coat_jax.fusion.axes import (
    MOVES,
    SPREADS,
    Axis,
    MismatchError,
    Sizes,
    before,
    labelled,
    moved,
    of_operand,
)
from coat_jax.fusion.masks import Mask, masks_of
from coat_jax.programs.graph import Graph
from coat_jax.programs.primitives import Operand, number_of

# The exponential of a score that is so much smaller than another one is zero.
_HIDDEN = -1e8
# No score of a model is so large. Its exponential would be infinite.
_LARGEST = 2.0**16
_DTYPES = frozenset(map(jnp.dtype, ("bfloat16", "float16", "float32")))
_NUMBERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(SPREADS, lambda x: x),
    "div": np.divide,
    "mul": np.multiply,
    "neg": np.negative,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
}


class Scores(NamedTuple):
    """The operand of a softmax: scaled and masked products of queries and keys.

    Attributes:
      axes: The axes of the operand. Labels are the axes of the products.
      scale: The factor on the products.
      masks: The masks, which are combined by "and".
      shifted: Whether hidden scores are not replaced by a number, but all become equal
        when a number is added to them. The gradients of a query that sees no key then
        pass to queries and keys.
    """

    axes: list[Axis]
    scale: float
    masks: list[Mask]
    shifted: bool


class Softmax:
    """A softmax between the matmul of the scores and the matmul with the values.

    Args:
      graph: The program.
      last: The second matmul, with the values.
      side: The place of the probabilities among the operands of `last`, 0 or 1.

    Attributes:
      first: The matmul of the scores.
      axis: The axis of the softmax.
      eqns: The operations between the two matmuls, and the first matmul. Nothing else
        reads their results.

    Raises:
      MismatchError: If there is no softmax before this operand.
    """

    def __init__(self, graph: Graph, last: core.JaxprEqn, side: int):
        self._graph = graph
        self.eqns: list[core.JaxprEqn] = []
        *after, division = self._chain(last.invars[side], "div", self._moved)
        x, self.axis = self._operand_of(division)
        *scores, self.first = self._chain(x, "dot_general", self._scores_of)
        self._after, self._scores = after[::-1], scores[::-1]
        results = [v for eqn in self.eqns for v in eqn.outvars]
        if not graph.only_read_by(results, [*self.eqns, last]):
            raise MismatchError

    def scores(self, sizes: Sizes) -> Scores:
        """Returns the scores that the softmax is of.

        Raises:
          MismatchError: If scores are scaled after they are masked, or if the scores of
            a query that sees no key may differ.
        """
        axes, scale = labelled(self.first.outvars[0].aval.shape), 1.0
        masks, hidden = [], []
        for eqn in self._scores:
            name = eqn.primitive.name
            if name in ("mul", "div"):
                if masks:
                    raise MismatchError
                numbers = [n for n in map(self._number, eqn.invars) if n is not None]
                scale = scale * numbers[0] if name == "mul" else scale / numbers[0]
            elif name in ("add", "select_n"):
                masks += self._masks(eqn, axes, sizes)
                numbers = [n for v in eqn.invars if (n := self._number(v)) is not None]
                hidden.append(numbers[0] if numbers else None)
            else:
                axes = moved(eqn, axes, sizes)
        # If one number replaces hidden scores, the scores of a query that sees no key
        # are equal. If several numbers replace scores, they may differ.
        if len(hidden) > 1 and (None in hidden or len({*hidden}) > 1):
            raise MismatchError
        key = axes[self.axis]
        is_shown = len(masks) < 2 and all(mask.always_shows(key) for mask in masks)
        shifted = hidden == [None] and not is_shown
        additions = [eqn for eqn in self._scores if eqn.primitive.name == "add"]
        if shifted and not all(map(self._is_level, additions)):
            raise MismatchError
        return Scores(axes, scale, masks, shifted)

    def probabilities(self, axes: Sequence[Axis], sizes: Sizes) -> Sequence[Axis]:
        """Returns the axes of the probabilities, from the axes of the softmax."""
        for eqn in self._after:
            axes = moved(eqn, axes, sizes)
        return axes

    def _chain(
        self, var: Operand, end: str, step: Callable[[core.JaxprEqn], Operand]
    ) -> list[core.JaxprEqn]:
        """Returns the operations from `var` back to the first one named `end`.

        The search goes on from an operation to the operand that `step` returns.
        """
        chain = [self._maker(var)]
        while chain[-1].primitive.name != end:
            chain.append(self._maker(step(chain[-1])))
        return chain

    def _moved(self, eqn: core.JaxprEqn) -> Operand:
        """Returns the operand of an operation that moves or casts elements."""
        if eqn.primitive.name not in MOVES:
            raise MismatchError
        return eqn.invars[0]

    def _scores_of(self, eqn: core.JaxprEqn) -> Operand:
        """Returns the scores that an operation moves, casts, scales or masks."""
        name = eqn.primitive.name
        if name in MOVES:
            return eqn.invars[0]
        if name == "add":
            is_other = [self._selection(v) is not None for v in eqn.invars]
        elif name in ("mul", "div"):
            is_other = [self._number(v) is not None for v in eqn.invars]
        elif name == "select_n":
            numbers = [self._number(v) for v in eqn.invars[1:]]
            is_other = [True, *(n is not None and n <= _HIDDEN for n in numbers)]
        else:
            raise MismatchError
        places = [i for i, other in enumerate(is_other) if not other]
        if len(places) != 1 or (name == "div" and places != [0]):
            raise MismatchError
        return self._unrepeated(eqn, places[0])

    def _unrepeated(self, eqn: core.JaxprEqn, place: int) -> Operand:
        """Returns the operand at `place`, which an operation does not broadcast.

        Raises:
          MismatchError: If the operand and the result differ in shape.
        """
        if eqn.invars[place].aval.shape != eqn.outvars[0].aval.shape:
            raise MismatchError
        return eqn.invars[place]

    def _maker(self, var: Operand) -> core.JaxprEqn:
        """Returns the operation that computes a variable, and adds it to `eqns`."""
        eqn = self._graph.makers.get(var) if isinstance(var, core.Var) else None
        # A cast to FP8 rounds on purpose.
        if eqn is None or len(eqn.outvars) != 1 or var.aval.dtype not in _DTYPES:
            raise MismatchError
        self.eqns.append(eqn)
        return eqn

    def _named(self, var: Operand, name: str) -> core.JaxprEqn:
        eqn = self._maker(self._root(var))
        if eqn.primitive.name != name:
            raise MismatchError
        return eqn

    def _root(self, var: Operand) -> core.Var:
        """Returns a variable before casts, and adds the casts to `eqns`."""
        if not isinstance(var, core.Var):
            raise MismatchError
        root = before_casts(var, self._graph)
        while var is not root:
            (var,) = self._maker(var).invars
        return root

    def _operand_of(self, division: core.JaxprEqn) -> tuple[core.Var, int]:
        """Returns the operand and the axis of the softmax that a division ends."""
        numerator, denominator = self._unrepeated(division, 0), division.invars[1]
        exponential = self._named(numerator, "exp")
        difference = self._named(exponential.invars[0], "sub")
        x, largest = self._unrepeated(difference, 0), difference.invars[1]
        x = self._root(x)
        axis = self._row(denominator, "reduce_sum", exponential.outvars[0])
        if self._row(largest, "reduce_max", x) != axis:
            raise MismatchError
        return x, axis

    def _row(self, var: Operand, name: str, x: core.Var) -> int:
        """Returns the axis of `x` along which a reduction gives `var`.

        `name` is the name of the reduction. The result may be moved, cast and
        broadcast.

        Raises:
          MismatchError: If `var` is not a reduction of this kind, or its elements are
            not in the order of the rows of `x`.
        """
        moves, eqn = [], self._maker(var)
        while eqn.primitive.name != name:
            operands = [v for v in eqn.invars if self._number(v) != -math.inf]
            if not operands:
                raise MismatchError
            is_bounded = eqn.primitive.name == "max" and len(operands) == 1
            if eqn.primitive.name in MOVES | SPREADS:
                moves.append(eqn)
            elif not is_bounded and (
                name != "reduce_max" or eqn.primitive.name != "stop_gradient"
            ):
                raise MismatchError
            eqn = self._maker(operands[0])
        # The reduction may have read another view of the same elements.
        (base, of_reduced), (base_of_x, of_x) = self._view(eqn.invars[0]), self._view(x)
        if base is not base_of_x or len(eqn.params["axes"]) != 1:
            raise MismatchError
        (axis,), sizes = eqn.params["axes"], dict(enumerate(base.aval.shape))
        row = [axes for i, axes in enumerate(of_reduced) if i != axis]
        for move in reversed(moves):
            row = moved(move, row, sizes)
        places = [i for i, axes in enumerate(of_x) if axes == of_reduced[axis]]
        if len(of_reduced[axis]) != 1 or len(places) != 1:
            raise MismatchError
        (place,) = places
        if row != [*of_x[:place], (), *of_x[place + 1 :]]:
            raise MismatchError
        return place

    def _view(self, var: Operand) -> tuple[core.Var, list[Axis]]:
        """Returns the variable that `var` is a view of, and the axes of `var`.

        Labels are the positions of axes of the returned variable.
        """
        moves = []
        while (eqn := self._graph.makers.get(var)) and eqn.primitive.name in MOVES:
            moves.append(self._maker(var))
            (var,) = eqn.invars
            if not isinstance(var, core.Var):
                raise MismatchError
        axes, sizes = labelled(var.aval.shape), dict(enumerate(var.aval.shape))
        for move in reversed(moves):
            axes = moved(move, axes, sizes)
        return var, axes

    def _number(self, var: Operand, steps: int = 8) -> float | None:
        """Returns the number that all elements of an array equal, or None.

        At most `steps` operations may compute the array from literals.
        """
        if isinstance(var, core.Literal):
            return number_of(var) if np.ndim(var.val) == 0 else None
        eqn = self._graph.makers.get(var)
        function = None if eqn is None else _NUMBERS.get(eqn.primitive.name)
        if function is None or not steps:
            return None
        numbers = [self._number(v, steps - 1) for v in eqn.invars]
        if not numbers or None in numbers:
            return None
        with np.errstate(all="ignore"):
            number = np.float64(function(*numbers))
            return float(number.astype(eqn.outvars[0].aval.dtype))

    def _selection(self, var: Operand) -> core.JaxprEqn | None:
        """Returns the `select_n` of 0 and a low number that is broadcast to `var`.

        Returns None if `var` is anything else.
        """
        while isinstance(var, core.Var) and var in self._graph.makers:
            eqn = self._graph.makers[var]
            if var.aval.dtype not in _DTYPES:
                return None
            if eqn.primitive.name == "select_n":
                numbers = [self._number(v) for v in eqn.invars[1:]]
                if len(numbers) != 2 or None in numbers:
                    return None
                return eqn if max(numbers) == 0 and min(numbers) <= _HIDDEN else None
            if eqn.primitive.name not in MOVES | SPREADS:
                return None
            var = eqn.invars[0]
        return None

    def _is_level(self, eqn: core.JaxprEqn) -> bool:
        """Returns whether an addition makes hidden scores equal.

        The number is so large that any score is lost when the sum is rounded.
        """
        _, selection = self._addend(eqn)
        number = min(self._number(v) for v in selection.invars[1:])
        dtype = eqn.outvars[0].aval.dtype
        return -number * float(jnp.finfo(dtype).eps) / 4 > _LARGEST

    def _addend(self, eqn: core.JaxprEqn) -> tuple[core.Var, core.JaxprEqn]:
        """Returns the operand by which an addition hides scores, and its selection."""
        pairs = ((v, self._selection(v)) for v in eqn.invars)
        (addend,) = (pair for pair in pairs if pair[1] is not None)
        return addend

    def _masks(
        self, eqn: core.JaxprEqn, axes: Sequence[Axis], sizes: Sizes
    ) -> list[Mask]:
        """Returns the masks by which an operation hides scores with axes `axes`."""
        graph = self._graph
        if eqn.primitive.name == "add":
            var, selection = self._addend(eqn)
            axes = of_operand(var, axes)
            while (maker := graph.makers[var]) is not selection:
                axes = before(maker, axes, sizes)
                var = maker.invars[0]
            shows = [self._number(v) == 0 for v in selection.invars[1:]]
        else:
            selection = eqn
            shows = [self._number(v) is None for v in eqn.invars[1:]]
        which = selection.invars[0]
        if which.aval.dtype != jnp.bool_:
            raise MismatchError
        axes = of_operand(which, axes)
        return masks_of(which, axes, sizes, graph, negated=not shows[1])
