"""Attention with soft caps, windows and segments, and its gradients."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import positive_int
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import WHOLE, Axes
from pallas_kernels.ops.attention import backward, forward, reference
from pallas_kernels.ops.attention.axes import HeadAxes, grouped
from pallas_kernels.ops.attention.plan import HEAD_DIMS, Scoring, Tuning

_SEGMENTS = Axes("b _")


def attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s m d"],
    v: Float[Array, "b s m d"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    window: Int[Array, ""] | int | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> tuple[Float[Array, "b s n d"], Float[Array, "b n s"]]:
    """Computes softmax attention, and the log-sum-exp of each query's scores.

    The score of a query and a key is `x = scale * q @ k`, or
    `softcap * tanh(x / softcap)`. The output is `softmax(scores) @ v` over the keys
    that are not masked. If all keys of a query are masked, its output is 0, and its
    log-sum-exp -inf. The kernel saves no scores: it is FlashAttention (arXiv
    2307.08691, algorithm 1).

    Args:
      q: Queries, bfloat16 for the kernel.
      k: Keys; m divides n, and each key head serves n / m consecutive query heads.
      v: Values.
      scale: The factor on products; None means 1 / sqrt(d).
      softcap: The bound of scores; None means no bound.
      causal: Whether later positions are masked.
      window: The number of positions that a query attends to, including its own: keys
        at a distance of `window` or more are masked. None means all.
      segment_ids: The number of each position's segment. Positions attend only to their
        own segment.
      implementation: The implementation; None means the kernel where it can run.
      tuning: The kernels' tiles; None means the default.

    Returns:
      The output, of the dtype of `q`, and the log-sum-exp, float32.

    Raises:
      ValueError: If the shapes do not match, a number is not positive, or the kernel
        was named and cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import attention
      >>> q, k = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
      >>> out, lse = attention(q, k, k, softcap=50.0)
      >>> out.shape, lse.shape
      ((1, 3, 4, 8), (1, 4, 3))
    """
    scoring, masks = _checked(q, k, v, scale, softcap, causal, window, segment_ids)
    operation = _Attention(scoring=scoring, tuning=tuning)
    arrays = grouped(q, k), k, v, *masks
    out, lse = operation(*arrays, implementation=implementation)
    b, s, n, _ = q.shape
    return out.reshape(q.shape), lse.reshape(b, n, s)


def attention_grad(
    do: Float[Array, "b s n d"],
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s m d"],
    v: Float[Array, "b s m d"],
    out: Float[Array, "b s n d"],
    lse: Float[Array, "b n s"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    window: Int[Array, ""] | int | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> tuple[Float[Array, "b s n d"], Float[Array, "b s m d"], Float[Array, "b s m d"]]:
    """Computes the gradients of `attention` with respect to q, k and v.

    Probabilities are computed again, as `exp(scores - lse)`. So k and v may be a part
    of the keys and values from which `out` and `lse` were computed: the gradients of
    the part are right, and the gradient of q is the sum of the results of all parts.

    Args:
      do: The gradient of the output, bfloat16 for the kernel.
      q: Queries.
      k: Keys.
      v: Values.
      out: The output of `attention`.
      lse: The log-sum-exp of `attention`.
      scale: See `attention`, as for all other arguments.
      softcap: The bound of scores.
      causal: Whether later positions are masked.
      window: The number of positions that a query attends to.
      segment_ids: The number of each position's segment.
      implementation: The implementation; None means the kernel where it can run.
      tuning: The kernels' tiles; None means the default.

    Returns:
      The gradients, of the dtypes of q, k and v.

    Raises:
      ValueError: If the shapes do not match, a number is not positive, or the kernel
        was named and cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import attention, attention_grad
      >>> q, k = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
      >>> out, lse = attention(q, k, k)
      >>> dq, dk, dv = attention_grad(q, q, k, k, out, lse)
      >>> dq.shape, dk.shape, dv.shape
      ((1, 3, 4, 8), (1, 3, 2, 8), (1, 3, 2, 8))
    """
    scoring, masks = _checked(q, k, v, scale, softcap, causal, window, segment_ids)
    b, s, n, _ = q.shape
    if do.shape != q.shape or out.shape != q.shape or lse.shape != (b, n, s):
        raise ValueError(
            f"outputs and their gradients must be {q.shape} and log-sum-exps "
            f"{(b, n, s)}, got {out.shape}, {do.shape} and {lse.shape}"
        )
    operation = _AttentionGrad(scoring=scoring, tuning=tuning)
    lse = lse.astype(jnp.float32).reshape(b, k.shape[2], -1, s)
    wide = [grouped(x, k) for x in (do, q, out)]
    arrays = wide[0], wide[1], k, v, wide[2], lse, *masks
    dq, dk, dv = operation(*arrays, implementation=implementation)
    return dq.reshape(q.shape), dk, dv


def runs_kernel(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s m d"],
    v: Float[Array, "b s m d"],
    *,
    in_place_of_kernel: bool = False,
    **options,
) -> bool:
    """Returns whether `attention` runs the kernel by default on these arguments.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      in_place_of_kernel: Whether the caller runs another kernel if this one does not
        run. Otherwise warnings and `explain` say why it does not run.
      **options: Options of `attention` that determine scores and masks.
    """
    scoring, masks = _checked(q, k, v, **(_DEFAULTS | options))
    operation = _Attention(scoring=scoring, tuning=None)
    arrays = grouped(q, k), k, v, *masks
    if in_place_of_kernel:
        return operation.prefers_kernel(*arrays)
    return operation.runs(*arrays) == "mosaic"


_DEFAULTS = dict(scale=None, softcap=None, causal=True, window=None, segment_ids=None)


def check_heads(q: Array, k: Array, v: Array, segment_ids: Array | None) -> None:
    """Raises ValueError unless the shapes of attention's arrays match.

    Segment ids must be integers.
    """
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            "heads must have four axes, batch, positions, heads and columns, got "
            f"{q.shape}, {k.shape} and {v.shape}"
        )
    b, s, n, d = q.shape
    m = k.shape[2]
    if k.shape != (b, s, m, d) or v.shape != k.shape or not m or n % m:
        raise ValueError(
            "heads must be [b, s, n, d], [b, s, m, d] and [b, s, m, d], n a multiple "
            f"of m, got {q.shape}, {k.shape} and {v.shape}"
        )
    if segment_ids is not None and segment_ids.shape != (b, s):
        raise ValueError(f"segment ids must be {(b, s)}, got {segment_ids.shape}")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment ids must be integers, got {segment_ids.dtype}")


def _checked(q, k, v, scale, softcap, causal, window, segment_ids):
    """Checks arguments of `attention`; returns their `Scoring`, and the masks' arrays.

    The arrays of the masks are `window`, as an int32 scalar or None, and `segment_ids`.
    """
    check_heads(q, k, v, segment_ids)
    s, d = q.shape[1], q.shape[3]
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive, got {value!r}")
    if window is not None and not isinstance(window, jax.Array):
        window = min(positive_int("window", window), max(s, 1))
    scoring = Scoring(
        scale=d**-0.5 if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        causal=causal,
        windowed=window is not None,
        segmented=segment_ids is not None,
    )
    if window is not None:
        window = jnp.asarray(window)
        if window.shape or not jnp.issubdtype(window.dtype, jnp.integer):
            kind = f"{window.dtype}{list(window.shape)}"
            raise ValueError(f"window must be an integer scalar, got {kind}")
        if window.dtype.itemsize < 4:  # Types that may not hold s.
            window = window.astype(jnp.int32)
        # A distance is less than s. Larger windows could overflow in sums.
        window = jnp.clip(window, 1, max(s, 1)).astype(jnp.int32)
    return scoring, (window, segment_ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Attention(operations.Operation):
    """The operation of `attention`; q is [b, s, m, g, d], g heads for each key head."""

    scoring: Scoring
    tuning: Tuning | None
    name = "attention"

    def obstacle(self, q, k, v, window, segment_ids) -> str | None:
        return _obstacle(q, k, v, self.tuning)

    def reference(self, q, k, v, window, segment_ids):
        return reference.attention(self.scoring, q, k, v, window, segment_ids)

    def axes(self, q, k, v, *masks) -> tuple:
        axes = HeadAxes.of(q)
        operands = axes.queries, axes.keys, axes.keys, *_axes_of_masks(masks)
        return operands, (axes.queries, axes.statistics)

    def kernel(self, q, k, v, window, segment_ids):
        tiles = _tiles(self.tuning, q).forward

        @jax.custom_batching.sequential_vmap
        def launch(q, k, v, window, segment_ids):
            arrays = _heads(q), k, v, *_of_masks(window, segment_ids)
            out, lse = forward.run(*arrays, scoring=self.scoring, tiles=tiles)
            return out.reshape(q.shape), lse.reshape(*q.shape[:1], *q.shape[2:4], -1)

        return launch(q, k, v, window, segment_ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AttentionGrad(operations.Operation):
    """The operation of `attention_grad`, with queries as in `_Attention`."""

    scoring: Scoring
    tuning: Tuning | None
    name = "attention_grad"

    def obstacle(self, do, q, k, v, out, lse, window, segment_ids) -> str | None:
        for name, x in (("outputs", out), ("gradients", do)):
            if x.dtype != jnp.bfloat16:
                return f"{name} must be bfloat16, got {x.dtype}"
        return _obstacle(q, k, v, self.tuning)

    def reference(self, do, q, k, v, out, lse, window, segment_ids):
        arrays = do, q, k, v, out, lse, window, segment_ids
        return reference.attention_grad(self.scoring, *arrays)

    def axes(self, do, q, k, v, out, lse, *masks) -> tuple:
        axes = HeadAxes.of(q)
        operands = axes.queries, axes.queries, axes.keys, axes.keys, axes.queries
        operands += axes.statistics, *_axes_of_masks(masks)
        return operands, (axes.queries, axes.key_gradients, axes.key_gradients)

    def kernel(self, do, q, k, v, out, lse, window, segment_ids):
        tuning = _tiles(self.tuning, q)

        @jax.custom_batching.sequential_vmap
        def launch(do, q, k, v, out, lse, window, segment_ids):
            b, s, m, g, _ = q.shape
            arrays = _heads(do), _heads(q), k, v, _heads(out)
            arrays += lse.reshape(b, m * g, s), *_of_masks(window, segment_ids)
            dq, dk, dv = backward.run(*arrays, scoring=self.scoring, tuning=tuning)
            return dq.reshape(q.shape), dk, dv

        return launch(do, q, k, v, out, lse, window, segment_ids)


def _axes_of_masks(masks: tuple) -> tuple:
    window, segment_ids = masks
    return (
        None if window is None else WHOLE,
        None if segment_ids is None else _SEGMENTS,
    )


def _heads(x: Array) -> Array:
    """Returns heads [b, s, m, g, d] as [b, s, n, d]."""
    b, s, _, _, d = x.shape
    return x.reshape(b, s, -1, d)


def _of_masks(window: Array | None, segment_ids: Array | None) -> tuple:
    """Returns the masks' arrays as the kernels take them."""
    window = jnp.zeros(1, jnp.int32) if window is None else window.reshape(1)
    return window, None if segment_ids is None else segment_ids.astype(jnp.int32)


def _tiles(tuning: Tuning | None, q: Array) -> Tuning:
    return Tuning.of(q.shape[-1]) if tuning is None else tuning


def _obstacle(q: Array, k: Array, v: Array, tuning: Tuning | None) -> str | None:
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        if x.dtype != jnp.bfloat16:
            return f"{name} must be bfloat16, got {x.dtype}"
    *_, d = q.shape
    if d not in HEAD_DIMS:
        return f"heads must have one of the sizes {HEAD_DIMS}, got {d}"
    tuning = _tiles(tuning, q)
    step = tuning.step
    if not q.size or q.shape[1] % step:
        return f"positions must be a multiple of {step}, got {q.shape[1]}"
    return None
