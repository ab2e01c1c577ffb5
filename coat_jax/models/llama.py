"""Llama and OLMo: decoder-only transformers with their layers under `scan`."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from coat_jax.layers import recipes
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.meshes import embedded, on_explicit_tokens
from pallas_kernels import Activation, NormKind, dispatch, placement
from pallas_kernels.checks import check_positive
from pallas_kernels.placement import Axes

# The number of logits in a chunk of `cross_entropy`, at most: 256 MiB in float32.
_LOGITS_PER_CHUNK = 2**26


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape and precision of a `Llama`.

    Attributes:
      vocab_size: The number of tokens in the vocabulary.
      hidden_size: The size of the residual stream.
      intermediate_size: The size of the MLP's hidden layer.
      num_layers: The number of layers.
      num_heads: The number of query heads.
      num_kv_heads: The number of key and value heads.
      head_dim: The size of a head; None means hidden_size / num_heads.
      norm: "rms", or "layer" without parameters as in OLMo.
      norm_eps: The number that the norms add to the mean square, or to the variance.
      gate: The activation of the MLP's gate.
      rope_theta: The base of RoPE's frequencies.
      tie_embeddings: Whether the output head is the transpose of the embedding.
      dtype: The dtype of the computation.
      param_dtype: The dtype of the parameters.
      recipe: The precision recipe of the layers: "bf16", "te", "coat" or "coat_max".
      scaling: The scaling of gradients in the layers; see `DecoderLayer`.
      batch_axes: The mesh axes that split the batch, for meshes whose axes are
        automatic: there no type says how tokens are split, and XLA may split the
        residual stream in another way.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    gate: Activation = "silu"
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    dtype: DTypeLike = jnp.bfloat16
    param_dtype: DTypeLike = jnp.float32
    recipe: recipes.RecipeName = "coat"
    scaling: recipes.Scaling = "just_in_time"
    batch_axes: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_positive(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
        )
        recipes.check_names(
            recipe=self.recipe, scaling=self.scaling, norm=self.norm, gate=self.gate
        )
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise ValueError(f"dtype must be floating, got {jnp.dtype(self.dtype)}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                "num_heads must divide hidden_size where head_dim is None, got "
                f"{self.num_heads}, {self.hidden_size}"
            )


def _llama(hidden: int, intermediate: int, layers: int, heads: int, **rest):
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        **{"vocab_size": 32_000, **rest},
    )


# Published shapes. The vocabularies of OLMo and 124m are padded to a multiple of 128.
CONFIGS: dict[str, LlamaConfig] = {
    "124m": _llama(768, 2048, 12, 12, vocab_size=50_304, tie_embeddings=True),
    "olmo-1b": _llama(
        2048, 8192, 16, 16, vocab_size=50_304, tie_embeddings=True, norm="layer"
    ),
    "llama2-7b": _llama(4096, 11_008, 32, 32),
    "llama2-13b": _llama(5120, 13_824, 40, 40),
    "llama-30b": _llama(6656, 17_920, 60, 52, norm_eps=1e-6),
}


class Llama(nnx.Module):
    """A causal language model; `layers` holds the stacked parameters of all layers.

    Args:
      config: The shape and precision of the model.
      rngs: The random number generators for the initialization, which does not depend
        on the recipe.

    Example:
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

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(0.02)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(init(rngs.params(), shape, config.param_dtype))
        self.head = (
            None
            if config.tie_embeddings
            else nnx.Param(init(rngs.params(), shape[::-1], config.param_dtype))
        )
        self.norm = (
            nnx.Param(jnp.ones(config.hidden_size, config.param_dtype))
            if config.norm == "rms"
            else None
        )
        stack = nnx.vmap(lambda rngs: _layer(config, rngs))
        self.layers = nnx.split_rngs(splits=config.num_layers)(stack)(rngs)

    def __call__(self, tokens: Int[Array, "b s"]) -> Float[Array, "b s vocab"]:
        """Computes the logits of each position's next token, in float32."""
        return _logits(self.hidden(tokens), self.head_weight())

    def hidden(self, tokens: Int[Array, "b s"]) -> Float[Array, "b s h"]:
        """Computes the final norm's output, in `config.dtype`."""
        return self.decode(self.embed(tokens))

    def embed(self, tokens: Int[Array, "b s"]) -> Float[Array, "b s h"]:
        """Returns the embeddings of tokens, in `config.dtype`."""
        x = embedded(self.embedding[...], tokens, self.config.batch_axes)
        return x.astype(self.config.dtype)

    def decode(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        """Computes the final norm's output from embeddings, as `hidden` from tokens."""
        recipe = recipes.RECIPES[self.config.recipe]
        x = recipe.leave(apply_layers(self.layers, recipe.enter(x)))
        weight = None if self.norm is None else self.norm[...]
        norm = recipes.Norm(kind=self.config.norm, eps=self.config.norm_eps)
        return recipe.norm(norm)(weight, x)

    def quantize_weights(self) -> None:
        """Quantizes the weights of every layer; see `DecoderLayer.quantize_weights`.

        Call it at the beginning of a step that accumulates gradients.

        Example:
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

    def head_weight(self) -> Float[Array, "h vocab"]:
        """Returns the weight of the output head."""
        return self.embedding[...].T if self.head is None else self.head[...]


def apply_layers(layers: DecoderLayer, x: recipes.Residual) -> recipes.Residual:
    """Applies layers with stacked parameters one after another, under `scan`."""
    graph, stacked = nnx.split(layers)
    return lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, stacked)[0]


def cross_entropy(
    model: Llama, tokens: Int[Array, "b s"], targets: Int[Array, "b s"]
) -> Float[Array, ""]:
    """Computes the mean negative log-likelihood of `targets`, in nats per token.

    The loss of a token is `logsumexp(logits) - logits[target]`. Logits and their
    gradients are computed in chunks of tokens, so that they never exist as a whole.

    Args:
      model: The model.
      tokens: The input of the model.
      targets: The token that follows each input token.

    Raises:
      ValueError: If `targets` does not have the shape of `tokens`.

    Example:
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
    if targets.shape != tokens.shape:
        raise ValueError(
            f"targets must have the shape {tokens.shape} of tokens, got {targets.shape}"
        )
    hidden = model.hidden(tokens)
    loss = on_explicit_tokens(_mean_loss, hidden, 2, results=False)
    return loss(hidden, model.head_weight(), targets)


@jax.custom_vjp
@placement.on_common_mesh
def _mean_loss(
    hidden: Float[Array, "b s h"],
    head: Float[Array, "h vocab"],
    targets: Int[Array, "b s"],
) -> Float[Array, ""]:
    """Computes the mean of all tokens' losses.

    If it is differentiated, forward computes the gradients of a chunk together with its
    loss, while the chunk's logits exist. They are gradients of the mean already, so
    that no other pass divides them by the number of tokens.
    """
    return _Loss(count=targets.size)(hidden, head, targets)


@placement.on_common_mesh
def _mean_loss_fwd(hidden, head, targets):
    loss, *grads = _LossAndGrads(count=targets.size)(hidden, head, targets)
    return loss, grads


def _mean_loss_bwd(grads, dmean):
    dhidden, dhead = (g * dmean.astype(g.dtype) for g in grads)
    return dhidden, dhead, None


_mean_loss.defvjp(_mean_loss_fwd, _mean_loss_bwd)


@dataclasses.dataclass(frozen=True)
class _Loss(dispatch.Operation):
    """The sum of all tokens' losses, divided by `count`, in chunks of tokens.

    On a mesh each device has chunks of its own tokens.
    """

    count: int
    name = "cross_entropy"

    def reference(self, hidden, head, targets):
        def add(total, chunk):
            return total + _chunk_loss(chunk[0], head, chunk[1], self.count), None

        zero = jnp.zeros((), jnp.float32)
        return lax.scan(add, zero, _chunks(hidden, head, targets))[0]

    kernel = reference

    def obstacle(self, *arrays) -> None:
        return None

    def axes(self, *arrays) -> tuple:
        return (Axes("b s _"), Axes("_ _"), Axes("b s")), Axes("", reduced="sum")


@dataclasses.dataclass(frozen=True)
class _LossAndGrads(_Loss):
    """The loss, and its gradients with respect to `hidden` and `head`."""

    def reference(self, hidden, head, targets):
        def add(carry, chunk):
            total, dhead = carry
            loss, grads = jax.value_and_grad(_chunk_loss, (0, 1))(
                chunk[0], head, chunk[1], self.count
            )
            return (total + loss, dhead + grads[1]), grads[0]

        zeros = jnp.zeros((), jnp.float32), jnp.zeros_like(head)
        (total, dhead), dhidden = lax.scan(add, zeros, _chunks(hidden, head, targets))
        return total, dhidden.reshape(hidden.shape), dhead

    kernel = reference

    def axes(self, *arrays) -> tuple:
        operands, loss = super().axes(*arrays)
        return operands, (loss, operands[0], Axes("h vocab", reduced="sum"))


def _chunk_loss(
    hidden: Array, head: Array, targets: Array, count: int
) -> Float[Array, ""]:
    """Computes the sum of a chunk's losses divided by `count`."""
    logits = _logits(hidden, head)
    # A comparison selects the target's logit, because its gradient fuses with that of
    # the other logits. The gradient of an index is a scatter, which would read and
    # write arrays of this size twice more.
    is_target = targets[:, None] == jnp.arange(logits.shape[1])[None]
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked) / count


