"""Finds kernels with a backward pass that reads operands and a statistic of them.

Flash attention is an example. Its backward kernel reads queries, keys and values
together with the output and a statistic of each row, the log-sum-exp. With rounded
queries and keys the probabilities that it computes add up to one only if the statistic
was computed from the rounded ones. So all of these arrays must be exact, or all be of
copies.
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from coat_jax.programs.graph import written_out
from coat_jax.programs.primitives import (
    bodies_of,
    is_foreign,
    is_layout,
    size_of,
    variables,
)
from coat_jax.remat.shapes import MIN_STATISTIC, why_not_fp8
from coat_jax.remat.trace import Linearized


class Kernel(NamedTuple):
    """The residuals around a kernel that has a statistic of its operands.

    Attributes:
      results: The residuals that are results of the kernel.
      operands: The residuals from which backward reads or computes its operands.
      is_nested: Whether the kernel is in a loop or another part of the program. Then
        the operands are all residuals that backward reads with the statistic.
    """

    results: frozenset[core.Var]
    operands: frozenset[core.Var]
    is_nested: bool


def kernel_statistics(traced: Linearized, program: core.Jaxpr) -> set[core.Var]:
    """Returns the residuals that are statistics of a kernel's operands.

    A statistic is a float32 result of a kernel, with far fewer elements than an
    operand, which a kernel of backward reads. Backward may move, scale or select its
    numbers first.

    Args:
      traced: The function, with its backward program.
      program: The forward program, with its calls inlined.
    """
    results = _Results.of(traced, program)
    small = {
        var
        for var, kernel in results.of_kernels().items()
        if size_of(var.aval) * MIN_STATISTIC <= _largest(kernel)
    }
    if not small:
        return small
    read = frozenset().union(*_read_by_kernels(traced))
    return {var for var in small if results.places[var] in read}


def kernels_with_statistics(
    traced: Linearized, program: core.Jaxpr, copied: Container[core.Var]
) -> Iterator[Kernel]:
    """Yields the kernels of a forward program that have copies for operands.

    Their statistics, of any size, are not copied, and a kernel of backward reads them
    together with the operands. With a policy, backward may compute the operands from
    other residuals, which then count as such.

    Args:
      traced: The function, with its backward program.
      program: The forward program, with its calls inlined.
      copied: The residuals that would be saved as FP8 copies.
    """
    results = _Results.of(traced, program)
    places = results.places
    statistics = {v: k for v, k in results.of_kernels().items() if v not in copied}
    read_together = _read_by_kernels(traced) if statistics else []
    for statistic, kernel in statistics.items():
        read = frozenset().union(
            *(read for read in read_together if places[statistic] in read)
        )
        is_nested = not any(eqn is kernel for eqn in program.eqns)
        sources = places if is_nested else results.sources(kernel)
        operands = frozenset(v for v in sources if v in copied and places[v] in read)
        if operands:
            of_kernel = frozenset(v for v in places if results.maker(v) is kernel)
            yield Kernel(of_kernel, operands, is_nested)


class _Results(NamedTuple):
    """The results of a forward program's operations.

    Attributes:
      places: The residuals, with their indices.
      makers: The operations, by their results.
    """

    places: dict[core.Var, int]
    makers: dict[core.Var, core.JaxprEqn]

    @classmethod
    def of(cls, traced: Linearized, program: core.Jaxpr) -> "_Results":
        residuals = program.outvars[traced.num_outputs :]
        return cls(
            {v: i for i, v in enumerate(residuals) if isinstance(v, core.Var)},
            {var: eqn for eqn in program.eqns for var in eqn.outvars},
        )

    def of_kernels(self) -> dict[core.Var, core.JaxprEqn]:
        """Returns the float32 residuals that are results of kernels, with these."""
        makers = {v: self.maker(v) for v in self.places if v.aval.dtype == jnp.float32}
        return {v: eqn for v, eqn in makers.items() if eqn and _is_one(eqn)}

    def maker(self, var: core.Var) -> core.JaxprEqn | None:
        """Returns the operation that computed an array, before others moved it.

        For arrays that a loop stacks, it is the operation in the loop.
        """
        return _maker(self.makers, var)

    def sources(self, kernel: core.JaxprEqn) -> set[core.Var]:
        """Returns the nearest residuals from which a kernel's operands follow."""
        nearest, visited = set(), set()
        queue = {v for v in variables(kernel.invars) if not why_not_fp8(v.aval)}
        while queue:
            visited.add(var := queue.pop())
            if var in self.places:
                nearest.add(var)
            elif var in self.makers:
                queue |= variables(self.makers[var].invars) - visited
        return nearest


def _maker(makers: Mapping[core.Var, core.JaxprEqn], var: core.Var) -> Any:
    eqn = makers.get(var)
    if eqn is None or _is_one(eqn):
        return eqn
    if is_layout(eqn):
        operand = eqn.invars[0]
        return eqn if isinstance(operand, core.Literal) else _maker(makers, operand)
    for body in bodies_of(eqn):
        # Other branches of a cond have zeros in a residual's place.
        inner = body.outvars[eqn.outvars.index(var)]
        if len(body.outvars) == len(eqn.outvars) and isinstance(inner, core.Var):
            of_body = {v: each for each in body.eqns for v in each.outvars}
            maker = _maker(of_body, inner)
            if maker and _is_one(maker):
                return maker
    return eqn


def _is_one(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a kernel, and not a loop or a `shard_map`."""
    return is_foreign(eqn.primitive) and not bodies_of(eqn)


def _largest(kernel: core.JaxprEqn) -> int:
    return max((size_of(v.aval) for v in kernel.invars), default=0)


def _read_by_kernels(traced: Linearized) -> list[frozenset[int]]:
    """Returns, for each kernel of backward, the residuals that its operands come from.

    Residuals are named by their indices. Operands that depend on cotangents do not
    count.
    """
    backward = written_out(traced.backward.jaxpr)
    residuals = backward.invars[: len(traced.residuals)]
    return list(_reads(backward, {v: frozenset({i}) for i, v in enumerate(residuals)}))


def _reads(
    program: core.Jaxpr, sources: dict[core.Var, frozenset[int]]
) -> Iterator[frozenset[int]]:
    """Yields what each kernel reads, where `sources` says what inputs come from."""
    sources |= dict.fromkeys(program.constvars, frozenset())
    for eqn in program.eqns:
        operands = [v for v in eqn.invars if isinstance(v, core.Var)]
        known = [sources[v] for v in operands if v in sources]
        together = frozenset().union(*known)
        if _is_one(eqn):
            yield together
        elif eqn.primitive.name != "while":
            for body in bodies_of(eqn):
                # The branches of a cond do not take its index.
                outer = eqn.invars[len(eqn.invars) - len(body.invars) :]
                pairs = zip(body.invars, outer, strict=True)
                of_body = {v: sources[o] for v, o in pairs if _is_in(o, sources)}
                yield from _reads(body, of_body)
        if eqn.primitive.name == "optimization_barrier":
            for out, v in zip(eqn.outvars, eqn.invars, strict=True):
                if _is_in(v, sources):
                    sources[out] = sources[v]
        elif len(known) == len(operands):
            sources |= dict.fromkeys(eqn.outvars, together)


def _is_in(operand: Any, sources: Container[core.Var]) -> bool:
    return isinstance(operand, core.Var) and operand in sources
