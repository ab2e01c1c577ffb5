"""Finds arrays that a loop stacks more than once."""

from collections.abc import Mapping

from jax.extend import core

from coat_jax.programs.graph import Names, written_out
from coat_jax.programs.primitives import Kind, Operand, bodies_of, kind_of
from pallas_kernels import versions


def equal_stacks(program: core.Jaxpr) -> Names:
    """Returns a map from each repeated result of a loop to the first equal result.

    A loop has equal results if it stacks an array twice, with and without a mark, such
    as a name or a sharding constraint. JAX saves both stacks if operations of the
    backward pass read both.
    """
    names: Names = {}
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            names |= _equal_results(eqn)
    return names


def _equal_results(loop: core.JaxprEqn) -> Names:
    [body] = map(written_out, bodies_of(loop))
    makers = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    names: Names = {}
    first: dict[tuple[core.Var, str], core.Var] = {}
    for stack, array in zip(loop.outvars, body.outvars, strict=True):
        source = _unmarked(array, makers)
        is_carry = stack.aval.ndim == array.aval.ndim
        if is_carry or versions.is_dropped(stack) or isinstance(source, core.Literal):
            continue
        # Marks may change a type, such as the axes over which an array varies.
        same = first.setdefault((source, repr(stack.aval)), stack)
        if same is not stack:
            names[stack] = same
    return names


def _unmarked(array: Operand, makers: Mapping[core.Var, core.JaxprEqn]) -> Operand:
    """Returns an array as it was before marks, such as names, were applied to it."""
    while isinstance(array, core.Var):
        eqn = makers.get(array)
        if eqn is None or kind_of(eqn) is not Kind.MARK:
            return array
        array = eqn.invars[eqn.outvars.index(array)]
    return array
