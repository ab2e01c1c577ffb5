"""Adam with its moments in FP8 (COAT, arXiv 2410.19313, section 4)."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array

from coat_jax.quantized import (
    E4M3,
    Format,
    PerGroup,
    QuantizedArray,
    quantize,
    quantized_zeros,
)

# Below this many elements a parameter's moments stay in float32: together such
# parameters are a fraction of a percent of a model, and they are its most sensitive.
MIN_QUANTIZED_SIZE = 4096


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


def scale_by_fp8_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    nesterov: bool = False,
    quantize_mask: Any | Callable[[optax.Params], Any] | None = None,
    normalize_mu: bool = True,
    mu_format: Format = E4M3,
    nu_format: Format = E4M3,
    granularity: PerGroup = PerGroup(128),
) -> optax.GradientTransformation:
    """Rescales updates by Adam, keeping both moments in 8 bits with range expansion.

    Each step reads the moments as float32, does what `optax.scale_by_adam` does, and
    stores them quantized: 2.05 bytes a parameter for both instead of 8. Parameters of
    fewer than 4,096 elements keep float32 moments and are updated exactly as by optax,
    as are those that `quantize_mask` leaves out. Updates have the gradients' dtype.

    The second moment has COAT's expansion (section 4.2), whose k follows each group's
    range. The first is stored as mu / sqrt(nu), since that is what updates read: it
    varies little within a group, so that one k serves all (3 for E4M3, a cube), and an
    error of nu does not reach the update. A quarter of the error of COAT's own scheme,
    which `normalize_mu=False` gives.

    Args:
      b1: Decay rate of the first moment.
      b2: Decay rate of the second moment.
      eps: Added to the denominator outside of the square root.
      eps_root: Added to the denominator inside of the square root.
      nesterov: Whether to use Nesterov momentum.
      quantize_mask: A tree of bools with the structure of the parameters (or a prefix
        of it), or a function from parameters to such a tree; False keeps a parameter's
        moments in float32. None quantizes every parameter that is large enough.
      normalize_mu: Whether to store the first moment over the square root of the
        second; False stores it by itself, as COAT does.
      mu_format: Format of the first moment.
      nu_format: Format of the second moment.
      granularity: Groups along the last axis that share a scale and an exponent.

    Returns:
      A `GradientTransformation` whose moments have the parameters' shapes.

    Raises:
      ValueError: If `granularity` is not `PerGroup`, so that a moment could not be
        sharded like its parameter.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp, optax
      >>> tx = optax.chain(coat.scale_by_fp8_adam(), optax.scale(-1e-3))
      >>> state = tx.init({"w": jnp.zeros((64, 128))})
      >>> state[0].mu["w"].codes.dtype
      dtype(float8_e4m3fn)
    """
    if not isinstance(granularity, PerGroup):
        raise ValueError(f"granularity must be coat.PerGroup(g), got {granularity}")
    adam = optax.scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov)
    mu_expand = mu_format.power if normalize_mu else True
    mu_how = {"format": mu_format, "granularity": granularity, "expand": mu_expand}
    nu_how = {"format": nu_format, "granularity": granularity, "expand": True}

    def init_fn(params):
        def zeros(param, quantized, how):
            if quantized:
                return quantized_zeros(param.shape, **how)
            return jnp.zeros_like(param, jnp.float32)

        mask = _resolve_mask(quantize_mask, params)
        mu = jax.tree.map(lambda p, q: zeros(p, q, mu_how), params, mask)
        nu = jax.tree.map(lambda p, q: zeros(p, q, nu_how), params, mask)
        count = jnp.zeros([], jnp.int32)
        return ScaleByFP8AdamState(count, mu, nu, MuScaling(normalize_mu))

    def update_fn(updates, state, params=None):
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        wide, adam_state = adam.update(wide, _to_optax(state), params)
        updates = jax.tree.map(lambda u, g: u.astype(g.dtype), wide, updates)
        return updates, _from_optax(adam_state, like=state)

    return optax.GradientTransformation(init_fn, update_fn)


def fp8_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    nesterov: bool = False,
    quantize_mask: Any | Callable[[optax.Params], Any] | None = None,
    normalize_mu: bool = True,
    mu_format: Format = E4M3,
    nu_format: Format = E4M3,
    granularity: PerGroup = PerGroup(128),
) -> optax.GradientTransformation:
    """AdamW with both moments in FP8: `optax.adamw` in a quarter of its memory.

    Takes what `optax.adamw` takes; see `scale_by_fp8_adam` for the rest and for how
    moments are kept.

    Args:
      learning_rate: A global scaling factor, fixed or a schedule.
      b1: Decay rate of the first moment.
      b2: Decay rate of the second moment.
      eps: Added to the denominator outside of the square root.
      eps_root: Added to the denominator inside of the square root.
      weight_decay: Strength of the decoupled weight decay.
      mask: Which parameters decay: a tree of bools (or a prefix of it), or a function
        from parameters to one. None decays all.
      nesterov: Whether to use Nesterov momentum.
      quantize_mask: Which parameters' moments may be quantized; None means all.
      normalize_mu: Whether to store the first moment over the square root of the
        second.
      mu_format: Format of the first moment.
      nu_format: Format of the second moment.
      granularity: Groups along the last axis that share a scale and an exponent.

    Returns:
      The corresponding `GradientTransformation`.

    Example:
      >>> import coat_jax as coat, jax, jax.numpy as jnp, optax
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), coat.fp8_adamw(1e-3))
      >>> params = jnp.ones((64, 128))
      >>> state = tx.init(params)
      >>> grads = jax.grad(lambda p: jnp.sum(p**2))(params)
      >>> updates, state = tx.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
    """
    return optax.chain(
        scale_by_fp8_adam(
            b1,
            b2,
            eps,
            eps_root,
            nesterov=nesterov,
            quantize_mask=quantize_mask,
            normalize_mu=normalize_mu,
            mu_format=mu_format,
            nu_format=nu_format,
            granularity=granularity,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


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
        lambda s: _to_optax(s) if _is_state(s) else s, state, is_leaf=_is_state
    )


def from_optax_state(state: Any, like: Any) -> Any:
    """Replaces optax's Adam states by FP8 ones; undoes `to_optax_state`.

    Args:
      state: A tree that holds `optax.ScaleByAdamState`, such as `optax.adamw`'s state.
      like: The corresponding state with FP8 moments, of which only shapes are read:
        `tx.init(params)` or `jax.eval_shape(tx.init, params)`.

    Raises:
      ValueError: If the trees differ, or a moment's shape.

    Example:
      >>> import coat_jax as coat, jax, jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones((64, 128))}
      >>> like = jax.eval_shape(coat.fp8_adamw(1e-3).init, params)
      >>> state = coat.from_optax_state(optax.adamw(1e-3).init(params), like)
      >>> state[0].nu["w"].codes.dtype
      dtype(float8_e4m3fn)
    """
    return jax.tree.map(
        lambda new, old: _from_optax(old, new) if _is_state(new) else old,
        like,
        state,
        is_leaf=_is_state,
    )


def _is_state(node: Any) -> bool:
    return isinstance(node, ScaleByFP8AdamState)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedArray)


def _to_optax(state: ScaleByFP8AdamState) -> optax.ScaleByAdamState:
    def dequantized(moments):
        return jax.tree.map(
            lambda m: m.dequantize() if _is_quantized(m) else m,
            moments,
            is_leaf=_is_quantized,
        )

    mu, nu = dequantized(state.mu), dequantized(state.nu)
    if state.scaling.normalized:
        mu = _where_quantized(lambda m, v: m * jnp.sqrt(v), state.mu, mu, nu)
    return optax.ScaleByAdamState(state.count, mu, nu)


def _from_optax(
    state: optax.ScaleByAdamState, like: ScaleByFP8AdamState
) -> ScaleByFP8AdamState:
    mu, nu = state.mu, state.nu
    if like.scaling.normalized:
        mu = _where_quantized(_normalize, like.mu, mu, nu)
    return ScaleByFP8AdamState(
        state.count,
        _quantize_like(like.mu, mu),
        _quantize_like(like.nu, nu),
        like.scaling,
    )


def _normalize(mu: Array, nu: Array) -> Array:
    """Computes mu / sqrt(nu), which is 0 where nu counts as 0."""
    return jnp.where(nu < jnp.finfo(jnp.float32).tiny, 0.0, mu * lax.rsqrt(nu))


def _where_quantized(fn: Callable[..., Array], moments: Any, mu: Any, nu: Any) -> Any:
    """fn(mu, nu) where `moments` are quantized, elsewhere mu."""
    return jax.tree.map(
        lambda q, m, v: fn(m, v) if _is_quantized(q) else m,
        moments,
        mu,
        nu,
        is_leaf=_is_quantized,
    )


def _quantize_like(like: Any, moments: Any) -> Any:
    """Quantizes moments as those in `like` are."""

    def quantized(q, moment):
        if q.shape != moment.shape:
            raise ValueError(f"a moment of shape {moment.shape}, expected {q.shape}")
        if not _is_quantized(q):
            return moment
        expand = q.power if q.exponent is None else True
        how = {"format": q.format, "granularity": q.granularity, "expand": expand}
        return quantize(moment.astype(jnp.float32), **how)

    return jax.tree.map(quantized, like, moments, is_leaf=_is_quantized)


def _resolve_mask(mask: Any, params: optax.Params) -> Any:
    """One bool a parameter: whether the mask allows FP8 and the size deserves it."""
    mask = mask(params) if callable(mask) else mask
    mask = True if mask is None else mask
    return jax.tree.map(
        lambda allowed, subtree: jax.tree.map(
            lambda p: bool(allowed) and np.size(p) >= MIN_QUANTIZED_SIZE, subtree
        ),
        mask,
        params,
    )
