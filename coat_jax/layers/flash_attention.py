"""cuDNN's flash attention, on one device or on each device's part of sharded arrays.

JAX's own function rejects some shardings: queries, keys and values that are sharded
differently, and sequences that are split. Here the names of axes say what each device
computes, as for the library's kernels: batch and heads may be split, and positions are
gathered.

cuDNN's backward pass takes no odd numbers of positions, such as the 197 of a vision
transformer with a class token. They get one more, which nothing reads: keys are hidden
by their number, by a mask, or because they come last and attention is causal.
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
from pallas_kernels.ops.attention.axes import HeadAxes, grouped


def has_flash_attention(q: Array) -> bool:
    """Returns whether cuDNN can compute attention of queries `q`, and its gradients."""
    _, length, _, head_dim = q.shape
    is_simulated = stand_ins.active.get()
    return (
        (is_simulated or devices.has_gpu())
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= (256 if is_simulated or devices.has_hopper() else 128)
        and isinstance(length, int)  # `jax.export` leaves lengths open.
        and length > 1
    )


def flash_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b t m d"],
    v: Float[Array, "b t m d"],
    *,
    mask: Bool[Array, "#b #n s t"] | None,
    scale: float | None,
    causal: bool,
    window: int | None = None,
) -> Float[Array, "b s n d"]:
    """Computes attention with cuDNN, where `has_flash_attention` is true of q and k.

    Args:
      q: Queries.
      k: Keys; m divides n.
      v: Values.
      mask: True where a query attends to a key; None means everywhere.
      scale: The factor on products; None means 1 / sqrt(d).
      causal: Whether later positions are masked, too.
      window: The number of positions that a query of causal attention attends to, its
        own one included; None means all.
    """
    q, k, v, mask = array_types.varying_alike((q, k, v, mask))
    scores = _Scores(scale, causal, window)
    is_alone = devices.is_alone() or array_types.is_manual(jax.typeof(q).sharding.mesh)
    if is_alone and not (q.shape[1] % 2 or k.shape[1] % 2):
        return _in_jax(scores, q, k, v, mask)
    return _with_statistics(scores, is_alone, q, k, v, mask)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """The settings that determine the scores of attention.

    Attributes:
      scale: The factor on products; None means 1 / sqrt(d).
      causal: Whether later positions are masked.
      window: The number of positions that a query attends to; None means all.
      lengths: The numbers of queries and of keys that count; None means all.
    """

    scale: float | None
    causal: bool
    window: int | None = None
    lengths: tuple[int, int] | None = None


def _in_jax(scores: _Scores, q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    if stand_ins.active.get():
        return stand_ins.attention(q, k, v)
    lengths = [None, None]
    if scores.lengths:
        lengths = [jnp.full(q.shape[:1], n, jnp.int32) for n in scores.lengths]
        _, lengths = array_types.varying_alike((q, lengths))
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scores.scale,
        is_causal=scores.causal,
        local_window_size=(scores.window - 1, 0) if scores.window else None,
        query_seq_lengths=lengths[0],
        key_value_seq_lengths=lengths[1],
        implementation="cudnn",
    )


@dataclasses.dataclass(frozen=True)
class _Attention(operations.OfParts):
    """The operation that computes attention [b, s, m, g, d] and its statistics."""

    scores: _Scores
    name = "attention"

    def reference(self, q, k, v, mask):
        o, _, statistics = _differentiated(self.scores, q, k, v, mask)
        s = q.shape[1]
        return o[:, :s].reshape(q.shape), statistics[..., :s].reshape(_statistics_of(q))

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
        b, s, m, g, d = q.shape
        # A query that is appended gets zeros, and adds nothing to gradients of keys.
        do, o = (_even(x.reshape(b, s, m * g, d), 1) for x in (do, o))
        statistics = _even(statistics.reshape(b, m * g, s), 2)
        saved = {id(again): o, id(unread): statistics}
        vjp = jax.tree.map(lambda x: saved.get(id(x), x), vjp)
        dq, dk, dv = vjp(do)
        t = k.shape[1]
        return dq[:, :s].reshape(q.shape), dk[:, :t], dv[:, :t]

    def axes(self, do, q, k, v, mask, o, statistics) -> tuple:
        axes = HeadAxes.of(q)
        operands = axes.queries, axes.queries, axes.keys, axes.keys
        operands += _axes_of_mask(q, mask), axes.queries, axes.statistics
        return operands, (axes.queries, axes.key_gradients, axes.key_gradients)


def _differentiated(
    scores: _Scores, q: Array, k: Array, v: Array, mask: Array | None
) -> tuple[Array, Any, Array]:
    """Returns attention [b, s, n, d], its vjp, and the statistics [b, n, s] of softmax.

    The numbers of positions are even, here and in the vjp. The vjp saves the result and
    the statistics, so they are among its leaves.
    """
    b, s, m, g, d = q.shape
    lengths = s, k.shape[1]
    if mask is not None:
        mask = mask.reshape(mask.shape[0], -1, *mask.shape[3:])
        mask = _even(_even(mask, 2), 3)
    elif any(n % 2 for n in lengths) and not (scores.causal and s <= k.shape[1]):
        scores = dataclasses.replace(scores, lengths=lengths)

    def run(q, k, v):
        return _in_jax(scores, q, k, v, mask)

    q = q.reshape(b, s, m * g, d)
    o, vjp = jax.vjp(run, *(_even(x, 1) for x in (q, k, v)))
    leaves = jax.tree.leaves(vjp)
    (statistics,) = (x for x in leaves if x.dtype == jnp.float32 and x.ndim == 3)
    if not any(x is o for x in leaves):
        raise RuntimeError("JAX's flash attention does not save its result")
    return o, vjp, statistics


def _even(x: Array, axis: int) -> Array:
    """Appends zeros to an array if its length along an axis is odd."""
    if x.shape[axis] % 2 == 0:
        return x
    return jnp.pad(x, [(0, int(i == axis)) for i in range(x.ndim)])


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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_statistics(scores, is_alone, q, k, v, mask):
    """Computes attention, and saves its arguments, its result and the statistics.

    `is_alone` says that the arrays are not sharded over a mesh.
    """
    return _with_statistics_fwd(scores, is_alone, q, k, v, mask)[0]


def _with_statistics_fwd(scores, is_alone, q, k, v, mask):
    arrays = grouped(q, k), k, v, _mask_in_groups(mask, q, k)
    o, statistics = _run(_Attention(scores), is_alone, *arrays)
    o = o.reshape(q.shape)
    return o, (q, k, v, mask, o, statistics)


def _with_statistics_bwd(scores, is_alone, saved, do):
    q, k, v, mask, o, statistics = saved
    arrays = grouped(q, k), k, v, _mask_in_groups(mask, q, k), grouped(o, k)
    grads = _AttentionGrad(scores)
    dq, dk, dv = _run(grads, is_alone, grouped(do, k), *arrays, statistics)
    return dq.reshape(q.shape), dk, dv, None


_with_statistics.defvjp(_with_statistics_fwd, _with_statistics_bwd)


def _run(operation: _Attention, is_alone: bool, *arrays: Any) -> Any:
    """Runs an operation, on each device's part of the arrays unless `is_alone`."""
    run = operation.reference if is_alone else partial(placement.on_parts, operation)
    return run(*arrays)


def _mask_in_groups(mask: Array | None, q: Array, k: Array) -> Array | None:
    """Reshapes a mask [#b, #n, s, t] to [#b, #m, #(n / m), s, t]."""
    if mask is None:
        return None
    n, m = q.shape[2], k.shape[2]
    groups = (m, n // m) if mask.shape[1] > 1 else (1, 1)
    return mask.reshape(mask.shape[0], *groups, *mask.shape[2:])
