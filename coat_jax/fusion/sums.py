"""Sums of a matmul's result and another array: biases and residual streams."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from jax.extend import core

from coat_jax.fusion.algebra import is_mark
from coat_jax.programs.graph import Graph
from coat_jax.programs.primitives import keeps_order

Eqns = tuple[core.JaxprEqn, ...]


class Sum(NamedTuple):
    """The sum of a result and another array.

    Attributes:
      other: The other array.
      result: The sum.
      eqns: The operations from the result to the sum: reshapes, marks, the addition.
    """

    other: core.Var
    result: core.Var
    eqns: Eqns


def sum_of(result: core.Var, graph: Graph, before: int) -> Sum | None:
    """Returns the sum of a result and another array, if nothing else reads the result.

    The other array has the result's shape and dtype.

    Args:
      result: The result of a matmul, or its sum with a bias.
      graph: The program.
      before: The position in the program before which the other array must be computed.
    """
    for match, summand in _sums(result, graph):
        other, like = match.other.aval, summand.aval
        is_ready = graph.position(graph.makers.get(match.other)) < before
        if is_ready and other.shape == like.shape and other.dtype == like.dtype:
            return match
    return None


def bias_of(result: core.Var, graph: Graph, fixed: Collection[core.Var]) -> Sum | None:
    """Returns the sum of a result and a bias, if nothing else reads the result.

    A bias has a number for each column, and is one of `fixed`, the variables that
    follow from parameters alone.
    """
    for match, summand in _sums(result, graph):
        if summand.aval.shape[-1:] == result.aval.shape[-1:]:
            bias = _column(match.other, summand, graph)
            if bias in fixed:
                return match._replace(other=bias)
    return None


def _sums(result: core.Var, graph: Graph) -> Iterator[tuple[Sum, core.Var]]:
    """Yields the sums of a matmul's result and another array, each with a summand.

    The summand is the result after reshapes and marks. Nothing else reads the result,
    the summand, or an array in between.
    """
    eqns: list[core.JaxprEqn] = []
    while len(graph.readers[result]) == 1:
        (reader,) = graph.readers[result]
        if reader is graph.program or len(reader.outvars) > 1:
            return
        name = reader.primitive.name
        if name not in ("add", "reshape") and not is_mark(reader):
            return
        if name == "reshape" and not keeps_order(reader):
            return
        eqns.append(reader)
        (total,) = reader.outvars
        if name == "add":
            for other in reader.invars:
                if isinstance(other, core.Var) and other is not result:
                    yield Sum(other, total, tuple(eqns)), result
            return
        result = total


def _column(var: core.Var, like: core.Var, graph: Graph) -> core.Var | None:
    """Returns the vector that is broadcast to `var`, or None.

    The vector has an element for each column of `like`. `var` and `like` must have the
    same number of axes.
    """
    columns = like.aval.shape[-1:]
    if var.aval.ndim != like.aval.ndim or var.aval.shape[-1:] != columns:
        return None
    while var.aval.shape != columns:
        maker = graph.makers.get(var)
        if maker is None or maker.primitive.name not in ("broadcast_in_dim", "reshape"):
            return None
        if maker.primitive.name == "reshape" and not keeps_order(maker):
            return None
        axes = maker.params.get("broadcast_dimensions", (var.aval.ndim - 1,))
        (var, *_) = maker.invars
        last = axes[-1:] == (maker.outvars[0].aval.ndim - 1,)
        if not isinstance(var, core.Var) or not last or var.aval.shape[-1:] != columns:
            return None
    return var


def reader_after(x: core.Var, norm: Eqns, graph: Graph) -> core.JaxprEqn | None:
    """Returns the addition that reads the input x of a norm, or None.

    Nothing else but the norm may read x.
    """
    inner = {id(eqn) for eqn in norm}
    readers = [eqn for eqn in graph.readers[x] if not _is_for(eqn, inner, graph)]
    if len(readers) != 1:
        return None
    (reader,) = readers
    is_sum = reader is not graph.program and reader.primitive.name == "add"
    return reader if is_sum else None


def _is_for(eqn: Any, inner: Collection[int], graph: Graph) -> bool:
    """Returns whether an operation is in `inner`, or is a cast for operations in it."""
    if eqn is graph.program or id(eqn) in inner:
        return id(eqn) in inner
    if eqn.primitive.name != "convert_element_type":
        return False
    return all(_is_for(r, inner, graph) for r in graph.readers[eqn.outvars[0]])
