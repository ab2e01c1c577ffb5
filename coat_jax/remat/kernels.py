"""Finds kernels with a backward pass that reads operands and a statistic of them.

Flash attention is an example. Its backward kernel reads queries, keys and values
together with the output and a statistic of each row, the log-sum-exp. With rounded
queries and keys the probabilities that it computes add up to one only if the statistic
was computed from the rounded queries and keys, too. So either all of these arrays must
be exact, or output and statistic must be computed from the copies.
"""

import functools
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from coat_jax.programs.graph import written_out
from coat_jax.programs.primitives import (
    Kind,
    bodies_of,
    is_foreign,
    is_layout,
    kind_of,
    size_of,
    variables,
)
from coat_jax.remat.shapes import MIN_STATISTIC, why_not_fp8
from coat_jax.remat.trace import Linearized
from pallas_kernels.dispatch import placement

# Operations besides loops and branches that contain a part of the program.
_PARTS = frozenset({"remat2", "shard_map"})


class Kernel(NamedTuple):
    """The residuals that are operands or results of a kernel with a statistic.

    Attributes:
      results: The residuals that follow from results of the kernel.
      operands: The copied residuals that are operands of the kernel, or that the
        backward pass computes its operands from.
      is_nested: Whether the kernel is within a loop or another operation. In this case
        `operands` are all copied residuals that the backward pass reads together with
        the statistic, and `results` leave out the residuals that only matmuls read.
    """

    results: frozenset[core.Var]
    operands: frozenset[core.Var]
    is_nested: bool


def _is_for_matmuls(traced: Linearized, index: int) -> bool:
    """Returns whether all readers of a residual are matmuls without batch axes.

    The backward pass of flash attention multiplies the output and its gradient head by
    head, in a matmul with batch axes. The result is subtracted from products with the
    operands, so the output has to be exact.
    """
    return all(map(_is_plain_matmul, traced.readers(index)))


