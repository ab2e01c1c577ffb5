"""Finds the residuals by which a backward pass chooses elements or rounds numbers.

The gradient of a maximum over windows goes to the largest number of each window. In FP8
numbers of a window are often equal, and the gradient would go to another number. In the
same way rounding errors of a copy move numbers over the threshold of a derivative rule,
such as `g * (abs(x) <= 1)`, and over the edges of a function such as `jnp.round`.

A `jax.checkpoint` computes its results again from copies, and derivatives fit these
results, so that thresholds do not count there. But an element that is chosen among
others must be the one that the forward pass chose: a token's experts, for example.
"""

import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from jax.extend import core

from coat_jax.programs.graph import written_out
from coat_jax.programs.primitives import (
    Operand,
    bodies_of,
    is_layout,
    real_number_of,
    variables,
)
from coat_jax.remat.errors import is_cheap
from coat_jax.remat.kernels import known_inside
from coat_jax.remat.policies import CHECKPOINT
from coat_jax.remat.trace import Linearized

# The gradients of maxima and minima over windows.
_WINDOWS = frozenset({"select_and_gather_add", "select_and_scatter_add"})
_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
_TINY = float(jnp.finfo(jnp.float32).tiny)  # Quantization compares with it.
# Operations that choose elements among others, and that round elements.
_AMONG = _WINDOWS | {"approx_top_k", "argmax", "argmin", "sort", "top_k"}
_ROUNDING = frozenset({"ceil", "floor", "round"})


def choosing(traced: Linearized) -> set[int]:
    """Returns the indices of the residuals by which the backward pass chooses.

    A residual counts if a choice depends on it by elementwise operations on residuals
    alone, or by any operations within a `jax.checkpoint`. Comparisons with zero do not
    count: copies keep signs.
    """
    backward = written_out(traced.backward.jaxpr)
    residuals = backward.invars[: len(traced.residuals)]
    sources = {v: frozenset({i}) for i, v in enumerate(residuals)}
    choices = _choosing(backward, sources, dict(sources), {}, False)
    return {i for chosen in choices for i in chosen}


def _choosing(
    program: core.Jaxpr,
    sources: dict[core.Var, frozenset[int]],
    origins: dict[core.Var, frozenset[int]],
    numbers: dict[core.Var, float],
    is_again: bool,
) -> Iterator[frozenset[int]]:
    """Yields the residuals that each choice of a program depends on.

    Args:
      program: The program.
      sources: The residuals that each input of the program comes from by elementwise
        operations. Inputs that depend on anything else are left out.
      origins: The same for any operations.
      numbers: The inputs of the program that are a repeated number.
      is_again: Whether the program is within a `jax.checkpoint`.
    """
    sources |= dict.fromkeys(program.constvars, frozenset())
    origins |= dict.fromkeys(program.constvars, frozenset())
    pairs: set[frozenset[core.Var]] = set()  # Maxima of two arrays, with each of them.
    for eqn in program.eqns:
        operands = variables(eqn.invars)
        if eqn.primitive.name in ("clamp", "max", "min"):
            pairs |= {frozenset((v, *eqn.outvars)) for v in operands}
        if is_again and operands not in pairs and _chooses_among(eqn, numbers):
            yield frozenset().union(*(origins.get(v, ()) for v in operands))
        elif not is_again and _chooses(eqn, numbers):
            yield frozenset().union(*(sources.get(v, ()) for v in operands))
        within = is_again or eqn.primitive.name == CHECKPOINT
        for body in map(written_out, bodies_of(eqn)):
            inside = (known_inside(eqn, body, x) for x in (sources, origins, numbers))
            yield from _choosing(body, *inside, within)
        if is_layout(eqn) and (number := _number(eqn.invars[0], numbers)) is not None:
            numbers |= dict.fromkeys(eqn.outvars, number)
        for residuals_of, follows in ((sources, is_cheap(eqn)), (origins, True)):
            if follows and operands <= residuals_of.keys():
                together = frozenset().union(*(residuals_of[v] for v in operands))
                residuals_of |= dict.fromkeys(eqn.outvars, together)


def _chooses_among(eqn: core.JaxprEqn, numbers: Mapping[core.Var, float]) -> bool:
    """Returns whether an operation chooses floating elements among others.

    The gradient of a maximum over elements compares the elements with it.
    """
    if not any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars):
        return False
    if eqn.primitive.name == "eq":
        return all(_number(v, numbers) is None for v in eqn.invars)
    return eqn.primitive.name in _AMONG


def _chooses(eqn: core.JaxprEqn, numbers: Mapping[core.Var, float]) -> bool:
    """Returns whether an operation compares elements, or rounds them to integers."""
    name = eqn.primitive.name
    if name in _COMPARISONS:
        bounds = (_number(v, numbers) for v in eqn.invars)
        is_nan_check = eqn.invars[0] is eqn.invars[-1]
        return not (is_nan_check or any(map(_copies_keep, bounds)))
    if name == "convert_element_type":
        return jnp.issubdtype(eqn.params["new_dtype"], jnp.integer)
    return name in _AMONG or name in _ROUNDING


def _number(operand: Operand, numbers: Mapping[core.Var, float]) -> float | None:
    """Returns the number that all elements of an operand equal, if it is known."""
    if isinstance(operand, core.Var):
        return numbers.get(operand)
    return real_number_of(operand)


def _copies_keep(bound: float | None) -> bool:
    """Returns whether numbers and their copies are on the same side of a bound."""
    return bound is not None and (abs(bound) <= _TINY or math.isinf(bound))
