"""The FP8 matmuls of one array, and the operation that takes their place."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend import core

from coat_jax.fp8.fused import activated_product, gated_products, products
from coat_jax.fp8.prologue import Prologue, Saves, Source
from coat_jax.fp8.stored import Stored
from coat_jax.fusion.operation import fused, traced
from coat_jax.fusion.patterns import Gate, NormMatch, marks_of
from coat_jax.fusion.sums import Sum


@dataclasses.dataclass(kw_only=True)
class FusedMatmul:
    """The FP8 matmuls of one array, with a prologue and an epilogue.

    Attributes:
      calls: The matmuls; in a gated MLP only the last matmul.
      stored: The weights, in the order of axes in which the program stores them.
      pair: The two matmuls of a gated MLP that compute gate and up, or ().
      whole: The array that has the weights of `pair` as its halves, gate first; None if
        there is no array of this kind, or if a single matmul cannot read it.
      norm: The norm that the first matmuls read, if a kernel computes it; or None.
      gate: The activation or gate that `calls` read, if a kernel computes it; or None.
      biases: The sum of each result of `calls` and a bias, or None.
      total: The sum of the only result and another array, or None.
      passed: The variable that stands for the norm's input after this operation, so
        that its gradient comes to the kernel of the norm's gradient; or None.
    """

    calls: Sequence[core.JaxprEqn]
    stored: Mapping[core.Var, Stored]
    pair: Sequence[core.JaxprEqn] = ()
    whole: Stored | None = None
    norm: NormMatch | None = None
    gate: Gate | None = None
    biases: Sequence[Sum | None] = ()
    total: Sum | None = None
    passed: core.Var | None = None

    @property
    def source(self) -> Source:
        """The operands of the fused norm or activation, or else the activations."""
        if self.norm is not None:
            return self.norm.source
        if self.gate is not None and not self.pair:
            return Source(*self.gate.operands)
        return Source((*self.pair, *self.calls)[0].invars[0])

    @property
    def weights(self) -> list[tuple[Stored, core.Var | None]]:
        """The weight of each matmul of `calls`, with its bias or None."""
        pairs = zip(self.calls, self.biases, strict=True)
        return [
            (self.stored[call.invars[1]], bias and bias.other) for call, bias in pairs
        ]

    @property
    def results(self) -> list[core.Var]:
        """The variables that the fused operation computes."""
        pairs = zip(self.calls, self.biases, strict=True)
        sums = [(self.total or bias, call) for call, bias in pairs]
        results = [sum.result if sum else call.outvars[0] for sum, call in sums]
        return results if self.passed is None else [*results, self.passed]

    @property
    def eqns(self) -> Iterator[core.JaxprEqn]:
        """The operations that the fused operation replaces."""
        yield from (*self.pair, *self.calls)
        for match in (self.norm, self.gate, *self.biases, self.total):
            if match is not None:
                yield from match.eqns

    def traced(self, saves: Saves) -> list[core.JaxprEqn]:
        """Returns the operations of the fused form, in the place of the first call."""
        form, operands = self._form(saves)
        types = [call.outvars[0].aval for call in self.calls]
        marks = [marks_of(bias.eqns) if bias else () for bias in self.biases]
        if self.total:
            marks = [(*marks[0], *marks_of(self.total.eqns))]
        leaves, tree = jax.tree.flatten(operands)

        def marked(*arrays):
            # The source comes first among the operands, and may be passed on.
            passed = [] if self.passed is None else [jax.typeof(arrays[0])]
            ys = fused(form, tree, (*types, *passed), arrays)
            for i, of_result in enumerate(marks):
                for mark in of_result:
                    ys[i] = mark(ys[i])
            pairs = zip(ys, self.results, strict=True)
            return [y.reshape(v.aval.shape) for y, v in pairs]

        return traced(marked, leaves, self.results, like=self.calls[0])

    def _form(self, saves: Saves) -> tuple[Callable[..., list], tuple]:
        """Returns the function that computes the matmuls, and its operands."""
        total = self.total and self.total.other
        norm = self.norm and Prologue(self.norm.norm, marks_of(self.norm.eqns), saves)
        options: dict[str, Any] = {"dtype": self.calls[0].params["dtype"]}
        if self.gate is None:
            options |= {"norm": norm, "passes": self.passed is not None}
            operands = self.source, tuple(self.weights), total
            return partial(products, **options), operands
        marks = marks_of(self.gate.eqns)
        options["activation"] = Prologue(self.gate.activation, marks, saves)
        (down,) = self.weights
        if not self.pair:
            return partial(activated_product, **options), (self.source.x, down, total)
        options |= {"norm": norm, "adds": self.total is not None}
        options["inner"] = self.pair[0].params["dtype"]
        # Without copies backward reads gate and up as two arrays.
        first = (self.whole,) if self.whole and saves == "copies" else self.of_gate
        return partial(gated_products, **options), (self.source, first, down)

    @property
    def of_gate(self) -> tuple[Stored, ...]:
        """The weights of gate and up, in this order."""
        weights = {call.outvars[0]: self.stored[call.invars[1]] for call in self.pair}
        return tuple(weights[v] for v in self.gate.operands)
