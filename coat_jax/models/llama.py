"""Decoder-only transformers such as Llama and OLMo, with their layers under `scan`."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from coat_jax.layers import recipes
from coat_jax.layers.decoder import DecoderLayer, LayerKind
from coat_jax.layers.experts.routing import Experts, Routing, updated_bias
from coat_jax.meshes import embedded, on_explicit_tokens
from coat_jax.models.llama_config import CONFIGS, LlamaConfig
from coat_jax.models.loss import (
    check_shapes,
    comparable,
    logits,
    token_shares,
    weighted_loss,
)
from coat_jax.release.layers import scan_layers
from pallas_kernels.dispatch import array_types

__all__ = [
    "CONFIGS",
    "Experts",
    "Llama",
    "LlamaConfig",
    "Losses",
    "Routing",
    "apply_layers",
    "cross_entropy",
    "training_loss",
    "updated_bias",
]


class Llama(nnx.Module):
    """A causal language model; `layers` holds the stacked parameters of all layers.

    Args:
      config: The shape and precision of the model.
      rngs: The random number generators for the initialization, which does not depend
        on the recipe.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.models import llama
      >>> from flax import nnx
      >>> config = llama.LlamaConfig(
      ...     vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
      ...     num_heads=4, num_kv_heads=2)
      >>> model = llama.Llama(config, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((1, 8), jnp.int32)).shape
      (1, 8, 256)
    """

    config: LlamaConfig
    embedding: nnx.Param[Array]
    head: nnx.Param[Array] | None
    norm: nnx.Param[Array] | None
    layers: DecoderLayer
    # The folder that `hf.load` read the parameters from, for `hf.save`.
    origin: Any

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.origin = None
        init = nnx.initializers.normal(0.02)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(init(rngs.params(), shape, config.param_dtype))
        self.head = (
            None
            if config.tie_embeddings
            else nnx.Param(init(rngs.params(), shape[::-1], config.param_dtype))
        )
        ones = jnp.full(config.hidden_size, 1 - config.norm_offset, config.param_dtype)
        self.norm = nnx.Param(ones) if config.norm == "rms" else None
        stack = nnx.vmap(lambda rngs: _layer(config, rngs))
        self.layers = nnx.split_rngs(splits=config.num_layers)(stack)(rngs)
        if config.local_layers is not None:
            self.layers.local = LayerKind(jnp.array(config.local_layers))

    def __call__(
        self, tokens: Int[Array, "b s"], segment_ids: Int[Array, "b s"] | None = None
    ) -> Float[Array, "b s vocab"]:
        """Computes the logits of each position's next token, in float32.

        With `segment_ids` each position attends only to its own document; see
        `cross_entropy`.
        """
        return self.logits(self.hidden(tokens, segment_ids))

    def hidden(
        self, tokens: Int[Array, "b s"], segment_ids: Int[Array, "b s"] | None = None
    ) -> Float[Array, "b s h"]:
        """Computes the final norm's output, in `config.dtype`."""
        return self.decode(self.embed(tokens), segment_ids)

    def embed(self, tokens: Int[Array, "b s"]) -> Float[Array, "b s h"]:
        """Returns the embeddings of tokens, in `config.dtype`."""
        check_shapes(tokens)
        context, axes = self.config.context, (self.config.batch_axes, None)
        if context is not None:
            axes = context.batch_axes, context.axis
        x = embedded(self.embedding[...], comparable(tokens), *axes)
        x = x.astype(self.config.dtype)
        # Gemma rounds the factor to the dtype of the computation.
        scale = jnp.asarray(self.config.embedding_scale, x.dtype)
        return x if self.config.embedding_scale == 1 else x * scale

    def decode(
        self, x: Float[Array, "b s h"], segment_ids: Int[Array, "b s"] | None = None
    ) -> Float[Array, "b s h"]:
        """Computes the final norm's output from the embeddings that `embed` returns."""
        return self._decoded(x, segment_ids)[0]

    def hidden_and_routing(
        self, tokens: Int[Array, "b s"], segment_ids: Int[Array, "b s"] | None = None
    ) -> tuple[Float[Array, "b s h"], Routing | None]:
        """Computes `hidden`, and the loads and losses of experts if there are any.

        Loads are [layers, experts], and losses are means over layers.
        """
        return self._decoded(self.embed(tokens), segment_ids)

    def _decoded(
        self, x: Float[Array, "b s h"], segment_ids: Int[Array, "b s"] | None
    ) -> tuple[Float[Array, "b s h"], Routing | None]:
        recipe = recipes.recipe_of(self.config.recipe, self.config.norm_placement)
        context, batch_axes = self.config.context, self.config.batch_axes
        if context is not None:
            x, batch_axes = context.enter(x), context.row_axes
        x = recipe.enter(x, batch_axes)
        x, routing = apply_layers(self.layers, x, segment_ids)
        x = recipe.leave(x)
        x = x if context is None else context.leave(x)
        return self.final_norm(x), routing

    def final_norm(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        """Applies the norm after the last layer."""
        weight = None if self.norm is None else self.norm[...]
        if self.config.norm_offset:
            weight = weight.astype(jnp.float32) + self.config.norm_offset
        norm = recipes.Norm(kind=self.config.norm, eps=self.config.norm_eps)
        recipe = recipes.RECIPES[self.config.recipe]
        return recipe.outside(recipe.norm(norm))(weight, x)

    def logits(self, hidden: Float[Array, "*b h"]) -> Float[Array, "*b vocab"]:
        """Computes logits from the result of `hidden`, at all or at some positions."""
        return logits(hidden, self.head_weight(), self.config.logit_softcap)

    def head_weight(self) -> Float[Array, "h vocab"]:
        """Returns the weight of the output head."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def quantize_weights(self) -> None:
        """Quantizes the weights of every layer; see `DecoderLayer.quantize_weights`.

        Call the method at the beginning of a step that accumulates gradients.

        Examples:
          >>> import jax, jax.numpy as jnp
          >>> from coat_jax.models import llama
          >>> from flax import nnx
          >>> config = llama.LlamaConfig(
          ...     vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
          ...     num_heads=4, num_kv_heads=2)
          >>> model = llama.Llama(config, rngs=nnx.Rngs(0))
          >>> model.quantize_weights()
          >>> graph, params, codes = nnx.split(model, nnx.Param, ...)
          >>> def loss(params, tokens):
          ...     model = nnx.merge(graph, params, codes)
          ...     return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])
          >>> microbatches = jnp.zeros((3, 1, 9), jnp.int32)
          >>> def accumulate(total, tokens):
          ...     grads = jax.grad(loss)(params, tokens)
          ...     return jax.tree.map(jnp.add, total, grads), None
          >>> zeros = jax.tree.map(jnp.zeros_like, params)
          >>> grads, _ = jax.lax.scan(accumulate, zeros, microbatches)
        """
        nnx.vmap(DecoderLayer.quantize_weights)(self.layers)


def apply_layers(
    layers: Any, x: recipes.Residual, segment_ids: Int[Array, "b s"] | None = None
) -> tuple[recipes.Residual, Routing | None]:
    """Applies layers with stacked parameters, under `coat.scan_layers`.

    Returns:
      The residual stream, and the routing of all layers if they have experts.
    """
    graph, stacked = nnx.split(layers)

    # Layers of other kinds need to take documents only if there are any.
    documents = () if segment_ids is None else (segment_ids,)
    experts = getattr(layers, "experts", None)
    if experts is None:

        def apply(layer, x):
            return nnx.merge(graph, layer)(x, *documents)

        return scan_layers(apply, x, stacked), None
    depth = len(jax.tree.leaves(stacked)[0])

    def apply_with_routing(layer, carry):
        x, sums = carry
        x, routing = nnx.merge(graph, layer).with_routing(x, *documents)
        # Rows of loads move up by one, so that the loop ends with them in layer order.
        load = jnp.concatenate([sums.load[1:], routing.load[None]])
        balance, z = (a + b / depth for a, b in zip(sums[1:], routing[1:], strict=True))
        return x, Routing(load, balance, z)

    zero = jnp.zeros(())
    sums = Routing(jnp.zeros((depth, experts.num_experts)), zero, zero)
    sums = array_types.varying_alike(sums, x)
    return scan_layers(apply_with_routing, (x, sums), stacked)


def cross_entropy(
    model: Llama,
    tokens: Int[Array, "b s"],
    targets: Int[Array, "b s"],
    *,
    weights: Shaped[Array, "b s"] | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
) -> Float[Array, ""]:
    """Computes the mean negative log-likelihood of `targets`, in nats per token.

    Auxiliary losses of experts are not part of it; see `training_loss`.

    The loss of a token is `logsumexp(logits) - logits[target]`. Logits and their
    gradients are computed in chunks of tokens, so that memory never holds all of them.

    Sequences may hold several documents, one after the other, if `segment_ids` says
    which document a token is in. Each document then has the logits that it has alone:
    attention does not cross documents, and RoPE depends only on distances between
    positions, so that positions need not start again.

    Args:
      model: The model.
      tokens: The input of the model.
      targets: The token that follows each input token. The loss is NaN if one of them
        is not in the vocabulary, as -100 is not, and its weight is not 0.
      weights: The weight of each target in the mean: 0 ignores it. None weighs all
        alike. If all weights are 0, the loss is 0. The loss is a differentiable
        function of the weights.
      segment_ids: The number of each token's document; None means that a sequence is
        one document.

    Raises:
      ValueError: If `tokens` is not [b, s] or has no token, or if `targets`, `weights`
        or `segment_ids` does not have its shape.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.models import llama
      >>> from flax import nnx
      >>> config = llama.LlamaConfig(
      ...     vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
      ...     num_heads=4, num_kv_heads=2)
      >>> model = llama.Llama(config, rngs=nnx.Rngs(0))
      >>> tokens = jnp.zeros((1, 9), jnp.int32)
      >>> bool(llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:]) > 0)
      True
    """
    check_shapes(tokens, targets=targets, weights=weights, segment_ids=segment_ids)
    hidden = model.hidden(tokens, segment_ids)
    return mean_loss(model, hidden, targets, weights)


class Losses(NamedTuple):
    """The parts of `training_loss`.

    Attributes:
      cross_entropy: The mean negative log-likelihood, in nats per token.
      routing: The auxiliary losses and loads of experts; None without experts.
    """

    cross_entropy: Float[Array, ""]
    routing: Routing | None


def training_loss(
    model: Llama,
    tokens: Int[Array, "b s"],
    targets: Int[Array, "b s"],
    *,
    weights: Shaped[Array, "b s"] | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
) -> tuple[Float[Array, ""], Losses]:
    """Computes the loss to train with: `cross_entropy`, and auxiliary losses.

    The loss is `cross_entropy + balance_weight * balance + z_weight * z` with the
    weights of `config.experts`. Without experts the loss is `cross_entropy`. The
    function fits `jax.value_and_grad` and `coat.value_and_update` with `has_aux=True`.

    Args:
      model: The model.
      tokens: The input of the model.
      targets: The token that follows each input token; see `cross_entropy`.
      weights: The weight of each target in the mean; see `cross_entropy`. Auxiliary
        losses weigh all tokens of this call alike. Their mean over microbatches is not
        the loss of the whole batch, because loads differ between microbatches.
      segment_ids: The number of each token's document; see `cross_entropy`.

    Returns:
      The loss, and its parts with the load of every expert, for logging.

    Raises:
      ValueError: If `tokens` is not [b, s] or has no token, or if `targets`, `weights`
        or `segment_ids` does not have its shape.

    Examples:
      >>> import functools, jax, jax.numpy as jnp
      >>> from coat_jax.models import llama
      >>> from flax import nnx
      >>> config = llama.LlamaConfig(
      ...     vocab_size=256, hidden_size=64, intermediate_size=32, num_layers=2,
      ...     num_heads=4, num_kv_heads=2,
      ...     experts=llama.Experts(num_experts=8, top_k=2))
      >>> model = llama.Llama(config, rngs=nnx.Rngs(0))
      >>> graph, params, others = nnx.split(model, nnx.Param, ...)
      >>> @jax.jit
      ... @functools.partial(jax.value_and_grad, has_aux=True)
      ... def loss_and_grads(params, tokens):
      ...     model = nnx.merge(graph, params, others)  # No optimizer steps the others.
      ...     return llama.training_loss(model, tokens[:, :-1], tokens[:, 1:])
      >>> tokens = jnp.zeros((1, 9), jnp.int32)
      >>> (loss, losses), grads = loss_and_grads(params, tokens)
      >>> losses.routing.load.shape
      (2, 8)
    """
    check_shapes(tokens, targets=targets, weights=weights, segment_ids=segment_ids)
    hidden, routing = model.hidden_and_routing(tokens, segment_ids)
    loss = cross_entropy = mean_loss(model, hidden, targets, weights)
    if routing is not None:
        experts = model.config.experts
        loss = loss + experts.balance_weight * routing.balance
        loss = loss + experts.z_weight * routing.z
    return loss, Losses(cross_entropy, routing)


def mean_loss(
    model: Llama,
    hidden: Float[Array, "b s h"],
    targets: Int[Array, "b s"],
    weights: Shaped[Array, "b s"] | None,
) -> Float[Array, ""]:
    """Returns the weighted mean loss of targets, from a model's final hidden states."""

    def mean(hidden, head, targets, weights):
        shares = token_shares(targets, weights, head.shape[1])
        return weighted_loss(hidden, head, targets, shares, model.config.logit_softcap)

    loss = on_explicit_tokens(mean, hidden, results=0)
    return loss(hidden, model.head_weight(), targets, weights)


def _layer(config: LlamaConfig, rngs: nnx.Rngs) -> DecoderLayer:
    return DecoderLayer(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.size_of_heads,
        recipe=config.recipe,
        scaling=config.scaling,
        norm=config.norm,
        norm_eps=config.norm_eps,
        gate=config.gate,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        local_rope_theta=config.local_rope_theta,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        norm_placement=config.norm_placement,
        norm_offset=config.norm_offset,
        scores=config.scores,
        experts=config.experts,
        context=config.context,
        batch_axes=config.batch_axes,
        param_dtype=config.param_dtype,
        output_scale=1 / math.sqrt(2 * config.num_layers),
        rngs=rngs,
    )
