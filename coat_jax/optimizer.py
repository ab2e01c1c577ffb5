"""Adam with its moments in FP8 (COAT, arXiv 2410.19313, section 4)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from coat_jax.fused import fused_adamw
from coat_jax.quantized import E4M3, Format, PerGroup
from coat_jax.sharding import quantized_zeros_like
from coat_jax.state import MuScaling, ScaleByFP8AdamState
from coat_jax.step import Adam, adam_step
from coat_jax.variables import boxed

# Below this many elements a parameter's moments stay in float32: together such
# parameters, norms and biases, are a fraction of a percent of a model, and they are its
# most sensitive. XLA does the steps of all of them in one kernel.
MIN_QUANTIZED_SIZE = 8192


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
    stores them quantized: 2.04 bytes a parameter for both instead of 8. Parameters of
    fewer than 8,192 elements keep float32 moments and are updated exactly as by optax,
    as are those that `quantize_mask` leaves out. Updates have the gradients' dtype.

    The second moment has COAT's expansion (section 4.2), whose k follows each group's
    range. The first is stored as mu / sqrt(nu), since that is what updates read: it
    varies little within a group, so that one k serves all (3 for E4M3, a cube), and an
    error of nu does not reach the update. A quarter of the error of COAT's own scheme,
    which `normalize_mu=False` gives.

    As in `optax.scale_by_adam`, a gradient that is not finite spoils its element for
    good. Here, from the next step on, it spoils the whole group that shares its scale,
    and so does a finite one whose square overflows. In `optax.apply_if_finite` a step
    with a gradient that is not finite leaves no trace.

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
        sharded like its parameter, or a format is none. `init` raises it for complex
        parameters.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp, optax
      >>> tx = optax.chain(coat.scale_by_fp8_adam(), optax.scale(-1e-3))
      >>> state = tx.init({"w": jnp.zeros((64, 128))})
      >>> state[0].mu["w"].codes.dtype
      dtype(float8_e4m3fn)
    """
    if not isinstance(granularity, PerGroup):
        raise ValueError(f"granularity must be coat.PerGroup(g), got {granularity}")
    for name, format in (("mu_format", mu_format), ("nu_format", nu_format)):
        if not isinstance(format, Format):
            raise ValueError(f"{name} must be a coat format, got {format!r}")
    adam = Adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov)
    mu_expand = mu_format.power if normalize_mu else True
    mu_how = {"format": mu_format, "granularity": granularity, "expand": mu_expand}
    nu_how = {"format": nu_format, "granularity": granularity, "expand": True}

    def init_fn(params):
        def zeros(param, quantized, how):
            if jnp.iscomplexobj(param):
                dtype = jnp.dtype(param.dtype)
                raise ValueError(f"FP8 Adam takes real parameters, got {dtype}")
            if quantized:
                return quantized_zeros_like(param, **how)
            return jnp.zeros_like(param, jnp.float32)

        arrays = nnx.as_pure(params)
        mask = nnx.as_pure(_resolve_mask(quantize_mask, params))
        mu = jax.tree.map(lambda p, q: zeros(p, q, mu_how), arrays, mask)
        nu = jax.tree.map(lambda p, q: zeros(p, q, nu_how), arrays, mask)
        return ScaleByFP8AdamState(
            jnp.zeros([], jnp.int32),
            boxed(mu, params),
            boxed(nu, params),
            MuScaling(normalize_mu),
        )

    def update_fn(updates, state, params=None):
        del params
        return adam_step(adam, updates, state)

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
) -> optax.GradientTransformationExtraArgs:
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
    chain = optax.chain(
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
    adam = Adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov)

    def update_fn(updates, state, params=None, *, coat_fused=None, **extra_args):
        if coat_fused is None:
            return chain.update(updates, state, params, **extra_args)
        decay = optax.add_decayed_weights(weight_decay, _resolved(mask, params))
        rate = optax.scale_by_learning_rate(learning_rate)
        return fused_adamw(coat_fused, adam, decay, rate, updates, state, params)

    return optax.GradientTransformationExtraArgs(chain.init, update_fn)


def _resolved(mask: Any, params: optax.Params) -> Any:
    return mask(params) if callable(mask) else mask


def _resolve_mask(mask: Any, params: optax.Params) -> Any:
    """One bool a parameter: whether the mask allows FP8 and the size deserves it."""
    mask = True if mask is None else _resolved(mask, params)
    return jax.tree.map(
        lambda allowed, subtree: jax.tree.map(
            lambda p: bool(allowed) and np.size(p) >= MIN_QUANTIZED_SIZE, subtree
        ),
        mask,
        params,
    )
