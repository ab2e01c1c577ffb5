"""Tests how a config.json is read, against the values that transformers reads."""

import dataclasses

import pytest

from coat_jax.layers.rope import RopeScaling
from coat_jax.models.hf import config as configs

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LENGTH = {"original_max_position_embeddings": 16}


def read(model_type="llama", **values):
    return configs.read({"model_type": model_type, **SIZES, **values})


@pytest.mark.parametrize(
    ("values", "theta", "scaling"),
    [
        ({}, 1e4, None),
        ({"rope_theta": 500, "rope_scaling": LINEAR}, 500, "linear"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4, "linear"),
        ({"rope_scaling": LINEAR | {"rope_theta": 500.0}}, 500, "linear"),
        ({"rope_parameters": LINEAR | {"rope_theta": 500.0}}, 500, "linear"),
        ({"rope_parameters": {"type": "linear", "factor": 4.0}}, 1e4, "linear"),
        ({"rope_theta": 500, "rope_parameters": {"type": "default"}}, 500, None),
        ({"rope_parameters": LINEAR, "rope_scaling": LINEAR}, 1e4, "linear"),
        ({"rope_scaling": LLAMA3 | LENGTH}, 1e4, "llama3"),
        ({"rope_scaling": LLAMA3} | LENGTH, 1e4, "llama3"),
        ({"rope_parameters": LLAMA3 | LENGTH} | LENGTH, 1e4, "llama3"),
    ],
)
def test_spellings_of_rope_are_one(values, theta, scaling):
    scalings = {
        None: None,
        "linear": RopeScaling(kind="linear", factor=4.0),
        "llama3": RopeScaling(kind="llama3", factor=8.0, original_length=16),
    }
    config = read(**values)
    assert config.rope_theta == theta
    assert config.rope_scaling == scalings[scaling]
    origin = {"model_type": "llama", **SIZES, **values, "vocab_size": 9}
    assert configs.read(configs.written(config, origin)) == config


@pytest.mark.parametrize(
    ("values", "bases"),
    [
        ({}, (1e6, 1e4)),
        ({"rope_theta": 500, "rope_local_base_freq": 100}, (500, 100)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 500.0}}}, (500, 1e4)),
        (
            {
                "rope_local_base_freq": 100.0,
                "rope_parameters": {"full_attention": {}, "sliding_attention": None},
            },
            (1e6, 100),
        ),
    ],
)
def test_gemma_3_has_a_base_for_each_kind_of_layer(values, bases):
    config = read("gemma3_text", **values)
    assert (config.rope_theta, config.local_rope_theta) == bases


@pytest.mark.parametrize(
    ("model_type", "values", "rule"),
    [
        (
            "qwen3",
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "yarn"}},
            "rope_type .* must be default, linear or llama3, got 'yarn'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": LINEAR},
            "rope_scaling .* must be absent or RoPE as in rope_parameters",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 1e4},
            r"rope_theta .* must be 500\.0, its value in another spelling, got 10000",
        ),
        (
            "llama",
            {"rope_scaling": LLAMA3 | LENGTH, "original_max_position_embeddings": 32},
            "original_max_position_embeddings .* must be 16, .* got 32",
        ),
        (
            "llama",
            {"rope_scaling": LINEAR | {"type": "llama3"}},
            "type .* must be linear, its value in another spelling, got 'llama3'",
        ),
        (
            "llama",
            {"rope_scaling": {"factor": 4.0}},
            r"rope_scaling .* RoPE of the type default, got {'factor': 4\.0}",
        ),
        (
            "llama",
            {"rope_scaling": LINEAR | {"beta_fast": 32}},
            "rope_scaling .* RoPE of the type linear, got {'beta_fast': 32}",
        ),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": LINEAR}},
            "rope_parameters .* must be without keys other than .* {'full_attention'",
        ),
        (
            "gemma3_text",
            {"rope_parameters": LINEAR},
            "rope_parameters .* full_attention, sliding_attention for gemma3_text",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": LINEAR}},
            "sliding_attention .* must be RoPE without scaling",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor .* must be 1, got 0\.5",
        ),
    ],
)
def test_rope_that_is_not_read_is_refused(model_type, values, rule):
    with pytest.raises(ValueError, match=rule):
        read(model_type, **values)


