"""The training step and the validation of a Llama on tokens."""

import dataclasses
import math
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int32

from coat_jax.layers.experts.routing import Routing
from coat_jax.models import llama
from coat_jax.models.loss import logits
from experiments.common import meshes
from experiments.training import health, speed
from experiments.training.optimizer import Optimizer
from experiments.training.settings import Settings
from experiments.training.state import EMPTY, TrainState
from experiments.training.step import ModelTrainer


class Trainer(ModelTrainer):
    """A compiled training step and validation of one recipe, for a Llama.

    Args:
      config: The config of the model, with its recipe.
      settings: The settings of the training.
      steps: The length of the training, which sets the learning rate schedule.
      optimizer: The optimizer; None means the recipe's.
      mesh: The mesh that the training is sharded over; None means the first device.

    Attributes:
      config: The config of the model.
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
        meshes.check_experts(config, mesh)
        if mesh is not None:
            config = dataclasses.replace(
                config, batch_axes=meshes.BATCH_AXES, context=meshes.context_of(mesh)
            )
        self.config = config
        super().__init__(
            settings,
            config.recipe,
            steps=steps,
            optimizer=optimizer,
            mesh=mesh,
            param_dtype=config.param_dtype,
        )
        self._evaluate = jax.jit(self.loss, compiler_options=self._options)
        self._likelihoods = jax.jit(
            self._log_likelihoods, static_argnums=3, compiler_options=self._options
        )

    def init(self, seed: int | None = None) -> TrainState:
        """Returns the state before the first step.

        `seed` is the seed of its parameters; None means the settings' seed.
        """
        return super().init(self._settings.seed if seed is None else seed)

    def new_model(self, rngs: nnx.Rngs) -> llama.Llama:
        """Returns a model with float32 parameters."""
        config = dataclasses.replace(self.config, param_dtype=jnp.float32)
        return llama.Llama(config, rngs=rngs)

    def inputs(self, batch: Int32[Array, "batch length+1"]) -> dict[str, Array]:
        """Returns the keyword arguments of losses: tokens and their next tokens."""
        return {"tokens": batch[:, :-1], "targets": batch[:, 1:]}

    def loss(
        self, params: nnx.State, histories: nnx.State, batch: Int32[Array, "..."]
    ) -> Float32[Array, ""]:
        """Computes the mean loss in nats per token."""
        model = self.merged(params, histories)
        return llama.cross_entropy(model, **self.inputs(batch))

    def training_loss(
        self, params: nnx.State, histories: nnx.State, batch: Int32[Array, "..."]
    ) -> tuple[Float32[Array, ""], Routing | None]:
        """Returns the loss with auxiliary losses of experts, and the routing."""
        model = self.merged(params, histories)
        loss, losses = llama.training_loss(model, **self.inputs(batch))
        return loss, losses.routing

    @property
    def abstract_batch(self) -> jax.ShapeDtypeStruct:
        """The shape, dtype and sharding of a batch, as an abstract array."""
        shape = self._settings.batch_size, self._settings.seq_len + 1
        where = None if self.mesh is None else meshes.batch_sharding(self.mesh)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)

    def reports(
        self, state: TrainState, batch: Int32[Array, "..."], grads: nnx.State
    ) -> health.Reports:
        """Returns reports of amax, saturation and underflow."""
        model, inputs = self.merged(state.params, state.histories), self.inputs(batch)
        where = inputs["tokens"], grads, state.opt_state, inputs.get("segment_ids")
        return health.reports(model, *where)

    def placed(
        self, batch: Int32[np.ndarray, "rows length+1"], size: int
    ) -> Int32[Array, "batch length+1"]:
        """Places the rows of a batch on the devices, and returns the array.

        `batch` has all `size` rows, or only the rows of this process.
        """
        if self.mesh is None:
            return jnp.asarray(batch)
        rows = np.arange(size)
        if len(batch) != size:
            rows = meshes.own_rows(size, self.mesh)
        return meshes.spread(batch, rows, size, self.mesh)

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the model's matmuls for a token, forward and backward."""
        return speed.flops_per_token(self.config, self._settings.seq_len)

    def evaluate(self, state: TrainState, batches: list[np.ndarray]) -> float:
        """Returns the mean loss in nats per token, over batches of equal size."""
        where = state.params, self.others(state)
        losses = [self._evaluate(*where, self.placed(b, len(b))) for b in batches]
        return math.fsum(map(float, losses)) / len(losses)

    def evaluate_in_bf16(self, state: TrainState, batches: list[np.ndarray]) -> float:
        """Returns the mean loss of a state's parameters with all matmuls in BF16.

        Trained models are often used in this way.
        """
        state = state._replace(histories=EMPTY)
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

        It is conditioned on the tokens before them.
        """
        placed = self.placed(tokens, len(tokens))
        likelihoods = self._likelihoods(state.params, self.others(state), placed, last)
        return np.asarray(likelihoods)

    def _log_likelihoods(
        self,
        params: nnx.State,
        histories: nnx.State,
        tokens: Int32[Array, "b length+1"],
        last: int,
    ) -> Float32[Array, " b"]:
        model = self.merged(params, histories)
        hidden = model.hidden(tokens[:, :-1])[:, -last:]
        scores = logits(hidden, model.head_weight())
        losses = optax.softmax_cross_entropy_with_integer_labels(
            scores, tokens[:, -last:]
        )
        return -losses.sum(axis=1)
