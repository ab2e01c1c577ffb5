"""Finds gated MLPs of experts: `ragged_dot`, a gate, and `ragged_dot` again.

The weighted sums of each token's rows may follow; see `coat_jax.fusion.combine`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from coat_jax.fp8.gated_experts import Combine, ExpertRows, gated_experts
from coat_jax.fp8.ragged_dot import fp8_ragged_dot_p
from coat_jax.fusion.combine import CombineMatch, combine_of
from coat_jax.fusion.gathers import rows_p
from coat_jax.fusion.halves import cuts_of
from coat_jax.fusion.operation import fused, traced
from coat_jax.fusion.patterns import Gate, gate_of, marks_of
from coat_jax.programs.graph import (
    Graph,
    deduplicated,
    inlined,
    is_plain_call,
    with_replaced,
)
from coat_jax.programs.primitives import all_eqns
from pallas_kernels.checks import WIDE


class _Half(NamedTuple):
    """A result of a grouped matmul, or a half of its columns.

    Attributes:
      matmul: The matmul.
      half: 0 or 1, or None for the whole result.
      eqn: The operation that takes the half, or None.
    """

    matmul: core.JaxprEqn
    half: int | None = None
    eqn: core.JaxprEqn | None = None


class _Experts(NamedTuple):
    """A gated MLP of experts.

    Attributes:
      gate: The gate between the matmuls.
      halves: The matmul results that are gate and up, in this order.
      down: The matmul after the gate.
      gather: The gather that copies tokens to rows, if nothing else reads the rows.
      combine: The weighted sums of rows by token, if nothing else reads the results.
    """

    gate: Gate
    halves: tuple[_Half, _Half]
    down: core.JaxprEqn
    gather: core.JaxprEqn | None
    combine: CombineMatch | None

    @property
    def matmuls(self) -> list[core.JaxprEqn]:
        """The one or two matmuls that compute gate and up."""
        matmuls = [half.matmul for half in self.halves]
        return matmuls[: 1 if matmuls[0] is matmuls[1] else 2]

    @property
    def last(self) -> core.JaxprEqn:
        """The last operation, in place of which the fused form is computed."""
        return self.combine.eqns[-1] if self.combine else self.down

    @property
    def eqns(self) -> list[core.JaxprEqn]:
        """The operations that the fused form replaces."""
        cuts = [half.eqn for half in self.halves]
        others = [eqn for eqn in (*cuts, self.gather) if eqn is not None]
        sums = self.combine.eqns if self.combine else ()
        return [*self.matmuls, *self.gate.eqns, *others, self.down, *sums]

    def traced(self) -> list[core.JaxprEqn]:
        """Returns the operations of the fused form, in the place of `last`."""
        first, *_ = self.matmuls
        x, _, sizes = first.invars
        rows = ExpertRows(*(self.gather.invars if self.gather else [x]))
        weights = tuple(eqn.invars[1] for eqn in self.matmuls)
        operands = rows, weights, self.down.invars[1], sizes
        if match := self.combine:
            operands = *operands, Combine(match.weights, match.places)
        (result,) = self.last.outvars
        form = partial(
            _in_order if self.halves[0].half == 1 else gated_experts,
            activation=self.gate.activation,
            inner=first.params["dtype"],
            outer=self.down.params["dtype"],
            dtype=result.aval.dtype,
        )
        leaves, tree = jax.tree.flatten(operands)

        def run(*arrays):
            rows, w, down, sizes, *combine = jax.tree.unflatten(tree, arrays)
            for each in combine:
                weights = each.weights.reshape(match.shape)
                combine = [each._replace(weights=weights)]
            arrays, of_form = jax.tree.flatten((rows, w, down, sizes, *combine))
            return fused(form, of_form, [result.aval], arrays)

        return traced(run, leaves, [result], like=self.last)


def _in_order(rows, weights, *others, **options):
    """Computes `gated_experts` with one weight in which up comes before gate."""
    up, gate = jnp.split(weights[0], 2, axis=2)
    return gated_experts(rows, (gate, up), *others, **options)


def fuse_experts(program: core.Jaxpr) -> core.Jaxpr:
    """Returns a program with fused gated MLPs of experts."""
    if not any(eqn.primitive is fp8_ragged_dot_p for eqn in all_eqns(program.eqns)):
        return program
    program = deduplicated(inlined(program, is_plain_call))
    graph = Graph(program)
    matmuls = [eqn for eqn in program.eqns if eqn.primitive is fp8_ragged_dot_p]
    sources = dict(half for eqn in matmuls for half in _halves(eqn, graph))
    found: list[_Experts] = []
    ends: set[int] = set()
    for eqn in matmuls:
        match = _experts(eqn, graph, sources)
        # A matmul that ends one MLP may begin another one, but is fused with one only.
        if match and ends.isdisjoint(map(id, match.matmuls)):
            found.append(match)
            ends.add(id(eqn))
    replaced = {id(eqn): [] for match in found for eqn in match.eqns}
    replaced |= {id(match.last): match.traced() for match in found}
    return with_replaced(program, replaced)


def _halves(matmul: core.JaxprEqn, graph: Graph) -> Sequence[tuple[core.Var, _Half]]:
    """Returns the halves of a matmul's result, or the result if it is read as a whole.

    Each variable comes with its `_Half`.
    """
    (y,) = matmul.outvars
    rows, columns = y.aval.shape
    whole = [(y, _Half(matmul))]
    halves: list[tuple[core.Var, _Half]] = []
    for eqn in graph.readers[y]:
        cuts = [] if eqn is graph.program else list(cuts_of(eqn))
        if not cuts:
            return whole
        for axis, start, _, out in cuts:
            half, rest = divmod(2 * start, columns)
            if axis != 1 or rest:
                return whole
            halves.append((out, _Half(matmul, half, eqn)))
    equal = [out.aval.shape == (rows, columns // 2) for out, _ in halves]
    is_pair = sorted(half.half for _, half in halves) == [0, 1]
    return halves if is_pair and columns % 2 == 0 and all(equal) else whole


def _experts(
    down: core.JaxprEqn, graph: Graph, sources: dict[core.Var, _Half]
) -> _Experts | None:
    """Returns the gated MLP of experts that ends with the matmul `down`, or None.

    `sources` has the results of grouped matmuls, or their halves; see `_halves`.
    """
    a, _, sizes = down.invars
    if not isinstance(a, core.Var) or a.aval.dtype not in WIDE:
        return None
    if not graph.only_read_by([a], [down]):
        return None
    gate = gate_of(a, graph, sources)
    if gate is None or marks_of(gate.eqns):
        return None
    gate_half, up_half = halves = tuple(sources[v] for v in gate.operands)
    first, second = gate_half.matmul, up_half.matmul
    x, weight, _ = first.invars
    alike = (
        first.invars[0] is second.invars[0]
        and first.invars[2] is second.invars[2] is sizes
        and weight.aval.dtype == second.invars[1].aval.dtype
        and first.params["dtype"] == second.params["dtype"]
        and (gate_half.half is None) == (up_half.half is None)
        and (gate_half.half is None) == (first is not second)
    )
    if not alike or not isinstance(x, core.Var) or x.aval.dtype not in WIDE:
        return None
    if any(isinstance(v, core.Literal) for v in (weight, *down.invars)):
        return None
    gather = graph.makers.get(x)
    if not _is_of_tokens(gather) or not graph.only_read_by([x], [first, second]):
        gather = None
    return _Experts(gate, halves, down, gather, combine_of(down.outvars[0], graph))


def _is_of_tokens(eqn: core.JaxprEqn | None) -> bool:
    """Returns whether an operation copies tokens [t, k] to rows [m, k]."""
    if eqn is None or eqn.primitive is not rows_p:
        return False
    return eqn.invars[0].aval.ndim == 2 and len(eqn.params["shape"]) == 1
