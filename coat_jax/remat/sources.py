"""Finds the inputs of parts of a program, and parts that may be computed again."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval as pe

from coat_jax.programs.graph import renamed
from coat_jax.programs.primitives import (
    Kind,
    all_eqns,
    does_work,
    kind_of,
    size_of,
    variables,
)
from coat_jax.remat.errors import is_cheap
from pallas_kernels import versions


def restricted(
    program: core.Jaxpr,
    outputs: Sequence[core.Var | core.Literal],
    inputs: Iterable[core.Var] = (),
) -> tuple[core.Jaxpr, list[bool]]:
    """Returns the part of a program that computes `outputs`, and which inputs it uses.

    The inputs are the inputs of the program, followed by the variables in `inputs`.
    """
    names = {var: core.Var(var.aval) for var in inputs}
    eqns = program.eqns
    if names:
        eqns = [eqn.replace(invars=renamed(eqn.invars, names)) for eqn in eqns]
    part = program.replace(
        invars=[*program.invars, *names.values()],
        outvars=renamed(outputs, names),
        eqns=eqns,
        debug_info=program.debug_info.with_unknown_names(),
    )
    return pe.dce_jaxpr(part, [True] * len(outputs))


def computed_from(program: core.Jaxpr, is_param: Sequence[bool]) -> set[core.Var]:
    """Returns the variables that depend on an input that is not a parameter.

    Results of loops and calls are left out, because some of these results may depend on
    parameters alone.
    """
    dependent = {v for v, p in zip(program.invars, is_param, strict=True) if not p}
    for eqn in program.eqns:
        plain = not list(versions.bodies_in_params(eqn.params))
        if plain and not dependent.isdisjoint(variables(eqn.invars)):
            dependent.update(eqn.outvars)
    return dependent


def follows_cheaply(
    restricted: tuple[core.Jaxpr, list[bool]], is_given: Sequence[bool]
) -> bool:
    """Returns whether a program reads only given inputs and does no costly work.

    Args:
      restricted: A program, and whether it uses each input, as the function
        `restricted` returns them.
      is_given: True for each input that is given.
    """
    program, used = restricted
    from_given = all(g for g, u in zip(is_given, used, strict=True) if u)
    return from_given and not any(map(does_work, all_eqns(program.eqns)))


def masks(
    program: core.Jaxpr, residuals: Sequence[Any], is_param: Sequence[bool]
) -> set[int]:
    """Returns the indices of integer residuals that the backward pass recomputes.

    These are arrays of integers or booleans, such as masks. Cheap operations,
    reductions and `iota` compute them from integer arguments and parameters. The
    arguments then live until the backward pass, so they must not take more bytes than
    the residuals.

    Args:
      program: The forward program.
      residuals: The residuals, which the program computes.
      is_param: True for each input that is a parameter.
    """
    integers = {v for v in program.invars if is_integer(v.aval)}
    is_given = [
        p or v in integers for v, p in zip(program.invars, is_param, strict=True)
    ]
    follow = computed_from(program, is_given)
    sources: dict[int, set[core.Var]] = {}
    for index, mask in enumerate(residuals):
        if isinstance(mask, core.Var) and is_integer(mask.aval) and mask not in follow:
            part, used = restricted(program, [mask])
            inputs = {v for v, u in zip(program.invars, used, strict=True) if u}
            if all(map(_makes_masks, part.eqns)):
                sources[index] = inputs & integers
    chosen: set[int] = set()
    needed = integers & variables(residuals)

    def pays(index: int) -> bool:
        return _bytes(sources[index] - needed) <= _bytes([residuals[index]])

    while paying := [i for i in sources.keys() - chosen if pays(i)]:
        chosen.add(paying[0])
        needed |= sources[paying[0]]
    return chosen


def _makes_masks(eqn: core.JaxprEqn) -> bool:
    is_reduction = kind_of(eqn) is Kind.REDUCTION
    return is_cheap(eqn) or is_reduction or eqn.primitive.name == "iota"


def _bytes(variables: Iterable[core.Var]) -> int:
    return sum(size_of(v.aval) * v.aval.dtype.itemsize for v in variables)


def is_integer(aval: jax.core.ShapedArray) -> bool:
    """Returns whether an array has integers or booleans."""
    dtypes = jnp.integer, jnp.bool_
    return any(jnp.issubdtype(aval.dtype, dtype) for dtype in dtypes)
