"""Replaces the matmuls and the softmax of attention in a program by flash attention.

Many models multiply queries and keys, mask the scores, take the softmax and multiply by
the values. The scores and the probabilities have a number for each pair of positions,
and XLA writes them to memory several times. cuDNN's flash attention computes the same
function without writing them.

A match starts at the product with the values, and goes back to the product of queries
and keys. The axes of the latter product have labels, which are followed through
transposes and reshapes: so attention is found with any order of axes, and with any way
to group heads. Queries and keys may be in float32 if they come from the dtype of the
values, as after a rotary embedding. The program stays as it is if there are other
operations in between, such as dropout, a soft cap, or a mask that may have a gradient;
if anything else reads the scores or the probabilities; or if a query that sees no key
would get another result.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from coat_jax.fusion.algebra import before_casts
from coat_jax.fusion.axes import MOVES, Axis, MismatchError, Sizes
from coat_jax.fusion.digits import with_digits_of
from coat_jax.fusion.flash import FEATURES, Attention
from coat_jax.fusion.masks import Mask
from coat_jax.fusion.softmax import Softmax
from coat_jax.layers.flash_attention import has_flash_attention
from coat_jax.programs.graph import (
    Graph,
    deduplicated,
    inlined,
    is_plain_call,
    with_replaced,
)
from coat_jax.programs.primitives import Operand, all_eqns
from pallas_kernels.dispatch import array_types, devices, stand_ins


def attention(
    program: core.Jaxpr, keys: Sequence[Any], is_param: Sequence[bool]
) -> core.Jaxpr:
    """Returns a program in which flash attention computes softmax attention."""
    del keys, is_param
    if not _has_kernel():
        return program
    names = {eqn.primitive.name for eqn in all_eqns(program.eqns)}
    if not names.issuperset({"dot_general", "exp", "reduce_max"}):
        return program
    inline = deduplicated(inlined(program, is_plain_call))
    graph = Graph(inline)
    replaced: dict[int, Sequence[core.JaxprEqn]] = {}
    for match in filter(None, (_match(eqn, graph) for eqn in inline.eqns)):
        # The result of one attention may be the scores of another one.
        if replaced.keys().isdisjoint(map(id, match.eqns)):
            replaced |= dict.fromkeys(map(id, match.eqns), ())
            replaced[id(match.eqns[-1])] = match.traced()
    if not replaced:
        return program
    return with_replaced(inline, replaced)


def _has_kernel() -> bool:
    """Returns whether cuDNN's flash attention can replace attention in a program.

    It can on Hopper GPUs, and in programs that are traced for a Hopper GPU with
    stand-ins and never run. It cannot elsewhere, because cuDNN's attention, unlike a
    Pallas kernel, cannot be compiled without a GPU.
    """
    is_here = jax.default_backend() == "gpu" and devices.has_hopper()
    return stand_ins.active.get() or is_here


class _Product:
    """The axes of a product of queries and keys, or of probabilities and values.

    Attributes:
      contracted: The contracted axis of each operand.
      batch: The batch axes of each operand, in the same order for both operands.
      free: The other axes of each operand.
    """

    def __init__(self, eqn: core.JaxprEqn):
        contracted, self.batch = eqn.params["dimension_numbers"]
        if len(contracted[0]) != 1:
            raise MismatchError
        self.contracted = [int(axes[0]) for axes in contracted]
        self.free = [
            [i for i in range(v.aval.ndim) if i != at and i not in batch]
            for v, at, batch in zip(
                eqn.invars, self.contracted, self.batch, strict=True
            )
        ]


def _match(last: core.JaxprEqn, graph: Graph) -> Attention | None:
    """Returns the attention that ends with the product `last`, or None."""
    if last.primitive.name != "dot_general":
        return None
    sizes = [n for v in (*last.invars, *last.outvars) for n in v.aval.shape]
    if not all(isinstance(n, int) and n for n in sizes):
        return None
    for side in (0, 1):
        try:
            match = _around(Softmax(graph, last, side), last, side, graph)
            _check(match, graph)
        except MismatchError:
            continue
        return match
    return None


def _around(
    softmax: Softmax, last: core.JaxprEqn, side: int, graph: Graph
) -> Attention:
    """Returns the attention with this softmax, which ends with the product `last`.

    `side` is the place of the probabilities among the operands of `last`.

    Raises:
      MismatchError: If the axes are not as in attention.
    """
    first = softmax.first
    product, shape = _Product(first), first.outvars[0].aval.shape
    sizes = {label: n for label, n in enumerate(shape) if n != 1}
    sizes[FEATURES] = first.invars[0].aval.shape[product.contracted[0]]
    axes, scale, masks, shifted = softmax.scores(sizes)
    key = axes[softmax.axis]
    labels = [_operand_axes(product, which, sizes) for which in (0, 1)]
    free = [_free(product, labels, which) for which in (0, 1)]
    if tuple(free[0]) == key:
        of_queries, of_keys = 1, 0
    elif tuple(free[1]) == key:
        of_queries, of_keys = 0, 1
    else:
        raise MismatchError
    if len(key) != 1 or not 0 < scale < math.inf:
        raise MismatchError
    batch = [label for label in range(len(product.batch[0])) if label in sizes]
    query = _query(free[of_queries], masks, sizes)
    heads = _heads(batch, masks, has_groups=len(free[of_queries]) > 1)
    axes = softmax.probabilities(axes, sizes)
    groups = (batch, free[of_queries], key[0])
    values, result_axes = _values(_Product(last), side, axes, groups)
    if last.invars[1 - side].aval.shape[values.index((FEATURES,))] != sizes[FEATURES]:
        raise MismatchError
    operands = first.invars[of_queries], first.invars[of_keys], last.invars[1 - side]
    operands = [_narrow(v, graph) for v in operands]
    return Attention(
        operands=operands,
        dtype=operands[-1].aval.dtype,
        axes=[labels[of_queries], labels[of_keys], values],
        sizes=sizes,
        query=query,
        key=key[0],
        batch=[label for label in batch if label not in heads],
        heads=heads,
        groups=[label for label in free[of_queries] if label != query],
        scale=scale,
        masks=masks,
        shifted=shifted,
        result_axes=result_axes,
        eqns=[*softmax.eqns, last],
    )


def _check(match: Attention, graph: Graph) -> None:
    """Raises MismatchError if flash attention cannot run, or would not help."""
    result = match.eqns[-1].outvars[0]
    # The second product may read probabilities or scores as its values, too.
    removed = {v for eqn in match.eqns[:-1] for v in eqn.outvars}
    if not removed.isdisjoint(match.operands):
        raise MismatchError
    # Within a `shard_map` that leaves some axes to XLA no kernel runs.
    for sharding in (v.aval.sharding for v in (*match.operands, result)):
        mesh = sharding.mesh
        is_mixed = mesh.manual_axes and not array_types.is_manual(mesh)
        if is_mixed or array_types.is_partial(sharding):
            raise MismatchError
    _check_split(match)
    others = {v for v in match.operands if v.aval.dtype != match.dtype}
    if others and not others <= with_digits_of(match.dtype, graph):
        raise MismatchError
    q, k, _ = (jax.ShapeDtypeStruct(shape, match.dtype) for shape in match.shapes)
    if not (has_flash_attention(q) and has_flash_attention(k)):
        raise MismatchError
    if not _is_narrow(result, match.dtype, graph):
        raise MismatchError
    # A mask of sequences and heads is as large as the scores.
    masked = _masked(match.masks)
    of_heads = masked.intersection([*match.heads, *match.groups])
    if of_heads and not masked.isdisjoint(match.batch):
        raise MismatchError


def _check_split(match: Attention) -> None:
    """Raises MismatchError if heads may be sharded unevenly.

    This is the case if the number of heads is not a multiple of the size of a mesh
    axis. A mesh with a single axis is an exception: then the heads are not sharded,
    because this axis more often shards sequences. On other meshes each device would
    compute the heads of all devices.
    """
    (_, _, query_heads, _), (_, _, key_heads, _), _ = match.shapes
    heads = key_heads if key_heads > 1 else query_heads
    meshes = [v.aval.sharding.mesh for v in match.operands]
    if devices.is_alone() or any(map(array_types.is_manual, meshes)):
        return
    sizes = [jax.device_count()]  # Types do not always have a mesh.
    for mesh in meshes:
        if not mesh.empty:
            sizes = [size for size in mesh.shape.values() if size > 1]
            if len(sizes) < 2:
                return
    if any(heads % size for size in sizes):
        raise MismatchError


def _is_narrow(result: core.Var, dtype: Any, graph: Graph) -> bool:
    """Returns whether a result has a dtype, or is only read by a cast to this dtype.

    Between the result and the cast there may be operations that only move elements.
    """
    while result.aval.dtype != dtype:
        readers = graph.readers[result]
        if len(readers) != 1 or readers[0] is graph.program:
            return False
        (reader,) = readers
        if reader.primitive.name not in MOVES or len(reader.outvars) > 1:
            return False
        (result,) = reader.outvars
    return True


def _narrow(operand: Operand, graph: Graph) -> core.Var:
    """Returns the variable that an operand was before casts from bfloat16."""
    if not isinstance(operand, core.Var):
        raise MismatchError
    return before_casts(operand, graph, (jnp.dtype(jnp.bfloat16),))


def _operand_axes(product: _Product, which: int, sizes: Sizes) -> list[Axis]:
    """Returns the labels of the axes of a product's operand `which`."""
    before_free = len(product.batch[0]) + which * len(product.free[0])
    labels = dict.fromkeys([product.contracted[which]], FEATURES)
    labels |= {int(axis): label for label, axis in enumerate(product.batch[which])}
    labels |= {axis: before_free + i for i, axis in enumerate(product.free[which])}
    return [(labels[i],) if labels[i] in sizes else () for i in range(len(labels))]


