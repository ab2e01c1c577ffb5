"""Finds the statistics of rows, such as the mean of a token in LayerNorm.

An error of a statistic is an error of all elements of its row, so statistics have no
copies. A statistic is the result of a reduction of long rows that is broadcast to rows
again, as in `x - mean(x)`. Sums that are activations, such as `sum(weights * values)`
before a matmul, are not broadcast, and have copies like the results of matmuls. One
number for each of many tokens, such as a loss, counts as a statistic in any case: it
takes few bytes.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from coat_jax.programs.graph import written_out
from coat_jax.programs.primitives import bodies_of, is_layout, size_of, variables
from coat_jax.remat.errors import is_cheap
from coat_jax.remat.kernels import entry_at, known_inside
from coat_jax.remat.shapes import MIN_STATISTIC


class _Row(NamedTuple):
    """A description of an array that may be a statistic.

    Attributes:
      size: The number of elements, or 0 if the array follows from parameters alone.
      is_pure: Whether elementwise operations compute it from reductions of long rows
        and parameters alone.
    """

    size: int
    is_pure: bool


_Rows = dict[core.Var, _Row]


def statistics_of(program: core.Jaxpr, params: Mapping[core.Var, int]) -> set[core.Var]:
    """Returns the statistics of a program, and what is computed from them.

    Results of a loop or a branch are among them if they are statistics inside of it.

    Args:
      program: The program, with its calls inlined.
      params: The inputs that are parameters.
    """
    rows = dict.fromkeys(params, _Row(0, True))
    statistics = _statistics(program, rows)
    largest = max(map(size_of, _activations(program, params)), default=0)
    return statistics | {
        v
        for v, row in rows.items()
        if row.size and size_of(v.aval) * MIN_STATISTIC < largest
    }


def _activations(
    program: core.Jaxpr, params: Mapping[core.Var, int]
) -> Iterator[jax.core.AbstractValue]:
    """Yields the types of floating inputs, outputs and results of matmuls."""
    inputs = [v for v in program.invars if v not in params]
    products = (e.outvars for e in program.eqns if e.primitive.name == "dot_general")
    for var in (*inputs, *program.outvars, *itertools.chain(*products)):
        if jnp.issubdtype(var.aval.dtype, jnp.floating):
            yield var.aval


def _statistics(program: core.Jaxpr, rows: _Rows) -> set[core.Var]:
    """Returns the statistics of a program; adds to `rows` what may be a statistic."""
    statistics: set[core.Var] = set()
    for eqn in program.eqns:
        rows |= _results(eqn, rows)
        for body, inside in _bodies(eqn, rows):
            of_body = _statistics(body, inside)
            # A loop by `while` also has the program of its condition.
            if len(body.outvars) != len(eqn.outvars):
                continue
            for var, v in zip(eqn.outvars, body.outvars, strict=True):
                if row := entry_at(v, inside):
                    size = size_of(var.aval) if row.size else 0
                    rows[var] = row._replace(size=size)
                    statistics |= {var} if v in of_body else set()
    may_be = {v for v, row in rows.items() if row.size}
    statistics |= _broadcast(program) & may_be
    for eqn in reversed(program.eqns):
        sources = variables(eqn.invars)
        is_pure = all(v in rows and rows[v].is_pure for v in sources)
        if is_pure and is_cheap(eqn) and not statistics.isdisjoint(eqn.outvars):
            statistics |= sources & may_be
    for eqn in program.eqns:
        sources = variables(eqn.invars) & statistics
        size = max((size_of(v.aval) for v in sources), default=0)
        if is_cheap(eqn):
            statistics |= {
                v for v in may_be.intersection(eqn.outvars) if size_of(v.aval) <= size
            }
    return statistics


def _results(eqn: core.JaxprEqn, rows: _Rows) -> _Rows:
    """Returns the results of an operation that may be statistics or constants."""
    operands = [rows.get(v) for v in variables(eqn.invars)]
    is_pure = all(x and x.is_pure for x in operands)
    size = max((x.size for x in operands if x), default=0)
    is_constant = is_pure and not size
    if eqn.primitive.name.startswith("reduce_"):
        of_rows = size_of(eqn.invars[0].aval) // MIN_STATISTIC
        size, is_pure = max(size, of_rows), True
    elif not is_cheap(eqn):
        is_pure = False
    results: _Rows = {}
    for var in eqn.outvars:
        if is_constant and not bodies_of(eqn):
            results[var] = _Row(0, True)
        elif size_of(var.aval) <= size:
            results[var] = _Row(size_of(var.aval), is_pure)
    return results


def _bodies(eqn: core.JaxprEqn, rows: _Rows) -> Iterator[tuple[core.Jaxpr, _Rows]]:
    """Yields the programs within an operation, with what `rows` says of their inputs.

    A loop slices some of its operands, so the sizes differ inside.
    """
    for inner in bodies_of(eqn):
        body = written_out(inner)
        inside = known_inside(eqn, body, rows)
        inside |= dict.fromkeys(body.constvars, _Row(0, True))
        sizes = {v: min(row.size, size_of(v.aval)) for v, row in inside.items()}
        yield body, {v: row._replace(size=sizes[v]) for v, row in inside.items()}


def _broadcast(program: core.Jaxpr) -> set[core.Var]:
    """Returns the arrays that are broadcast, maybe after changes of layout."""
    broadcast: set[core.Var] = set()
    for eqn in reversed(program.eqns):
        operands = variables(eqn.invars)
        for inner in bodies_of(eqn):
            body = written_out(inner)
            names = known_inside(eqn, body, {v: v for v in operands})
            broadcast |= {names[v] for v in _broadcast(body) & names.keys()}
        if is_layout(eqn) and not broadcast.isdisjoint(eqn.outvars):
            broadcast |= operands
        elif is_cheap(eqn) or _is_product(eqn):
            longest = max(size_of(v.aval) for v in eqn.outvars)
            broadcast |= {v for v in operands if size_of(v.aval) < longest}
    return broadcast


def _is_product(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a matmul without sums: `bs,bsd->bsd`, for one."""
    if eqn.primitive.name != "dot_general":
        return False
    contracted, _ = eqn.params["dimension_numbers"]
    return not any(contracted)
