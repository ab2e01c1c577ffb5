"""Small models with parameters as after training, and their layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from coat_jax.models import llama
from experiments.common.trained import Trained
from helpers.models import parameters


def config(**changes) -> llama.LlamaConfig:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
    heads = {"num_heads": 4, "num_kv_heads": 2}
    remaining = {"vocab_size": 128, "tie_embeddings": True, "recipe": "bf16"}
    return llama.LlamaConfig(**{**shape, **heads, **remaining, **changes})


@functools.cache
def _initial(config: llama.LlamaConfig):
    return parameters(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))[1]


def trained(config: llama.LlamaConfig, *, batches: int, length: int = 16) -> Trained:
    """Returns random tokens, and parameters so large that every operator matters."""
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda p: p + np.float32(0.1) * rng.standard_normal(p.shape, np.float32),
        _initial(config),
    )
    shape = (batches, 4, length + 1)
    tokens = list(rng.integers(0, config.vocab_size, shape, np.int32))
    return Trained(config=config, params=params, batches=tokens, loss=float("nan"))


def layer_of(model: Trained, index: int):
    """Returns a layer of a model, with float32 parameters and the BF16 recipe."""
    config = model.config_as("bf16", jnp.float32)
    graph, _ = nnx.split(nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0))))
    layers = nnx.merge(graph, model.params).layers
    graph, stacked = nnx.split(layers)
    return nnx.merge(graph, jax.tree.map(lambda p: p[index], stacked))