def _free(product: _Product, axes: Sequence[Sequence[Axis]], which: int) -> list[int]:
    """Returns the labels of the free axes of a product's operand `which`."""
    return [label for axis in product.free[which] for label in axes[which][axis]]


def _masked(masks: Sequence[Mask]) -> set[int]:
    """Returns the labels of all axes of masks."""
    return {label for mask in masks for label in mask.labels}


def _query(free: Sequence[int], masks: Sequence[Mask], sizes: Sizes) -> int:
    """Returns the label of the positions of queries, which is among `free`.

    The other labels in `free` are labels of heads. A mask has an axis of positions, so
    a label of a mask is chosen. If no mask has one of these labels, attention is the
    same for any choice, and the longest axis is chosen.
    """
    masked = _masked(masks)
    candidates = [label for label in free if label in masked] or free
    if not candidates or (masked.intersection(free) and len(candidates) > 1):
        raise MismatchError
    return max(candidates, key=sizes.__getitem__)


def _heads(batch: Sequence[int], masks: Sequence[Mask], has_groups: bool) -> list[int]:
    """Returns a list with the label of key heads among `batch`, or an empty list.

    A label that no mask has is preferred, because masks have an axis of sequences more
    often than an axis of heads.

    `has_groups` says whether several query heads share a key head.
    """
    if has_groups and len(batch) < 2:
        return []
    masked = _masked(masks)
    unmasked = [label for label in batch if label not in masked]
    return list((unmasked or batch)[-1:])


