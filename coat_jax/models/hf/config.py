"""Converts a config.json of Hugging Face to a `LlamaConfig`, and back.

Keys are read by name, in their old and new spellings: `rope_theta` and `rope_scaling`
or `rope_parameters`, `torch_dtype` or `dtype`. A missing key has the default value of
the model's class in `transformers`. Values that the decoder does not support are
errors.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from coat_jax.layers.experts.routing import Experts
from coat_jax.layers.rope import RopeScaling
from coat_jax.models.hf.families import FAMILIES, Family
from coat_jax.models.hf.keys import Keys, error
from coat_jax.models.hf.rope import rope_fields
from coat_jax.models.llama import LlamaConfig

_GATES = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}
_DTYPES = ("float32", "bfloat16", "float16")
# A config.json must not make the library loop for long.
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 10_000
# Values that the decoder supports, for keys that have other values in other models.
_ONLY = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "use_bidirectional_attention": (False,),
    "clip_qkv": (),
    "is_decoder": (True, False),
    "add_cross_attention": (False,),
}
# The kinds of layers, in `layer_types`.
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Both spellings of the number of experts, as transformers takes them.
_EXPERT_COUNTS = ("num_experts", "num_local_experts")
# Keys of a loaded config.json that are dropped, because `_values` has their values,
# maybe in another spelling.
_SPELLINGS = ("rope_parameters", "original_max_position_embeddings", *_EXPERT_COUNTS)
# Fields of `LlamaConfig` that say how a model is computed rather than what it is.
_OF_COMPUTATION = ("dtype", "param_dtype", "recipe", "scaling", "batch_axes", "context")


def family_of(values: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json.

    Raises:
      ValueError: If the family is unknown, or the class is not the family's causal
        language model.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        names = ", ".join(FAMILIES)
        raise error("model_type", f"one of {names}", model_type)
    family = FAMILIES[model_type]
    classes = values.get("architectures") or [family.architecture]
    if classes != [family.architecture]:
        raise error("architectures", f'["{family.architecture}"]', classes)
    return family


def read(values: Mapping[str, Any]) -> LlamaConfig:
    """Returns the configuration of a decoder from a config.json.

    Raises:
      ValueError: If a value is missing, of a wrong type, or not supported.

    Examples:
      >>> from coat_jax.models.hf import config
      >>> sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
      >>> heads = {"num_hidden_layers": 2, "num_attention_heads": 4}
      >>> config.read({"model_type": "llama", **sizes, **heads}).num_kv_heads
      4
    """
    family = family_of(values)
    keys = Keys(values, family.defaults)
    for key, only in _ONLY.items():
        if (value := keys.get(key)) is not None and value not in only:
            raise error(key, " or ".join(map(str, only)) or "null", value)
    num_layers = keys.integer("num_hidden_layers")
    if num_layers > _MOST_LAYERS:
        raise error("num_hidden_layers", f"at most {_MOST_LAYERS}", num_layers)
    num_heads = keys.integer("num_attention_heads")
    num_kv_heads = keys.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        rule = f"a divisor of num_attention_heads {num_heads}"
        raise error("num_key_value_heads", rule, num_kv_heads)
    hidden_size = keys.integer("hidden_size")
    fields = {
        **family.fields,
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer(_size_key(family)),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": _head_dim(keys, hidden_size, num_heads),
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "gate": _gate(keys, family),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
        **rope_fields(keys, family),
        **_windows(keys, family, num_layers),
        **_experts(keys, family),
    }
    if family.is_gemma:
        cap = keys.number_or_none("attn_logit_softcapping")
        if family.model_type == "gemma3_text" and cap is not None:
            # transformers has this key of Gemma 2 in Gemma 3, and ignores it.
            raise error("attn_logit_softcapping", "null", cap)
        fields |= {
            "embedding_scale": hidden_size**0.5,
            "attention_scale": keys.number("query_pre_attn_scalar") ** -0.5,
            "attention_softcap": cap,
            "logit_softcap": keys.number_or_none("final_logit_softcapping"),
        }
    return LlamaConfig(**fields)


def _size_key(family: Family) -> str:
    """Returns the key in config.json of the hidden size of the MLP or of an expert."""
    names = family.experts
    return "intermediate_size" if names is None else names.intermediate_size


def _experts(keys: Keys, family: Family) -> dict[str, Any]:
    """Returns the field `experts` if the family has experts, and checks its keys.

    All layers must have experts.
    """
    if family.experts is None:
        return {}
    if family.model_type == "qwen3_moe":
        layers, step = keys.get("mlp_only_layers", []), "decoder_sparse_step"
        if layers != []:
            raise error("mlp_only_layers", "empty: all layers need experts", layers)
        if (period := keys.integer(step, 1)) != 1:
            raise error(step, "1: all layers need experts", period)
    if (noise := keys.get("router_jitter_noise", 0)) != 0:
        raise error("router_jitter_noise", "0", noise)
    counts = [keys.get(key) for key in _EXPERT_COUNTS if keys.get(key) is not None]
    if len(counts) == 2 and counts[0] != counts[1]:
        raise error("num_local_experts", f"num_experts {counts[0]}", counts[1])
    count = counts[0] if counts else family.experts.default_count
    num_experts = Keys({"num_experts": count}).integer("num_experts")
    top_k = keys.integer("num_experts_per_tok")
    if num_experts > _MOST_EXPERTS:
        raise error("num_experts", f"at most {_MOST_EXPERTS}", num_experts)
    if top_k > num_experts:
        raise error("num_experts_per_tok", f"at most {num_experts}", top_k)
    weight = keys.get("router_aux_loss_coef", 0.001)
    if type(weight) not in (int, float) or not 0 <= weight < float("inf"):
        raise error("router_aux_loss_coef", "a number of 0 or more", weight)
    experts = Experts(
        num_experts=num_experts,
        top_k=top_k,
        # Mixtral has no such key.
        normalized=family.model_type == "mixtral" or keys.flag("norm_topk_prob"),
        # transformers adds up the loads of all of a token's experts.
        balance_weight=float(weight) * top_k,
        z_weight=0.0,
    )
    return {"experts": experts}


def _head_dim(keys: Keys, hidden_size: int, num_heads: int) -> int:
    if keys.get("head_dim") is None and hidden_size % num_heads:
        raise error("head_dim", "given if heads do not divide hidden_size", None)
    return keys.integer("head_dim", hidden_size // num_heads)


def _gate(keys: Keys, family: Family) -> str:
    key = "hidden_activation" if family.is_gemma else "hidden_act"
    value = keys.get(key, "silu")
    if not isinstance(value, str) or value not in _GATES:
        raise error(key, f"one of {', '.join(_GATES)}", value)
    return _GATES[value]


def _windows(keys: Keys, family: Family, num_layers: int) -> dict[str, Any]:
    """Returns the fields `window` and `local_layers`, if they are not the defaults."""
    window = _window(keys, family)
    kinds = keys.get("layer_types")
    if window is None or family.has_equal_layers:
        kind = _LOCAL if window else _GLOBAL
        if kinds not in (None, [kind] * num_layers):
            raise error("layer_types", f"{num_layers} times {kind}", kinds)
        return {} if window is None else {"window": window}
    if kinds is None:
        kinds = _default_kinds(keys, family, num_layers)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(kind in (_LOCAL, _GLOBAL) for kind in kinds)
    ):
        rule = f"{num_layers} times {_LOCAL} or {_GLOBAL}"
        raise error("layer_types", rule, kinds)
    local = tuple(kind == _LOCAL for kind in kinds)
    if not family.is_gemma and not any(local):
        return {}
    return {"window": window, "local_layers": local}


def _window(keys: Keys, family: Family) -> int | None:
    """Returns the window of the family's local layers, or None."""
    if "sliding_window" not in family.defaults:
        return None
    if family.model_type.startswith("qwen") and not keys.flag("use_sliding_window"):
        return None
    if not family.is_gemma and keys.get("sliding_window") is None:
        return None
    return keys.integer("sliding_window")


