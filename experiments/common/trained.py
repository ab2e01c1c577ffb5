"""A trained model, and unseen text on which errors are measured."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Int32

from coat_jax.layers.recipes import RecipeName as Recipe
from coat_jax.models import llama


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A model after its last training step.

    Attributes:
      config: The model's shape, and the recipe it was trained with.
      params: The model's parameters.
      batches: Batches of the validation text.
      loss: The validation loss on `batches`, in nats per token.
    """

    config: llama.LlamaConfig
    params: nnx.State
    batches: Sequence[Int32[np.ndarray, "batch length+1"]]
    loss: float

    def config_as(self, recipe: Recipe, dtype: DTypeLike) -> llama.LlamaConfig:
        """Returns `config` with another recipe and dtype, and float32 parameters."""
        options = {"recipe": recipe, "dtype": dtype, "param_dtype": jnp.float32}
        return dataclasses.replace(self.config, **options)

    def wide_params(self) -> nnx.State:
        """Returns the parameters in float32."""
        return jax.tree.map(lambda p: p.astype(jnp.float32), self.params)


def structure(config: llama.LlamaConfig) -> nnx.GraphDef:
    """Returns the graph definition with which `nnx.merge` builds a model."""
    return nnx.split(nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0))))[0]
