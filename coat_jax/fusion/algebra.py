"""Computes a normal form of small programs, by which norms and gates are found.

A norm or a gate is found by its arithmetic, not by the names of functions. Casts
between floating dtypes, such as the casts that Flax inserts, do not count: kernels
compute in float32 and round once. Marks do not count either. These are sharding
constraints, names, optimization barriers of one array, and reshards, such as between
explicit and automatic mesh axes. The casts of `shard_map` that say over which devices
an array varies are ignored in the same way.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding

from coat_jax.programs.graph import Graph
from coat_jax.programs.primitives import adds_up, keeps_order, number_of, variables
from pallas_kernels.checks import WIDE
from pallas_kernels.dispatch.array_types import is_partial

MARKS = frozenset({"name", "optimization_barrier", "reshard", "sharding_constraint"})
CASTS = MARKS | {"convert_element_type", "copy", "pcast", "pvary"}
_MOVES = frozenset({"broadcast_in_dim", "reshape"})
_FUNCTIONS = frozenset({"erf", "erfc", "logistic", "rsqrt", "sqrt", "tanh"})
_ARITHMETIC = frozenset(
    {"add", "div", "integer_pow", "max", "mul", "neg", "reduce_sum", "square", "sub"}
)
# `jnp.var` selects its result by a comparison of two numbers.
_CHOICES = frozenset({"gt", "select_n"})
_KNOWN = CASTS | _MOVES | _FUNCTIONS | _ARITHMETIC | _CHOICES
# Norms and gates have less arithmetic, and smaller powers.
MAX_STEPS = 24
_MAX_FACTORS = 8

# The axes of an array: "elements" are [..., n], "columns" are [n] or [1, ..., n],
# "rows" are [..., 1], and "tokens" are [...], with a number for each row of elements.
# "vectors" are [batch, 1, n], with one row for all positions of a sequence.
Layout = Literal["elements", "columns", "vectors", "rows", "tokens"]
Role = Literal["argument", "parameter", "inner"]


class Term(NamedTuple):
    """A product of a number and factors, which are sorted.

    A factor is the name of a variable, a function of a term, or a sum of terms.
    """

    number: float
    factors: tuple[tuple[Any, ...], ...] = ()


class _Value(NamedTuple):
    """A term and the layout of its array. A number has no layout."""

    term: Term
    layout: Layout | None = None


class _UnknownError(Exception):
    """Raised for operations that do not occur in the formulas of norms and gates."""


def is_known(eqn: core.JaxprEqn) -> bool:
    """Returns whether `term_of` supports an operation; if so, it has one result."""
    is_named = eqn.primitive.name in _KNOWN and len(eqn.outvars) == 1
    return is_named and not adds_up(eqn)


def is_mark(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a mark, such as a name; see the module."""
    return eqn.primitive.name in MARKS and not adds_up(eqn)


def term_of(
    eqns: Sequence[core.JaxprEqn],
    result: core.Var,
    names: Mapping[core.Var, tuple[str, Layout]],
    width: int | None,
) -> Term | None:
    """Returns the normal form of a result of operations; None if it is not supported.

    Args:
      eqns: The operations, in their order.
      result: The variable that they compute.
      names: The names and layouts of the variables that they read.
      width: The number of columns, or None if the layout of all arrays is "elements"
        and operations keep elements in their order.
    """
    values = {v: _Value(Term(1.0, ((name,),)), of) for v, (name, of) in names.items()}
    steps = 0
    try:
        for eqn in eqns:
            operands = [
                _Value(Term(number_of(v))) if isinstance(v, core.Literal) else values[v]
                for v in eqn.invars
            ]
            value = _result(eqn, operands, width)
            steps += eqn.primitive.name not in CASTS | _MOVES
            if steps > MAX_STEPS or len(value.term.factors) > _MAX_FACTORS:
                return None
            values[eqn.outvars[0]] = value
    except (_UnknownError, KeyError):
        return None
    value = values.get(result)
    return None if value is None or value.layout != "elements" else value.term


