"""Finds the norms before FP8 matmuls: RMSNorm and LayerNorm of the last axis."""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coat_jax.fp8.fused import Norm, Source
from coat_jax.remat.formulas import (
    CASTS,
    Role,
    Term,
    arguments_of,
    before_casts,
    is_number,
    number_of,
    term_of,
)
from coat_jax.remat.programs import part_of, written_out
from pallas_kernels.numerics import NormKind


class NormOf(NamedTuple):
    """The norm that computes a variable.

    Attributes:
      norm: The norm.
      source: The variables that it reads.
      eqns: The operations that compute it from these and from constants.
    """

    norm: Norm
    source: Source
    eqns: tuple[core.JaxprEqn, ...]


def norm_of(
    y: core.Var,
    program: core.Jaxpr,
    makers: Mapping[core.Var, core.JaxprEqn],
    places: Mapping[int, int],
    fixed: Collection[core.Var],
) -> NormOf | None:
    """Returns the norm that computes `y` from an array of BF16, or None.

    Args:
      y: A variable of BF16.
      program: The program that computes it.
      makers: The operation that computes each variable.
      places: The place of each operation in the program, by its identity.
      fixed: The variables that follow from parameters and constants alone.
    """
    width = y.aval.shape[-1]

    def role_of(operand: core.Var) -> Role:
        if operand not in fixed:
            return "argument"
        is_column = _is_column(operand, width) and not is_number(operand, makers)
        return "parameter" if is_column else "inner"

    for x, columns, eqns in arguments_of(y, makers, places, role_of):
        # A LayerNorm is an RMSNorm of centered numbers, which are in float32.
        before = before_casts(x, makers)
        if before.aval.dtype != jnp.bfloat16 or len(columns) > 2:
            continue
        if found := _matched(y, x, columns, program, eqns):
            norm, source = found
            return NormOf(norm, source._replace(x=before), eqns)
    return None


def _is_column(v: core.Var, width: int) -> bool:
    shape = v.aval.shape
    return shape[-1:] == (width,) and math.prod(shape) == width


def _matched(
    y: core.Var,
    x: core.Var,
    columns: Collection[core.Var],
    program: core.Jaxpr,
    eqns: tuple[core.JaxprEqn, ...],
) -> tuple[Norm, Source] | None:
    """Returns the norm that operations compute, and its operands, or None."""
    width = y.aval.shape[-1]
    if x.aval.ndim < 2 or x.aval.shape[-1] != width or x.aval.size != y.aval.size:
        return None
    part = part_of(program, [x, *columns], y, eqns)
    if not any(eqn.primitive.name in ("rsqrt", "sqrt") for eqn in part.eqns):
        return None
    roles = itertools.permutations(("scale", "bias"), len(columns))
    for names in roles:
        operands = dict(zip(names, columns, strict=True))
        layouts = {v: (name, "columns") for name, v in operands.items()}
        term = term_of(part, {x: ("x", "elements"), **layouts}, width)
        if term is None:
            continue
        for eps in _added_numbers(part):
            if kind := _known(width, eps).get(term):
                return Norm(kind, eps), Source(x, **operands)
    return None


def _added_numbers(program: core.Jaxpr) -> set[float]:
    """Returns the numbers that a program adds, one of which is a norm's eps."""
    # A number may be cast before it is added.
    adding = (eqn for eqn in program.eqns if eqn.primitive.name in {"add", *CASTS})
    operands = (v for eqn in adding for v in eqn.invars)
    return {number_of(v) for v in operands if isinstance(v, core.Literal)}


@functools.lru_cache(maxsize=256)
def _known(width: int, eps: float) -> dict[Term | None, NormKind]:
    """Returns the kinds of norms, by the arithmetic of each way to write them."""
    found: dict[Term | None, NormKind] = {}
    x = jax.ShapeDtypeStruct((2, width), jnp.float32)
    column = jax.ShapeDtypeStruct((1, width), jnp.float32)
    for names in (("x",), ("x", "scale"), ("x", "bias"), ("x", "scale", "bias")):
        for kind, form in _forms(eps):

            def norm(*arrays, form=form, names=names):
                x, *others = arrays
                given = dict(zip(names[1:], others, strict=True))
                y = form(x)
                y = y * given["scale"] if "scale" in given else y
                return y + given["bias"] if "bias" in given else y

            columns = [column] * (len(names) - 1)
            program = written_out(jax.make_jaxpr(norm)(x, *columns).jaxpr)
            named = [("x", "elements"), *((name, "columns") for name in names[1:])]
            operands = dict(zip(program.invars, named, strict=True))
            found[term_of(program, operands, width)] = kind
    return found


def _forms(eps: float) -> Iterator[tuple[NormKind, Callable]]:
    """Yields the norms without parameters, and ways to compute the variance."""

    def mean(x):
        return jnp.mean(x, axis=-1, keepdims=True)

    def layer(variance):
        def norm(x):
            return (x - mean(x)) * lax.rsqrt(variance(x) + eps)

        return norm

    def twice(x):
        return mean(jnp.square(x - mean(x)))

    def once(x):
        return mean(jnp.square(x)) - jnp.square(mean(x))

    yield "rms", lambda x: x * lax.rsqrt(mean(jnp.square(x)) + eps)
    yield "layer", layer(twice)
    yield "layer", layer(once)
    yield "layer", layer(lambda x: jnp.maximum(0.0, once(x)))