def _default_kinds(keys: Keys, family: Family, num_layers: int) -> list[str]:
    if family.model_type == "gemma2":
        full = [bool(i % 2) for i in range(num_layers)]
    elif family.model_type == "gemma3_text":
        key = "sliding_window_pattern"
        period = keys.integer(key if keys.get(key) else f"_{key}", 6)
        full = [(i + 1) % period == 0 for i in range(num_layers)]
    else:
        first = keys.get("max_window_layers")
        if type(first) is not int or first < 0:
            raise error("max_window_layers", "an integer of 0 or more", first)
        full = [i < first for i in range(num_layers)]
    return [_GLOBAL if is_full else _LOCAL for is_full in full]


def written(config: LlamaConfig, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of a model's config.json.

    Args:
      config: The configuration of the model.
      origin: The config.json that the model was loaded with, or empty if the model was
        not loaded. Keys that `config` does not determine keep their values.

    Raises:
      ValueError: If no family supports the configuration.

    Examples:
      >>> from coat_jax.models import llama
      >>> from coat_jax.models.hf import config
      >>> config.written(llama.CONFIGS["llama2-7b"], {})["model_type"]
      'llama'
    """
    if origin and not _differences(read(origin), config):
        return dict(origin)
    reasons = []
    families = [family_of(origin)] if origin else list(FAMILIES.values())
    for family in families:
        other = {k: v for k, v in origin.items() if k not in _SPELLINGS}
        values = {**other, **_values(family, config)}
        try:
            differences = _differences(read(values), config)
        except ValueError as error:
            differences = [str(error)]
        if not differences:
            return values
        reasons.append((len(differences), f"{family.model_type}: {differences[0]}"))
    kind = " or ".join(family.model_type for family in families)
    _, nearest = min(reasons, key=lambda reason: reason[0])
    raise ValueError(
        f"no model of the type {kind} has this configuration; the nearest is {nearest}"
    )


def _differences(config: LlamaConfig, expected: LlamaConfig) -> list[str]:
    """Returns what differs in the models of two configurations."""
    actual = _fields(config)
    return [
        f"{name} is {actual[name]!r}, not {value!r}"
        for name, value in _fields(expected).items()
        if actual[name] != value
    ]


def _fields(config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields that determine a model, with defaults spelled out."""
    names = {field.name for field in dataclasses.fields(config)} - {*_OF_COMPUTATION}
    fields = {name: getattr(config, name) for name in sorted(names)}
    head_dim, experts = config.size_of_heads, config.experts
    fields["head_dim"] = head_dim
    fields["attention_scale"] = config.attention_scale or head_dim**-0.5
    if experts is not None:  # A weight of a loss is not the model's.
        fields["experts"] = dataclasses.replace(experts, z_weight=0.0)
    is_local = config.window is not None
    fields["local_layers"] = config.local_layers or (is_local,) * config.num_layers
    if not any(fields["local_layers"]):
        fields["window"] = fields["local_rope_theta"] = None
    return fields


def _values(family: Family, config: LlamaConfig) -> dict[str, Any]:
    """Returns a configuration as keys and values of config.json, in old spellings."""
    acts = {gate: act for act, gate in _GATES.items()}
    head_dim = config.size_of_heads
    values = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        _size_key(family): config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": head_dim,
        "hidden_activation" if family.is_gemma else "hidden_act": acts[config.gate],
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_values(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.window is not None or family.defaults.get("sliding_window"):
        values["sliding_window"] = config.window
    if family.experts is not None and (experts := config.experts) is not None:
        values |= {
            family.experts.count: experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "router_aux_loss_coef": experts.balance_weight / experts.top_k,
        }
        if family.model_type != "mixtral":
            values["norm_topk_prob"] = experts.normalized
    if family.model_type.startswith("qwen"):
        values["use_sliding_window"] = config.window is not None
    if config.local_layers is not None:
        kinds = (_GLOBAL, _LOCAL)
        values["layer_types"] = [kinds[is_local] for is_local in config.local_layers]
    if config.local_rope_theta is not None:
        values["rope_local_base_freq"] = config.local_rope_theta
    if family.is_gemma:
        scale = config.attention_scale or head_dim**-0.5
        values["query_pre_attn_scalar"] = _rounded(scale**-2)
        values["attn_logit_softcapping"] = config.attention_softcap
        values["final_logit_softcapping"] = config.logit_softcap
    return values


def _scaling_values(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    return values


def _rounded(number: float) -> float | int:
    """Returns the nearest integer if `number` differs from it by rounding errors only.

    If the difference is larger, it returns `number`.
    """
    nearest = round(number)
    return nearest if math.isclose(number, nearest, rel_tol=1e-12) else number


def dtype_of(values: Mapping[str, Any]) -> jnp.dtype | None:
    """Returns the dtype that a config.json names, or None.

    Raises:
      ValueError: If the dtype is not float32, bfloat16 or float16.
    """
    key = "dtype" if values.get("dtype") is not None else "torch_dtype"
    name = values.get(key)
    if name is None:
        return None
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    if name not in _DTYPES:
        raise error(key, f"one of {', '.join(_DTYPES)}", name)
    return jnp.dtype(name)
