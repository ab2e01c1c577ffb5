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

# `jax.lax.ragged_dot` is this operation with these dimension numbers.
_RAGGED = "ragged_dot_general"
_RAGGED_DOT = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def is_in_jax(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is `dot_general` or `ragged_dot` of `jax.lax`."""
    if is_ragged(eqn):
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        return numbers == _RAGGED_DOT and eqn.params["group_offset"] is None
    return eqn.primitive.name == "dot_general"


def is_ragged(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a `jax.lax.ragged_dot_general`."""
    return eqn.primitive.name == _RAGGED


def dimensions(eqn: core.JaxprEqn) -> lax.DotDimensionNumbers:
    """Returns the contracted and the batch axes of both operands.

    The groups of a `ragged_dot` are a batch axis of its weights.
    """
    if is_ragged(eqn):
        contracted, _ = _RAGGED_DOT.dot_dimension_numbers
        return contracted, ((), tuple(_RAGGED_DOT.rhs_group_dimensions))
    return eqn.params["dimension_numbers"]


def fp8_form(eqn: core.JaxprEqn, side: int) -> list[core.JaxprEqn]:
    """Returns operations that compute a matmul in FP8; operand `side` is its weight."""
    matmul = partial(_matmul, eqn=eqn, side=side)
    return in_place_of(eqn, matmul, eqn.invars, eqn.outvars)


def _matmul(*operands: jax.Array, eqn: core.JaxprEqn, side: int) -> jax.Array:
    dtype, sharding = eqn.outvars[0].aval.dtype, eqn.params.get("out_sharding")
    if is_ragged(eqn):
        options = {"preferred_element_type": dtype, "out_sharding": sharding}
        return fp8_ragged_dot(*operands, **options)
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
