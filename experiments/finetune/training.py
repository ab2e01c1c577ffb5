"""The training step of a fine-tuning, with a loss of answers alone."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float32, Int32

from coat_jax.models import llama
from experiments.common.trained import structure
from experiments.training.settings import Settings
from experiments.training.step import TrainState
from experiments.training.trainer import Trainer
from pallas_kernels.rounding import stochastic_bfloat16


class AnswerTrainer(Trainer):
    """A trainer on packed conversations, `PackedWindows`, that starts from a base.

    All recipes round BF16 parameters in the same way. `optax.adamw` alone would round
    them to nearest.

    Args:
      config: Config of the model, with its recipe.
      settings: Settings of the training.
      steps: Length of the training, which sets the learning rate schedule.
      base: The parameters to start from; None means random ones.
    """

    def __init__(
        self,
        config: llama.LlamaConfig,
        settings: Settings,
        *,
        steps: int,
        base: nnx.State | None,
    ) -> None:
        super().__init__(config, settings, steps=steps)
        self._base = base

    def init(self, seed: int | None = None) -> TrainState:
        """Returns the state before the first step, with the base's parameters."""
        state = super().init(seed)
        if self._base is None:
            return state
        dtype = self.config.param_dtype
        params = jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), self._base)
        return state._replace(params=params)

    def model(self, params: nnx.State) -> llama.Llama:
        """Returns the model that generates, without any recipe's FP8.

        Models of all recipes then have one structure, so generation compiles once.
        """
        plain = {"recipe": "bf16", "scaling": "just_in_time"}
        return nnx.merge(structure(dataclasses.replace(self.config, **plain)), params)

    @property
    def abstract_batch(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of tokens, segments and answers."""
        shape = self._settings.batch_size, 3, self._settings.seq_len + 1
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def loss(
        self,
        params: nnx.State,
        histories: nnx.State,
        batch: Int32[Array, "batch 3 length+1"],
    ) -> Float32[Array, ""]:
        """Computes the mean loss of the answers' tokens."""
        model = self.merged(params, histories)
        tokens, segment_ids, answers = batch[:, 0], batch[:, 1], batch[:, 2]
        return llama.cross_entropy(
            model,
            tokens[:, :-1],
            tokens[:, 1:],
            weights=answers[:, 1:],
            segment_ids=segment_ids[:, :-1],
        )

    def updated(
        self, state: TrainState, grads: nnx.State, histories: nnx.State
    ) -> TrainState:
        """Returns the state after an update, with parameters rounded at random."""
        if self._optimizer.fused or self._settings.rounding == "nearest":
            return super().updated(state, grads, histories)
        updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
        # The count is the number of steps done, so a resumed run has the same random
        # bits.
        count = optax.tree.get_all_with_path(opt_state, "count")[0][1]
        key = jax.random.fold_in(jax.random.key(state.seed), count)
        params = rounded_sum(state.params, updates, key)
        return TrainState(params, opt_state, state.seed, histories)


def rounded_sum(params: nnx.State, updates: nnx.State, key: Array) -> nnx.State:
    """Returns BF16 parameters plus float32 updates, rounded stochastically."""
    leaves, structure_of = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    summed = [
        stochastic_bfloat16(
            param.astype(jnp.float32) + update, jax.random.bits(param_key, param.shape)
        )
        for param, update, param_key in zip(
            leaves, jax.tree.leaves(updates), keys, strict=True
        )
    ]
    return jax.tree.unflatten(structure_of, summed)
