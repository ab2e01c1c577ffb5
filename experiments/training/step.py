"""The training step of a model with one recipe.

All recipes train the same model on the same data. They differ in precision:

| recipe       | linear layers | saved activations       | Adam's moments |
|--------------|---------------|-------------------------|----------------|
| `bf16`       | BF16          | as autodiff saves them  | float32        |
| `te`         | FP8           | FP8 and BF16            | float32        |
| `coat`       | FP8           | FP8, BF16 in attention  | FP8, expanded  |
| `coat_max`   | FP8           | FP8                     | FP8, expanded  |
| `coat_block` | FP8, blocks   | FP8, BF16 in attention  | FP8, expanded  |
| `coat_bf16`  | BF16          | FP8, BF16 in attention  | FP8, expanded  |

In `coat_block`, the operands of matmuls have a scale per block. "Expanded" moments are
stored with the paper's dynamic range expansion.
"""

import abc
import math
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32

import coat_jax as coat
from coat_jax.layers.experts.routing import Routing
from coat_jax.layers.recipes import RecipeName
from coat_jax.quantization.delayed import OverwriteWithGradient
from coat_jax.remat.report import peak_bytes
from experiments.common import meshes
from experiments.common.timing import OPTIONS
from experiments.training.gradients import accumulated, microbatches
from experiments.training.health import Reports
from experiments.training.optimizer import Optimizer, learning_rate
from experiments.training.state import EMPTY, Metrics, TrainState