def _chunks(hidden: Array, head: Array, targets: Array) -> tuple[Array, Array]:
    count = _num_chunks(targets.size, head.shape[1])
    return hidden.reshape(count, -1, hidden.shape[-1]), targets.reshape(count, -1)


def _layer(config: LlamaConfig, rngs: nnx.Rngs) -> DecoderLayer:
    return DecoderLayer(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim or config.hidden_size // config.num_heads,
        recipe=config.recipe,
        scaling=config.scaling,
        norm=config.norm,
        norm_eps=config.norm_eps,
        gate=config.gate,
        rope_theta=config.rope_theta,
        param_dtype=config.param_dtype,
        output_scale=1 / math.sqrt(2 * config.num_layers),
        rngs=rngs,
    )


@jax.custom_vjp
def _logits(hidden: Array, head: Array) -> Float[Array, "*b vocab"]:
    """Computes `hidden @ head` in the dtype of `hidden`, with a float32 result.

    Backward rounds the gradient of the logits to the dtype of `hidden`. Otherwise XLA
    would run the matmuls of backward in float32.
    """
    head = head.astype(hidden.dtype)
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def _logits_fwd(hidden, head):
    return _logits(hidden, head), (hidden, head)


def _logits_bwd(residuals, dlogits):
    hidden, head = residuals
    wide = functools.partial(jnp.tensordot, preferred_element_type=jnp.float32)
    dlogits = dlogits.astype(hidden.dtype)
    tokens = tuple(range(hidden.ndim - 1))
    dhidden = wide(dlogits, head.astype(hidden.dtype), axes=(-1, -1))
    dhead = wide(hidden, dlogits, axes=(tokens, tokens))
    return dhidden.astype(hidden.dtype), dhead.astype(head.dtype)


_logits.defvjp(_logits_fwd, _logits_bwd)


def _num_chunks(tokens: int, vocab_size: int) -> int:
    """Returns the smallest divisor of `tokens` that keeps a chunk's logits small."""
    fewest = math.ceil(tokens * vocab_size / _LOGITS_PER_CHUNK)
    return next(n for n in range(max(fewest, 1), tokens + 1) if tokens % n == 0)
