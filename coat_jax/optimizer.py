"""Adam with its moments in FP8 (COAT, arXiv 2410.19313, section 4)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

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


class ScaleByFP8AdamState(NamedTuple):
    """State of `scale_by_fp8_adam`: optax's, with quantized leaves.

    Attributes:
      count: Number of updates so far, int32.
      mu: First moments; per parameter a QuantizedArray or a float32 array of its shape.
      nu: Second moments, likewise.
    """

    count: chex.Array
    mu: optax.Updates
    nu: optax.Updates


def scale_by_fp8_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    nesterov: bool = False,
    quantize_mask: Any | Callable[[optax.Params], Any] | None = None,
    mu_format: Format = E4M3,
    nu_format: Format = E4M3,
    granularity: PerGroup = PerGroup(128),
) -> optax.GradientTransformation:
    """Rescales updates by Adam, keeping both moments in 8 bits with range expansion.

    Each step reads the moments as float32, does what `optax.scale_by_adam` does, and
    stores them quantized: 2.05 bytes a parameter for both instead of 8. Parameters of
    fewer than 4,096 elements keep float32 moments and are updated exactly as by optax,
    as are those that `quantize_mask` leaves out. Updates have the gradients' dtype.

    Args:
      b1: Decay rate of the first moment.
      b2: Decay rate of the second moment.
      eps: Added to the denominator outside of the square root.
      eps_root: Added to the denominator inside of the square root.
      nesterov: Whether to use Nesterov momentum.
      quantize_mask: A tree of bools with the structure of the parameters (or a prefix
        of it), or a function from parameters to such a tree; False keeps a parameter's
        moments in float32. None quantizes every parameter that is large enough.
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
    mu_how = {"format": mu_format, "granularity": granularity, "expand": True}
    nu_how = {"format": nu_format, "granularity": granularity, "expand": True}

    def init_fn(params):
        def zeros(param, quantized, how):
            if quantized:
                return quantized_zeros(param.shape, **how)
            return jnp.zeros_like(param, jnp.float32)

        mask = _resolve_mask(quantize_mask, params)
        mu = jax.tree.map(lambda p, q: zeros(p, q, mu_how), params, mask)
        nu = jax.tree.map(lambda p, q: zeros(p, q, nu_how), params, mask)
        return ScaleByFP8AdamState(jnp.zeros([], jnp.int32), mu, nu)

    def update_fn(updates, state, params=None):
        wide_state = optax.ScaleByAdamState(
            state.count, _dequantize_tree(state.mu), _dequantize_tree(state.nu)
        )
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        wide, wide_state = adam.update(wide, wide_state, params)
        mu = _requantize(wide_state.mu, state.mu, mu_how)
        nu = _requantize(wide_state.nu, state.nu, nu_how)
        updates = jax.tree.map(lambda u, g: u.astype(g.dtype), wide, updates)
        return updates, ScaleByFP8AdamState(wide_state.count, mu, nu)

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
            mu_format=mu_format,
            nu_format=nu_format,
            granularity=granularity,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedArray)


def _dequantize_tree(tree: Any) -> Any:
    return jax.tree.map(
        lambda m: m.dequantize() if _is_quantized(m) else m, tree, is_leaf=_is_quantized
    )


def _requantize(wide: Any, old: Any, how: dict[str, Any]) -> Any:
    """Quantizes what was quantized in `old`."""
    return jax.tree.map(
        lambda m, before: quantize(m, **how) if _is_quantized(before) else m, wide, old
    )


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
