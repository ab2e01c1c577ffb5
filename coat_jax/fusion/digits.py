"""Finds float32 arrays that have no more digits than the narrow arrays they come from.

Rotary embeddings multiply queries and keys by cosines and sines in float32. If nothing
casts the result back, attention runs in float32, and what enters it was rounded to
bfloat16 before. To round it again adds errors of the size that it has already.
"""

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coat_jax.programs.graph import Graph
from coat_jax.programs.primitives import Operand, is_layout

# Every operand is a term of the result.
_SUMS = frozenset(
    {"add", "complex", "concatenate", "imag", "neg", "pad", "real", "sub"}
)


def has_digits_of(var: core.Var, dtype: jnp.dtype, graph: Graph) -> bool:
    """Returns whether an array has a dtype, or comes from arrays that have it.

    The array may be a sum of multiples of such arrays, in any places: then its rounding
    errors are relative to the same numbers. The multipliers may be any arrays.
    """
    known: dict[core.Var, bool] = {}

    def is_term(operand: Operand) -> bool:
        if isinstance(operand, core.Literal):
            return not np.any(operand.val)
        if operand not in known:
            known[operand] = operand.aval.dtype == dtype or comes_from_terms(operand)
        return known[operand]

    def comes_from_terms(operand: core.Var) -> bool:
        eqn = graph.makers.get(operand)
        if eqn is None or not jnp.issubdtype(operand.aval.dtype, jnp.inexact):
            return False
        name = eqn.primitive.name
        if name == "mul":
            return any(isinstance(v, core.Var) and is_term(v) for v in eqn.invars)
        if name == "div" or is_layout(eqn):
            return is_term(eqn.invars[0])
        return name in _SUMS and all(map(is_term, eqn.invars))

    return is_term(var)
