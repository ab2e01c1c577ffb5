"""Gates before matmuls in BF16, with gradients by a kernel.

For the gradients of a gate, autodiff reads gate and up, and for the gradient of the
next weight the gate's output. `fp8_remat` saves FP8 copies of gate and up. From these
copies one kernel computes all of this in one pass, which takes XLA several. The forward
operations stay as the program has them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array

import pallas_kernels as kernels
from coat_jax.fp8.prologue import Prologue
from coat_jax.fusion.algebra import is_known
from coat_jax.fusion.halves import cut_of
from coat_jax.fusion.operation import traced
from coat_jax.fusion.patterns import Gate, activation_of, gate_of, marks_of
from coat_jax.programs.graph import (
    Graph,
    deduplicated,
    inlined,
    is_plain_call,
    with_replaced,
)
from coat_jax.programs.primitives import all_eqns
from coat_jax.quantization.array import scales_as_bits
from coat_jax.quantization.formats import E4M3
from coat_jax.remat.notes import Note
from coat_jax.remat.shapes import why_not_fp8
from pallas_kernels.dispatch import array_types
from pallas_kernels.numerics import GROUP

_READER = "the gradient of a gate"


class _Matmul(NamedTuple):
    """A matmul of rows [..., k] in BF16 with one weight.

    Attributes:
      axis: The axis of the weight that is contracted.
      precision: The precision that the program asks for.
    """

    axis: int
    precision: Any

    @classmethod
    def of(cls, eqn: core.JaxprEqn) -> "_Matmul | None":
        """Returns the matmul that an operation computes, or None."""
        if eqn.primitive.name != "dot_general":
            return None
        (a, w), (y,), params = eqn.invars, eqn.outvars, eqn.params
        (of_a, of_w), batch = params["dimension_numbers"]
        if any(isinstance(v, core.Literal) for v in (a, w)) or any(batch):
            return None
        is_bf16 = all(v.aval.dtype == jnp.bfloat16 for v in (a, w, y))
        if not is_bf16 or a.aval.ndim < 2 or tuple(of_a) != (a.aval.ndim - 1,):
            return None
        # On explicit mesh axes a matmul asks how its gradients are to be sharded.
        if any(v.aval.sharding.mesh.explicit_axes for v in (a, w, y)):
            return None
        return cls(of_w[0], params["precision"])

    def __call__(self, a: Array, w: Array) -> Array:
        """Multiplies a [..., k] by w, which has the axis k somewhere."""
        return self._dot(a, w, (a.ndim - 1,), (self.axis,))

    def of_rows(self, dy: Array, w: Array) -> Array:
        """Returns the gradient of `a`, [..., k]."""
        outputs = [axis for axis in range(w.ndim) if axis != self.axis]
        return self._dot(dy, w, range(dy.ndim - len(outputs), dy.ndim), outputs)

    def of_weight(self, a: Array, dy: Array) -> Array:
        """Returns the gradient of `w`."""
        rows = range(a.ndim - 1)
        return jnp.moveaxis(self._dot(a, dy, rows, rows), 0, self.axis)

    def _dot(self, a, b, axes_of_a, axes_of_b):
        contracted = (tuple(axes_of_a), tuple(axes_of_b))
        return lax.dot_general(a, b, (contracted, ((), ())), precision=self.precision)


class _GatedMatmul(NamedTuple):
    """A matmul of a gate's output, or of an activation's, that nothing else reads.

    Attributes:
      gate: The gate.
      eqn: The matmul in the program.
      matmul: The matmul.
      operands: The variables of gate and up, of one array with both, or of the gate
        alone.
    """

    gate: Gate
    eqn: core.JaxprEqn
    matmul: _Matmul
    operands: tuple[core.Var, ...]

    def traced(self) -> list[core.JaxprEqn]:
        """Returns the operations that take the place of the matmul."""
        prologue = Prologue(self.gate.activation, marks_of(self.gate.eqns), "copies")
        a, w = self.eqn.invars
        joined = self.operands != self.gate.operands

        def run(a, w, *operands):
            if joined:  # [..., 2, f] or [..., 2 f]
                operands = (operands[0].reshape(*a.shape[:-1], 2, a.shape[-1]),)
            arrays = array_types.varying_alike((lax.stop_gradient(a), operands, w))
            return [_product(prologue, self.matmul, joined, *arrays)]

        return traced(run, [a, w, *self.operands], self.eqn.outvars, like=self.eqn)


def fuse_gates(program: core.Jaxpr) -> core.Jaxpr:
    """Returns a program in which a kernel computes the gradients of gates in BF16."""
    if not any(map(_Matmul.of, all_eqns(program.eqns))):
        return program
    program = deduplicated(inlined(program, is_plain_call))
    graph = Graph(program)
    replaced = {id(match.eqn): match.traced() for match in _gated(graph)}
    return with_replaced(program, replaced)


def _gated(graph: Graph) -> Iterator[_GatedMatmul]:
    """Yields the matmuls of gates."""
    sources = _sources(graph)
    for eqn in graph.program.eqns:
        matmul = _Matmul.of(eqn)
        if matmul is None:
            continue
        a, _ = eqn.invars
        # The same arrays as elsewhere have no copies.
        if why_not_fp8(a.aval) or a.aval.shape[-1] % GROUP:
            continue
        if not graph.only_read_by([a], [eqn]):
            continue
        gate = gate_of(a, graph, sources) or activation_of(a, graph)
        if gate is None or any(v.aval.dtype != jnp.bfloat16 for v in gate.operands):
            continue
        if all(v.aval.shape == a.aval.shape for v in gate.operands):
            yield _GatedMatmul(gate, eqn, matmul, _operands(gate, graph))


def _sources(graph: Graph) -> set[core.Var]:
    """Returns the variables that no elementwise operation computes."""
    program = graph.program
    computed = (v for e in program.eqns if not is_known(e) for v in e.outvars)
    return {*program.invars, *program.constvars, *computed}


def _operands(gate: Gate, graph: Graph) -> tuple[core.Var, ...]:
    """Returns the array that has gate and up as its halves, or the gate's operands."""
    cuts = [cut_of(v, graph) for v in gate.operands]
    if len(cuts) == 2 and None not in cuts:
        (array, axis, start, size), (same, *place) = cuts
        shape, last = array.aval.shape, array.aval.ndim - 1
        in_order = array is same and (start, place) == (0, [axis, size, size])
        # The halves of each row are one after the other: [..., 2 f] or [..., 2, f].
        row = size if axis == last else shape[last]
        by_row = axis == last or (axis == last - 1 and size == 1)
        is_row = row == gate.operands[0].aval.shape[-1]
        if in_order and by_row and is_row and shape[axis] == 2 * size:
            return (array,)
    return gate.operands


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    gate: Prologue,
    matmul: _Matmul,
    joined: bool,
    a: Array,
    operands: tuple[Array, ...],
    w: Array,
) -> Array:
    """Multiplies `a`, the gate of the operands, by `w`.

    The gradients of `a` go to the operands: gate and up, the gate alone, or one array
    [..., 2, f] if they are `joined`.
    """
    return matmul(a, w)


def _product_fwd(gate, matmul, joined, a, operands, w):
    with Note(f"{E4M3}, groups of {GROUP}", _READER).scope():
        groups = [kernels.quantize_groups(x, dtype=E4M3.dtype) for x in operands]
    # Scales are saved as integers, which an outer `fp8_remat` saves exactly.
    with Note(f"scales of groups of {GROUP}", _READER).scope():
        saved = gate.named([jax.tree.map(scales_as_bits, q) for q in groups])
    return matmul(a, w), (saved, w)


@array_types.on_common_mesh
def _product_bwd(gate, matmul, joined, residuals, dy):
    saved, w = residuals
    groups = tuple(jax.tree.map(scales_as_bits, q) for q in saved)
    da = gate.constrained(matmul.of_rows(dy, w))
    out = kernels.gated_grad(
        groups[0] if joined else groups, da, activation=gate.function, keep_product=True
    )
    gradients = (out.values,) if joined else out.values
    return jnp.zeros_like(da), gradients, matmul.of_weight(out.product, dy)


_product.defvjp(_product_fwd, _product_bwd)
