"""Finds the matmuls of `jax.lax` in programs, and returns their FP8 forms."""

from functools import partial

import jax
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.fp8.dot_general import fp8_dot_general
from coat_jax.fp8.ragged_dot import fp8_ragged_dot
from coat_jax.programs.graph import in_place_of

_RAGGED = "ragged_dot_general"


def is_in_jax(eqn: core.JaxprEqn) -> bool:
    """Returns whether it is a `dot_general` or `ragged_dot_general` of `jax.lax`."""
    return is_ragged(eqn) or eqn.primitive.name == "dot_general"


def is_ragged(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a `jax.lax.ragged_dot_general`."""
    return eqn.primitive.name == _RAGGED


def ragged_obstacle(eqn: core.JaxprEqn) -> str:
    """Returns why a `ragged_dot_general` has no FP8 form, or "".

    The forms with an FP8 form are `jax.lax.ragged_dot` of operands with their axes in
    any order.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (of_x, _), batch = numbers.dot_dimension_numbers
    if eqn.params["group_offset"] is not None:
        return "it has a group_offset"
    if tuple(numbers.lhs_ragged_dimensions) == tuple(of_x):
        return "its groups are of the axis that it sums over"
    if any(batch) or (eqn.invars[0].aval.ndim, eqn.invars[1].aval.ndim) != (2, 3):
        return "a ragged_dot_general with axes of a batch"
    return ""


def dimensions(eqn: core.JaxprEqn) -> lax.DotDimensionNumbers:
    """Returns the contracted and the batch axes of both operands.

    The groups of a `ragged_dot_general` are a batch axis of its weights.
    """
    if is_ragged(eqn):
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contracted, (of_x, of_w) = numbers.dot_dimension_numbers
        return contracted, (of_x, (*of_w, *numbers.rhs_group_dimensions))
    return eqn.params["dimension_numbers"]


def fp8_form(eqn: core.JaxprEqn, side: int) -> list[core.JaxprEqn]:
    """Returns operations that compute a matmul in FP8; operand `side` is its weight."""
    matmul = partial(_matmul, eqn=eqn, side=side)
    return in_place_of(eqn, matmul, eqn.invars, eqn.outvars)


def _matmul(*operands: jax.Array, eqn: core.JaxprEqn, side: int) -> jax.Array:
    dtype, sharding = eqn.outvars[0].aval.dtype, eqn.params.get("out_sharding")
    if is_ragged(eqn):
        x, w, sizes = operands
        ((of_x,), (of_w,)), (_, (of_groups,)) = dimensions(eqn)
        x = lax.transpose(x, (1 - of_x, of_x))
        w = lax.transpose(w, (of_groups, of_w, 3 - of_groups - of_w))
        options = {"preferred_element_type": dtype, "out_sharding": sharding}
        return fp8_ragged_dot(x, w, sizes, **options)
    contract, batch = eqn.params["dimension_numbers"]
    if side == 1:
        return fp8_dot_general(
            *operands,
            (contract, batch),
            preferred_element_type=dtype,
            out_sharding=sharding,
        )
    # The activations come first here; the transpose restores the order of the axes.
    batches, rank = len(batch[0]), eqn.outvars[0].aval.ndim
    first = batches + operands[0].ndim - len(contract[0]) - len(batch[0])
    swapped = *range(batches), *range(first, rank), *range(batches, first)
    if sharding is not None:
        spec = eqn.outvars[0].aval.sharding.spec  # It has an entry for each axis.
        sharding = NamedSharding(sharding.mesh, P(*(spec[axis] for axis in swapped)))
    y = fp8_dot_general(
        *operands[::-1],
        (contract[::-1], batch[::-1]),
        preferred_element_type=dtype,
        out_sharding=sharding,
    )
    return lax.transpose(y, [swapped.index(axis) for axis in range(rank)])