def arguments_of(
    y: core.Var, graph: Graph, role_of: Callable[[core.Var], Role]
) -> Iterator[tuple[core.Var, set[core.Var], tuple[core.JaxprEqn, ...]]]:
    """Yields each variable x such that `y` is a function of x and parameters alone.

    Variables next to `y` come first. Each variable comes with the parameters, and with
    the operations between x and `y` in the program's order. The search ends at an
    operation that `term_of` does not support.

    Args:
      y: A variable.
      graph: The program that computes it.
      role_of: A function that returns the role of an operand. The search goes on to the
        operands that an "inner" operand is computed from.
    """
    free, parameters, passed = {y}, set(), {}
    while free and len(passed) < 2 * MAX_STEPS:
        last = max(free, key=lambda v: graph.position(graph.makers.get(v)))
        computed = [last]
        for var in computed:
            eqn = graph.makers.get(var)
            if eqn is None or not is_known(eqn):
                return
            passed[id(eqn)] = eqn
            for operand in variables(eqn.invars):
                role = role_of(operand)
                if role == "argument":
                    free.add(operand)
                elif role == "parameter":
                    parameters.add(operand)
                elif operand not in computed:
                    computed.append(operand)
            free.difference_update(eqn.outvars)
        if len(free) == 1:
            (x,) = free
            yield x, parameters, graph.in_order(passed.values())


def is_number(v: core.Var, graph: Graph) -> bool:
    """Returns whether a variable is a number, perhaps moved or cast.

    Its elements follow from literals alone. Within `shard_map` numbers are cast to vary
    over devices, and then to a dtype.
    """
    eqn = graph.makers.get(v)
    if eqn is None:
        return False
    operands = variables(eqn.invars)
    is_moved = eqn.primitive.name in CASTS | _MOVES
    return not operands or (is_moved and all(is_number(x, graph) for x in operands))


def rounded(number: float, dtype: jnp.dtype) -> float:
    """Returns a number rounded to a dtype."""
    return float(np.asarray(number, dtype))


def before_casts(
    x: core.Var, graph: Graph, dtypes: Collection[jnp.dtype] = ()
) -> core.Var:
    """Returns the variable that `x` was before casts between floating dtypes.

    The search ends at the first variable with a dtype in `dtypes`, if there is one.
    """
    while x.aval.dtype not in dtypes:
        eqn = graph.makers.get(x)
        if eqn is None or eqn.primitive.name != "convert_element_type":
            break
        (operand,) = eqn.invars
        if not isinstance(operand, core.Var) or operand.aval.dtype not in WIDE:
            break
        x = operand
    return x


def _result(eqn: core.JaxprEqn, operands: list[_Value], width: int | None) -> _Value:
    """Returns the term and the layout of an operation's result.

    Raises:
      _UnknownError: If the operation is not supported.
    """
    if not operands:
        raise _UnknownError
    name, (x, *_) = eqn.primitive.name, operands
    if name in _CHOICES:
        return _chosen(name, operands)
    dtype = eqn.outvars[0].aval.dtype
    if name in CASTS and x == _Value(Term(x.term.number)):
        return _Value(Term(_cast(x.term.number, dtype)))
    if dtype not in WIDE:
        raise _UnknownError
    if name not in MARKS and _is_placed(eqn):
        raise _UnknownError
    if name in MARKS and x.layout != "elements":
        raise _UnknownError
    if name in CASTS:
        return x
    if name in _MOVES:
        return x._replace(layout=_moved(eqn, x.layout, width))
    if name == "reduce_sum":
        last = eqn.invars[0].aval.ndim - 1
        if width is None or x.layout != "elements" or eqn.params["axes"] != (last,):
            raise _UnknownError
        inner = Term(1.0, x.term.factors)
        return _Value(Term(x.term.number, (("row sum", inner),)), "tokens")
    layouts = {value.layout for value in operands} - {None}
    if len(layouts) > 1 and not layouts <= {"elements", "columns", "vectors", "rows"}:
        raise _UnknownError
    layout = layouts.pop() if len(layouts) == 1 else "elements" if layouts else None
    return _Value(_computed(eqn, [value.term for value in operands]), layout)


def _cast(number: float, dtype: jnp.dtype) -> float:
    """Returns a number of a program, cast to a dtype.

    Raises:
      _UnknownError: If the dtype is neither in `WIDE`, nor an integer dtype that can
        hold the number.
    """
    if dtype in WIDE:
        return rounded(number, dtype)
    if jnp.issubdtype(dtype, jnp.integer) and math.isfinite(number):
        limits = jnp.iinfo(dtype)
        if number.is_integer() and limits.min <= number <= limits.max:
            return number
    raise _UnknownError


