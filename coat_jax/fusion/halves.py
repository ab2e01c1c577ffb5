"""Splits matmuls that compute gate and up at once, so that a gate fuses with them.

Many models multiply by one weight [k, 2 f], or by a stack [2, f, k], and take the
halves of the result. The kernel of a gate reads two arrays, so the matmul is replaced
by two matmuls, one for each half of the weight. Activations are quantized once for both
matmuls.

A weight [k, 2 f] may be split over devices by its columns. Its halves would then move
between devices in 16 bits. So with several devices only stacks are taken apart.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax import lax
from jax.extend import core

from coat_jax.fp8.dot_general import bound
from coat_jax.fusion.operation import traced
from coat_jax.programs.graph import Graph, with_replaced
from coat_jax.programs.primitives import keeps_order
from pallas_kernels.dispatch import devices

_MOVES = "concatenate", "rev", "transpose"


class Halves(NamedTuple):
    """A matmul with a result that is read only as two halves of its columns.

    Attributes:
      matmul: The matmul of x [m, k] and w [k, n].
      results: The halves, in the order of the columns.
      eqns: The operations between the matmul's result and the halves.
    """

    matmul: core.JaxprEqn
    results: tuple[core.Var, core.Var]
    eqns: tuple[core.JaxprEqn, ...]

    def traced(self) -> list[core.JaxprEqn]:
        """Returns the operations of two matmuls, one for each half."""
        dtype, (x, w) = self.matmul.params["dtype"], self.matmul.invars

        def matmuls(x, w):
            n = w.shape[1]
            ends = (0, n // 2), (n // 2, n)
            parts = (lax.slice_in_dim(w, *columns, axis=1) for columns in ends)
            ys = [y for part in parts for y in bound(x, part, dtype)]
            pairs = zip(ys, self.results, strict=True)
            return [y.reshape(v.aval.shape) for y, v in pairs]

        return traced(matmuls, (x, w), self.results, like=self.matmul)


def halves_of(matmul: core.JaxprEqn, graph: Graph) -> Halves | None:
    """Returns the halves of a matmul's result, or None if it cannot be split.

    It cannot be split if anything else than its halves is read, or if several devices
    may share the columns of the weight.
    """
    (y,) = matmul.outvars
    if y.aval.ndim != 2 or any(isinstance(v, core.Literal) for v in matmul.invars):
        return None
    if not (devices.is_alone() or _is_stack(matmul.invars[1], graph)):
        return None
    eqns: list[core.JaxprEqn] = []
    whole = y
    while len(graph.readers[whole]) == 1 and _passes(reader := graph.readers[whole][0]):
        eqns.append(reader)
        (whole,) = reader.outvars
    shape, rows = whole.aval.shape, y.aval.shape[0]
    halves: dict[int, core.Var] = {}
    for reader in graph.readers[whole]:
        cuts = [] if reader is graph.program else list(cuts_of(reader))
        for axis, start, size, result in cuts:
            # The columns begin at this axis.
            if math.prod(shape[:axis]) != rows or 2 * start not in (0, shape[axis]):
                return None
            if 2 * size != shape[axis] or start in halves:
                return None
            halves[start] = result
        if not cuts:
            return None
        eqns.append(reader)
    if len(halves) != 2:
        return None
    results = []
    for _, half in sorted(halves.items()):
        # An index of an axis is a slice of one element, without its axis.
        squeezes = [eqn for eqn in graph.readers[half] if _is_squeeze(eqn)]
        is_index = len(squeezes) == len(graph.readers[half]) == 1
        results.append(squeezes[0].outvars[0] if is_index else half)
        eqns += squeezes if is_index else []
    return Halves(matmul, (results[0], results[1]), tuple(eqns))


def split(program: core.Jaxpr, matches: Sequence[Halves]) -> core.Jaxpr:
    """Returns a program with two matmuls in place of each matmul of `matches`."""
    replaced = {id(eqn): [] for match in matches for eqn in match.eqns}
    replaced |= {id(match.matmul): match.traced() for match in matches}
    return with_replaced(program, replaced)


def joined(
    first: core.Var, second: core.Var, axis: int, graph: Graph
) -> core.Var | None:
    """Returns the array that two matrices are the halves of, in this order, or None.

    Args:
      first: The first half.
      second: The second half.
      axis: The axis of the matrices, -1 or -2, along which one half follows the other.
        With -2, the array may have several axes before its last axis.
      graph: The program.
    """
    cuts = [cut_of(half, graph) for half in (first, second)]
    if None in cuts or first.aval.shape != second.aval.shape:
        return None
    (array, along, start, size), (again, *place) = cuts
    if array is not again or (start, place) != (0, [along, size, size]):
        return None
    shape, (rows, columns) = array.aval.shape, first.aval.shape
    if 2 * size != shape[along]:
        return None
    if axis == -1:
        return array if (shape, along) == ((rows, 2 * columns), 1) else None
    # The halves lie in memory one after the other if all axes before theirs are one.
    follows = math.prod(shape[:along]) == 1 and along < len(shape) - 1
    return array if follows and shape[-1] == columns else None


def is_moved(array: core.Var, graph: Graph) -> bool:
    """Returns whether a program moves elements to compute an array.

    XLA reads a half of the array where its elements were before, but would move all
    elements to read the whole array.
    """
    maker = graph.makers.get(array)
    while maker is not None and _passes(maker):
        maker = graph.makers.get(maker.invars[0])
    return maker is not None and maker.primitive.name in _MOVES


def cut_of(half: core.Var, graph: Graph) -> tuple[core.Var, int, int, int] | None:
    """Returns the array, axis, start and size of the slice `half`, or None.

    Operations that keep all elements in their order may follow the slice.
    """
    maker = graph.makers.get(half)
    while maker is not None and (_passes(maker) or _is_squeeze(maker)):
        half = maker.invars[0]
        maker = graph.makers.get(half) if isinstance(half, core.Var) else None
    if maker is None or not isinstance(maker.invars[0], core.Var):
        return None
    for axis, start, size, result in cuts_of(maker):
        if result is half:
            return maker.invars[0], axis, start, size
    return None


def _is_stack(weight: core.Var, graph: Graph) -> bool:
    """Returns whether a weight [k, n] is reshaped from a stack [k, 2, ...]."""
    maker = graph.makers.get(weight)
    if maker is None or maker.primitive.name != "reshape":
        return False
    k, _ = weight.aval.shape
    return keeps_order(maker) and maker.invars[0].aval.shape[:2] == (k, 2)


def _passes(eqn: core.JaxprEqn | core.Jaxpr) -> bool:
    """Returns whether an operation keeps all elements in their order."""
    if isinstance(eqn, core.Jaxpr) or len(eqn.outvars) > 1:
        return False
    if eqn.primitive.name == "reshape":
        return keeps_order(eqn)
    return eqn.primitive.name == "optimization_barrier"


def _is_squeeze(eqn: core.JaxprEqn | core.Jaxpr) -> bool:
    return not isinstance(eqn, core.Jaxpr) and eqn.primitive.name == "squeeze"


def cuts_of(eqn: core.JaxprEqn) -> Iterator[tuple[int, int, int, core.Var]]:
    """Yields the axis, start, size and result of each slice that an operation takes.

    Slices along several axes are left out.
    """
    shape = eqn.invars[0].aval.shape
    if eqn.primitive.name == "split":
        start, axis = 0, eqn.params["axis"]
        for size, result in zip(eqn.params["sizes"], eqn.outvars, strict=True):
            yield axis, start, size, result
            start += size
    if eqn.primitive.name == "slice" and not any(
        stride > 1 for stride in eqn.params["strides"] or ()
    ):
        sizes = eqn.outvars[0].aval.shape
        axes = [axis for axis, size in enumerate(sizes) if size != shape[axis]]
        if len(axes) == 1:
            (axis,) = axes
            start = eqn.params["start_indices"][axis]
            yield axis, start, sizes[axis], eqn.outvars[0]
