"""The training step of one recipe.

All recipes train the same model on the same data. They differ in precision:

| recipe       | linear layers | saved for backward      | Adam's moments |
|--------------|---------------|-------------------------|----------------|
| `bf16`       | BF16          | as autodiff saves them  | float32        |
| `te`         | FP8           | FP8 beside BF16         | float32        |
| `coat`       | FP8           | FP8, BF16 in attention  | FP8, expanded  |
| `coat_max`   | FP8           | FP8                     | FP8, expanded  |
| `coat_block` | FP8, blocks   | FP8, BF16 in attention  | FP8, expanded  |
"""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32

import coat_jax as coat
from coat_jax.models import llama
from coat_jax.models.loss import logits
from coat_jax.remat.report import peak_bytes
from experiments.common import meshes
from experiments.common.timing import OPTIONS
from experiments.training import health
from experiments.training.optimizer import Optimizer, learning_rate
from experiments.training.settings import Settings


class TrainState(NamedTuple):
    """The training state that a step updates and a checkpoint stores.

    Attributes:
      params: The parameters.
      opt_state: The optimizer's state.
      seed: Seed of stochastic rounding; no step changes it.
      histories: Amax histories of delayed scaling; empty without it.
    """

    params: nnx.State
    opt_state: optax.OptState
    seed: Int32[Array, ""]
    histories: nnx.State = nnx.State({})


class Metrics(NamedTuple):
    """Metrics of a step.

    Attributes:
      loss: Mean training loss, in nats per token.
      grad_norm: Global norm of the gradient before clipping.
      grad_norms: Norm of each parameter's gradient, in the order of
        `Trainer.parameter_names`.
      ok: Whether the loss is within the step's limit and the gradient's norm finite.
      reports: The reports of `health.reports`, if the step makes them.
    """

    loss: Float32[Array, ""]
    grad_norm: Float32[Array, ""]
    grad_norms: Float32[Array, " parameters"]
    ok: Bool[Array, ""]
    reports: health.Reports


