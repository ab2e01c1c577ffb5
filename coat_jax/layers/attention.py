"""Softmax attention by the fastest implementation, and the residuals that it saves."""

import dataclasses
import functools
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from coat_jax.layers.flash_attention import flash_attention, has_flash_attention
from pallas_kernels.checks import check_flags, is_positive_number, summary
from pallas_kernels.dispatch import array_types, devices, stand_ins
from pallas_kernels.numerics import on_last_axes
from pallas_kernels.ops.attention.api import check_heads, runs_kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The scale, bound and window of the scores of attention.

    The score of a query and a key is `scale * q @ k`, or
    `softcap * tanh(scale * q @ k / softcap)` with a soft cap, as in Gemma 2.

    Attributes:
      scale: The factor on products; None means 1 / sqrt(d).
      softcap: The bound of scores; None means no bound.
      window: The number of positions that a query of a local layer attends to, its own
        one included; None means all.

    Raises:
      ValueError: If a number is not positive and finite, or the window is not an
        integer.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            try:
                operator.index(self.window)
            except TypeError as error:  # A tracer raises TypeError, too.
                raise ValueError(
                    f"window must be a whole number, got {summary(self.window)}"
                ) from error
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not is_positive_number(value):
                is_array = isinstance(value, jax.Array)  # A tracer is one, too.
                rule = "a Python number, static under jit" if is_array else "positive"
                raise ValueError(f"{field.name} must be {rule}, got {summary(value)}")


LLAMA_SCORES = Scores()


def attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s m d"],
    v: Float[Array, "b s m d"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    window: int | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
) -> Float[Array, "b s n d"]:
    """Computes softmax attention with the fastest kernel, for any model.

    The score of a query and a key is `x = scale * q @ k`, or
    `softcap * tanh(x / softcap)` with a soft cap, as in Gemma 2. The output is
    `softmax(scores) @ v` over the keys that are not masked.

    `jax.nn.dot_product_attention` computes the same without soft caps, and needs a mask
    [b, 1, s, s] if several documents are packed into a sequence. On Hopper GPUs
    `pallas_kernels.attention` runs for soft caps, for several documents, and for heads
    of 256; otherwise cuDNN's attention runs on GPUs. Both save q, k, v, the output, and
    a number for each query and head. XLA's attention, which runs elsewhere, recomputes
    the probabilities in the backward pass.

    Args:
      q: Queries.
      k: Keys; m divides n, and each key head serves n / m consecutive query heads.
      v: Values.
      scale: The factor on products; None means 1 / sqrt(d).
      softcap: The bound of scores; None means no bound.
      causal: Whether later positions are masked.
      window: The number of positions that a query attends to, its own one included;
        None means all. A window needs `causal`.
      segment_ids: The number of each position's document. Positions attend only to
        their own document; None means that a sequence is one document.

    Raises:
      ValueError: If shapes do not match, queries, keys and values do not have one
        floating dtype, segment ids are not integers, `causal` is not a bool, a number
        is not positive, the window is not an integer, or `window` is given and `causal`
        is false. All options are Python numbers: within `jax.jit` they are static.

    Examples:
      >>> import coat_jax as coat
      >>> import jax.numpy as jnp
      >>> q, k = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
      >>> documents = jnp.array([[0, 0, 1]])
      >>> coat.attention(q, k, k, softcap=50.0, segment_ids=documents).shape
      (1, 3, 4, 8)
    """
    check_heads(q, k, v, segment_ids)
    dtypes = q.dtype, k.dtype, v.dtype
    if len({*dtypes}) > 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        names = ", ".join(map(str, dtypes))
        raise ValueError(f"heads must have one floating dtype, got {names}")
    check_flags(causal=causal)
    if window is not None and not causal:
        raise ValueError(f"a window needs causal=True, got window={window}")
    scores = Scores(scale=scale, softcap=softcap, window=window)
    masks = segment_ids, None
    return _attention(q, k, v, masks=masks, causal=causal, scores=scores)


