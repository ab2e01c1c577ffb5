"""Finds the weighted sums of each token's rows, after the matmuls of its experts."""

from typing import NamedTuple

from jax.extend import core

from coat_jax.fusion.algebra import DTYPES
from coat_jax.fusion.gathers import rows_p
from coat_jax.programs.graph import Graph
from coat_jax.programs.primitives import keeps_order


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
    """Returns the weighted sums that rows [m, n] go into, or None.

    Rows are gathered by a permutation, and each is multiplied by one number. Nothing
    else may read the rows or what they become on the way.
    """
    steps = _steps(rows, graph)
    names = [eqn.primitive.name for eqn in steps if not _is_cast(eqn)]
    if "reshape" in names:
        names.remove("reshape")
    if names != [rows_p.name, "mul", "reduce_sum"]:
        return None
    gather, product, total = (
        eqn for eqn in steps if eqn.primitive.name in (rows_p.name, "mul", "reduce_sum")
    )
    each = total.invars[0].aval.shape
    if len(each) != 3 or total.params["axes"] != (1,):
        return None
    tokens, k, n = each
    if (tokens * k, n) != rows.aval.shape:
        return None
    weights = _weights(product, steps, each, graph)
    if weights is None or gather.invars[0] is not rows:
        return None
    result = steps[-1].outvars[0]
    return CombineMatch(weights, gather.invars[1], (tokens, k), result, tuple(steps))


def _steps(var: core.Var, graph: Graph) -> list[core.JaxprEqn]:
    """Returns the operations that alone read `var` and what it becomes, to a sum.

    Casts of the sum follow it.
    """
    steps: list[core.JaxprEqn] = []
    while len(graph.readers[var]) == 1:
        (eqn,) = graph.readers[var]
        if eqn is graph.program or not _may_be_between(eqn, var):
            break
        summed = any(step.primitive.name == "reduce_sum" for step in steps)
        if summed and not _is_cast(eqn):
            break
        steps.append(eqn)
        (var,) = eqn.outvars
    return steps


def _may_be_between(eqn: core.JaxprEqn, var: core.Var) -> bool:
    name = eqn.primitive.name
    if len(eqn.outvars) != 1 or eqn.outvars[0].aval.dtype not in DTYPES:
        return False
    if name == "reshape":
        return keeps_order(eqn)
    if name == "mul":
        return sum(v is var for v in eqn.invars) == 1
    return name in (rows_p.name, "convert_element_type", "reduce_sum")


def _is_cast(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type"


def _weights(
    product: core.JaxprEqn,
    steps: list[core.JaxprEqn],
    each: tuple[int, int, int],
    graph: Graph,
) -> core.Var | None:
    """Returns the weights [t, k] or [t, k, 1] that rows [t, k, n] are multiplied by.

    Args:
      product: The multiplication.
      steps: The operations on rows.
      each: The shape of rows.
      graph: The program.
    """
    of_rows = {v for eqn in steps for v in eqn.outvars}
    factors = [v for v in product.invars if isinstance(v, core.Var)]
    others = [v for v in factors if v not in of_rows]
    if len(factors) != 2 or len(others) != 1 or product.outvars[0].aval.shape != each:
        return None
    (factor,) = others
    if factor.aval.shape == each and each[2] > 1:
        maker = graph.makers.get(factor)
        if maker is None or maker.primitive.name != "broadcast_in_dim":
            return None
        if maker.params["broadcast_dimensions"] not in ((0, 1), (0, 1, 2)):
            return None
        factor, *_ = maker.invars
    is_number = isinstance(factor, core.Var) and factor.aval.dtype in DTYPES
    by_row = is_number and factor.aval.shape in (each[:2], (*each[:2], 1))
    return factor if by_row else None
