"""Finds what parts of a program follow from, and whether they may be computed again."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval as pe

from coat_jax.programs.graph import renamed
from coat_jax.programs.primitives import Kind, all_eqns, does_work, kind_of, variables
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

    Results of loops are left out, because some may depend on parameters alone.
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
    """Returns whether a program reads only given inputs and does no costly work."""
    program, used = restricted
    from_given = all(g for g, u in zip(is_given, used, strict=True) if u)
    return from_given and not any(map(does_work, all_eqns(program.eqns)))


def makes_mask(
    restricted: tuple[core.Jaxpr, list[bool]], is_constant: Sequence[bool]
) -> bool:
    """Returns whether a program makes a mask of constants, without indices."""
    program, used = restricted
    from_constants = all(c for c, u in zip(is_constant, used, strict=True) if u)
    return from_constants and all(
        is_cheap(eqn) or kind_of(eqn) is Kind.REDUCTION or eqn.primitive.name == "iota"
        for eqn in program.eqns
    )


def is_integer(aval: jax.core.ShapedArray) -> bool:
    """Returns whether an array has integers or booleans."""
    dtypes = jnp.integer, jnp.bool_
    return any(jnp.issubdtype(aval.dtype, dtype) for dtype in dtypes)