def _is_plain_matmul(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    return not batch


class _Origin(NamedTuple):
    """The result of a kernel that an array follows from.

    Attributes:
      kernel: The kernel, which may be within a loop or another operation.
      result: The kernel's result.
    """

    kernel: core.JaxprEqn
    result: core.Var

    @property
    def is_statistic(self) -> bool:
        """True if the result is a statistic, by its dtype and size."""
        return self.result.aval.dtype == jnp.float32 and self.are_few(self.result)

    def are_few(self, var: core.Var) -> bool:
        """Returns whether a variable is small enough for a statistic of the kernel."""
        return size_of(var.aval) * MIN_STATISTIC <= _largest(self.kernel)


class Kernels:
    """The kernels of a forward program, and the residuals that follow from them.

    Attributes:
      traced: The forward and the backward program of the function.
      program: The forward program, with its calls inlined.
      places: The index of each residual.
      makers: The operation that computes each variable.
      origins: The origin of each variable that follows from a kernel's result.
    """

    def __init__(self, traced: Linearized, program: core.Jaxpr):
        residuals = program.outvars[traced.num_outputs :]
        self.traced, self.program = traced, program
        self.places = {v: i for i, v in enumerate(residuals) if isinstance(v, core.Var)}
        self.makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}
        self.origins = _from_kernels(program, {})

    @functools.cached_property
    def read_together(self) -> list[frozenset[int]]:
        """The result of `_read_by_kernels`: indices of residuals for each kernel."""
        return _read_by_kernels(self.traced)

    def statistics(self) -> set[core.Var]:
        """Returns the residuals that are statistics of a kernel's operands.

        A statistic is a float32 result of a kernel. It has far fewer elements than an
        operand of this kernel, and a kernel of the backward pass reads it, or numbers
        that are computed from it.
        """
        few = {v for v, origin in self._in_float32().items() if origin.is_statistic}
        read = frozenset().union(*self.read_together) if few else frozenset()
        return {var for var in few if self.places[var] in read}

    def with_statistics(self, copied: Container[core.Var]) -> Iterator[Kernel]:
        """Yields the kernels with operands that would be copied but should be exact.

        A kernel of the backward pass reads these operands together with a statistic
        that is not copied. Here a statistic is a float32 result of any size. With a
        policy, the backward pass may compute operands from other residuals, which then
        count as operands.

        Args:
          copied: The residuals that would be saved as FP8 copies.
        """
        places = self.places
        statistics = {v: m for v, m in self._in_float32().items() if v not in copied}
        for statistic, origin in statistics.items():
            kernel = origin.kernel
            read = frozenset().union(
                *(read for read in self.read_together if places[statistic] in read)
            )
            is_nested = not any(eqn is kernel for eqn in self.program.eqns)
            sources = places if is_nested else self._sources(kernel)
            operands = frozenset(
                v for v in sources if v in copied and places[v] in read
            )
            results = self._results(kernel, is_nested)
            if not _needs_exact(kernel):
                # Arrays as small as a statistic, such as shifts, are not worth a copy.
                operands = frozenset(filter(origin.are_few, operands))
                results = frozenset()
            if operands:
                yield Kernel(results, operands, is_nested)

    def _results(self, kernel: core.JaxprEqn, is_nested: bool) -> frozenset[core.Var]:
        """Returns the residuals that follow from results of a kernel.

        If the kernel is nested, residuals that only matmuls read are left out.
        """
        origins = self._of_residuals()
        results = frozenset(v for v, m in origins.items() if m.kernel is kernel)
        if not is_nested:
            return results
        # A loop saves the output again in the shape that a projection reads.
        return frozenset(
            v for v in results if not _is_for_matmuls(self.traced, self.places[v])
        )

    def _of_residuals(self) -> dict[core.Var, _Origin]:
        """Returns the origins of the residuals that follow from results of kernels."""
        return {v: self.origins[v] for v in self.places if v in self.origins}

    def _in_float32(self) -> dict[core.Var, _Origin]:
        """Returns the origins of residuals that follow from float32 kernel results."""
        origins = self._of_residuals()
        return {v: m for v, m in origins.items() if m.result.aval.dtype == jnp.float32}

    @functools.cached_property
    def _by_unmarked(self) -> dict[core.Var, set[core.Var]]:
        """A map from a variable to the residuals that equal it but for marks.

        Marks are operations such as names: an `fp8_remat` within another `fp8_remat`
        gives a name to each array that it saves.
        """
        residuals: dict[core.Var, set[core.Var]] = {}
        for residual in self.places:
            operands = [residual]
            while len(operands) == 1 and isinstance(operands[0], core.Var):
                (var,) = operands
                residuals.setdefault(var, set()).add(residual)
                eqn = self.makers.get(var)
                is_marked = eqn is not None and kind_of(eqn) is Kind.MARK
                operands = eqn.invars if is_marked else []
        return residuals

    def _sources(self, kernel: core.JaxprEqn) -> set[core.Var]:
        """Returns the nearest residuals from which a kernel's operands follow."""
        nearest, visited = set(), set()
        queue = {v for v in variables(kernel.invars) if not why_not_fp8(v.aval)}
        while queue:
            visited.add(var := queue.pop())
            if var in self._by_unmarked:
                nearest |= self._by_unmarked[var]
            elif var in self.makers:
                queue |= variables(self.makers[var].invars) - visited
        return nearest


