"""The state that a training step updates, and the metrics that it returns."""

from typing import NamedTuple

import optax
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32

from coat_jax.layers.experts.routing import Routing
from experiments.training.health import Reports

EMPTY = nnx.State({})  # The histories of a model without delayed scaling.


class TrainState(NamedTuple):
    """The training state that a step updates and a checkpoint stores.

    Attributes:
      params: The parameters.
      opt_state: The optimizer's state.
      seed: The seed of stochastic rounding; no step changes it.
      histories: The amax histories of delayed scaling; empty without it.
    """

    params: nnx.State
    opt_state: optax.OptState
    seed: Int32[Array, ""]
    histories: nnx.State = EMPTY


class Metrics(NamedTuple):
    """The metrics of a step.

    Attributes:
      loss: The mean training loss, in nats.
      grad_norm: The global norm of the gradient before clipping.
      grad_norms: The norm of each parameter's gradient, in the order of
        `ModelTrainer.parameter_names`. Steps with `release="once"` compute no norms:
        `grad_norms` is empty, and `grad_norm` is NaN.
      ok: Whether the loss is within the step's limit and the gradient's norm is finite.
      reports: The reports of `ModelTrainer.reports`; empty in steps without reports.
      routing: The loads and auxiliary losses of experts; None without experts.
    """

    loss: Float32[Array, ""]
    grad_norm: Float32[Array, ""]
    grad_norms: Float32[Array, " parameters"]
    ok: Bool[Array, ""]
    reports: Reports
    routing: Routing | None = None
