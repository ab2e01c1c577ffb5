"""Attention with the fastest implementation, and its saved residuals."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import array_types, dispatch, stand_ins


def causal_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    kept: tuple[Array, ...] = (),
    segment_ids: Int[Array, "b s"] | None = None,
) -> Float[Array, "b s n d"]:
    """Computes softmax attention of each position to itself and earlier positions.

    The output is `softmax(q @ k.T / sqrt(d)) @ v` for each head, with later positions
    masked. cuDNN's flash attention runs where it can: on GPUs, for heads and dtypes
    that it supports. It saves q, k, v, the output, and one softmax statistic per query
    and head. XLA's attention runs elsewhere. It saves q, k, v and recomputes the
    probabilities.

    With `segment_ids` positions attend only to positions of their own segment. Both
    implementations then read a mask [b, 1, s, s], which cuDNN takes as numbers to add,
    and compute the parts that are masked.

    Args:
      q: Queries.
      k: Keys; the number of key heads divides the number of query heads.
      v: Values.
      kept: Copies of q, k and v, which are saved in their place. They get no gradients.
      segment_ids: The number of each position's document, in packed sequences; None
        means that a sequence is one document.
    """
    return _attention(q, k, v, kept, segment_ids)


def full_attention(
    q: Float[Array, "b s n d"], k: Float[Array, "b s k d"], v: Float[Array, "b s k d"]
) -> Float[Array, "b s n d"]:
    """Computes softmax attention of each position to all positions.

    The implementation and what it saves are those of `causal_attention`.
    """
    return _attention(q, k, v, causal=False)


def _attention(q, k, v, kept=(), segment_ids=None, causal=True):
    def attention(q, k, v, segment_ids, implementation):
        mask = None if segment_ids is None else _same_segment(segment_ids)
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=causal, implementation=implementation
        )

    if not _has_flash_attention(q):
        run = jax.checkpoint(partial(attention, implementation="xla"))
        if not kept:
            return run(q, k, v, segment_ids)
    elif stand_ins.active.get():
        run = _ignoring_segments
    else:
        run = partial(attention, implementation="cudnn")
    return _saving(run, *array_types.varying_alike((q, k, v, kept, segment_ids)))


def _ignoring_segments(q, k, v, segment_ids):
    return stand_ins.attention(q, k, v)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _saving(run, q, k, v, kept, segment_ids):
    """Runs attention, whose backward pass reads the copies `kept` of q, k and v."""
    return run(q, k, v, segment_ids)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Empty:
    """The place of an array without elements, as cuDNN's attention saves one.

    JAX 0.11 cannot return such an array from `shard_map`: XLA's process dies.
    """

    shape: tuple[int, ...]
    dtype: Any


def _saving_fwd(run, q, k, v, kept, segment_ids):
    # `vjp` is a tree of residuals, in which the copies replace q, k and v.
    o, vjp = jax.vjp(lambda q, k, v: run(q, k, v, segment_ids), q, k, v)
    copies = {id(x): copy for x, copy in zip((q, k, v), kept, strict=bool(kept))}

    def saved(x):
        return copies.get(id(x), x) if x.size else _Empty(x.shape, x.dtype)

    return o, jax.tree.map(saved, vjp)


def _saving_bwd(run, saved, do):
    def residual(x):
        return jnp.zeros(x.shape, x.dtype) if isinstance(x, _Empty) else x

    vjp = jax.tree.map(residual, saved, is_leaf=lambda x: isinstance(x, _Empty))
    return *vjp(do), None, None


_saving.defvjp(_saving_fwd, _saving_bwd)


def _same_segment(ids: Int[Array, "b s"]) -> Bool[Array, "b 1 s s"]:
    return ids[:, None, :, None] == ids[:, None, None, :]


def _has_flash_attention(q: Array) -> bool:
    # cuDNN's kernel has a backward pass only for these shapes and dtypes.
    _, length, _, head_dim = q.shape
    return (
        (stand_ins.active.get() or dispatch.has_gpu())
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and length % 2 == 0
    )