class ModelTrainer(abc.ABC):
    """A compiled training step of one recipe, for any model.

    Args:
      settings: `OptimizerSettings` that also have `accumulate`, `rounding` and
        `bad_step`.
      recipe: The recipe.
      steps: The length of the training, which sets the learning rate schedule.
      optimizer: The optimizer; None means the recipe's.
      mesh: The mesh that the training is sharded over; None means the first device.
      param_dtype: The dtype in which parameters are stored.

    Attributes:
      parameters: The number of parameters of the model.
      parameter_names: The path of each array of parameters.
      mesh: The mesh, or None.
    """

    def __init__(
        self,
        settings: Any,
        recipe: RecipeName,
        *,
        steps: int,
        optimizer: Optimizer | None = None,
        mesh: Mesh | None = None,
        param_dtype: DTypeLike = jnp.float32,
    ) -> None:
        self._settings = settings
        self.mesh = mesh
        self._param_dtype = param_dtype
        self._optimizer = optimizer or Optimizer.of(recipe)
        self._schedule = learning_rate(settings, steps)
        self._release = getattr(settings, "release", "no")
        self._tx = self._optimizer.transformation(
            settings, steps, clips=self._release == "no"
        )
        model = nnx.eval_shape(lambda: self.new_model(nnx.Rngs(0)))
        self._graphdef, params, _, self._constant = split(model)
        leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params))
        self.parameters = sum(leaf.size for _, leaf in leaves)
        self.parameter_names = [
            jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves
        ]
        self._options = OPTIONS if jax.default_backend() == "gpu" else None
        placed = None if mesh is None else self._shardings
        self._compiled_init = jax.jit(self._init, out_shardings=placed)

    @abc.abstractmethod
    def new_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Returns a model with float32 parameters."""

    @abc.abstractmethod
    def loss(
        self, params: nnx.State, histories: nnx.State, batch: Any
    ) -> Float32[Array, ""]:
        """Computes the loss of a batch."""

    def training_loss(
        self, params: nnx.State, histories: nnx.State, batch: Any
    ) -> tuple[Float32[Array, ""], Routing | None]:
        """Computes the loss to train with; returns it and the routing of experts.

        By default this is `loss` and None.
        """
        return self.loss(params, histories, batch), None

    @property
    @abc.abstractmethod
    def abstract_batch(self) -> Any:
        """The shapes, dtypes and shardings of a batch, as abstract arrays."""

    def reports(self, state: TrainState, batch: Any, grads: nnx.State) -> Reports:
        """Returns reports of amax, saturation and underflow; by default no reports."""
        del state, batch, grads
        return {}

    def placed(self, batch: Any, size: int) -> Any:
        """Places the rows of a batch on the devices, and returns their arrays.

        `batch` has all `size` rows, or only the rows of this process.
        """
        del size
        return jax.tree.map(jnp.asarray, batch)

    def merged(self, params: nnx.State, others: nnx.State = EMPTY) -> Any:
        """Returns the model with the given parameters and other variables."""
        return nnx.merge(self._graphdef, params, others)

    @cached_property
    def constants(self) -> nnx.State:
        """The variables that no step changes, such as frozen weights.

        They are not part of a `TrainState`, so checkpoints do not store them.
        """
        if not jax.tree.leaves(self._constant):
            return EMPTY

        def constants() -> nnx.State:
            return split(self.new_model(nnx.Rngs(0)))[3]

        return jax.jit(constants, out_shardings=meshes.whole(self.mesh))()

    def abstract_constants(self) -> nnx.State:
        """Returns the shapes, dtypes and shardings of the constants."""
        where = meshes.whole(self.mesh)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            self._constant,
        )

    def others(self, state: TrainState) -> nnx.State:
        """Returns all variables of the model except its parameters."""
        return nnx.merge_state(state.histories, self.constants)

    def shares(self, batch: Any, count: int) -> Float32[Array, " count"]:
        """Returns the share of each of `count` microbatches in the batch's loss."""
        del batch
        return jnp.full(count, 1 / count, jnp.float32)

    @cached_property
    def compiled(self) -> tuple[jax.stages.Compiled, float]:
        """The compiled step, and the compile time in seconds."""
        started = time.perf_counter()
        compiled = self._compiled_step(reporting=False)
        return compiled, time.perf_counter() - started

    def _compiled_step(self, reporting: bool) -> jax.stages.Compiled:
        placed = None
        if self.mesh is not None:
            placed = self._shardings, meshes.whole(self.mesh)
        step = partial(self._step, reporting=reporting)
        step = jax.jit(step, donate_argnums=0, out_shardings=placed)
        limit = jax.ShapeDtypeStruct((), jnp.float32)
        arguments = self.abstract_state(), self.abstract_batch, limit
        lowered = step.lower(*arguments, self.abstract_constants())
        return lowered.compile(self._options)

    def init(self, seed: int) -> TrainState:
        """Returns the state before the first step, which only depends on the seed.

        BF16 parameters are rounded from float32 parameters.
        """
        return self._compiled_init(seed)

    def abstract_state(self) -> TrainState:
        """Returns the shapes, dtypes and shardings of a state."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=sharding
            ),
            jax.eval_shape(self._init, 0),
            self._shardings,
        )

    def step(
        self, state: TrainState, batch: Any, limit: float = math.inf
    ) -> tuple[TrainState, Metrics]:
        """Runs one optimizer step; `state` is donated.

        A step is `ok` if its loss is at most `limit` and its gradient's norm is finite.
        With `bad_step="skip"` in the settings, a step that is not `ok` returns the
        state unchanged.

        Args:
          state: The state before the step.
          batch: The batch to train on. If there are several processes, each passes only
            the rows on its devices.
          limit: The largest loss of a step that is `ok`, in nats.

        Returns:
          The state after the step, and its metrics.
        """
        return self._run(self.compiled[0], state, batch, limit)

    def _run(
        self, compiled: jax.stages.Compiled, state: TrainState, batch: Any, limit: float
    ) -> tuple[TrainState, Metrics]:
        batch = self.placed(batch, self._settings.batch_size)
        return compiled(state, batch, np.float32(limit), self.constants)

    @cached_property
    def reporting_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """A function like `step`, with reports in the metrics that it returns.

        The reports are of amax, saturation and underflow. The function is a separate
        program, so that reports add nothing to the cost of other steps.
        """
        compiled = self._compiled_step(reporting=True)

        def run(state, batch, limit=math.inf):
            return self._run(compiled, state, batch, limit)

        return run

    def moment_rows(self, state: TrainState) -> list[dict[str, Any]]:
        """Returns the rows of `coat.moment_report`; empty for float32 moments."""
        if not self._optimizer.fused:
            return []
        return coat.moment_report(state.opt_state).rows()

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of step `step`, counted from 1."""
        return float(f"{self._schedule(step - 1):.6g}")

    def saved_activation_bytes(self) -> int:
        """Returns the bytes that the forward pass saves for the backward pass.

        They are counted for one microbatch, on all devices together.
        """
        state = self.abstract_state()
        parts = self._settings.accumulate
        batch = jax.tree.map(
            lambda x: x.update(shape=(x.shape[0] // parts, *x.shape[1:])),
            self.abstract_batch,
        )
        others = nnx.merge_state(state.histories, self.abstract_constants())
        report = coat.residual_report(self.loss, state.params, others, batch)
        return report.nbytes

    def step_bytes(self) -> int:
        """Returns the peak memory of the compiled step on a device, in bytes.

        Arguments of the step are included.
        """
        return peak_bytes(self.compiled[0])

    @cached_property
    def _shardings(self) -> TrainState:
        """The shardings of the arrays of a state."""
        state = jax.eval_shape(self._init, 0)
        params, opt_state, histories = meshes.state_shardings(
            self._tx, state.params, state.opt_state, state.histories, self.mesh
        )
        return TrainState(params, opt_state, meshes.whole(self.mesh), histories)

    def _init(self, seed: Int32[Array, ""] | int) -> TrainState:
        model = self.new_model(nnx.Rngs(jax.random.key(seed)))
        _, params, histories, _ = split(model)
        params = jax.tree.map(lambda p: p.astype(self._param_dtype), params)
        return TrainState(params, self._tx.init(params), jnp.int32(seed), histories)

    def _step(
        self,
        state: TrainState,
        batch: Any,
        limit: Float32[Array, ""],
        constants: nnx.State = EMPTY,
        reporting: bool = False,
    ) -> tuple[TrainState, Metrics]:
        if self._release != "no":
            return self._released(state, batch, limit, constants)
        (loss, routing), grads, histories = self._gradients(state, batch, constants)
        squares = [optax.tree.norm(g, squared=True) for g in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares))
        reports = self._reported(state, batch, grads, constants) if reporting else {}
        ok = (loss <= limit) & jnp.isfinite(norm)  # No comparison with NaN is true.
        if self._settings.bad_step == "skip":
            state = jax.lax.cond(
                ok, self.updated, lambda state, *_: state, state, grads, histories
            )
        else:
            state = self.updated(state, grads, histories)
        norms = jnp.sqrt(jnp.stack(squares))
        return state, Metrics(loss, norm, norms, ok, reports, routing)

    def _reported(
        self, state: TrainState, batch: Any, grads: nnx.State, constants: nnx.State
    ) -> Reports:
        """Returns `reports` of a state with the constants among its histories."""
        others = nnx.merge_state(state.histories, constants)
        return self.reports(state._replace(histories=others), batch, grads)

    def _released(
        self,
        state: TrainState,
        batch: Any,
        limit: Float32[Array, ""],
        constants: nnx.State,
    ) -> tuple[TrainState, Metrics]:
        """Runs a step with the optimizer inside the backward pass."""
        others = nnx.merge_state(state.histories, constants)
        clips, skips = self._release == "clip", self._settings.bad_step == "skip"
        step = coat.value_and_update(
            lambda params, batch: self.training_loss(params, others, batch),
            self._tx,
            has_aux=True,
            max_norm=self._settings.clip_norm if clips else None,
            return_norms=clips,
            skip_not_finite=skips,
        )
        arguments = state.params, state.opt_state, batch
        options = {"key": self._key(state), "max_loss": limit if skips else None}
        (loss, routing), params, opt_state, *norms = step(*arguments, **options)
        grad_norms, norm, ok = jnp.zeros(0), jnp.float32(jnp.nan), loss <= limit
        if clips:
            grad_norms = jnp.stack(jax.tree.leaves(norms))
            norm = optax.tree.norm(grad_norms)
            ok = ok & jnp.isfinite(norm)
        state = TrainState(params, opt_state, state.seed, state.histories)
        ok = ok & jnp.isfinite(loss)
        return state, Metrics(loss, norm, grad_norms, ok, {}, routing)

    def _key(self, state: TrainState) -> Array | None:
        """Returns the key of stochastic rounding in `coat.fp8_adamw`, or None."""
        stochastic = self._optimizer.fused and self._settings.rounding == "stochastic"
        return jax.random.key(state.seed) if stochastic else None

    def _gradients(
        self, state: TrainState, batch: Any, constants: nnx.State
    ) -> tuple[tuple[Float32[Array, ""], Routing | None], nnx.State, nnx.State]:
        """Returns (loss, routing), the gradients of the loss, and new histories."""

        def loss_of(params, histories, batch):
            others = nnx.merge_state(histories, constants)
            return self.training_loss(params, others, batch)

        gradients = jax.value_and_grad(loss_of, (0, 1), has_aux=True)
        count = self._settings.accumulate
        if count == 1:
            loss, (grads, histories) = gradients(state.params, state.histories, batch)
            return loss, grads, histories
        placed = None if self.mesh is None else self._shardings.params
        parts = microbatches(batch, count)
        arguments = state.params, state.histories, parts, self.shares(parts, count)
        return accumulated(gradients, *arguments, placed=placed)

    def updated(
        self, state: TrainState, grads: nnx.State, histories: nnx.State
    ) -> TrainState:
        """Returns the state after an update by the optimizer."""
        if self._optimizer.fused:
            params, opt_state = coat.fused_update(
                self._tx, grads, state.opt_state, state.params, key=self._key(state)
            )
        else:
            updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.seed, histories)


def split(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State, nnx.State]:
    """Returns a model's structure, parameters, histories and constants."""
    return nnx.split(model, nnx.Param, OverwriteWithGradient, ...)
