"""cuDNN's flash attention, on one device or on each device's part of sharded arrays.

JAX's own function rejects some shardings: queries, keys and values that are sharded
differently, and sequences that are split. Here the names of axes say what each device
computes, as for the library's kernels: batch and heads may be split, and positions are
gathered.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.dispatch import (
    array_types,
    devices,
    operations,
    placement,
    stand_ins,
)
from pallas_kernels.dispatch.axes import Axes
from pallas_kernels.ops.attention.axes import HeadAxes


def has_flash_attention(q: Array) -> bool:
    """Returns whether cuDNN can compute attention of queries `q`, and its gradients."""
    _, length, _, head_dim = q.shape
    return (
        (stand_ins.active.get() or devices.has_gpu())
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and length % 2 == 0
    )


def flash_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b t m d"],
    v: Float[Array, "b t m d"],
    *,
    mask: Bool[Array, "#b #n s t"] | None,
    scale: float,
    causal: bool,
) -> Float[Array, "b s n d"]:
    """Computes attention with cuDNN, where `has_flash_attention(q)` is true.

    Args:
      q: Queries.
      k: Keys; m divides n.
      v: Values.
      mask: True where a query attends to a key; None means everywhere.
      scale: The factor on products.
      causal: Whether later positions are masked, too.
    """
    q, k, v, mask = array_types.varying_alike((q, k, v, mask))
    scores = _Scores(scale, causal)
    if devices.is_alone() or array_types.is_manual(jax.typeof(q).sharding.mesh):
        return _in_jax(scores, q, k, v, mask)
    b, s, n, d = q.shape
    m = k.shape[2]
    # Query heads are in groups that share a key head.
    if mask is not None:
        groups = (m, n // m) if mask.shape[1] > 1 else (1, 1)
        mask = mask.reshape(mask.shape[0], *groups, *mask.shape[2:])
    return _on_mesh(scores, q.reshape(b, s, m, n // m, d), k, v, mask).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """The scores of attention: the factor on products, and whether they are causal."""

    scale: float
    causal: bool


def _in_jax(scores: _Scores, q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    if stand_ins.active.get():
        return stand_ins.attention(q, k, v)
    options = {"scale": scores.scale, "is_causal": scores.causal}
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, implementation="cudnn", **options
    )


@dataclasses.dataclass(frozen=True)
class _Attention(operations.OfParts):
    """The operation that computes attention [b, s, m, g, d] and its statistics."""

    scores: _Scores
    name = "attention"

    def reference(self, q, k, v, mask):
        o, _, statistics = _differentiated(self.scores, q, k, v, mask)
        return o.reshape(q.shape), statistics.reshape(_statistics_of(q))

    def axes(self, q, k, v, mask) -> tuple:
        axes = HeadAxes.of(q)
        operands = axes.queries, axes.keys, axes.keys, _axes_of_mask(q, mask)
        return operands, (axes.queries, axes.statistics)


@dataclasses.dataclass(frozen=True)
class _AttentionGrad(_Attention):
    """The operation that computes the gradients of queries, keys and values."""

    def reference(self, do, q, k, v, mask, o, statistics):
        # This call also traces forward, which XLA drops because nothing reads it.
        again, vjp, unread = _differentiated(self.scores, q, k, v, mask)
        saved = {
            id(again): o.reshape(again.shape),
            id(unread): statistics.reshape(unread.shape),
        }
        vjp = jax.tree.map(lambda x: saved.get(id(x), x), vjp)
        dq, dk, dv = vjp(do.reshape(again.shape))
        return dq.reshape(q.shape), dk, dv

    def axes(self, do, q, k, v, mask, o, statistics) -> tuple:
        axes = HeadAxes.of(q)
        operands = axes.queries, axes.queries, axes.keys, axes.keys
        operands += _axes_of_mask(q, mask), axes.queries, axes.statistics
        return operands, (axes.queries, axes.key_gradients, axes.key_gradients)


def _differentiated(
    scores: _Scores, q: Array, k: Array, v: Array, mask: Array | None
) -> tuple[Array, Any, Array]:
    """Returns attention [b, s, n, d], its vjp, and the statistics [b, n, s] of softmax.

    The vjp saves the result and the statistics, so they are among its leaves.
    """
    b, s, m, g, d = q.shape
    if mask is not None:
        mask = mask.reshape(mask.shape[0], -1, *mask.shape[3:])

    def run(q, k, v):
        return _in_jax(scores, q, k, v, mask)

    o, vjp = jax.vjp(run, q.reshape(b, s, m * g, d), k, v)
    leaves = jax.tree.leaves(vjp)
    (statistics,) = (x for x in leaves if x.dtype == jnp.float32 and x.ndim == 3)
    if not any(x is o for x in leaves):
        raise RuntimeError("JAX's flash attention does not save its result")
    return o, vjp, statistics


def _statistics_of(q: Array) -> tuple[int, ...]:
    b, s, m, g, _ = q.shape
    return b, m, g, s


def _axes_of_mask(q: Array, mask: Array | None) -> Axes | None:
    """Returns the names of the axes of a mask [#b, #m, #g, s, t]; None without a mask.

    The axes are sequences, key heads, query heads of a key head, queries and keys. An
    axis of length one has no name.
    """
    if mask is None:
        return None
    names = ["b", *HeadAxes.of(q).heads]
    sizes = zip(mask.shape, [q.shape[0], *q.shape[2:4]], strict=False)
    names = [
        name if n == of_queries > 1 else "_"
        for name, (n, of_queries) in zip(names, sizes, strict=True)
    ]
    return Axes(" ".join([*names, "_ _"]))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_mesh(scores, q, k, v, mask):
    return placement.on_parts(_Attention(scores), q, k, v, mask)[0]


def _on_mesh_fwd(scores, q, k, v, mask):
    o, statistics = placement.on_parts(_Attention(scores), q, k, v, mask)
    return o, (q, k, v, mask, o, statistics)


def _on_mesh_bwd(scores, saved, do):
    return *placement.on_parts(_AttentionGrad(scores), do, *saved), None


_on_mesh.defvjp(_on_mesh_fwd, _on_mesh_bwd)
