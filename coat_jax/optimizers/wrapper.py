"""Any optax transformation, with the moving averages of its state in 8 bits."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from coat_jax.optimizers.codec import dequantized, quantized
from coat_jax.optimizers.initial import Choices, initial_state
from coat_jax.optimizers.moment import Moment
from coat_jax.optimizers.state import Rounding, check_gradients, check_state, next_state
from coat_jax.optimizers.trees import boxed
from coat_jax.quantization.array import PerGroup


def with_quantized_state(
    inner: optax.GradientTransformation,
    *,
    moments: Mapping[str, Moment | None] | None = None,
    quantize_mask: Any | Callable[[optax.Params], Any] | None = None,
    granularity: PerGroup = PerGroup(128),
    rounding: Rounding = "stochastic",
) -> optax.GradientTransformationExtraArgs:
    """Keeps the moving averages of any optax transformation in 8 bits.

    Each step reads the averages as float32, does what `inner` does, and stores them
    quantized: 1.04 bytes an element for each instead of 4. What is an average, and how
    it is stored, is known of optax's own transformations (Adam, AdamW, Lion, Muon, SGD
    with momentum, RMSProp, AdaBelief, AdEMAMix, Adan, LAMB and what wraps them); of
    others the fields are named. Counts, keys and copies of parameters are left alone.

    An average of n steps follows the one that float32 would hold. Its codes are rounded
    stochastically, by bits that are a function of the step, the parameter's path and
    the element: nothing stalls, however little a step moves, and each rounding is right
    on average. The bits are the same on every sharding under jit, and a resumed run
    repeats them. Within `shard_map` they depend on the place within the shard.

    Args:
      inner: Any transformation whose state keeps the parameters' structure.
      moments: A `coat.Moment` for each field of the state, by the field's name, that
        is to be quantized otherwise than is known; None leaves a field alone.
      quantize_mask: A tree of bools with the structure of the parameters (or a prefix
        of it), or a function from parameters to such a tree; False keeps a parameter's
        moments in float32. None quantizes those of 8,192 elements or more.
      granularity: Groups along the last axis that share a scale and an exponent.
      rounding: "stochastic", or "nearest" as COAT has it (arXiv 2410.19313), with
        which averages of 100 steps or more stall.

    Returns:
      A transformation whose state is a `QuantizedState`, whose updates have the
      gradients' dtypes.

    Raises:
      ValueError: If an option is none, `moments` names no field of the state, or one
        that does not start at zero. `init` raises it for complex parameters, `update`
        for gradients that are not floating or of another shape than their moments.

    Warns:
      UserWarning: If a field of the state has the parameters' shapes, and it is neither
        known nor named what it is: it stays as it is.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp, optax
      >>> tx = coat.with_quantized_state(optax.lion(1e-4))
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = tx.init(params)
      >>> optax.tree.get(state, "mu")["w"].codes.dtype
      dtype(float8_e4m3fn)
      >>> updates, state = tx.update(params, state, params)
    """
    if not isinstance(granularity, PerGroup):
        raise ValueError(f"granularity must be coat.PerGroup(g), got {granularity}")
    if rounding not in ("stochastic", "nearest"):
        raise ValueError(
            f"rounding must be 'stochastic' or 'nearest', got {rounding!r}"
        )
    for field, moment in (moments or {}).items():
        if not isinstance(moment, Moment | None):
            raise ValueError(
                f"moments[{field!r}] must be a coat.Moment or None, got {moment!r}"
            )
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        chosen = Choices(moments or {}, quantize_mask, granularity, rounding)
        return initial_state(inner, params, chosen)

    def update_fn(updates, state, params=None, **extra_args):
        check_state(state)
        given = updates
        updates, state, params = map(nnx.as_pure, (updates, state, params))
        check_gradients(updates, state)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        before = dequantized(state.inner_state, state.layout)
        results, after = inner.update(wide, before, params, **extra_args)
        results = jax.tree.map(lambda u, g: u.astype(g.dtype), results, updates)
        after = quantized(after, state.inner_state, state.layout, state.rounding_step)
        return boxed(results, given), next_state(state, after, given)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
