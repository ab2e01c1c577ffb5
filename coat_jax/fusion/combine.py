"""Finds the weighted sums of each token's rows, after the matmuls of its experts."""

from typing import NamedTuple

from jax.extend import core

from coat_jax.fusion.gathers import rows_p
from coat_jax.programs.graph import Graph
from coat_jax.programs.primitives import keeps_order, variables
from pallas_kernels.checks import WIDE

_LAYOUTS = frozenset({"convert_element_type", "reshape"})
_SUMS = frozenset({"dot_general", "reduce_sum"})
_APART = rows_p.name, "mul", "reduce_sum"
_AT_ONCE = rows_p.name, "dot_general"


class CombineMatch(NamedTuple):
    """The weighted sums of rows [m, n] by token: `sum(y[places] * weights, axis=1)`.

    Attributes:
      weights: The weights, of t * k elements.
      places: The permutation by which rows are gathered in the order of tokens.
      shape: The numbers of tokens and of a token's rows, t and k.
      result: The sums [t, n].
      eqns: The operations from the rows to the sums.
    """

    weights: core.Var
    places: core.Var
    shape: tuple[int, int]
    result: core.Var
    eqns: tuple[core.JaxprEqn, ...]


def combine_of(rows: core.Var, graph: Graph) -> CombineMatch | None:
    """Returns the weighted sums that are computed from rows [m, n], or None.

    Rows are gathered by a permutation. Each row is multiplied by a number, and the rows
    of each token are added, in two operations or in one matmul. Nothing else may read
    the rows, or the arrays between the rows and the sums.
    """
    steps = _steps(rows, graph)
    named = [eqn for eqn in steps if eqn.primitive.name not in _LAYOUTS]
    names = tuple(eqn.primitive.name for eqn in named)
    if names not in (_APART, _AT_ONCE):
        return None
    gather, product, total = named[0], named[1], named[-1]
    if gather.invars[0].aval.shape != rows.aval.shape:
        return None
    of_rows = {rows, *(v for eqn in steps for v in eqn.outvars)}
    (summed,) = (v for v in variables(total.invars) if v in of_rows)
    each = summed.aval.shape
    if len(each) != 3 or (each[0] * each[1], each[2]) != rows.aval.shape:
        return None
    tokens, k, _ = each
    factors = [v for v in variables(product.invars) if v not in of_rows]
    weights = factors[0] if len(factors) == 1 else None
    if weights is None or weights.aval.dtype not in WIDE:
        return None
    if total is product:
        if not _contracts(product, summed) or weights.aval.shape != (tokens, k):
            return None
    else:
        spread = product.outvars[0].aval.shape
        weights = _by_row(weights, spread, graph)
        if total.params["axes"] != (1,) or spread not in (each, rows.aval.shape):
            return None
        if weights is None:
            return None
    result = steps[-1].outvars[0]
    return CombineMatch(weights, gather.invars[1], (tokens, k), result, tuple(steps))


def _steps(var: core.Var, graph: Graph) -> list[core.JaxprEqn]:
    """Returns the chain of operations from `var` to a sum, and the casts of the sum.

    Each operation is the only reader of the result before it. The chain ends earlier if
    a result has several readers, or another operation reads it.
    """
    steps: list[core.JaxprEqn] = []
    allowed = {rows_p.name, "mul", *_SUMS, *_LAYOUTS}
    while len(graph.readers[var]) == 1:
        (eqn,) = graph.readers[var]
        if eqn is graph.program or not _may_be_between(eqn, var, allowed):
            break
        steps.append(eqn)
        (var,) = eqn.outvars
        if eqn.primitive.name in _SUMS:
            allowed = {"convert_element_type"}
    return steps


def _may_be_between(eqn: core.JaxprEqn, var: core.Var, allowed: set[str]) -> bool:
    """Returns whether an operation has an allowed name and reads `var` once."""
    name = eqn.primitive.name
    if name not in allowed or sum(v is var for v in eqn.invars) != 1:
        return False
    if len(eqn.outvars) != 1 or eqn.outvars[0].aval.dtype not in WIDE:
        return False
    return name != "reshape" or keeps_order(eqn)


def _contracts(product: core.JaxprEqn, rows: core.Var) -> bool:
    """Returns whether a matmul sums rows [t, k, n] over k, with weights [t, k]."""
    contracted, batch = product.params["dimension_numbers"]
    numbers = (tuple(map(tuple, contracted)), tuple(map(tuple, batch)))
    tokens, _, n = rows.aval.shape
    return numbers == (((1,), (1,)), ((0,), (0,))) and (
        product.outvars[0].aval.shape == (tokens, n)
    )


def _by_row(factor: core.Var, shape: tuple[int, ...], graph: Graph) -> core.Var | None:
    """Returns the array with one number per row that is broadcast to `factor`, or None.

    Args:
      factor: An array that rows are multiplied by.
      shape: The shape of the rows, [t, k, n] or [m, n].
      graph: The program.
    """
    of_rows = shape[:-1]
    if factor.aval.shape == shape and shape[-1] > 1:
        maker = graph.makers.get(factor)
        if maker is None or maker.primitive.name != "broadcast_in_dim":
            return None
        axes = maker.params["broadcast_dimensions"]
        if axes != tuple(range(len(axes))) or len(axes) < len(of_rows):
            return None
        factor, *_ = maker.invars
    if not isinstance(factor, core.Var) or factor.aval.dtype not in WIDE:
        return None
    return factor if factor.aval.shape in (of_rows, (*of_rows, 1)) else None
