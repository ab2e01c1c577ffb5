"""The configuration of decoders, and the configurations of published models."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from coat_jax.layers import recipes
from coat_jax.layers.attention import Scores
from coat_jax.layers.context import ContextParallel
from coat_jax.layers.experts.routing import Experts
from coat_jax.layers.heads import QkNorm
from coat_jax.layers.rope import RopeScaling
from pallas_kernels import Activation, NormKind
from pallas_kernels.checks import (
    check_flags,
    check_floating,
    check_sizes,
    is_positive_number,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape and precision of a `Llama`.

    Attributes:
      vocab_size: The number of tokens in the vocabulary.
      hidden_size: The size of the residual stream.
      intermediate_size: The size of the hidden layer of the MLP, or of each expert.
      num_layers: The number of layers.
      num_heads: The number of query heads.
      num_kv_heads: The number of key and value heads.
      head_dim: The size of a head; None means hidden_size / num_heads.
      norm: "rms", or "layer" without parameters as in OLMo.
      norm_eps: The number that the norms add to the mean square, or to the variance.
      gate: The activation of the MLP's gate.
      rope_theta: The base of RoPE's frequencies.
      rope_scaling: A change of RoPE's frequencies for long sequences, as in Llama 3.1.
      local_rope_theta: The base of RoPE in local layers, as in Gemma 3; None means the
        same RoPE in all layers.
      qkv_bias: Whether queries, keys and values have a bias, as in Qwen2.
      qk_norm: The RMSNorm of queries and keys: "none", "head" for each head as in Qwen3
        and Gemma 3, or "width" for all heads together as in OLMo 2.
      norm_placement: Where a layer's norms are: "before" attention and the MLP, "after"
        them as in OLMo 2, or "both" as in Gemma 2 and 3.
      norm_offset: A number that is added to the weights of norms, 1 in Gemma.
      window: The number of positions that a query attends to in local layers, including
        its own position; None means all.
      local_layers: Whether each layer is local; None means that all are if there is a
        window.
      attention_scale: The factor on products of queries and keys; None means
        1 / sqrt(head_dim).
      attention_softcap: The bound of attention's scores, as in Gemma 2; None means no
        bound.
      logit_softcap: The bound of logits, as in Gemma 2; None means no bound.
      embedding_scale: A factor on embeddings, sqrt(hidden_size) in Gemma.
      experts: The experts of every layer, in the MLP's place; None means one MLP.
      tie_embeddings: Whether the output head is the transpose of the embedding.
      dtype: The dtype of the computation.
      param_dtype: The dtype of the parameters.
      recipe: The precision recipe of the layers; see `recipes.RECIPES`.
      scaling: The scaling of gradients in the layers; see `DecoderLayer`.
      batch_axes: The mesh axes that split the batch, for meshes with automatic axes:
        there no type says how tokens are split, and XLA may split the residual stream
        in another way. Each shard of the batch has gradient scales of its own if
        scaling is just in time.
      context: How sequences are split over devices; None means that they are whole. A
        context also says which mesh axes split the batch. Generation does not split
        sequences.
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
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    qkv_bias: bool = False
    qk_norm: QkNorm = "none"
    norm_placement: recipes.NormPlacement = "before"
    norm_offset: float = 0.0
    window: int | None = None
    local_layers: tuple[bool, ...] | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    experts: Experts | None = None
    tie_embeddings: bool = False
    dtype: DTypeLike = jnp.bfloat16
    param_dtype: DTypeLike = jnp.float32
    recipe: recipes.RecipeName = "coat"
    scaling: recipes.Scaling = "just_in_time"
    batch_axes: str | tuple[str, ...] | None = None
    context: ContextParallel | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers")
        sizes += ("num_heads", "num_kv_heads")
        sizes += () if self.head_dim is None else ("head_dim",)
        check_sizes(**{name: getattr(self, name) for name in sizes})
        check_flags(qkv_bias=self.qkv_bias, tie_embeddings=self.tie_embeddings)
        recipes.check_names(
            recipe=self.recipe,
            scaling=self.scaling,
            norm=self.norm,
            gate=self.gate,
            norm_placement=self.norm_placement,
            qk_norm=self.qk_norm,
        )
        check_floating(dtype=self.dtype, param_dtype=self.param_dtype)
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                "num_heads must divide hidden_size where head_dim is None, got "
                f"{self.num_heads}, {self.hidden_size}"
            )
        if not isinstance(self.experts, Experts | None):
            raise ValueError(f"experts must be llama.Experts, got {self.experts!r}")
        if self.experts is not None:
            recipes.check_experts(self.recipe, self.scaling, self.norm_placement)
        if self.context is not None:
            self._check_context(self.context)
        self._check_attention()

    def _check_context(self, context: ContextParallel) -> None:
        context.check(self.num_heads)
        if self.batch_axes not in (None, context.batch_axes):
            raise ValueError(
                "batch_axes must be None or those of the context, "
                f"{context.batch_axes!r}, got {self.batch_axes!r}"
            )

    def _check_attention(self) -> None:
        local = self.local_layers
        if local is not None and len(local) != self.num_layers:
            raise ValueError(
                f"local_layers must have num_layers={self.num_layers} entries, got "
                f"{len(local)}"
            )
        if local is not None and any(local) and self.window is None:
            raise ValueError(f"local_layers need a window, got {self.window}")
        if self.local_rope_theta is not None and local is None:
            raise ValueError("local_rope_theta needs local_layers, got None")
        for name in ("rope_theta", "local_rope_theta", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not is_positive_number(value):
                raise ValueError(f"{name} must be positive, got {value!r}")

    @property
    def size_of_heads(self) -> int:
        """The size of a head: `head_dim`, or else hidden_size / num_heads."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def scores(self) -> Scores:
        """The scale, soft cap and window of attention's scores."""
        return Scores(
            scale=self.attention_scale,
            softcap=self.attention_softcap,
            window=self.window,
        )


