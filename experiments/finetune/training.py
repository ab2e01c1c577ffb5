"""Trainers of fine-tuning: they start from a base and train all weights or adapters."""

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int32

from coat_jax.models import llama, lora
from experiments.common import meshes
from experiments.common.trained import structure
from experiments.training.optimizer import Optimizer
from experiments.training.settings import Recipe, Settings
from experiments.training.state import TrainState
from experiments.training.step import split
from experiments.training.trainer import Trainer
from pallas_kernels.rounding import stochastic_bfloat16

# A function of a mesh, or None for the default device, and a dtype that returns a base
# with the recipe "bf16".
LoadModel = Callable[[Mesh | None, Any], llama.Llama]

# These changes turn a model's config into one for a single device, without FP8.
_PLAIN: dict[str, Any] = {
    "recipe": "bf16",
    "scaling": "just_in_time",
    "batch_axes": None,
    "context": None,
}


class AnswerTrainer(Trainer):
    """A trainer on packed conversations, `PackedWindows`, that starts from a base.

    All recipes round BF16 parameters according to `settings.rounding`. `optax.adamw`
    alone would round to nearest.

    Args:
      config: The config of the model, with its recipe.
      settings: The settings of the training.
      steps: The length of the training, which sets the learning rate schedule.
      base: A function that returns the model to start from; None means random
        parameters.
      mesh: The mesh that the training is sharded over; None means the first device.
      optimizer: The optimizer; None means the recipe's.
    """

    def __init__(
        self,
        config: llama.LlamaConfig,
        settings: Settings,
        *,
        steps: int,
        base: LoadModel | None,
        mesh: Mesh | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(config, settings, steps=steps, mesh=mesh, optimizer=optimizer)
        self._base = base

    def init(self, seed: int | None = None) -> TrainState:
        """Returns the state before the first step, with the base's parameters if any.

        `seed` is the seed of the state; None means the settings' seed.
        """
        if self._base is None:
            return super().init(seed)
        params = nnx.state(self._base(self.mesh, self.config.param_dtype), nnx.Param)
        params = jax.device_put(params, self._shardings.params)
        seed = self._settings.seed if seed is None else seed

        def started(params: nnx.State) -> TrainState:
            # The random parameters are not used, so XLA removes their computation.
            state = self._init(seed)
            return state._replace(params=params, opt_state=self._tx.init(params))

        placed = None if self.mesh is None else self._shardings
        return jax.jit(started, donate_argnums=0, out_shardings=placed)(params)

    def model(self, state: TrainState) -> llama.Llama:
        """Returns the model that generates answers, with the recipe "bf16".

        Models of all recipes then have one structure, so generation compiles once.
        """
        graph = structure(dataclasses.replace(self.config, **_PLAIN))
        return nnx.merge(graph, self.replicated(state.params), self.constants)

    def replicated(self, params: nnx.State) -> nnx.State:
        """Returns `params`, replicated over devices if there are several processes."""
        if jax.process_count() == 1:
            return params
        return jax.jit(lambda x: x, out_shardings=meshes.whole(self.mesh))(params)

    @property
    def abstract_batch(self) -> jax.ShapeDtypeStruct:
        """The abstract batch [rows, 3, length + 1]: tokens, segments and answers."""
        rows = super().abstract_batch
        return rows.update(shape=(rows.shape[0], 3, rows.shape[1]))

    def inputs(self, batch: Int32[Array, "batch 3 length+1"]) -> dict[str, Array]:
        """Returns the keyword arguments of losses for a batch.

        The weights are 1 for tokens that the loss counts, else 0.
        """
        tokens, segment_ids, answers = batch[:, 0], batch[:, 1], batch[:, 2]
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": answers[:, 1:],
            "segment_ids": segment_ids[:, :-1],
        }

    def shares(
        self, batch: Int32[Array, "count batch 3 length+1"], count: int
    ) -> Float32[Array, " count"]:
        """Returns the fractions of the batch's counted tokens in each microbatch."""
        answers = batch[:, :, 2, 1:].sum(axis=(1, 2)).astype(jnp.float32)
        return answers / jnp.maximum(answers.sum(), 1)

    def evaluate(self, state: TrainState, batches: list[np.ndarray]) -> float:
        """Returns the mean loss of the tokens that count in all batches, in nats."""
        where = state.params, self.others(state)
        losses, counts = [], []
        for batch in batches:
            loss = self._evaluate(*where, self.placed(batch, len(batch)))
            counts.append(int(batch[:, 2, 1:].sum()))
            losses.append(float(loss) * counts[-1])
        return math.fsum(losses) / max(sum(counts), 1)

    @cached_property
    def _in_bf16(self) -> "AnswerTrainer":
        if self.config.recipe == "bf16":
            return self
        config = dataclasses.replace(self.config, recipe="bf16", scaling="just_in_time")
        options = {"base": None, "mesh": self.mesh}
        return AnswerTrainer(config, self._settings, steps=1, **options)

    def updated(
        self, state: TrainState, grads: nnx.State, histories: nnx.State
    ) -> TrainState:
        """Returns the state after an update, rounded as `settings.rounding` says."""
        if self._optimizer.fused or self._settings.rounding == "nearest":
            return super().updated(state, grads, histories)
        updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
        # The count is the number of steps done, so a resumed run has the same random
        # bits.
        count = optax.tree.get_all_with_path(opt_state, "count")[0][1]
        key = jax.random.fold_in(jax.random.key(state.seed), count)
        params = rounded_sum(state.params, updates, key)
        return TrainState(params, opt_state, state.seed, histories)

    def exported(self, state: TrainState) -> llama.Llama:
        """Returns the trained model with the recipe "bf16", to be saved."""
        plain = dataclasses.replace(self.config, **_PLAIN)
        return nnx.merge(structure(plain), state.params, self.constants)


