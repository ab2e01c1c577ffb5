"""Patterns that kernels of FP8 matmuls compute: norms, activations, gates and sums.

Norms, activations and gates are written as Python functions. Operations of a program
match a function if their normal forms are equal; see `coat_jax.fusion.algebra`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coat_jax.fp8.fused import ACTIVATIONS
from coat_jax.fp8.prologue import Mark, Norm, Source
from coat_jax.fusion.algebra import (
    CASTS,
    MAX_STEPS,
    Role,
    Term,
    arguments_of,
    before_casts,
    is_known,
    is_mark,
    is_number,
    rounded,
    term_of,
)
from coat_jax.fusion.sums import Eqns
from coat_jax.programs.graph import Graph, inlined, is_plain_call
from coat_jax.programs.primitives import keeps_parts, number_of, variables
from pallas_kernels import Activation, NormKind
from pallas_kernels.checks import WIDE


def _mean(x):
    return jnp.mean(x, axis=-1, keepdims=True)


def _rms(x, eps):
    return x * lax.rsqrt(_mean(jnp.square(x)) + eps)


def _layer(x, eps, variance):
    return (x - _mean(x)) * lax.rsqrt(variance(x) + eps)


def _variance(x):
    return _mean(jnp.square(x - _mean(x)))


def _variance_at_once(x):
    return _mean(jnp.square(x)) - jnp.square(_mean(x))


def _positive_variance(x):
    return jnp.maximum(0.0, _variance_at_once(x))


# Norms of x without parameters, with the ways to compute a variance.
NORMS: list[tuple[NormKind, Callable]] = [
    ("rms", _rms),
    *(
        ("layer", functools.partial(_layer, variance=variance))
        for variance in (_variance, _variance_at_once, _positive_variance)
    ),
]


class NormMatch(NamedTuple):
    """A norm that computes a variable.

    Attributes:
      norm: The norm.
      source: The variables that it reads.
      eqns: The operations that compute the variable from `source` and from constants.
    """

    norm: Norm
    source: Source
    eqns: Eqns


class Gate(NamedTuple):
    """An activation, or its product with another array, that computes a variable.

    Attributes:
      activation: The activation.
      operands: The variable that it is applied to, and the factor if there is one.
      eqns: The operations that compute the result from these variables.
    """

    activation: Activation
    operands: tuple[core.Var, ...]
    eqns: Eqns


def marks_of(eqns: Sequence[core.JaxprEqn]) -> tuple[Mark, ...]:
    """Returns the sharding constraints and names among operations.

    Barriers are left out, because the kernel is a barrier itself.
    """
    return tuple(
        Mark.of(eqn)
        for eqn in filter(is_mark, eqns)
        if not (eqn.primitive.name == "optimization_barrier" or keeps_parts(eqn))
    )


def norm_of(y: core.Var, graph: Graph, fixed: Collection[core.Var]) -> NormMatch | None:
    """Returns the norm that computes `y` from an array of BF16, or None.

    Args:
      y: A variable of BF16.
      graph: The program that computes it.
      fixed: The variables that follow from parameters and constants alone.
    """
    width = y.aval.shape[-1]

    def role_of(operand: core.Var) -> Role:
        if operand not in fixed:
            return "parameter" if _is_vector(operand, y.aval) else "argument"
        is_column = _is_column(operand, width) and not is_number(operand, graph)
        return "parameter" if is_column else "inner"

    for x, columns, eqns in arguments_of(y, graph, role_of):
        # A LayerNorm is an RMSNorm of centered numbers, which are in float32.
        unnormalized = before_casts(x, graph, (jnp.dtype(jnp.bfloat16),))
        if unnormalized.aval.dtype != jnp.bfloat16 or len(columns) > 2:
            continue
        if match := _norm_between(y, x, columns, eqns):
            norm, source = match
            return NormMatch(norm, source._replace(x=unnormalized), eqns)
    return None


def _is_column(v: core.Var, width: int) -> bool:
    shape = v.aval.shape
    return shape[-1:] == (width,) and math.prod(shape) == width


def _is_vector(v: core.Var, like: jax.core.ShapedArray) -> bool:
    """Returns whether a variable has one row for all positions of each sequence.

    A diffusion transformer multiplies a norm's output by an array of this shape, and
    adds another array of this shape.
    """
    shape = v.aval.shape
    is_row = len(shape) > 2 and shape[-2:] == (1, *like.shape[-1:])
    return is_row and v.aval.size < like.size


def _fits(vector: core.Var, x: core.Var) -> bool:
    """Returns whether a vector can be applied to all positions of each sequence of `x`.

    The vector [..., 1, n] has as many axes as `x`. Its first axes are as long as the
    first axes of `x`, and all other axes before n have length 1.
    """
    shape = vector.aval.shape
    count = max((i + 1 for i, n in enumerate(shape[:-1]) if n > 1), default=0)
    return len(shape) == x.aval.ndim and shape[:count] == x.aval.shape[:count]


def _norm_between(
    y: core.Var, x: core.Var, columns: Collection[core.Var], eqns: Eqns
) -> tuple[Norm, Source] | None:
    """Returns the norm of x that `eqns` compute as y, and its operands, or None.

    `columns` are the candidates for its weight and bias.
    """
    width = y.aval.shape[-1]
    if x.aval.ndim < 2 or x.aval.shape[-1] != width or x.aval.size != y.aval.size:
        return None
    if not any(eqn.primitive.name in ("rsqrt", "sqrt") for eqn in eqns):
        return None
    if not all(_is_column(v, width) or _fits(v, x) for v in columns):
        return None
    for names in itertools.permutations(("scale", "bias"), len(columns)):
        params = dict(zip(names, columns, strict=True))
        layouts = {
            v: (name, "columns" if _is_column(v, width) else "vectors")
            for name, v in params.items()
        }
        term = term_of(eqns, y, {x: ("x", "elements"), **layouts}, width)
        if term is None:
            continue
        for eps in _added_numbers(eqns):
            if kind := _norm_terms(width, eps).get(term):
                return Norm(kind, eps), Source(x, **params)
    return None


def _added_numbers(eqns: Eqns) -> set[float]:
    """Returns the literals that operations add: candidates for the eps of a norm."""
    # A number may be cast before it is added.
    adding = (eqn for eqn in eqns if eqn.primitive.name in {"add", *CASTS})
    operands = (v for eqn in adding for v in eqn.invars)
    numbers = {number_of(v) for v in operands if isinstance(v, core.Literal)}
    return numbers | {rounded(number, jnp.bfloat16) for number in numbers}


@functools.lru_cache(maxsize=256)
def _norm_terms(width: int, eps: float) -> dict[Term | None, NormKind]:
    """Returns a map from the normal form of a norm to the kind of the norm.

    A norm has one form for each way to write it, with and without scale and bias.
    """
    x = jax.ShapeDtypeStruct((2, width), jnp.float32)
    column = jax.ShapeDtypeStruct((1, width), jnp.float32)
    terms: dict[Term | None, NormKind] = {}
    for params in ((), ("scale",), ("bias",), ("scale", "bias")):
        layouts = [("x", "elements"), *((name, "columns") for name in params)]
        for kind, norm in NORMS:

            def affine(x, *arrays, norm=norm, params=params):
                values = dict(zip(params, arrays, strict=True))
                return norm(x, eps) * values.get("scale", 1.0) + values.get("bias", 0.0)

            arrays = x, *[column] * len(params)
            terms[_term_of_function(affine, arrays, layouts, width)] = kind
    return terms


def _term_of_function(
    fn: Callable, arrays: Sequence[Any], layouts: Sequence[Any], width: int | None
) -> Term | None:
    """Returns the normal form of a Python function's result.

    `layouts` has the name and the layout of each array.
    """
    program = inlined(jax.make_jaxpr(fn)(*arrays).jaxpr, is_plain_call)
    names = dict(zip(program.invars, layouts, strict=True))
    return term_of(program.eqns, program.outvars[0], names, width)


def gate_of(y: core.Var, graph: Graph, sources: Collection[core.Var]) -> Gate | None:
    """Returns the gate that computes `y` from two of `sources`, or None.

    Nothing but the gate may read its two sources.
    """
    eqns: list[core.JaxprEqn] = []
    operands, reached = [], [y]
    for var in reached:
        if var in sources:
            operands.append(var)
            continue
        eqn = graph.makers.get(var)
        if eqn is None or not is_known(eqn) or len(eqns) > 2 * MAX_STEPS:
            return None
        eqns.append(eqn)
        reached += [v for v in variables(eqn.invars) if v not in reached]
    if len(operands) != 2 or any(v.aval.shape != y.aval.shape for v in operands):
        return None
    computed = [v for v in reached[1:] if not is_number(v, graph)]
    if not graph.only_read_by(computed, eqns):
        return None
    ordered = graph.in_order(eqns)
    for pair in (operands, operands[::-1]):
        if activation := _gate_terms(2).get(_gate_term(ordered, y, pair)):
            return Gate(activation, tuple(pair), _without_numbers(ordered, graph))
    return None


def activation_of(y: core.Var, graph: Graph) -> Gate | None:
    """Returns the activation that computes `y` from one variable, or None.

    Nothing but the activation may read its argument.
    """

    def role_of(operand: core.Var) -> Role:
        return "inner" if is_number(operand, graph) else "argument"

    for x, _, eqns in arguments_of(y, graph, role_of):
        if x.aval.dtype not in WIDE or x.aval.size != y.aval.size:
            continue
        if activation := _gate_terms(1).get(_gate_term(eqns, y, [x])):
            uncast = before_casts(x, graph)
            alone = graph.only_read_by([x], eqns)
            if uncast is not x:
                alone = alone and len(graph.readers[uncast]) == 1
            eqns = _without_numbers(eqns, graph)
            return Gate(activation, (uncast,), eqns) if alone else None
    return None


def _without_numbers(
    eqns: Sequence[core.JaxprEqn], graph: Graph
) -> tuple[core.JaxprEqn, ...]:
    """Returns the operations except those that compute numbers.

    Other operations may read these numbers, too.
    """
    return tuple(eqn for eqn in eqns if not is_number(eqn.outvars[0], graph))


def _gate_term(
    eqns: Sequence[core.JaxprEqn], y: core.Var, operands: Sequence[core.Var]
) -> Term | None:
    """Returns the normal form of `y`, computed from gate and up, or from gate alone."""
    names = zip(operands, ("gate", "up"), strict=False)
    return term_of(eqns, y, {v: (name, "elements") for v, name in names}, width=None)


@functools.cache
def _gate_terms(count: int) -> dict[Term | None, Activation]:
    """Returns activations by the normal form of a gate with `count` operands."""
    layouts = [("gate", "elements"), ("up", "elements")][:count]
    terms = {}
    for activation, fn in ACTIVATIONS.items():
        for dtype in WIDE:

            def product(gate, *up, fn=fn):
                return math.prod(up, start=fn(gate))

            arrays = [jax.ShapeDtypeStruct((), dtype)] * count
            terms[_term_of_function(product, arrays, layouts, None)] = activation
    return terms
