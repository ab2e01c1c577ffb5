"""Families of models in `transformers`: their names, and the values that they share."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names of experts in tensors and in config.json.

    Attributes:
      block: The prefix of the names of all tensors of experts.
      gate: The name of an expert's gate matrix.
      up: The name of an expert's up matrix.
      down: The name of an expert's down matrix.
      count: The key of the number of experts.
      default_count: The number of experts if there is no such key.
      intermediate_size: The key of the size of an expert's hidden layer.
    """

    block: str
    gate: str
    up: str
    down: str
    count: str
    default_count: int
    intermediate_size: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models in `transformers`.

    Attributes:
      model_type: The name in config.json.
      architecture: The class of the family's causal language model.
      fields: The fields of `LlamaConfig` that all models of the family share.
      has_equal_layers: Whether all layers are local if there is a window.
      rope_theta: The base of RoPE if a config.json has none.
      local_rope_theta: The base in local layers if a config.json has none; None for
        families with one RoPE for all layers.
      defaults: The values of other keys that a config.json lacks. Families without
        windows have no "sliding_window".
      experts: The names of experts; None for families without experts.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has_equal_layers: bool = False
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    experts: "ExpertNames | None" = None

    @property
    def is_gemma(self) -> bool:
        """True if the family has the scales and soft caps of Gemma."""
        return self.model_type.startswith("gemma")


_GEMMA = {"norm_placement": "both", "norm_offset": 1.0}
_OF_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_OF_GEMMA |= {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="llama", architecture="LlamaForCausalLM"),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            has_equal_layers=True,
            defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            fields={"qkv_bias": True},
            defaults={
                "sliding_window": 4096,
                "max_window_layers": 28,
                "num_key_value_heads": 32,
            },
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            fields={"qk_norm": "head"},
            defaults={
                "sliding_window": 4096,
                "max_window_layers": 28,
                "num_key_value_heads": 32,
                "head_dim": 128,
            },
        ),
        Family(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            rope_theta=1e6,
            has_equal_layers=True,
            defaults={
                "sliding_window": None,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
            },
            experts=ExpertNames(
                block="block_sparse_moe",
                gate="w1",
                up="w3",
                down="w2",
                count="num_local_experts",
                default_count=8,
                intermediate_size="intermediate_size",
            ),
        ),
        Family(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            fields={"qk_norm": "head"},
            has_equal_layers=True,
            defaults={
                "sliding_window": 4096,
                "num_key_value_heads": 4,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
            },
            experts=ExpertNames(
                block="mlp",
                gate="gate_proj",
                up="up_proj",
                down="down_proj",
                count="num_experts",
                default_count=128,
                intermediate_size="moe_intermediate_size",
            ),
        ),
        Family(
            model_type="gemma2",
            architecture="Gemma2ForCausalLM",
            fields=_GEMMA,
            defaults=_OF_GEMMA
            | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
        Family(
            model_type="gemma3_text",
            architecture="Gemma3ForCausalLM",
            fields=_GEMMA | {"qk_norm": "head"},
            rope_theta=1e6,
            local_rope_theta=1e4,
            defaults=_OF_GEMMA,
        ),
        Family(
            model_type="olmo2",
            architecture="Olmo2ForCausalLM",
            fields={"qk_norm": "width", "norm_placement": "after"},
            defaults={"rms_norm_eps": 1e-5},
        ),
    )
}