def _is_placed(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation gives its result a sharding that must be kept.

    On explicit mesh axes all results have shardings, but kernels may shard their
    results differently. So these shardings need not be kept, unless devices have
    partial sums.
    """
    for sharding in (eqn.params.get("sharding"), eqn.params.get("out_sharding")):
        if sharding is None:
            continue
        if not isinstance(sharding, NamedSharding) or is_partial(sharding):
            return True
        if any(sharding.spec) and not sharding.mesh.explicit_axes:
            return True
    return False


def _chosen(name: str, operands: list[_Value]) -> _Value:
    """Returns the result of a comparison of numbers, or of a `select_n` by a number."""
    (first, _), *cases = operands
    if first.factors:
        raise _UnknownError
    if name == "select_n":
        return cases[int(first.number)]
    ((second, _),) = cases
    if second.factors:
        raise _UnknownError
    return _Value(Term(float(first.number > second.number)))


def _moved(
    eqn: core.JaxprEqn, layout: Layout | None, width: int | None
) -> Layout | None:
    """Returns the layout of a reshaped or broadcast array."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive.name == "reshape" and not keeps_order(eqn):
        raise _UnknownError
    if layout is None or old == new:
        return layout
    if layout == "vectors":
        raise _UnknownError
    if eqn.primitive.name == "reshape":
        if width is None or (layout == "elements" and old[-1:] == new[-1:]):
            return layout
        if layout == "tokens" and new == (*old, 1):
            return "rows"
        if layout == "rows" and new == old[:-1]:
            return "tokens"
        if layout == "columns" and math.prod(new[:-1]) == 1:
            return layout
        raise _UnknownError
    axes, leading = eqn.params["broadcast_dimensions"], new[:-1]
    if layout == "columns" and axes[-1] == len(new) - 1:
        return layout if math.prod(leading) == 1 else "elements"
    axes_of_old = tuple(range(len(old)))
    rows = {"tokens": old, "rows": old[:-1]}.get(layout)
    if rows == leading and axes == axes_of_old:
        return "rows" if new[-1] == 1 else "elements"
    raise _UnknownError


def _computed(eqn: core.JaxprEqn, operands: list[Term]) -> Term:
    """Returns the term of the result of an elementwise operation."""
    name, (x, *further) = eqn.primitive.name, operands
    if name in _FUNCTIONS:
        return Term(1.0, ((name, x),))
    if name == "max":
        return Term(1.0, (("max", *sorted((x, *further), key=repr)),))
    if name in ("add", "sub"):
        (y,) = further
        return _added(x, _multiplied(Term(-1.0), y) if name == "sub" else y)
    if name == "integer_pow":
        power = eqn.params["y"]
        if 1 <= power <= _MAX_FACTORS:
            return _multiplied(*[x] * power)
    if name == "div":
        return _multiplied(x, _inverse(*further))
    if name == "mul":
        return _multiplied(x, *further)
    if name == "square":
        return _multiplied(x, x)
    if name == "neg":
        return _multiplied(Term(-1.0), x)
    raise _UnknownError


def _inverse(x: Term) -> Term:
    if not x.factors and x.number:
        return Term(1 / x.number)
    match x:
        case Term(1.0, (("sqrt", inner),)):
            return Term(1.0, (("rsqrt", inner),))
    raise _UnknownError


def _added(*terms: Term) -> Term:
    """Returns a sum in normal form: no sums and at most one number among its terms."""
    parts: list[Term] = []
    for term in terms:
        match term:
            case Term(1.0, (("sum", *inner),)):
                parts += inner
            case _:
                parts.append(term)
    number = Term(sum(summand.number for summand in parts if not summand.factors))
    parts = [summand for summand in parts if summand.factors]
    if number.number or not parts:
        parts.append(number)
    if len(parts) == 1:
        return parts[0]
    return Term(1.0, (("sum", *sorted(parts, key=repr)),))


def _multiplied(*terms: Term) -> Term:
    number = functools.reduce(lambda a, b: a * b, (term.number for term in terms))
    factors = sorted((f for term in terms for f in term.factors), key=repr)
    # Products of the same numbers in another order differ in the last digits.
    return Term(float(f"{number:.6g}"), tuple(factors) if number else ())