def _llama(hidden: int, intermediate: int, layers: int, heads: int, **rest):
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        **{"num_kv_heads": heads, "vocab_size": 32_000, **rest},
    )


# Published shapes, and "300m" with a size between two of them. The vocabularies of
# OLMo, 124m and 300m are padded to a multiple of 128.
CONFIGS: dict[str, LlamaConfig] = {
    "124m": _llama(768, 2048, 12, 12, vocab_size=50_304, tie_embeddings=True),
    "300m": _llama(1024, 2816, 24, 16, vocab_size=50_304, tie_embeddings=True),
    "olmo-1b": _llama(
        2048, 8192, 16, 16, vocab_size=50_304, tie_embeddings=True, norm="layer"
    ),
    "llama2-7b": _llama(4096, 11_008, 32, 32),
    "llama2-13b": _llama(5120, 13_824, 40, 40),
    "llama3-8b": _llama(
        4096, 14_336, 32, 32, num_kv_heads=8, vocab_size=128_256, rope_theta=500_000.0
    ),
    "llama-30b": _llama(6656, 17_920, 60, 52, norm_eps=1e-6),
    "moe-300m": _llama(
        768,
        128,
        12,
        12,
        vocab_size=50_304,
        tie_embeddings=True,
        experts=Experts(num_experts=64, top_k=8),
    ),
    "mixtral-8x7b": _llama(
        4096,
        14_336,
        32,
        32,
        num_kv_heads=8,
        rope_theta=1e6,
        # In both families' losses the loads add up to `top_k`; here they add up to 1.
        experts=Experts(num_experts=8, top_k=2, balance_weight=2 * 0.02, z_weight=0.0),
    ),
    "qwen3-30b-a3b": _llama(
        2048,
        768,
        48,
        32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151_936,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm="head",
        experts=Experts(
            num_experts=128, top_k=8, balance_weight=8 * 0.001, z_weight=0.0
        ),
    ),
}
