"""Finds what is added to results: biases, and the residual stream that norms pass on.

A block of a transformer computes `x + fn(norm(x))`. A matmul's kernel can add the
stream to its result, and the kernel of a norm's gradient can add the gradient of the
stream. Without that each of the two sums reads two arrays and writes a third. A
matmul's kernel can add a bias, too.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from jax.extend import core

from coat_jax.remat.programs import Uses, keeps_order


class Sum(NamedTuple):
    """The sum of a call's result and another array.

    Attributes:
      call: The call.
      other: The other array.
      result: The sum.
      eqns: The operations before the sum: reshapes of the result, then the addition.
    """

    call: core.JaxprEqn
    other: core.Var
    result: core.Var
    eqns: tuple[core.JaxprEqn, ...]


def sum_of(call: core.JaxprEqn, var: core.Var, uses: Uses) -> Sum | None:
    """Returns the sum of a result and another array, if nothing else reads the result.

    The array has the result's shape and dtype, and is known before the call.

    Args:
      call: The call.
      var: Its result, or the sum of that and a bias.
      uses: The uses of the program's variables.
    """
    for found, before in _sums(call, var, uses):
        other, like = found.other.aval, before.aval
        known = uses.made.get(found.other, -1) < uses.places[id(call)]
        if known and other.shape == like.shape and other.dtype == like.dtype:
            return found
    return None


def bias_of(call: core.JaxprEqn, fixed: Collection[core.Var], uses: Uses) -> Sum | None:
    """Returns the sum of a call's result and a bias, if nothing else reads the result.

    A bias has a number for each column, and follows from parameters, as `fixed` do.
    """
    (var,) = call.outvars
    for found, before in _sums(call, var, uses):
        if before.aval.shape[-1:] == var.aval.shape[-1:]:
            bias = _column(found.other, before, uses)
            if bias in fixed:
                return found._replace(other=bias)
    return None


def _sums(
    call: core.JaxprEqn, var: core.Var, uses: Uses
) -> Iterator[tuple[Sum, core.Var]]:
    """Yields what is added to a result that nothing else reads, and the summand."""
    eqns: list[core.JaxprEqn] = []
    while len(uses.readers[var]) == 1:
        (reader,) = uses.readers[var]
        if reader is uses.program or reader.primitive.name not in ("add", "reshape"):
            return
        if reader.primitive.name == "reshape" and not keeps_order(reader):
            return
        eqns.append(reader)
        (result,) = reader.outvars
        if reader.primitive.name == "add":
            for other in reader.invars:
                if isinstance(other, core.Var) and other is not var:
                    yield Sum(call, other, result, tuple(eqns)), var
            return
        var = result


def _column(var: core.Var, like: core.Var, uses: Uses) -> core.Var | None:
    """Returns the vector of which a variable has an element for each column of `like`.

    If the variable is nothing of the kind, returns None.
    """
    columns = like.aval.shape[-1:]
    if var.aval.ndim != like.aval.ndim or var.aval.shape[-1:] != columns:
        return None
    while var.aval.shape != columns:
        maker = uses.makers.get(var)
        if maker is None or maker.primitive.name not in ("broadcast_in_dim", "reshape"):
            return None
        if maker.primitive.name == "reshape" and not keeps_order(maker):
            return None
        axes = maker.params.get("broadcast_dimensions", (var.aval.ndim - 1,))
        (var, *_) = maker.invars
        last = axes[-1:] == (maker.outvars[0].aval.ndim - 1,)
        if not isinstance(var, core.Var) or not last or var.aval.shape[-1:] != columns:
            return None
    return var


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
