"""Finds the residual stream: what is added to results, and what norms pass on.

A block of a transformer computes `x + fn(norm(x))`. A matmul's kernel can add the
stream to its result, and the kernel of a norm's gradient can add the gradient of the
stream. Without that each of the two sums reads two arrays and writes a third.
"""

from collections.abc import Collection
from typing import NamedTuple

from jax.extend import core

from coat_jax.remat.programs import Uses


class Sum(NamedTuple):
    """The sum of a call's result and another array of the same shape and dtype.

    Attributes:
      call: The call.
      other: The other array, which is known before the call.
      result: The sum.
      eqns: The operations behind the call: reshapes, then the addition.
    """

    call: core.JaxprEqn
    other: core.Var
    result: core.Var
    eqns: tuple[core.JaxprEqn, ...]


def sum_of(call: core.JaxprEqn, uses: Uses) -> Sum | None:
    """Returns the sum that alone reads a call's only result, or None."""
    (var,), eqns = call.outvars, []
    while len(uses.readers[var]) == 1:
        (reader,) = uses.readers[var]
        if reader is uses.program or reader.primitive.name not in ("add", "reshape"):
            return None
        eqns.append(reader)
        (result,) = reader.outvars
        if reader.primitive.name == "add":
            others = [v for v in reader.invars if v is not var]
            known = [
                v for v in others if _is_known(v, var, uses.places[id(call)], uses)
            ]
            return Sum(call, known[0], result, tuple(eqns)) if known else None
        var = result
    return None


def _is_known(other: core.Var, var: core.Var, place: int, uses: Uses) -> bool:
    """Returns whether an operand is like `var`, and computed before a place."""
    if not isinstance(other, core.Var):
        return False
    alike = other.aval.shape == var.aval.shape and other.aval.dtype == var.aval.dtype
    return alike and uses.made.get(other, -1) < place


def reader_behind(
    x: core.Var,
    norm: Collection[core.JaxprEqn],
    place: int,
    sums: Collection[Sum],
    uses: Uses,
) -> core.JaxprEqn | None:
    """Returns the sum that alone reads a norm's input beside the norm, or None.

    Args:
      x: The norm's input.
      norm: The operations of the norm.
      place: The place behind which the input is to be read.
      sums: The sums that calls compute, at their own places.
      uses: The uses of the program's variables.

    Returns:
      The addition, or the call that computes it.
    """
    own = {id(eqn) for eqn in norm}
    others = [eqn for eqn in uses.readers[x] if not _is_for(eqn, own, uses)]
    if len(others) != 1:
        return None
    (reader,) = others
    if reader is uses.program or reader.primitive.name != "add":
        return None
    for found in sums:
        if reader is found.eqns[-1]:
            reader = found.call
    return reader if uses.places[id(reader)] > place else None


def _is_for(eqn: core.JaxprEqn | core.Jaxpr, own: Collection[int], uses: Uses) -> bool:
    """Returns whether an operation is one of `own`, or a cast that only these read."""
    if eqn is uses.program or id(eqn) in own:
        return id(eqn) in own
    if eqn.primitive.name != "convert_element_type":
        return False
    return all(_is_for(reader, own, uses) for reader in uses.readers[eqn.outvars[0]])
