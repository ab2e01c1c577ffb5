"""Runs a decoder layer operator by operator, and stores activations in any precision.

The function `run` computes the same as `coat_jax.layers.decoder.DecoderLayer`, in the
dtype of the input, and also returns the activations in between.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.layers import recipes as blocks
from coat_jax.layers.decoder import DecoderLayer

Reader = Literal["non-linear", "linear", "attention"]
# The kind of operator that reads each activation, in the order of the forward pass.
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
# The non-linear operators: the activations that they read, and the matmul that reads
# their output.
OPERATORS = {
    "attention norm": (("attention norm",), "qkv"),
    "mlp norm": (("mlp norm",), "gate_up"),
    "gate": (("gate", "up"), "down"),
}
Store = Callable[[str, Float[Array, "b s n"]], Float[Array, "b s n"]]


def keep(site: str, x: Array) -> Array:
    """Returns `x` unchanged; this is the default `store` of `run`."""
    del site
    return x


def run(
    layer: DecoderLayer, x: Float[Array, "b s h"], store: Store = keep
) -> tuple[Float[Array, "b s h"], dict[str, Float[Array, "b s n"]]]:
    """Applies a decoder layer, and also returns the activations inside it.

    Args:
      layer: One decoder layer.
      x: The residual stream.
      store: A function of a site and its activation that returns the activation as the
        next operator reads it.

    Returns:
      The residual stream after the layer, and the activation read at each of `SITES`.
    """
    activations: dict[str, Array] = {}

    def at(site: str, value: Array) -> Array:
        activations[site] = store(site, value)
        return activations[site]

    op = operators(layer)
    qkv = _product(at("qkv", op["attention norm"](at("attention norm", x))), layer.qkv)
    heads = zip(("query", "key", "value"), layer.heads.split(qkv), strict=True)
    heads = [_heads(layer, at(site, _flat(value))) for site, value in heads]
    x = x + _product(at("out", _attention(*heads)), layer.out)
    normed = at("gate_up", op["mlp norm"](at("mlp norm", x)))
    gate_up = _product(normed, layer.gate_up)
    gate, up = at("gate", gate_up[..., 0, :]), at("up", gate_up[..., 1, :])
    return x + _product(at("down", op["gate"](gate, up)), layer.down), activations


def operators(layer: DecoderLayer) -> dict[str, Callable]:
    """Returns the non-linear operators of a layer, by their names in `OPERATORS`."""

    def norm(param):
        weight = None if param is None else param[...]
        apply = blocks.NORMS[layer.norm.kind]
        return lambda x: apply(x, weight, eps=layer.norm.eps)

    return {
        "attention norm": norm(layer.attention_norm),
        "mlp norm": norm(layer.mlp_norm),
        "gate": blocks.GATES[layer.gate],
    }


def _product(x: Array, param) -> Array:
    return jnp.tensordot(x, param[...].astype(x.dtype), axes=(-1, -1))


def _attention(q: Array, k: Array, v: Array) -> Array:
    attention = partial(jax.nn.dot_product_attention, implementation="xla")
    return _flat(attention(q, k, v, is_causal=True))


def _flat(x: Float[Array, "b s n d"]) -> Float[Array, "b s m"]:
    return x.reshape(*x.shape[:2], -1)


def _heads(layer: DecoderLayer, x: Float[Array, "b s m"]) -> Float[Array, "b s n d"]:
    return x.reshape(*x.shape[:2], -1, layer.heads.head_dim)