def _values(
    product: _Product,
    side: int,
    axes: Sequence[Axis],
    groups: tuple[Sequence[int], Sequence[int], int],
) -> tuple[list[Axis], list[Axis]]:
    """Returns the labels of the axes of the values, and of the result.

    Args:
      product: The product of probabilities and values.
      side: The place of the probabilities among its operands.
      axes: The labels of the axes of the probabilities.
      groups: The labels that queries and keys share, the other labels of queries, and
        the label of the positions of keys.

    Raises:
      MismatchError: If the labels of probabilities and values do not match `groups`.
    """
    batch, free, key = groups
    if axes[product.contracted[side]] != (key,) or len(product.free[1 - side]) != 1:
        raise MismatchError
    shared = [axes[i] for i in product.batch[side]]
    of_queries = [axes[i] for i in product.free[side]]
    for group, labels in ((shared, batch), (of_queries, free)):
        if sorted(label for axis in group for label in axis) != sorted(labels):
            raise MismatchError
    values = dict(zip(map(int, product.batch[1 - side]), shared, strict=True))
    (features,) = product.free[1 - side]
    values |= {product.contracted[1 - side]: (key,), features: (FEATURES,)}
    result = [of_queries, [(FEATURES,)]][:: 1 if side == 0 else -1]
    return [values[i] for i in range(len(values))], [*shared, *result[0], *result[1]]