def causal_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    kept: tuple[Array, ...] = (),
    segment_ids: Int[Array, "b s"] | None = None,
    *,
    scores: Scores = LLAMA_SCORES,
    local: Bool[Array, ""] | None = None,
) -> Float[Array, "b s n d"]:
    """Computes softmax attention of each position to itself and earlier positions.

    The output is `softmax(scores) @ v` for each head, with later positions masked; see
    `Scores`. By default the scores are `q @ k.T / sqrt(d)`. cuDNN's flash attention
    runs where it can: on GPUs, for heads and dtypes that it supports. It saves q, k, v,
    the output, and one softmax statistic per query and head. On Hopper GPUs
    `pallas_kernels.attention` runs for soft caps, heads of 256, segments, and windows
    with `local`, and saves the same. XLA's attention runs elsewhere. It saves q, k, v
    and recomputes the probabilities.

    With `segment_ids`, positions attend only to positions of their own segment.
    `pallas_kernels.attention` skips all scores outside of segments and windows. The
    other implementations read masks, and compute masked scores as well: a mask
    [b, 1, s, s] for segments, and a mask [1, 1, s, s] for a window with `local`. cuDNN
    takes masks as numbers to add. A window without `local` and segments needs no mask,
    and neither does a window that is at least as long as the sequence.

    Args:
      q: Queries.
      k: Keys; the number of key heads divides the number of query heads.
      v: Values.
      kept: Copies of q, k and v, or (). The backward pass reads the copies in place of
        q, k and v. The copies get no gradients.
      segment_ids: The number of each position's document, in packed sequences; None
        means that a sequence is one document.
      scores: The scale, soft cap and window of scores.
      local: Whether the window applies; None means that it does.
    """
    return _attention(q, k, v, kept, (segment_ids, local), scores=scores)


def full_attention(
    q: Float[Array, "b s n d"], k: Float[Array, "b s k d"], v: Float[Array, "b s k d"]
) -> Float[Array, "b s n d"]:
    """Computes softmax attention of each position to all positions.

    The choice of the implementation and the residuals are as in `causal_attention`.
    """
    return _attention(q, k, v, causal=False)


def cached_attention(
    q: Float[Array, "b 1 n d"],
    keys: Float[Array, "b t k d"],
    values: Float[Array, "b t k d"],
    position: Int[Array, ""],
    visible: Bool[Array, "b t"],
    *,
    scores: Scores = LLAMA_SCORES,
    local: Bool[Array, ""] | None = None,
) -> Float[Array, "b 1 n d"]:
    """Computes attention of one position to a cache of t positions, for generation.

    Args:
      q: The queries of the position.
      keys: The keys of all positions.
      values: The values of all positions.
      position: The position of the queries.
      visible: True for each position of the cache that may be attended to.
      scores: The scale, soft cap and window of scores.
      local: Whether the window applies; None means that it does.
    """
    mask = visible[:, None, None]
    if scores.window is not None:
        near = position - jnp.arange(keys.shape[1]) < scores.window
        near = on_last_axes(near, mask.ndim)
        mask &= near if local is None else near | on_last_axes(~local, mask.ndim)
    return _masked_attention(q, keys, values, mask, scores)


def _attention(q, k, v, kept=(), masks=(None, None), causal=True, scores=LLAMA_SCORES):
    if scores.window is not None and _covers(scores.window, q.shape[1]):
        scores, masks = dataclasses.replace(scores, window=None), (masks[0], None)
    in_cudnn = has_flash_attention(q) and scores.softcap is None
    # cuDNN's attention also computes the scores that a mask hides.
    is_fastest = in_cudnn and _skips(scores, *masks) and q.shape[-1] <= 128
    if devices.has_hopper() and not is_fastest:
        options = {"scale": scores.scale, "softcap": scores.softcap, "causal": causal}
        ranges = _ranges(q.shape[1], scores, *masks)
        if runs_kernel(q, k, v, in_place_of_kernel=in_cudnn, **options, **ranges):
            arrays = array_types.varying_alike((q, k, v, kept, ranges))
            return _in_kernel(tuple(options.items()), *arrays)

    def in_jax(q, k, v, masks, implementation):
        mask = _mask(q.shape[1], scores, causal, *masks)
        if scores.softcap is not None:
            return _masked_attention(q, k, v, mask, scores)
        skips = scores.window is not None and mask is None
        if implementation == "cudnn" and q.shape[1] % 2:
            options = {"scale": scores.scale, "causal": causal}
            window = scores.window if skips else None
            return flash_attention(q, k, v, mask=mask, window=window, **options)
        run = _xla_attention
        if implementation == "cudnn":
            run = partial(jax.nn.dot_product_attention, implementation="cudnn")
        return run(
            q,
            k,
            v,
            mask=mask,
            scale=scores.scale,
            is_causal=causal,
            local_window_size=(scores.window - 1, 0) if skips else None,
        )

    if not in_cudnn:
        run = jax.checkpoint(partial(in_jax, implementation="xla"))
        if not kept:
            return run(q, k, v, masks)
    elif stand_ins.active.get():
        run = _ignoring_masks
    else:
        run = partial(in_jax, implementation="cudnn")
    return _saving(run, *array_types.varying_alike((q, k, v, kept, masks)))


