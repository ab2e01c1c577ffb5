"""Adam with its moments in FP8 (COAT, arXiv 2410.19313, section 4)."""

from collections.abc import Callable
from typing import Any

import optax

from coat_jax.optimizers.fused import fused_adamw
from coat_jax.optimizers.moment import Moment, over_root
from coat_jax.optimizers.state import Rounding
from coat_jax.optimizers.step import Adam, adam_step
from coat_jax.optimizers.wrapper import with_quantized_state
from coat_jax.quantization.array import E4M3, UE4M4, Format, PerGroup


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
    nu_format: Format = UE4M4,
    granularity: PerGroup = PerGroup(128),
    rounding: Rounding = "stochastic",
) -> optax.GradientTransformation:
    """Rescales updates by Adam, keeping both moments in 8 bits with range expansion.

    It is `coat.with_quantized_state(optax.scale_by_adam(...))` with a fused step: 2.07
    bytes a parameter for both moments instead of 8. Parameters of fewer than 8,192
    elements keep float32 moments and are updated exactly as by optax, as are those that
    `quantize_mask` leaves out. Updates have the gradients' dtype.

    The second moment has COAT's expansion (section 4.2), whose k follows each group's
    range. It has no sign: the sign's bit of its E4M3 codes is a fourth bit of their
    mantissa (`coat.UE4M4`). The first moment is stored as mu / sqrt(nu), since that is
    what updates read: it varies little within a group, so that one k serves all (3 for
    E4M3, a cube), and an error of nu does not reach the update.

    The moments follow float32 ones, whatever b2 is: scales are float32, and codes are
    rounded stochastically, by bits that are a function of step, parameter and element,
    so that an average which moves by less than half a code a step moves on average as
    it should. To nearest, as COAT has it, it would stand still: with b2 = 0.999 after
    gradients have become 100 times smaller, or beside an element that was large once.
    On normal gradients updates are within 1% of optax's on average, with an error of 9%
    of their size at b2 = 0.999, and of 4% at 0.95.

    As in `optax.scale_by_adam`, a gradient that is not finite spoils its element for
    good. Here, from the next step on, it spoils the whole group that shares its scale.
    In `optax.apply_if_finite` a step with a gradient that is not finite leaves no
    trace. A finite gradient whose square overflows makes its own update zero, as in
    optax, and leaves its neighbours alone.

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
        second; False stores it by itself with a k for each group, as COAT does.
      mu_format: Format of the first moment, one with a sign.
      nu_format: Format of the second moment.
      granularity: Groups along the last axis that share a scale and an exponent.
      rounding: "stochastic" or "nearest". With "nearest", `normalize_mu=False` and
        `nu_format=coat.E4M3` this is COAT's own scheme.

    Returns:
      A `GradientTransformation` whose moments have the parameters' shapes; its state is
      a `coat.QuantizedState`.

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
    adam = Adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov)
    return _quantized_adam(
        adam,
        quantize_mask=quantize_mask,
        normalize_mu=normalize_mu,
        mu_format=mu_format,
        nu_format=nu_format,
        granularity=granularity,
        rounding=rounding,
    )


def _quantized_adam(
    adam: Adam,
    *,
    normalize_mu: bool,
    mu_format: Format,
    nu_format: Format,
    **options: Any,
) -> optax.GradientTransformation:
    for name, format in (("mu_format", mu_format), ("nu_format", nu_format)):
        if not isinstance(format, Format):
            raise ValueError(f"{name} must be a coat format, got {format!r}")
    if not mu_format.signed:
        raise ValueError(f"mu_format must have a sign, got {mu_format}")
    mu = over_root("nu", mu_format) if normalize_mu else Moment(format=mu_format)
    moments = {"mu": mu, "nu": Moment(format=nu_format, squares=True)}
    wrapped = with_quantized_state(adam.transformation(), moments=moments, **options)

    def update_fn(updates, state, params=None):
        del params
        return adam_step(adam, updates, state)

    return optax.GradientTransformation(wrapped.init, update_fn)


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
    nu_format: Format = UE4M4,
    granularity: PerGroup = PerGroup(128),
    rounding: Rounding = "stochastic",
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
      mu_format: Format of the first moment, one with a sign.
      nu_format: Format of the second moment.
      granularity: Groups along the last axis that share a scale and an exponent.
      rounding: "stochastic" or "nearest".

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
    adam = Adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov)
    chain = optax.chain(
        _quantized_adam(
            adam,
            quantize_mask=quantize_mask,
            normalize_mu=normalize_mu,
            mu_format=mu_format,
            nu_format=nu_format,
            granularity=granularity,
            rounding=rounding,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )

    def update_fn(updates, state, params=None, *, coat_fused=None, **extra_args):
        if coat_fused is None:
            return chain.update(updates, state, params, **extra_args)
        decays = mask(params) if callable(mask) else mask
        decay = optax.add_decayed_weights(weight_decay, decays)
        rate = optax.scale_by_learning_rate(learning_rate)
        return fused_adamw(coat_fused, adam, decay, rate, updates, state, params)

    return optax.GradientTransformationExtraArgs(chain.init, update_fn)
