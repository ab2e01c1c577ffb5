"""Finds kernels whose backward reads a statistic beside what it is a statistic of.

Flash attention is an example. Its backward kernel reads queries, keys and values
together with the output and a statistic of each row, the log-sum-exp. With rounded
queries and keys the probabilities that it computes add up to one only if the statistic
is that of the rounded ones. So all of these arrays must be exact, or all be of copies.
"""

from collections.abc import Container, Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from coat_jax.remat.programs import variables
from coat_jax.remat.shapes import why_not_fp8
from coat_jax.remat.trace import LAYOUT, Linearized, is_foreign


class Kernel(NamedTuple):
    """The residuals around a kernel that has a statistic of its operands.

    Attributes:
      results: The residuals that are results of the kernel.
      operands: The residuals from which backward reads or computes its operands.
    """

    results: frozenset[core.Var]
    operands: frozenset[core.Var]


def kernels_with_statistics(
    traced: Linearized, program: core.Jaxpr, copied: Container[core.Var]
) -> Iterator[Kernel]:
    """Yields the kernels of a forward program that have copies for operands.

    A statistic is a float32 result that a kernel of backward reads. With a policy,
    backward may compute the operands from other residuals, which then count as such.

    Args:
      traced: The function, with its backward program.
      program: The forward program, whose calls are inlined.
      copied: The residuals that would be saved as FP8 copies.
    """
    residuals = program.outvars[traced.num_outputs :]
    places = {v: i for i, v in enumerate(residuals) if isinstance(v, core.Var)}
    makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}

    def unmoved(var: core.Var) -> core.Var:
        """Returns the array that operations moved or converted to `var`."""
        while (eqn := makers.get(var)) and eqn.primitive.name in LAYOUT:
            operand = eqn.invars[0]
            if isinstance(operand, core.Literal):
                break
            var = operand
        return var

    def readers(var: core.Var) -> set[int]:
        """Returns the kernels of backward that read a residual."""
        eqns = traced.readers(places[var])
        return {id(eqn) for eqn in eqns if is_foreign(eqn.primitive)}

    def operands(kernel: core.JaxprEqn, read_by: set[int]) -> Iterator[core.Var]:
        """Yields copies from which backward has the operands of a kernel."""
        own = {v for v in variables(kernel.invars) if not why_not_fp8(v.aval)}
        left, seen = set(own), set()
        while left:
            seen.add(var := left.pop())
            if var not in places:
                left |= variables(makers[var].invars) - seen if var in makers else set()
            elif var in copied and (var not in own or read_by & readers(var)):
                yield var

    for var in places:
        kernel = makers.get(unmoved(var))
        if kernel is None or not is_foreign(kernel.primitive):
            continue
        if var.aval.dtype != jnp.float32 or var in copied:
            continue
        read_by = readers(var)
        if read_by and (found := frozenset(operands(kernel, read_by))):
            results = (v for v in places if unmoved(v) in kernel.outvars)
            yield Kernel(frozenset(results), found)
