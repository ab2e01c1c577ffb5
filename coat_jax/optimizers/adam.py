"""Adam with its moments in FP8 (COAT, arXiv 2410.19313, section 4)."""

from collections.abc import Callable
from typing import Any

import optax
from jax.typing import DTypeLike

from coat_jax.optimizers.fused import fused_adamw
from coat_jax.optimizers.moment import Moment, over_root
from coat_jax.optimizers.state import Choices, Rounding
from coat_jax.optimizers.step import Adam, adam_step
from coat_jax.optimizers.wrapper import with_quantized_state
from coat_jax.quantization.formats import E4M3, UE4M4, Format
from coat_jax.quantization.granularity import PerGroup
from pallas_kernels.checks import check_flags

# Below it updates have a larger error than with `normalize_mu=False`.
_SMALLEST_B2 = 0.2


def scale_by_fp8_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = False,
    quantize_mask: Any | Callable[[optax.Params], Any] | None = None,
    normalize_mu: bool = True,
    mu_format: Format = E4M3,
    nu_format: Format = UE4M4,
    granularity: PerGroup = PerGroup(128),
    rounding: Rounding = "stochastic",
) -> optax.GradientTransformation:
    """Returns a transformation that rescales updates by Adam, with moments in 8 bits.

    It is `coat.with_quantized_state(optax.scale_by_adam(...))` with a fused step. Both
    moments take 2.07 bytes per parameter instead of 8. Parameters of fewer than 8,192
    elements have float32 moments and are updated exactly as by optax. The same holds
    for parameters that `quantize_mask` excludes, and for parameters with a last axis of
    one element, where 8 bits would make moments no smaller. Updates have the gradients'
    dtype.

    The second moment has COAT's range expansion (section 4.2), with a k for each group
    that follows the group's range. It is never negative, so the sign bit of its E4M3
    codes serves as a fourth bit of the mantissa (`coat.UE4M4`). The first moment is
    stored as mu / sqrt(nu), since updates read this ratio. The ratio varies little
    within a group, so one k serves all groups (3 for E4M3, a cube). Moreover, an error
    of nu does not reach the update.

    The moments follow float32 moments for every b2. This has two reasons: scales are
    float32, and codes are rounded stochastically. The random bits are a function of
    step, parameter and element. So an average that moves by less than half a code per
    step still moves as it should on average. Rounded to nearest, as in COAT, such an
    average would not move at all: with b2 = 0.999 this happens after gradients have
    become 100 times smaller, or in the group of an element that was large once. On
    normally distributed gradients, the mean of updates is within 1% of optax's. The
    error of single updates is 9% of their size at b2 = 0.999, and 4% at 0.95.

    As in `optax.scale_by_adam`, a gradient that is not finite spoils its element for
    good. Here, from the next step on, it spoils the whole group that shares the
    element's scale. `optax.apply_if_finite` skips a step with a gradient that is not
    finite. A finite gradient with a square that overflows makes its own update zero, as
    in optax, and does not affect its neighbours.

    Args:
      b1: The decay rate of the first moment.
      b2: The decay rate of the second moment.
      eps: A number added to the denominator outside of the square root.
      eps_root: A number added to the denominator inside of the square root.
      mu_dtype: The dtype of first moments that are not in 8 bits; None means float32.
      nesterov: Whether to use Nesterov momentum.
      quantize_mask: A tree of bools with the structure of the parameters (or a prefix
        of it), or a function from parameters to such a tree. False means that a
        parameter's moments stay in float32. None quantizes every parameter that is
        large enough.
      normalize_mu: Whether to store the first moment divided by the square root of the
        second, for a b2 of 0.2 or more. False stores the first moment itself with a k
        for each group, as COAT does.
      mu_format: The format of the first moment, which must have a sign.
      nu_format: The format of the second moment.
      granularity: Groups along the last axis that share a scale and an exponent.
      rounding: "stochastic" or "nearest". "nearest" with `normalize_mu=False` and
        `nu_format=coat.E4M3` is COAT's own scheme.

    Returns:
      A `GradientTransformation` with moments of the parameters' shapes. Its state is a
      `coat.QuantizedState`.

    Raises:
      ValueError: If `granularity` is not `PerGroup`, since a moment could then not be
        sharded like its parameter; if a format is not a `coat.Format`; if
        `mu_format` has no sign; or if `b2` is below 0.2 with `normalize_mu`. `init`
        raises it for complex parameters.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp, optax
      >>> tx = optax.chain(coat.scale_by_fp8_adam(), optax.scale(-1e-3))
      >>> state = tx.init({"w": jnp.zeros((64, 128))})
      >>> state[0].mu["w"].codes.dtype
      dtype(float8_e4m3fn)
    """
    adam = Adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov)
    choices = _choices(
        adam,
        quantize_mask=quantize_mask,
        normalize_mu=normalize_mu,
        mu_format=mu_format,
        nu_format=nu_format,
        granularity=granularity,
        rounding=rounding,
    )
    return _quantized_adam(adam, choices, mu_dtype)


