"""Finds float32 arrays that have no more digits than bfloat16 arrays they come from.

Rotary embeddings multiply queries and keys by cosines and sines in float32. If nothing
casts the result back, attention runs in float32, and what enters it was rounded to
bfloat16 before. To round it again adds errors of the size that it has already.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coat_jax.programs.graph import Graph
from coat_jax.programs.primitives import is_layout, size_of

# Every operand is a term of the result.
_SUMS = frozenset(
    {"add", "complex", "concatenate", "imag", "neg", "pad", "real", "sub"}
)
_Sizes = Mapping[core.Var, int]


def with_digits_of(dtype: jnp.dtype, graph: Graph) -> set[core.Var]:
    """Returns the arrays that have a dtype, or come from arrays that have it.

    The latter are sums of multiples of such arrays, in any places: then their rounding
    errors are relative to the same numbers. A multiplier may be any array that does not
    have more numbers, apart from repeated ones: a float32 array times a weight has more
    digits than the weight. No array comes from float16, because float32 numbers may be
    too large or too small for it.
    """
    program = graph.program
    # `sizes` counts the elements of each array before it was broadcast, and `terms` the
    # elements of the arrays with the dtype that it comes from.
    sizes = {v: size_of(v.aval) for v in (*program.constvars, *program.invars)}
    terms = {v: size for v, size in sizes.items() if v.aval.dtype == dtype}
    for eqn in program.eqns:
        of_terms = _of_terms(eqn, sizes, terms) if dtype == jnp.bfloat16 else 0
        moved = _size(eqn.invars[0], sizes) if is_layout(eqn) else None
        for v in eqn.outvars:
            sizes[v] = min(size_of(v.aval), moved or size_of(v.aval))
            if v.aval.dtype == dtype:
                terms[v] = sizes[v]
            elif of_terms and jnp.issubdtype(v.aval.dtype, jnp.inexact):
                terms[v] = min(size_of(v.aval), of_terms)
    return {*terms}


def _of_terms(eqn: core.JaxprEqn, sizes: _Sizes, terms: _Sizes) -> int:
    """Returns the entry in `terms` of an operation's results, or 0 for none."""
    name, numbers = eqn.primitive.name, [_size(v, sizes) for v in eqn.invars]
    of_operands = [
        int(not np.any(v.val)) if isinstance(v, core.Literal) else terms.get(v, 0)
        for v in eqn.invars
    ]
    if is_layout(eqn):
        return of_operands[0]
    if name in ("div", "mul"):
        pairs = zip(of_operands, reversed(numbers), strict=True)
        products = [of_v if of_v >= of_by else 0 for of_v, of_by in pairs]
        return products[0] if name == "div" else max(products)
    if name not in _SUMS or not all(of_operands):
        return 0
    return sum(of_operands) if name == "concatenate" else max(of_operands)


def _size(operand: core.Var | core.Literal, sizes: _Sizes) -> int:
    return sizes[operand] if isinstance(operand, core.Var) else 1