LOCAL, FULL = "sliding_attention", "full_attention"
QWEN = {"use_sliding_window": True}
HALVES = (False, False, True, True)


@pytest.mark.parametrize(
    ("model_type", "values", "window", "local"),
    [
        ("qwen2", {"sliding_window": 4, "max_window_layers": 0}, None, None),
        ("qwen2", QWEN | {"max_window_layers": 2}, 4096, HALVES),
        ("qwen3", QWEN | {"max_window_layers": 2}, 4096, HALVES),
        ("qwen3", QWEN | {"layer_types": [LOCAL, FULL] * 2}, 4096, (True, False) * 2),
        ("qwen3", QWEN | {"sliding_window": None, "max_window_layers": 0}, None, None),
        ("qwen3", QWEN, None, None),
        ("qwen3_moe", {"sliding_window": 4}, None, None),
        ("qwen3_moe", QWEN, 4096, None),
        ("qwen3_moe", QWEN | {"sliding_window": 4, "max_window_layers": 2}, 4, None),
        ("mistral", {"layer_types": [LOCAL] * 4}, 4096, None),
        ("mixtral", {}, None, None),
        ("llama", {"sliding_window": 4, "layer_types": [FULL] * 4}, None, None),
    ],
)
def test_layers_are_local_as_in_transformers(model_type, values, window, local):
    config = read(model_type, **values)
    assert (config.window, config.local_layers) == (window, local)
    assert configs.read(configs.written(config, {})) == config


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma2", {"attention_scale": None}),
        ("gemma3_text", {"attention_scale": None}),
        ("llama", {"attention_scale": 16**-0.5}),
        ("mistral", {"local_layers": (True,) * 4}),
        ("llama", {"local_layers": (False,) * 4}),
        ("llama", {"local_layers": (False,) * 4, "window": 4}),
    ],
)
def test_other_spellings_of_a_configuration_are_written(model_type, changes):
    scalar = {"query_pre_attn_scalar": 16} if model_type[:5] == "gemma" else {}
    config = read(model_type, **scalar)
    changed = dataclasses.replace(config, **changes)
    assert changed != config
    assert configs.read(configs.written(changed, {})) == config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm": "layer"}, "nearest is llama: norm is 'rms', not 'layer'"),
        ({"logit_softcap": 3.0}, "nearest is llama: logit_softcap is None, not 3.0"),
        (
            {"qkv_bias": True, "qk_norm": "head"},
            "nearest is qwen2: qk_norm is 'none', not 'head'",
        ),
    ],
)
def test_a_configuration_of_no_family_is_refused_by_its_field(changes, reason):
    with pytest.raises(ValueError, match=reason):
        configs.written(dataclasses.replace(read(), **changes), {})


@pytest.mark.parametrize(
    ("model_type", "values", "rule"),
    [
        ("llama", {"layer_types": [LOCAL] * 4}, "4 times full_attention, got"),
        ("qwen2", {"layer_types": [LOCAL] * 4}, "4 times full_attention, got"),
        ("mistral", {"layer_types": [FULL] * 4}, "4 times sliding_attention, got"),
        (
            "qwen3_moe",
            QWEN | {"layer_types": [LOCAL, FULL] * 2},
            "4 times sliding_attention, got",
        ),
        (
            "qwen3",
            QWEN | {"layer_types": [LOCAL]},
            "4 times sliding_attention or full_attention, got",
        ),
        ("gemma2", {"layer_types": [[]] * 4}, "4 times sliding_attention or full"),
    ],
)
def test_layers_of_other_kinds_are_refused(model_type, values, rule):
    with pytest.raises(ValueError, match=rf"layer_types in config.json must be {rule}"):
        read(model_type, **values)


def test_gemma_3_has_no_soft_cap_of_attention():
    assert read("gemma3_text", attn_logit_softcapping=None).attention_softcap is None
    with pytest.raises(
        ValueError, match=r"attn_logit_softcapping .* be null, got 2\.0"
    ):
        read("gemma3_text", attn_logit_softcapping=2.0)
    assert read("gemma2", attn_logit_softcapping=2.0).attention_softcap == 2.0