class Trainer:
    """A compiled training step and validation of one recipe.

    Args:
      config: Config of the model, with its recipe.
      settings: Settings of the training.
      steps: Length of the training, which sets the learning rate schedule.
      optimizer: The optimizer; None means the recipe's.
      mesh: The mesh that the training is spread over; None means the first device.

    Attributes:
      parameters: Number of parameters of the model.
      parameter_names: The path of each array of parameters.
      config: Config of the model.
      mesh: The mesh, or None.
    """

    def __init__(
        self,
        config: llama.LlamaConfig,
        settings: Settings,
        *,
        steps: int,
        optimizer: Optimizer | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        if mesh is not None:
            config = dataclasses.replace(config, batch_axes=meshes.BATCH_AXES)
        self.config = config
        self._settings = settings
        self.mesh = mesh
        self._optimizer = optimizer or Optimizer.of(config.recipe)
        self._schedule = learning_rate(settings, steps)
        self._tx = self._optimizer.transformation(settings, steps)
        model = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
        self._graphdef, params, _ = nnx.split(model, nnx.Param, ...)
        leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params))
        self.parameters = sum(leaf.size for _, leaf in leaves)
        self.parameter_names = [
            jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves
        ]
        self._options = OPTIONS if jax.default_backend() == "gpu" else None
        self._evaluate = jax.jit(self._loss, compiler_options=self._options)
        self._likelihoods = jax.jit(
            self._log_likelihoods, static_argnums=3, compiler_options=self._options
        )
        placed = None if mesh is None else self._shardings
        self._compiled_init = jax.jit(self._init, out_shardings=placed)

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
        lowered = step.lower(self.abstract_state(), self._abstract_batch, limit)
        return lowered.compile(self._options)

    def init(self, seed: int | None = None) -> TrainState:
        """Returns the state before the first step.

        The parameters depend on the seed alone, by default the settings' seed. BF16
        parameters are the float32 ones, rounded.
        """
        return self._compiled_init(self._settings.seed if seed is None else seed)

    def abstract_state(self) -> TrainState:
        """Returns the shapes, dtypes and placement of a state."""
        return jax.tree.map(
            lambda x, there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there),
            jax.eval_shape(self._init, 0),
            self._shardings,
        )

    def step(
        self,
        state: TrainState,
        batch: Int32[np.ndarray, "rows length+1"],
        limit: float = math.inf,
    ) -> tuple[TrainState, Metrics]:
        """Runs one optimizer step; `state` is donated.

        With `bad_step="skip"` in the settings, a step that is not `ok` returns the
        state as it was.

        Args:
          state: The state before the step.
          batch: The tokens to train on. A process has only those rows that are on its
            devices.
          limit: The largest loss of a step that is `ok`.
        """
        return self._run(self.compiled[0], state, batch, limit)

    def _run(
        self,
        compiled: jax.stages.Compiled,
        state: TrainState,
        batch: Int32[np.ndarray, "rows length+1"],
        limit: float,
    ) -> tuple[TrainState, Metrics]:
        batch = self._placed(batch, self._settings.batch_size)
        return compiled(state, batch, np.float32(limit))

    @cached_property
    def reporting_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """A `step` whose metrics have reports of amax, saturation and underflow.

        It is a program of its own, so that other steps cost what they cost without
        reports.
        """
        compiled = self._compiled_step(reporting=True)

        def run(state, batch, limit=math.inf):
            return self._run(compiled, state, batch, limit)

        return run

    def evaluate(self, state: TrainState, batches: list[np.ndarray]) -> float:
        """Returns the mean loss in nats per token, over batches of one size."""
        where = state.params, state.histories
        losses = [self._evaluate(*where, self._placed(b, len(b))) for b in batches]
        return math.fsum(map(float, losses)) / len(losses)

    def evaluate_in_bf16(self, state: TrainState, batches: list[np.ndarray]) -> float:
        """Returns the loss of the same parameters where all matmuls are BF16.

        So models are often used once they are trained.
        """
        state = state._replace(histories=nnx.State({}))
        return self._in_bf16.evaluate(state, batches)

    @cached_property
    def _in_bf16(self) -> "Trainer":
        if self.config.recipe == "bf16":
            return self
        config = dataclasses.replace(self.config, recipe="bf16", scaling="just_in_time")
        return Trainer(config, self._settings, steps=1, mesh=self.mesh)

    def log_likelihoods(
        self, state: TrainState, tokens: Int32[np.ndarray, "b length+1"], last: int
    ) -> Float32[np.ndarray, " b"]:
        """Returns the log-likelihood of each sequence's `last` tokens, in nats.

        Those before are given.
        """
        placed = self._placed(tokens, len(tokens))
        found = self._likelihoods(state.params, state.histories, placed, last)
        return np.asarray(found)

    def moment_rows(self, state: TrainState) -> list[dict[str, Any]]:
        """Returns the rows of `coat.moment_report`; none if the moments are float32."""
        if not self._optimizer.fused:
            return []
        return coat.moment_report(state.opt_state).rows()

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of step `step`, counted from 1."""
        return float(f"{self._schedule(step - 1):.6g}")

    def saved_activation_bytes(self) -> int:
        """Returns the bytes that forward saves for backward, on all devices together.

        They are those of one microbatch.
        """
        state = self.abstract_state()
        batch, parts = self._abstract_batch, self._settings.accumulate
        batch = batch.update(shape=(batch.shape[0] // parts, *batch.shape[1:]))
        found = coat.residual_report(self._loss, state.params, state.histories, batch)
        return found.nbytes

    def step_bytes(self) -> int:
        """Returns the memory of the compiled step on a device, with its arguments."""
        return peak_bytes(self.compiled[0])

    @property
    def _abstract_batch(self) -> jax.ShapeDtypeStruct:
        shape = self._settings.batch_size, self._settings.seq_len + 1
        where = None if self.mesh is None else meshes.batch_sharding(self.mesh)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)

    @cached_property
    def _shardings(self) -> TrainState:
        """The sharding of each array of the state."""
        state = jax.eval_shape(self._init, 0)
        params, opt_state, histories = meshes.state_shardings(
            self._tx, state.params, state.opt_state, state.histories, self.mesh
        )
        return TrainState(params, opt_state, meshes.whole(self.mesh), histories)

    def _placed(
        self, batch: Int32[np.ndarray, "rows length+1"], size: int
    ) -> Int32[Array, "batch length+1"]:
        """Returns a batch of `size` rows, all of which or this process's are given."""
        if self.mesh is None:
            return jnp.asarray(batch)
        rows = np.arange(size)
        if len(batch) != size:
            rows = meshes.own_rows(size, self.mesh)
        return meshes.spread(batch, rows, size, self.mesh)

    def _init(self, seed: Int32[Array, ""] | int) -> TrainState:
        config = dataclasses.replace(self.config, param_dtype=jnp.float32)
        rngs = nnx.Rngs(jax.random.key(seed))
        model = llama.Llama(config, rngs=rngs)
        _, params, histories = nnx.split(model, nnx.Param, ...)
        dtype = self.config.param_dtype
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        return TrainState(params, self._tx.init(params), jnp.int32(seed), histories)

    def _loss(
        self,
        params: nnx.State,
        histories: nnx.State,
        batch: Int32[Array, "batch length+1"],
    ):
        model = nnx.merge(self._graphdef, params, histories)
        return llama.cross_entropy(model, batch[:, :-1], batch[:, 1:])

    def _log_likelihoods(
        self,
        params: nnx.State,
        histories: nnx.State,
        tokens: Int32[Array, "b length+1"],
        last: int,
    ) -> Float32[Array, " b"]:
        model = nnx.merge(self._graphdef, params, histories)
        hidden = model.hidden(tokens[:, :-1])[:, -last:]
        scores = logits(hidden, model.head_weight())
        losses = optax.softmax_cross_entropy_with_integer_labels(
            scores, tokens[:, -last:]
        )
        return -losses.sum(axis=1)

    def _step(
        self,
        state: TrainState,
        batch: Int32[Array, "batch length+1"],
        limit: Float32[Array, ""],
        reporting: bool = False,
    ) -> tuple[TrainState, Metrics]:
        loss, grads, histories = self._gradients(state, batch)
        squares = [optax.tree.norm(g, squared=True) for g in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares))
        reports = {}
        if reporting:
            model = nnx.merge(self._graphdef, state.params, state.histories)
            reports = health.reports(model, batch[:, :-1], grads, state.opt_state)
        ok = (loss <= limit) & jnp.isfinite(norm)  # No comparison with NaN is true.
        if self._settings.bad_step == "skip":
            state = jax.lax.cond(
                ok, self._updated, lambda state, *_: state, state, grads, histories
            )
        else:
            state = self._updated(state, grads, histories)
        return state, Metrics(loss, norm, jnp.sqrt(jnp.stack(squares)), ok, reports)

    def _gradients(
        self, state: TrainState, batch: Int32[Array, "batch length+1"]
    ) -> tuple[Float32[Array, ""], nnx.State, nnx.State]:
        """Computes the loss, its gradients and the next histories.

        With several microbatches the sums of gradients are float32. Each device's rows
        are in all microbatches, so that no row moves.
        """
        count = self._settings.accumulate
        gradients = jax.value_and_grad(self._loss, (0, 1))
        if count == 1:
            loss, (grads, histories) = gradients(state.params, state.histories, batch)
            return loss, grads, histories

        def add(carry, batch):
            total, sums, histories = carry
            loss, (grads, histories) = gradients(state.params, histories, batch)
            sums = jax.tree.map(
                lambda s, g: s + g.astype(jnp.float32) / count, sums, grads
            )
            return (total + loss / count, in_shards(sums), histories), None

        def in_shards(sums):
            if self.mesh is None:
                return sums
            return jax.lax.with_sharding_constraint(sums, self._shardings.params)

        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), state.params)
        parts = batch.reshape(-1, count, batch.shape[1]).swapaxes(0, 1)
        (loss, sums, histories), _ = jax.lax.scan(
            add, (jnp.float32(0), in_shards(zeros), state.histories), parts
        )
        grads = jax.tree.map(lambda s, p: s.astype(p.dtype), sums, state.params)
        return loss, grads, histories

    def _updated(
        self, state: TrainState, grads: nnx.State, histories: nnx.State
    ) -> TrainState:
        if self._optimizer.fused:
            stochastic = self._settings.rounding == "stochastic"
            key = jax.random.key(state.seed) if stochastic else None
            params, opt_state = coat.fused_update(
                self._tx, grads, state.opt_state, state.params, key=key
            )
        else:
            updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.seed, histories)
