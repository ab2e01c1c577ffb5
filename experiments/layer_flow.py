"""A decoder layer, operator by operator, with what each reads stored as one likes.

It computes what `coat_jax.modules.DecoderLayer` does, in the dtype of its input, and
shows the activations in between, which the layer itself does not.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax import blocks, nonlinear
from coat_jax.models import llama
from coat_jax.modules import DecoderLayer

Reader = Literal["non-linear", "linear", "attention"]
# What is read, by whom, in the order of the forward pass.
SITES: dict[str, Reader] = {
    "attention norm": "non-linear",
    "qkv": "linear",
    "query": "attention",
    "key": "attention",
    "value": "attention",
    "out": "linear",
    "mlp norm": "non-linear",
    "gate_up": "linear",
    "gate": "non-linear",
    "up": "non-linear",
    "down": "linear",
}
# The non-linear operators: what they read, and the product that reads their output.
OPERATORS = {
    "attention norm": (("attention norm",), "qkv"),
    "mlp norm": (("mlp norm",), "gate_up"),
    "gate": (("gate", "up"), "down"),
}
Store = Callable[[str, Float[Array, "b s n"]], Float[Array, "b s n"]]


def keep(site: str, x: Array) -> Array:
    """Stores without a loss."""
    del site
    return x


def run(
    config: llama.LlamaConfig,
    layer: DecoderLayer,
    x: Float[Array, "b s h"],
    store: Store = keep,
) -> tuple[Float[Array, "b s h"], dict[str, Float[Array, "b s n"]]]:
    """Applies a layer.

    Args:
      config: The model that the layer is of.
      layer: One layer.
      x: The residual stream.
      store: What becomes of an activation between its operator and its reader.

    Returns:
      The residual stream behind the layer, and what was read at each of `SITES`.
    """
    read: dict[str, Array] = {}

    def at(site: str, value: Array) -> Array:
        read[site] = store(site, value)
        return read[site]

    op = operators(config, layer)
    qkv = _product(at("qkv", op["attention norm"](at("attention norm", x))), layer.qkv)
    heads = [at(*named) for named in _split_heads(config, qkv).items()]
    x = x + _product(at("out", _attention(config, *heads)), layer.out)
    normed = at("gate_up", op["mlp norm"](at("mlp norm", x)))
    gate_up = _product(normed, layer.gate_up)
    gate, up = at("gate", gate_up[..., 0, :]), at("up", gate_up[..., 1, :])
    return x + _product(at("down", op["gate"](gate, up)), layer.down), read


def operators(config: llama.LlamaConfig, layer: DecoderLayer) -> dict[str, Callable]:
    """The non-linear operators of a layer, by their names in `OPERATORS`."""

    def norm(param):
        weight = None if param is None else param[...]
        apply = blocks.NORMS[config.norm]
        return lambda x: apply(x, weight, eps=config.norm_eps)

    return {
        "attention norm": norm(layer.attention_norm),
        "mlp norm": norm(layer.mlp_norm),
        "gate": blocks.GATES[config.gate],
    }


def _product(x: Array, param) -> Array:
    return jnp.tensordot(x, param[...].astype(x.dtype), axes=1)


def _split_heads(config: llama.LlamaConfig, qkv: Array) -> dict[str, Array]:
    """Queries and keys with their rotary embedding, and values; heads side by side."""
    batch, length, _ = qkv.shape
    grouped = qkv.reshape(batch, length, config.num_kv_heads, -1, _head_dim(config))
    q, k, v = grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]
    rotary = partial(nonlinear.rotary, theta=config.rope_theta)
    q = q.reshape(batch, length, -1, _head_dim(config))
    heads = {"query": rotary(q), "key": rotary(k), "value": v}
    return {name: x.reshape(batch, length, -1) for name, x in heads.items()}


def _attention(config: llama.LlamaConfig, *flat: Array) -> Array:
    q, k, v = (x.reshape(*x.shape[:2], -1, _head_dim(config)) for x in flat)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    return y.reshape(*y.shape[:2], -1)


def _head_dim(config: llama.LlamaConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_heads