def _from_kernels(
    program: core.Jaxpr, origins: dict[core.Var, _Origin]
) -> dict[core.Var, _Origin]:
    """Returns the origins of the program's arrays that follow from kernels' results.

    An array follows if it is a result that was moved or converted, or if it has as few
    elements as a statistic and is computed from one. An array that a loop stacks counts
    with the size that it has within the loop.

    Args:
      program: The program.
      origins: The origins of inputs that follow from results of kernels outside. The
        returned origins are added to it.
    """
    for eqn in program.eqns:
        operands = [
            origins.get(v) if isinstance(v, core.Var) else None for v in eqn.invars
        ]
        sources: list[_Origin | None] = [None] * len(eqn.outvars)
        if _is_one(eqn):
            sources = [_Origin(eqn, var) for var in eqn.outvars]
        elif bodies := bodies_of(eqn):
            # Other branches of a cond have zeros in a residual's place.
            for body in bodies:
                of_body = _from_kernels(body, known_inside(eqn, body, origins))
                if len(body.outvars) == len(eqn.outvars):
                    inner = [entry_at(v, of_body) for v in body.outvars]
                    sources = [a or b for a, b in zip(sources, inner, strict=True)]
        elif eqn.primitive.name == "optimization_barrier":
            sources = operands
        elif is_layout(eqn):
            sources = operands[:1] * len(eqn.outvars)
        else:
            known = [m for m in operands if m and m.is_statistic]
            few = [[m for m in known if m.are_few(v)] for v in eqn.outvars]
            sources = [m[0] if m else None for m in few]
        pairs = zip(eqn.outvars, sources, strict=True)
        origins |= {var: source for var, source in pairs if source}
    return origins


def _is_one(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a kernel, not a wrapper of further operations."""
    return is_foreign(eqn.primitive) and eqn.primitive.name not in _PARTS


def _needs_exact(kernel: core.JaxprEqn) -> bool:
    """Returns whether a kernel's operands must be exact if its statistics are.

    Kernels of other libraries and attention need exact operands. The other kernels of
    `pallas_kernels` quantize or normalize rows. A statistic that they compute from
    exact rows also fits FP8 copies of the rows.
    """
    return placement.operation_of(kernel.params) in (None, "attention")


def _largest(kernel: core.JaxprEqn) -> int:
    return max((size_of(v.aval) for v in kernel.invars), default=0)


def known_inside(
    eqn: core.JaxprEqn, body: core.Jaxpr, outer: Mapping[core.Var, Any]
) -> dict[core.Var, Any]:
    """Returns what is known of the inputs of a program inside an operation.

    `outer` has what is known of the operation's operands.
    """
    # Branches of a cond do not take its index, and the body of a loop does not take the
    # constants of its condition. Inputs of conditions may be matched wrongly, but
    # conditions run no kernels.
    operands = eqn.invars[len(eqn.invars) - len(body.invars) :]
    pairs = zip(body.invars, operands, strict=True)
    return {var: outer[v] for var, v in pairs if entry_at(v, outer) is not None}


def entry_at(operand: Any, known: Mapping[core.Var, Any]) -> Any:
    """Returns the entry of an operand in `known`, or None; literals have no entry."""
    return known.get(operand) if isinstance(operand, core.Var) else None


def _read_by_kernels(traced: Linearized) -> list[frozenset[int]]:
    """Returns, for each backward kernel, the residuals that its operands come from.

    Residuals are given by their indices. Operands that depend on cotangents do not
    count.
    """
    backward = written_out(traced.backward.jaxpr)
    residuals = backward.invars[: len(traced.residuals)]
    return list(_reads(backward, {v: frozenset({i}) for i, v in enumerate(residuals)}))


def _reads(
    program: core.Jaxpr, sources: dict[core.Var, frozenset[int]]
) -> Iterator[frozenset[int]]:
    """Yields the residuals that the operands of each kernel come from.

    Residuals are given by their indices. `sources` has the residuals that each input of
    the program comes from.
    """
    sources |= dict.fromkeys(program.constvars, frozenset())
    for eqn in program.eqns:
        operands = [v for v in eqn.invars if isinstance(v, core.Var)]
        known = [sources[v] for v in operands if v in sources]
        together = frozenset().union(*known)
        if _is_one(eqn):
            yield together
        for body in bodies_of(eqn):
            yield from _reads(body, known_inside(eqn, body, sources))
        if eqn.primitive.name == "optimization_barrier":
            pairs = zip(eqn.outvars, eqn.invars, strict=True)
            sources |= {
                out: sources[v] for out, v in pairs if entry_at(v, sources) is not None
            }
        elif len(known) == len(operands):
            sources |= dict.fromkeys(eqn.outvars, together)
