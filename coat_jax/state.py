"""The state of Adam with FP8 moments, and what it is in optax's terms."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array

from coat_jax.quantized import QuantizedArray, quantize
from coat_jax.trees import check_structure
from coat_jax.variables import boxed


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MuScaling:
    """What quantized first moments are stored over; a leafless part of the state.

    Attributes:
      normalized: Whether over the square root of their second moments.
    """

    normalized: bool


class ScaleByFP8AdamState(NamedTuple):
    """State of `scale_by_fp8_adam`: optax's, with quantized leaves.

    Attributes:
      count: Number of updates so far, int32.
      mu: First moments; per parameter a QuantizedArray or a float32 array of its shape.
        Quantized ones stand for mu / sqrt(nu) where `scaling.normalized`;
        `coat.to_optax_state` returns mu itself.
      nu: Second moments, likewise; always themselves.
      scaling: What quantized first moments are stored over.
    """

    count: chex.Array
    mu: optax.Updates
    nu: optax.Updates
    scaling: MuScaling


def to_optax_state(state: Any) -> Any:
    """Replaces FP8 Adam states by optax's, with both moments in float32.

    Args:
      state: A `ScaleByFP8AdamState`, or any tree that holds some: the state of
        `fp8_adamw`, of a chain, of a whole training run.

    Returns:
      The same tree with an `optax.ScaleByAdamState` for each; `optax.adamw` goes on
      from it. Other leaves stay as they are.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = coat.to_optax_state(coat.fp8_adamw(1e-3).init(params))
      >>> updates, state = optax.adamw(1e-3).update(params, state, params)
    """
    return jax.tree.map(
        lambda s: dequantize_state(s) if _is_state(s) else s, state, is_leaf=_is_state
    )


def from_optax_state(state: Any, like: Any) -> Any:
    """Replaces optax's Adam states by FP8 ones; undoes `to_optax_state`.

    Undoes it with the same codes where one k serves all groups, in a floating format.
    Where each group has its own k (all second moments; first ones with
    `normalize_mu=False`) it is found anew, from the rounded extremes of the group, and
    moments are rounded once more.

    Args:
      state: A tree that holds `optax.ScaleByAdamState`, such as `optax.adamw`'s state.
      like: The corresponding state with FP8 moments, of which only shapes are read:
        `tx.init(params)` or `jax.eval_shape(tx.init, params)`.

    Raises:
      ValueError: If the trees differ, or a moment's shape; it names the place.

    Example:
      >>> import coat_jax as coat, jax, jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones((64, 128))}
      >>> like = jax.eval_shape(coat.fp8_adamw(1e-3).init, params)
      >>> state = coat.from_optax_state(optax.adamw(1e-3).init(params), like)
      >>> state[0].nu["w"].codes.dtype
      dtype(float8_e4m3fn)
    """
    check_structure(state, like, name="state", is_leaf=_is_adam)
    return jax.tree_util.tree_map_with_path(_converted, like, state, is_leaf=_is_adam)


def _converted(path: Any, like: Any, new: Any) -> Any:
    """The node at `path` of a state in the form of `like`."""
    name = f"state{jax.tree_util.keystr(path)}"
    if not _is_state(like):
        if _is_state(new):
            raise ValueError(f"{name} is in FP8 already, and its counterpart is not")
        return new
    if not isinstance(new, optax.ScaleByAdamState):
        kind = type(new).__name__
        raise ValueError(f"{name} must be an optax.ScaleByAdamState, got {kind}")
    for field in ("mu", "nu"):
        moments = (nnx.as_pure(getattr(state, field)) for state in (new, like))
        _check_shapes(f"{name}.{field}", *moments)
    return quantize_state(new, like)


def _check_shapes(name: str, moments: Any, like: Any) -> None:
    def check(path, q, moment):
        if q.shape != moment.shape:
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise ValueError(f"{where} must have shape {q.shape}, got {moment.shape}")

    check_structure(moments, like, name=name, is_leaf=is_quantized)
    jax.tree_util.tree_map_with_path(check, like, moments, is_leaf=is_quantized)


def _is_state(node: Any) -> bool:
    return isinstance(node, ScaleByFP8AdamState)


def _is_adam(node: Any) -> bool:
    return isinstance(node, ScaleByFP8AdamState | optax.ScaleByAdamState)


def is_quantized(leaf: Any) -> bool:
    """Whether a moment is in 8 bits; the `is_leaf` of trees of moments."""
    return isinstance(leaf, QuantizedArray)


def dequantize_state(state: ScaleByFP8AdamState) -> optax.ScaleByAdamState:
    """What `state` stands for, with both moments themselves in float32.

    Raises:
      ValueError: If a moment is stored without range expansion, which no optimizer
        does: a checkpoint without exponents was read as one with them.
    """

    def dequantized_leaf(m):
        if not is_quantized(m):
            return m
        if m.exponent is None and m.power == 1:
            raise ValueError(
                f"an FP8 moment of shape {m.shape} has no exponents: was its "
                "checkpoint saved with another normalize_mu?"
            )
        return m.dequantize()

    def dequantized(moments):
        return jax.tree.map(dequantized_leaf, moments, is_leaf=is_quantized)

    given, state = state.mu, nnx.as_pure(state)
    mu, nu = dequantized(state.mu), dequantized(state.nu)
    if state.scaling.normalized:
        mu = _where_quantized(lambda m, v: m * jnp.sqrt(v), state.mu, mu, nu)
    like = jax.tree.map(
        lambda m: m.codes if is_quantized(m) else m, given, is_leaf=is_quantized
    )
    return optax.ScaleByAdamState(state.count, boxed(mu, like), boxed(nu, like))


def quantize_state(
    state: optax.ScaleByAdamState, like: ScaleByFP8AdamState
) -> ScaleByFP8AdamState:
    """Undoes `dequantize_state`, with moments in 8 bits where `like` has them."""
    given, like = state.mu, nnx.as_pure(like)
    mu, nu = nnx.as_pure(state.mu), nnx.as_pure(state.nu)
    if like.scaling.normalized:
        mu = _where_quantized(_normalize, like.mu, mu, nu)
    return ScaleByFP8AdamState(
        state.count,
        boxed(_quantize_like(like.mu, mu), given),
        boxed(_quantize_like(like.nu, nu), given),
        like.scaling,
    )


def _normalize(mu: Array, nu: Array) -> Array:
    """Computes mu / sqrt(nu), as if nu were a normal number."""
    return mu * lax.rsqrt(jnp.maximum(nu, jnp.finfo(jnp.float32).tiny))


def _where_quantized(fn: Callable[..., Array], moments: Any, mu: Any, nu: Any) -> Any:
    """fn(mu, nu) where `moments` are quantized, elsewhere mu."""
    return jax.tree.map(
        lambda q, m, v: fn(m, v) if is_quantized(q) else m,
        moments,
        mu,
        nu,
        is_leaf=is_quantized,
    )


def _quantize_like(like: Any, moments: Any) -> Any:
    """Quantizes moments as those in `like` are."""

    def quantized(q, moment):
        if not is_quantized(q):
            return moment.astype(q.dtype)
        expand = q.power if q.exponent is None else True
        how = {"format": q.format, "granularity": q.granularity, "expand": expand}
        return quantize(moment.astype(jnp.float32), **how)

    return jax.tree.map(quantized, like, moments, is_leaf=is_quantized)
