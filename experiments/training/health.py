"""Reports of amax, saturation and underflow during a run.

A step with reports returns statistics of the parameters, the gradients, the FP8 moments
and the activations of its batch. Activations are computed in an additional forward
pass, by plain JAX functions in the dtype of the computation.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

import coat_jax as coat
from coat_jax.layers.attention import causal_attention
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.layers.recipes import GATES, NORMS
from coat_jax.models import llama

Reports = dict[str, Any]


def reports(
    model: llama.Llama, tokens: Int[Array, "b s"], grads: nnx.State, opt_state: Any
) -> Reports:
    """Returns the reports of a step as a pytree, by the kind of array.

    Args:
      model: The model with the parameters before the step.
      tokens: The tokens of the batch.
      grads: The gradients of the parameters.
      opt_state: The optimizer's state before the step.
    """
    params = nnx.state(model, nnx.Param)
    by_kind: Reports = {
        "parameters": coat.health_report(params, stacked="layers"),
        "gradients": coat.health_report(grads, role="gradient", stacked="layers"),
        "activations": _activations(model, tokens),
    }
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_quantized)
    moments = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
        if _is_quantized(leaf)
    }
    if moments:
        by_kind["moments"] = coat.health_report(moments)
    return by_kind


def rows(by_kind: Reports) -> Iterator[dict[str, Any]]:
    """Yields the statistics of a step's reports as flat rows."""
    for kind, report in by_kind.items():
        for layer_report in report if isinstance(report, tuple) else (report,):
            yield from ({"of": kind} | row for row in layer_report.rows())


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, coat.QuantizedArray)


def _activations(model: llama.Llama, tokens: Int[Array, "b s"]) -> tuple[Any, Any]:
    """Returns two reports by layer: of matmuls' operands, and of saved arrays."""
    config = model.config
    graph, stacked = nnx.split(model.layers)

    def layer(x, params):
        x, operands, saved = _tapped(nnx.merge(graph, params), x)
        of_operands = coat.health_report(operands)
        return x, (of_operands, coat.health_report(saved, role="saved"))

    x = model.embedding[...][tokens].astype(config.dtype)
    return lax.scan(layer, x, stacked)[1]


def _tapped(
    layer: DecoderLayer, x: Float[Array, "b s h"]
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Returns a layer's output, its matmuls' inputs, and its saved arrays, by name.

    Saved arrays are the arrays that the backward pass reads.
    """

    def product(x, weight):
        return jnp.tensordot(x, weight[...].astype(x.dtype), axes=(-1, -1))

    def norm(weight, x):
        weight = None if weight is None else weight[...]
        return NORMS[layer.norm.kind](x, weight, eps=layer.norm.eps)

    first = norm(layer.attention_norm, x)
    attended = causal_attention(*layer.heads.split(product(first, layer.qkv)))
    attended = attended.reshape(*x.shape[:2], -1)
    middle = x + product(attended, layer.out)
    second = norm(layer.mlp_norm, middle)
    gate_up = product(second, layer.gate_up)
    hidden = GATES[layer.gate](gate_up[..., 0, :], gate_up[..., 1, :])
    operands = {"qkv": first, "out": attended, "gate_up": second, "down": hidden}
    operands = {f"input of {name}": value for name, value in operands.items()}
    saved = {"stream": x, "stream before the MLP": middle, "gate and up": gate_up}
    return middle + product(hidden, layer.down), operands, saved