class AdapterTrainer(AnswerTrainer):
    """A trainer of LoRA adapters over a frozen base, which is FP8 in FP8 recipes.

    Args:
      config: The config of the model, with its recipe and the dtype of frozen weights.
      settings: The settings of the training, with the rank and the factor of adapters.
      steps: The length of the training, which sets the learning rate schedule.
      base: A function that returns the model to adapt.
      mesh: The mesh that the training is sharded over; None means the first device.
        Only its axis "data" may have more than one device.

    Raises:
      ValueError: If another axis of the mesh has more than one device, or the recipe
        does not support adapters.
    """

    def __init__(
        self,
        config: llama.LlamaConfig,
        settings: Any,
        *,
        steps: int,
        base: LoadModel,
        mesh: Mesh | None = None,
    ) -> None:
        if mesh is not None and mesh.shape["data"] != mesh.size:
            raise ValueError(
                "adapters and frozen weights are whole on each device, so that --lora "
                f"takes --mesh data=N alone, got {meshes.name_of(mesh)}"
            )
        self._recipe: Recipe = config.recipe
        self._lora = settings
        self._frozen_dtype = config.param_dtype
        self._frozen_base = base
        # Layers get the recipe with their adapters; the rest of the model is BF16.
        config = dataclasses.replace(
            config, recipe="bf16", scaling="just_in_time", param_dtype=jnp.float32
        )
        super().__init__(
            config,
            settings,
            steps=steps,
            base=None,
            mesh=mesh,
            optimizer=Optimizer.of(self._recipe),
        )

    def new_model(self, rngs: nnx.Rngs) -> llama.Llama:
        """Returns a model with adapters over random weights."""
        config = dataclasses.replace(self.config, param_dtype=self._frozen_dtype)
        return self._adapted(llama.Llama(config, rngs=rngs), rngs)

    def _adapted(self, model: llama.Llama, rngs: nnx.Rngs) -> llama.Llama:
        options = {"rank": self._lora.lora, "alpha": self._lora.lora_alpha}
        lora.adapt(model, recipe=self._recipe, rngs=rngs, **options)
        return model

    @cached_property
    def constants(self) -> nnx.State:
        """The frozen weights, which FP8 recipes store in FP8, on all devices.

        They are loaded and quantized in the host's memory, then copied to the devices.
        """
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            model = self._adapted(
                self._frozen_base(None, self._frozen_dtype), nnx.Rngs(0)
            )
            constants = split(model)[3]
        return jax.device_put(constants, meshes.whole(self.mesh))

    def model(self, state: TrainState) -> llama.Llama:
        """Returns the model that generates answers: frozen weights with adapters."""
        return self.merged(self.replicated(state.params), self.constants)

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of a token, where frozen weights have no gradients."""
        return super().flops_per_token * 2 // 3

    def exported(self, state: TrainState) -> llama.Llama:
        """Returns a model with the adapters merged into the weights, on the CPU."""
        host = jax.local_devices(backend="cpu")[0]
        with jax.default_device(host):
            arrays = jax.device_put((state.params, self.constants), host)
            return lora.merged(self.merged(*arrays), self._frozen_dtype)


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
