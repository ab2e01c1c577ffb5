"""Finds the shares of two numbers in the logarithm of the sum of their exponentials.

The gradient of `logaddexp(x, y)` is multiplied by exp(x - logaddexp(x, y)) and by
exp(y - logaddexp(x, y)), which add up to 1. A running sum in logarithms, such as
`jax.lax.cumlogsumexp` or a parallel scan of a gated recurrence, has such shares on each
of its levels, and the gradients of its terms cancel: if the shares add up to 1 only
nearly, as copies in FP8 do, what is left over grows with the length. So they are saved
unquantized.
"""

from collections.abc import Mapping

from jax.extend import core

from coat_jax.programs.graph import inlined, is_plain_call, written_out
from coat_jax.programs.primitives import Operand, is_layout
from coat_jax.remat.trace import Linearized

_Makers = Mapping[core.Var, core.JaxprEqn]


def shares_of_sums(traced: Linearized) -> set[int]:
    """Returns the indices of the residuals that are shares in sums of exponentials."""
    program = inlined(written_out(traced.forward.jaxpr), is_plain_call)
    makers = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    residuals = enumerate(program.outvars[traced.num_outputs :])
    return {i for i, v in residuals if _is_share(v, makers)}


def _is_share(operand: Operand, makers: _Makers) -> bool:
    """Returns whether an operand is exp(x - logaddexp(x, y))."""
    while (exp := _maker(operand, makers)) and is_layout(exp):
        operand = exp.invars[0]
    if not (exp and exp.primitive.name == "exp"):
        return False
    difference = _maker(exp.invars[0], makers)
    is_difference = difference and difference.primitive.name == "sub"
    return bool(is_difference) and _is_sum(difference.invars[1], makers)


def _is_sum(operand: Operand, makers: _Makers) -> bool:
    """Returns whether an operand is max(x, y) + log1p(...), or this where it is finite.

    Neither x nor y may be a number that is repeated, as 0 is in a softplus.
    """
    while (maker := _maker(operand, makers)) and maker.primitive.name == "select_n":
        operand = maker.invars[1]  # Where it is neither infinite nor NaN.
    if not (maker and maker.primitive.name == "add"):
        return False
    terms = {m.primitive.name: m for v in maker.invars if (m := _maker(v, makers))}
    if terms.keys() != {"max", "log1p"}:
        return False
    return not any(_is_number(v, makers) for v in terms["max"].invars)


def _is_number(operand: Operand, makers: _Makers) -> bool:
    """Returns whether an operand is a number, or one number that is repeated."""
    while (maker := _maker(operand, makers)) and is_layout(maker):
        operand = maker.invars[0]
    return isinstance(operand, core.Literal)


def _maker(operand: Operand, makers: _Makers) -> core.JaxprEqn | None:
    return makers.get(operand) if isinstance(operand, core.Var) else None
