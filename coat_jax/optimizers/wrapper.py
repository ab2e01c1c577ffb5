"""A wrapper that keeps the averages of any optax transformation in 8 bits."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax.optimizers.codec import dequantized, quantized
from coat_jax.optimizers.initial import initial_state
from coat_jax.optimizers.moment import Moment
from coat_jax.optimizers.state import Choices, Rounding, check_gradients, next_state
from coat_jax.optimizers.trees import boxed, unboxed
from coat_jax.quantization.granularity import PerGroup


def as_transformation(tx: Any, name: str) -> optax.GradientTransformation:
    """Returns an argument `name` as a transformation; `optax.MultiSteps` is not one.

    Raises:
      TypeError: If it is neither an optax transformation nor `optax.MultiSteps`.
    """
    if isinstance(tx, optax.MultiSteps):
        return tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be an optax transformation, as optax.lion(1e-4), got {tx!r}"
        )
    return tx


def with_quantized_state(
    inner: optax.GradientTransformation,
    *,
    moments: Mapping[str, Moment | None] | None = None,
    quantize_mask: Any | Callable[[optax.Params], Any] | None = None,
    granularity: PerGroup = PerGroup(128),
    rounding: Rounding = "stochastic",
) -> optax.GradientTransformationExtraArgs:
    """Returns an optax transformation with its moving averages stored in 8 bits.

    Each step reads the averages as float32, calls `inner`, and stores the averages
    quantized: 1.04 bytes per element for each average instead of 4. For optax's own
    transformations (Adam, AdamW, Lion, Muon, SGD with momentum, RMSProp, AdaBelief,
    AdEMAMix, Adan, Adamax, AMSGrad, ADOPT, LAMB and wrappers of them), it is known
    which fields are averages and how to store them. For others, name the fields in
    `moments`.
    Counts, keys and copies of parameters are not quantized.

    An average follows the same average in float32: codes are rounded stochastically, so
    that no average stalls, however little a step moves it, and each rounding is right
    on average. The random bits are a function of the step, the parameter's path and the
    element. Under jit they are the same for every sharding, and a resumed run repeats
    them. Within `shard_map` they depend on the position within the shard.

    The noise of a first moment grows with the steps that it averages over. If gradients
    have a mean of zero, its relative error is 4% for a decay of 0.9, 13% for 0.99 and
    42% for 0.999. So the slow average of AdEMAMix stays in float32, and so do the
    averages of centered RMSProp, which subtracts one from the other. AMSGrad's second
    moment stays in float32, because a maximum of rounded averages grows with the steps.
    The maximum itself is in 8 bits.

    Args:
      inner: Any transformation with a state that has the parameters' structure.
      moments: A dict from names of the state's fields to a `coat.Moment`, which says
        how a field is stored, or to None, which leaves it unquantized. It is for fields
        that the library does not know, or stores in another way.
      quantize_mask: A tree of bools with the structure of the parameters (or a prefix
        of it), or a function from parameters to such a tree. False means that a
        parameter's moments stay as optax has them. None means True for all. Moments of
        parameters of fewer than 8,192 elements, and moments that 8 bits would not make
        smaller, always stay as optax has them.
      granularity: Groups along the last axis that share a scale and an exponent.
      rounding: "stochastic", or "nearest" as in COAT (arXiv 2410.19313). With
        "nearest", averages over 100 steps or more stall.

    Returns:
      A transformation with a `QuantizedState` as its state. Its updates have the
      gradients' dtypes.

    Raises:
      TypeError: If `inner` is neither an optax transformation nor `optax.MultiSteps`.
      ValueError: If an option is invalid. `init` raises it if `moments` names a field
        that the state does not have or that does not start at zero, and for complex
        parameters. `update` raises it for gradients that are not floating or have
        another shape than their moments, for a state that was made with other options,
        and for an `inner` with updates in another structure than the gradients, such as
        `optax.lookahead`.

    Warns:
      UserWarning: If a field of the state has the parameters' shapes, but is neither
        known nor named in `moments`; or if a known average has other shapes than the
        parameters, as in `optax.contrib.galore` and `optax.flatten`. The field is not
        quantized.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp, optax
      >>> tx = coat.with_quantized_state(optax.lion(1e-4))
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = tx.init(params)
      >>> optax.tree.get(state, "mu")["w"].codes.dtype
      dtype(float8_e4m3fn)
      >>> updates, state = tx.update(params, state, params)
    """
    inner = as_transformation(inner, "inner")
    if not isinstance(granularity, PerGroup):
        raise ValueError(f"granularity must be coat.PerGroup(g), got {granularity}")
    if rounding not in ("stochastic", "nearest"):
        raise ValueError(
            f"rounding must be 'stochastic' or 'nearest', got {rounding!r}"
        )
    if not isinstance(moments, Mapping | None):
        raise ValueError(
            "moments must be a dict from names of fields to coat.Moment, got "
            f"{moments!r}"
        )
    for field, moment in (moments or {}).items():
        if not isinstance(moment, Moment | None):
            raise ValueError(
                f"moments[{field!r}] must be a coat.Moment or None, got {moment!r}"
            )
    inner = optax.with_extra_args_support(inner)
    chosen = Choices(moments or {}, quantize_mask, granularity, rounding)

    def init_fn(params):
        return initial_state(inner, params, chosen)

    def update_fn(updates, state, params=None, **extra_args):
        chosen.check(state)
        given = updates
        updates, state, params = map(unboxed, (updates, state, params))
        check_gradients(updates, state)
        updates = jax.tree.map(jnp.asarray, updates)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        before = dequantized(state.inner_state, state.layout)
        results, after = inner.update(wide, before, params, **extra_args)
        _check_results(results, updates)
        results = jax.tree.map(lambda u, g: u.astype(g.dtype), results, updates)
        after = quantized(after, state.inner_state, state.layout, state.rounding_step)
        return boxed(results, given), next_state(state, after, given)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_results(results: optax.Updates, updates: optax.Updates) -> None:
    """Raises ValueError unless updates have the structure of gradients."""
    kinds = [type(tree).__name__ for tree in (updates, results)]
    if jax.tree.structure(results) != jax.tree.structure(updates):
        raise ValueError(
            "updates must have the structure of gradients, got a {1} for a {0}. Put "
            "what changes it, as optax.lookahead, around: optax.lookahead("
            "coat.with_quantized_state(...), ...)".format(*kinds)
        )
