"""Uses `coat.fused_update` in trainers that call `tx.update` and apply its updates.

EasyDeL's state looks for a method `apply_updates_hook` of its optimizer, and Flax's
`TrainState` has a method for the step. A step in one pass over the parameters can run
in these methods without changes to the trainer.
"""

from collections.abc import Mapping
from typing import Any

import jax
import optax
from flax.training import train_state
from jaxtyping import Array, Key

from coat_jax.optimizers.fused import Applied, fused_update


class HookedTransformation(optax.GradientTransformationExtraArgs):
    """A transformation with a method that applies its updates, for EasyDeL's state."""

    def apply_updates_hook(self, params: optax.Params, updates: optax.Updates) -> Any:
        """Returns the parameters after the step, as `update` has computed them."""
        del params
        return jax.tree.map(lambda update: update.param, updates)


def with_apply_updates_hook(
    tx: optax.GradientTransformation, *, key: Key[Array, ""] | None = None
) -> HookedTransformation:
    """Returns an optimizer that takes its whole step in one pass over the parameters.

    The `update` of the result computes `coat.fused_update`. In place of updates it
    returns the parameters after the step, which `apply_updates_hook` unwraps. It is for
    trainers that call the hook if an optimizer has one, such as EasyDeL 0.3.

    Args:
      tx: An optimizer with `fp8_adamw` as its last transformation.
      key: A key to round bfloat16 parameters stochastically; see `coat.fused_update`.

    Returns:
      The optimizer with the hook. Its state is the state of `tx`.

    Raises:
      ValueError: If `tx` has no `fp8_adamw` at its end; in a step, if anything but the
        hook reads the updates.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> from coat_jax.integrations.fused import with_apply_updates_hook
      >>> tx = with_apply_updates_hook(coat.fp8_adamw(1e-3))
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> tx.apply_updates_hook(params, updates)["w"].dtype
      dtype(bfloat16)
    """

    def update(updates, state, params=None, **extra_args):
        params, state = fused_update(tx, updates, state, params, key=key, **extra_args)
        return jax.tree.map(Applied, params), state

    return HookedTransformation(tx.init, update)


class TrainState(train_state.TrainState):
    """Flax's `TrainState` with the step of `coat.fused_update`.

    Attributes:
      key: A key to round bfloat16 parameters stochastically, or None.

    Raises:
      ValueError: In a step, if `tx` does not end in `fp8_adamw`.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from coat_jax.integrations.fused import TrainState
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> tx = coat.fp8_adamw(1e-3)
      >>> state = TrainState.create(apply_fn=None, params=params, tx=tx)
      >>> step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
      >>> int(step(state, params).step)
      1
    """

    key: Key[Array, ""] | None = None

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "TrainState":
        """Returns the state after a step; `kwargs` replace further fields."""
        if not isinstance(grads, Mapping) or _OVERWRITTEN not in grads:
            params, opt_state = self._after(grads, self.params)
        else:  # Some collections have their next values as gradients.
            new, opt_state = self._after(grads["params"], self.params["params"])
            params = {"params": new, _OVERWRITTEN: grads[_OVERWRITTEN]}
        after = {"step": self.step + 1, "params": params, "opt_state": opt_state}
        return self.replace(**after, **kwargs)

    def _after(self, grads: Any, params: Any) -> tuple[Any, Any]:
        return fused_update(self.tx, grads, self.opt_state, params, key=self.key)


_OVERWRITTEN = train_state.OVERWRITE_WITH_GRADIENT