def _choices(
    adam: Adam,
    *,
    normalize_mu: bool,
    mu_format: Format,
    nu_format: Format,
    **options: Any,
) -> Choices:
    """Returns how Adam's moments are stored.

    Raises:
      ValueError: If a format is none, or has no sign, `b2` is too small, or a flag is
        not a bool.
    """
    check_flags(nesterov=adam.nesterov, normalize_mu=normalize_mu)
    for name, format in (("mu_format", mu_format), ("nu_format", nu_format)):
        if not isinstance(format, Format):
            raise ValueError(f"{name} must be a coat format, got {format!r}")
    if not mu_format.signed:
        raise ValueError(f"mu_format must have a sign, got {mu_format}")
    if normalize_mu and isinstance(adam.b2, int | float) and adam.b2 < _SMALLEST_B2:
        raise ValueError(
            f"b2 must be at least {_SMALLEST_B2} with normalize_mu=True, got "
            f"{adam.b2}: the first moment divided by the root of the second would have "
            "no bound; pass normalize_mu=False"
        )
    mu = over_root("nu", mu_format) if normalize_mu else Moment(format=mu_format)
    moments = {"mu": mu, "nu": Moment(format=nu_format, squares=True)}
    return Choices(moments=moments, **options)


def _quantized_adam(
    adam: Adam, choices: Choices, mu_dtype: DTypeLike | None
) -> optax.GradientTransformation:
    inner = adam.transformation(mu_dtype)
    wrapped = with_quantized_state(inner, **choices._asdict())

    def update_fn(updates, state, params=None):
        del params
        choices.check(state)
        return adam_step(adam, updates, state)

    return optax.GradientTransformation(wrapped.init, update_fn)


def fp8_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: DTypeLike | None = None,
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
    """Returns `optax.adamw` with moments in FP8, which take a quarter of the memory.

    It takes the arguments of `optax.adamw`, in the same order. See `scale_by_fp8_adam`
    for the other arguments and for how moments are stored.

    Args:
      learning_rate: A global scaling factor, a number or a schedule.
      b1: The decay rate of the first moment.
      b2: The decay rate of the second moment.
      eps: A number added to the denominator outside of the square root.
      eps_root: A number added to the denominator inside of the square root.
      mu_dtype: The dtype of first moments that are not in 8 bits; None means float32.
      weight_decay: The strength of the decoupled weight decay.
      mask: The parameters that decay: a tree of bools (or a prefix of it), or a
        function from parameters to such a tree. None means all.
      nesterov: Whether to use Nesterov momentum.
      quantize_mask: The parameters with moments that may be quantized: a tree or a
        function like `mask`. None means all.
      normalize_mu: Whether to store the first moment divided by the square root of the
        second, for a b2 of 0.2 or more.
      mu_format: The format of the first moment, which must have a sign.
      nu_format: The format of the second moment.
      granularity: Groups along the last axis that share a scale and an exponent.
      rounding: "stochastic" or "nearest".

    Returns:
      The corresponding `GradientTransformation`.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp, optax
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), coat.fp8_adamw(1e-3))
      >>> params = jnp.ones((64, 128))
      >>> state = tx.init(params)
      >>> grads = jax.grad(lambda p: jnp.sum(p**2))(params)
      >>> updates, state = tx.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
    """
    adam = Adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov)
    choices = _choices(
        adam,
        quantize_mask=quantize_mask,
        normalize_mu=normalize_mu,
        mu_format=mu_format,
        nu_format=nu_format,
        granularity=granularity,
        rounding=rounding,
    )
    chain = optax.chain(
        _quantized_adam(adam, choices, mu_dtype),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )

    def update_fn(updates, state, params=None, *, coat_fused=None, **extra_args):
        if coat_fused is None:
            return chain.update(updates, state, params, **extra_args)
        decays = mask(params) if callable(mask) else mask
        decay = optax.add_decayed_weights(weight_decay, decays)
        rate = optax.scale_by_learning_rate(learning_rate)
        choices.check(state[0])
        return fused_adamw(coat_fused, adam, decay, rate, updates, state, params)

    return optax.GradientTransformationExtraArgs(chain.init, update_fn)
