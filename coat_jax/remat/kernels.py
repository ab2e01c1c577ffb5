"""Finds kernels with a backward pass that reads operands and a statistic of them.

Flash attention is an example. Its backward kernel reads queries, keys and values
together with the output and a statistic of each row, the log-sum-exp. With rounded
queries and keys the probabilities that it computes add up to one only if the statistic
was computed from the rounded ones. So all of these arrays must be exact, or all be of
copies.
"""

from collections.abc import Container, Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from coat_jax.programs.graph import written_out
from coat_jax.programs.primitives import is_foreign, is_layout, variables
from coat_jax.remat.shapes import why_not_fp8
from coat_jax.remat.trace import Linearized


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

    A statistic is a float32 result that a kernel of backward reads together with the
    operands. With a policy, backward may compute the operands from other residuals,
    which then count as such.

    Args:
      traced: The function, with its backward program.
      program: The forward program, with its calls inlined.
      copied: The residuals that would be saved as FP8 copies.
    """
    residuals = program.outvars[traced.num_outputs :]
    places = {v: i for i, v in enumerate(residuals) if isinstance(v, core.Var)}
    makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}

    def unmoved(var: core.Var) -> core.Var:
        """Returns the array that operations moved or converted to `var`."""
        while (eqn := makers.get(var)) and is_layout(eqn):
            operand = eqn.invars[0]
            if isinstance(operand, core.Literal):
                break
            var = operand
        return var

    def behind(kernel: core.JaxprEqn) -> set[core.Var]:
        """Returns the nearest residuals from which a kernel's operands follow."""
        nearest, visited = set(), set()
        queue = {v for v in variables(kernel.invars) if not why_not_fp8(v.aval)}
        while queue:
            visited.add(var := queue.pop())
            if var in places:
                nearest.add(var)
            elif var in makers:
                queue |= variables(makers[var].invars) - visited
        return nearest

    statistics = {
        place: kernel
        for var, place in places.items()
        if (kernel := makers.get(unmoved(var))) and is_foreign(kernel.primitive)
        if var.aval.dtype == jnp.float32 and var not in copied
    }
    if not statistics:
        return
    backward = written_out(traced.backward.jaxpr)
    read_together = _read_by_kernels(backward, len(residuals))
    for place, kernel in statistics.items():
        operands_of_reader = frozenset().union(
            *(read for read in read_together if place in read)
        )
        operands = frozenset(
            v for v in behind(kernel) if v in copied and places[v] in operands_of_reader
        )
        if operands:
            results = (v for v in places if unmoved(v) in kernel.outvars)
            yield Kernel(frozenset(results), operands)


def _read_by_kernels(backward: core.Jaxpr, residuals: int) -> list[frozenset[int]]:
    """Returns, for each kernel, the residuals that its operands are computed from.

    Operands that depend on cotangents do not count. The first `residuals` inputs of the
    backward program are residuals, and their indices are returned. Calls in the program
    are inlined.
    """
    sources = {v: frozenset({i}) for i, v in enumerate(backward.invars[:residuals])}
    sources |= dict.fromkeys(backward.constvars, frozenset())
    by_kernel = []
    for eqn in backward.eqns:
        operands = [v for v in eqn.invars if isinstance(v, core.Var)]
        known = [sources[v] for v in operands if v in sources]
        together = frozenset().union(*known)
        if is_foreign(eqn.primitive):
            by_kernel.append(together)
        if eqn.primitive.name == "optimization_barrier":
            for out, v in zip(eqn.outvars, eqn.invars, strict=True):
                if isinstance(v, core.Var) and v in sources:
                    sources[out] = sources[v]
        elif len(known) == len(operands):
            sources |= dict.fromkeys(eqn.outvars, together)
    return by_kernel
