"""Reports of amax, saturation and underflow during a run.

A step with reports returns statistics of the parameters, the gradients, the FP8 moments
and the activations of its batch. Activations are computed in an additional forward
pass, by plain JAX functions in the dtype of the computation.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

import coat_jax as coat
from coat_jax.layers.decoder import WEIGHTS, DecoderLayer
from coat_jax.layers.experts.routing import Shares
from coat_jax.layers.plain import PlainRecipe
from coat_jax.layers.recipe import Residual
from coat_jax.models import llama

Reports = dict[str, Any]


def reports(
    model: llama.Llama,
    tokens: Int[Array, "b s"],
    grads: nnx.State,
    opt_state: Any,
    segment_ids: Int[Array, "b s"] | None = None,
) -> Reports:
    """Returns the reports of a step as a pytree, by the kind of array.

    Args:
      model: The model with the parameters before the step.
      tokens: The tokens of the batch.
      grads: The gradients of the parameters.
      opt_state: The optimizer's state before the step.
      segment_ids: The number of each token's document, if sequences are packed.
    """
    params = nnx.state(model, nnx.Param)
    by_kind: Reports = {
        "parameters": coat.health_report(params, stacked="layers"),
        "gradients": coat.health_report(grads, role="gradient", stacked="layers"),
        "activations": _activations(model, tokens, segment_ids),
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


def _activations(
    model: llama.Llama, tokens: Int[Array, "b s"], segment_ids: Int[Array, "b s"] | None
) -> tuple[Any, Any]:
    """Returns two reports by layer: of matmuls' operands, and of saved arrays."""
    graph, stacked = nnx.split(model.layers)

    def layer(x, params):
        x, operands, saved = _tapped(nnx.merge(graph, params), x, segment_ids)
        of_operands = coat.health_report(operands)
        return x, (of_operands, coat.health_report(saved, role="saved"))

    return lax.scan(layer, model.embed(tokens), stacked)[1]


class _Gathered(PlainRecipe):
    """A recipe that sends no tokens to the devices of their experts.

    Arrays within a program for each device could not be reported.
    """

    def experts(self, *arguments: Any, **options: Any) -> tuple[Residual, Shares]:
        """Adds the outputs of experts, with their weights on each device."""
        return super().experts(*arguments, **options | {"sent": False})


def _tapped(
    layer: DecoderLayer, x: Float[Array, "b s h"], segment_ids: Int[Array, "b s"] | None
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Returns a layer's output, its matmuls' inputs, and its saved arrays, by name.

    Saved arrays are the arrays that the backward pass reads. Gate and up of experts
    have a row for each choice of a token.
    """
    operands: dict[str, Array] = {}
    saved = {"stream": x}

    def multiplied(x: Array, product: Callable[[], Array]) -> Array:
        name = next(name for name in WEIGHTS if f"input of {name}" not in operands)
        operands[f"input of {name}"], y = x, product()
        if name == "gate_up":
            saved["gate and up"] = y
        return y

    def linear(x, weight):
        weight = weight.astype(x.dtype)
        return multiplied(x, lambda: jnp.tensordot(x, weight, axes=(-1, -1)))

    def of_experts(x, weight, rows, of_tokens):
        weight = weight.reshape(len(weight), -1, weight.shape[-1]).astype(x.dtype)
        x = rows.of_tokens(x) if of_tokens else x
        each = weight.swapaxes(1, 2)
        return multiplied(x, lambda: lax.ragged_dot(x, each, rows.sizes))

    def projected(project):
        def run(*arguments):
            saved["stream before the MLP"] = y = project(*arguments)
            return y

        return run

    # The forward pass is of whole sequences on any mesh.
    layer.heads = dataclasses.replace(layer.heads, context=None)
    layer.attention = dataclasses.replace(layer.attention, context=None)
    options = {"product": of_experts, "projection": projected}
    layer.recipe = _Gathered(linear=linear, **options)
    return layer(x, segment_ids), operands, saved