def _covers(window: int, length: int) -> bool:
    """Returns whether a window hides no position; False if the length is symbolic."""
    return isinstance(length, int) and window >= length


def _skips(scores: Scores, segment_ids: Array | None, local: Array | None) -> bool:
    """Returns whether cuDNN's attention skips all masked scores."""
    return segment_ids is None and (scores.window is None or local is None)


def _ranges(
    length: int, scores: Scores, segment_ids: Array | None, local: Array | None
) -> dict[str, Array | None]:
    """Returns the window and the segments as `pallas_kernels.attention` takes them."""
    window = scores.window
    if window is not None and local is not None:
        window = jnp.where(local, window, length)
    return {"window": window, "segment_ids": segment_ids}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_kernel(options, q, k, v, copies, ranges):
    """Runs `pallas_kernels.attention`; the backward pass reads `copies` if given.

    `copies` are copies of q, k and v, or (). `options` and `ranges` have the keyword
    arguments of the kernel.
    """
    return pallas_kernels.attention(q, k, v, **dict(options), **ranges)[0]


def _in_kernel_fwd(options, q, k, v, copies, ranges):
    o, lse = pallas_kernels.attention(q, k, v, **dict(options), **ranges)
    return o, (*(copies or (q, k, v)), o, lse, ranges)


def _in_kernel_bwd(options, saved, do):
    *arrays, ranges = saved
    grads = pallas_kernels.attention_grad(do, *arrays, **dict(options), **ranges)
    return *grads, None, None


_in_kernel.defvjp(_in_kernel_fwd, _in_kernel_bwd)


def _masked_attention(q, k, v, mask, scores):
    """Computes attention in XLA to the keys where `mask` is true, or to all keys."""
    if scores.softcap is None:
        return _xla_attention(q, k, v, mask=mask, scale=scores.scale)
    b, s, n, d = q.shape
    scale = d**-0.5 if scores.scale is None else scores.scale
    groups = q.reshape(b, s, k.shape[2], n // k.shape[2], d)
    wide = jnp.einsum(
        "bskgd,btkd->bkgst", groups, k, preferred_element_type=jnp.float32
    )
    capped = scores.softcap * jnp.tanh(scale * wide / scores.softcap)
    if mask is not None:
        capped = jnp.where(mask[:, :, None], capped, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(capped, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", shares, v).reshape(b, s, n, d)


def _xla_attention(q, k, v, **options):
    """Computes `jax.nn.dot_product_attention` in XLA, on CPUs in float16, too."""
    dtype = q.dtype
    if dtype == jnp.float16 and not devices.has_gpu():
        # JAX asks for an algorithm of float16 that XLA has on GPUs alone.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    o = jax.nn.dot_product_attention(q, k, v, **options, implementation="xla")
    return o.astype(dtype)


def _ignoring_masks(q, k, v, masks):
    return stand_ins.attention(q, k, v)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _saving(run, q, k, v, kept, masks):
    """Computes `run(q, k, v, masks)`; the backward pass reads `kept` if given.

    `kept` are copies of q, k and v that are saved in their place, or ().
    """
    return run(q, k, v, masks)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Empty:
    """A placeholder for an array without elements, which cuDNN's attention saves.

    JAX 0.11 cannot return an array without elements from `shard_map`: the process
    crashes in XLA.
    """

    shape: tuple[int, ...]
    dtype: Any


def _saving_fwd(run, q, k, v, kept, masks):
    # `vjp` is a tree of residuals, in which the copies replace q, k and v.
    o, vjp = jax.vjp(lambda q, k, v: run(q, k, v, masks), q, k, v)
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


def _mask(
    length: int,
    scores: Scores,
    causal: bool,
    segment_ids: Array | None,
    local: Array | None,
) -> Bool[Array, "#b 1 s s"] | None:
    """Returns a mask of the keys to attend to, or None if no mask is needed.

    `jax.nn.dot_product_attention` masks later positions itself, and a window if there
    is no other mask and the length is known, which `jax.export` may leave open. With a
    soft cap the mask also covers later positions.
    """
    masks = [] if segment_ids is None else [_same_segment(segment_ids)]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    if scores.softcap is not None and causal:
        masks.append((distance >= 0)[None, None])
    in_mask = masks or local is not None or not isinstance(length, int)
    if scores.window is not None and in_mask:
        near = (distance < scores.window)[None, None]
        masks.append(near if local is None else near | on_last_axes(~local, near.ndim))
    return functools.reduce(operator.and_, masks) if masks else None
