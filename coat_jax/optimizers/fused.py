"""A whole optimizer step in one pass over the parameters.

In an optax chain, each transformation reads updates from memory and writes them back
for the next one. `fused_update` calls the chain with an extra argument, which optax's
wrappers hand on to `fp8_adamw`. The argument asks `fp8_adamw` to apply its updates
itself. `fp8_adamw` then returns the parameters after the step in place of updates.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Key

from coat_jax.optimizers.state import states_in
from coat_jax.optimizers.step import Adam, Stacks, Target, adam_step
from pallas_kernels.checks import typed_key

_REQUEST = "coat_fused"  # The name of the extra argument.


def fused_update(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    key: Key[Array, ""] | None = None,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Computes `tx.update` and `optax.apply_updates` in one pass over the parameters.

    On a Hopper GPU one kernel reads a parameter, its gradient and its moments once and
    writes them once. It writes in place if `params` and `state` are donated. On other
    devices, and for arrays that the kernel does not support, the same arithmetic runs
    in JAX operations. Parameters are rounded once, after arithmetic in float32, or in
    float64 if they are float64. Optax's chain rounds after each of its updates.

    Transformations before `fp8_adamw` in a chain work as always, and so do
    `optax.masked`, `optax.partition` and `optax.inject_hyperparams` around it. Updates
    of other transformations, in an `optax.partition`, are applied as by optax.

    Args:
      tx: An optimizer that ends in `fp8_adamw`.
      grads: Gradients.
      state: The optimizer's state.
      params: Parameters.
      key: A key to round bfloat16 parameters stochastically, to one of the two
        neighbours; the mean is the exact result. The random bits depend on this key,
        the step's number, the parameter's path and the element's position, not on the
        sharding. None rounds to nearest.
      **extra_args: Further arguments for `tx.update`.

    Returns:
      The parameters and the state after the step.

    Raises:
      ValueError: If there is no `fp8_adamw`, or a transformation after or around it
        needs its updates, or arguments are swapped.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp, optax
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), coat.fp8_adamw(1e-3))
      >>> params = jnp.ones((64, 128), jnp.bfloat16)
      >>> state = tx.init(params)
      >>> @jax.jit(donate_argnames=("state", "params"))
      ... def step(grads, state, params):
      ...     return coat.fused_update(tx, grads, state, params, key=jax.random.key(0))
      >>> params, state = step(jnp.ones_like(params), state, params)
    """
    for name, argument in (("grads", grads), ("params", params)):
        if states_in(argument):
            raise ValueError(
                f"{name} has the state of an optimizer; the order of arguments is "
                "fused_update(tx, grads, state, params)"
            )
    request = FusedRequest(key=None if key is None else typed_key(key))
    return requested_update(tx, grads, state, params, request, **extra_args)


def requested_update(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    request: "FusedRequest",
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Computes `fused_update` with the key and the stacks of a request.

    Raises:
      NotFusedError: If `fp8_adamw` steps no parameter, except for a request with
        `is_part`; or if another transformation fails on the parameters in place of
        updates, or on the request.
    """
    tx = optax.with_extra_args_support(tx)
    extra_args = {_REQUEST: request, **extra_args}
    try:
        updates, state = tx.update(grads, state, params, **extra_args)
    except NotFusedError:
        raise
    except Exception as error:
        if request.has_applied or _REQUEST in str(error):
            reason = f"something after or around it fails: {error!r}"
            raise NotFusedError(_refusal(reason)) from error
        raise
    is_applied = [isinstance(u, Applied) for u in jax.tree.leaves(updates)]
    if is_applied and not any(is_applied) and not request.is_part:
        reason = "no fp8_adamw was reached: there is none, or what is around it hands "
        raise NotFusedError(
            _refusal(
                reason + "no extra arguments on (optax.MultiSteps, optax.lookahead)"
            )
        )

    def apply(param, update):
        if isinstance(update, Applied):
            return update.param
        return optax.apply_updates(param, update)

    is_none = lambda x: x is None  # noqa: E731
    return jax.tree.map(apply, params, updates, is_leaf=is_none), state


@dataclasses.dataclass(kw_only=True)
class FusedRequest:
    """The extra argument `coat_fused`, which asks `fp8_adamw` to apply its updates.

    Attributes:
      key: The key of stochastic rounding, or None.
      stacks: The stacks that parameters and moments are slices of, or None.
      is_part: Whether the step is of a part of the parameters. `fp8_adamw` may then
        step no parameter at all.
      has_applied: Whether `fp8_adamw` has returned parameters in place of updates.
    """

    key: Key[Array, ""] | None
    stacks: Stacks | None = None
    is_part: bool = False
    has_applied: bool = False


class NotFusedError(ValueError):
    """Raised if an optimizer cannot apply its updates itself; the message says why."""


class Applied:
    """A parameter after its step, in the place where optax expects an update.

    Arithmetic on it, and reading any other attribute, raise `NotFusedError`.
    """

    def __init__(self, param: Array):
        self.param = param

    def _refuse(self, *_):
        raise NotFusedError(_refusal("something after or around it reads its updates"))

    __getattr__ = __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __abs__ = _refuse


def fused_adamw(
    request: FusedRequest,
    adam: Adam,
    decay: optax.GradientTransformation,
    rate: optax.GradientTransformation,
    grads: optax.Updates,
    state: tuple[optax.OptState, ...],
    params: optax.Params,
) -> tuple[Any, tuple[optax.OptState, ...]]:
    """Computes the step of `fp8_adamw`; returns new parameters in place of updates.

    Weight decay and learning rate come from optax's own transformations, called on
    numbers: `decay` maps the update 0 for the parameter 1 to the weight decay, and
    `rate` maps -1 to the learning rate. So masks, schedules and their states stay
    optax's.
    """
    zeros, ones = (jax.tree.map(lambda _, x=x: x, params) for x in (0.0, 1.0))
    decays, decay_state = decay.update(zeros, state[1], ones)
    learning_rate, rate_state = rate.update(np.float32(-1), state[2])

    salt = None if request.key is None else jax.random.bits(request.key, (), jnp.uint32)
    targets = jax.tree.map(
        lambda param, decay: Target.of(param, learning_rate, decay, salt),
        params,
        decays,
    )
    params, adam_state = adam_step(adam, grads, state[0], targets, request.stacks)
    request.has_applied = True
    return jax.tree.map(Applied, params), (adam_state, decay_state, rate_state)


def _refusal(reason: str) -> str:
    return (
        "coat.fused_update needs an optimizer that ends in coat.fp8_adamw, which then "
        f"changes parameters itself, but {reason}. Put fp8_adamw last in its chain, "
        "or take tx.update and optax.apply_updates instead"
    )
