"""Tests layers of other models than Llama: windows, caps, biases and norms.

`tests/models/hf` compares logits of whole models with the logits of transformers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import small_models
from helpers.attention import oracle
from helpers.gradients import assert_close, compiled, cosine
from helpers.marks import slow
from helpers.models import normal

from coat_jax.layers.attention import Scores, cached_attention, causal_attention
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.layers.rope import Rope, RopeScaling
from coat_jax.models import llama

VARIANTS = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head", "head_dim": 16},
    "mistral": {"window": 5},
    "all before": {
        "qkv_bias": True,
        "qk_norm": "head",
        "head_dim": 16,
        "window": 5,
        "local_layers": (True, False),
    },
    "gemma2": {
        "norm_placement": "both",
        "norm_offset": 1.0,
        "window": 5,
        "local_layers": (True, False),
        "attention_softcap": 5.0,
        "logit_softcap": 3.0,
        "gate": "gelu",
    },
    "gemma3": {
        "norm_placement": "both",
        "norm_offset": 1.0,
        "window": 5,
        "local_layers": (True, False),
        "local_rope_theta": 100.0,
        "qk_norm": "head",
        "embedding_scale": 6.0,
    },
    "olmo2": {"norm_placement": "after", "qk_norm": "width"},
}


def heads(length=12):
    return tuple(normal(i, 2, length, n, 8) for i, n in enumerate((4, 2, 2)))


def attention(q, k, v, *, scale=8**-0.5, **scores):
    """Computes attention in float64."""
    return oracle(q, k, v, q, scale=scale, **scores)[0]


SCORES = {
    "window": {"window": 3},
    "window of one": {"window": 1},
    "wide window": {"window": 12},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 0.5},
    "all": {"window": 4, "softcap": 0.5, "scale": 0.7},
}


@pytest.mark.parametrize("local", [False, True])
def test_windows_of_local_layers_alone(local):
    q, k, v = heads()
    run = functools.partial(causal_attention, scores=Scores(window=3))
    actual = compiled(
        lambda q, k, v, local: run(q, k, v, local=local), q, k, v, jnp.array(local)
    )
    assert_close(actual, attention(q, k, v, window=3 if local else None), 1e-5)


@pytest.mark.parametrize("name", SCORES)
def test_attention_to_a_cache(name):
    q, k, v = heads()
    expected = attention(q, k, v, **SCORES[name])
    seen = np.broadcast_to(np.arange(12) <= 9, (2, 12))
    actual = compiled(
        lambda *arrays: cached_attention(*arrays, scores=Scores(**SCORES[name])),
        q[:, 9:10],
        k,
        v,
        jnp.int32(9),
        seen,
    )
    assert_close(actual, expected[:, 9:10], 1e-5)


def test_frequencies_of_llama_3_1():
    """The highest frequencies stay, and the lowest are divided by eight."""
    scaling = RopeScaling(kind="llama3", factor=8.0, original_length=8192)
    plain, scaled = (Rope(theta=5e5, scaling=s) for s in (None, scaling))
    (cos, sin), (own_cos, own_sin) = (r.angles(2, 128) for r in (plain, scaled))
    before, after = (
        np.arctan2(s[1], c[1]) for c, s in ((cos, sin), (own_cos, own_sin))
    )
    turns = 8192 * before / (2 * np.pi)
    np.testing.assert_allclose(after[turns > 4], before[turns > 4], rtol=1e-5)
    np.testing.assert_allclose(after[turns < 1], before[turns < 1] / 8, rtol=1e-4)
    between = (turns > 1) & (turns < 4)
    share = (turns[between] - 1) / 3
    expected = before[between] * (share + (1 - share) / 8)
    np.testing.assert_allclose(after[between], expected, rtol=1e-4)
    assert between.sum() > 5


@functools.cache
def loss_and_gradient(name: str, recipe: str):
    options = {"hidden_size": 64, "intermediate_size": 96, **VARIANTS[name]}
    config = small_models.config(recipe="bf16", **options)
    model = llama.Llama(config, rngs=nnx.Rngs(0))
    _, params, others = nnx.split(model, nnx.Param, ...)
    own = small_models.config(recipe=recipe, **options)
    graph, *_ = nnx.split(
        nnx.eval_shape(lambda: llama.Llama(own, rngs=nnx.Rngs(0))), nnx.Param, ...
    )
    params = jax.tree.map(lambda p: p * 2 if p.ndim > 2 else p, params)
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, 128)

    def loss(params):
        model = nnx.merge(graph, params, others)
        return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])

    return compiled(jax.value_and_grad(loss), params)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("all before", "coat"),
        ("olmo2", "coat"),
        *(
            slow(name, recipe)
            for name in VARIANTS
            for recipe in ("te", "coat", "coat_max", "coat_block")
            if (name, recipe) not in (("all before", "coat"), ("olmo2", "coat"))
        ),
    ],
)
def test_gradient_of_each_variant_is_near_that_of_bf16(name, recipe):
    (value, gradient), (expected, wide) = (
        loss_and_gradient(name, r) for r in (recipe, "bf16")
    )
    assert float(value) == pytest.approx(float(expected), rel=0.01)
    assert 0.97 < cosine(gradient, wide) < 1 - 1e-5


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_norms_after_segments_need_no_stream(name):
    """Layers with these norms refuse options that only the FP8 flow has."""
    options = {k: v for k, v in VARIANTS[name].items() if "norm" in k}
    sizes = (64, 96, 4, 2, 16)
    with pytest.raises(ValueError, match="scaling='delayed' needs the FP8 flow"):
        DecoderLayer(*sizes, scaling="delayed", rngs=nnx.Rngs(0), **options)
    layer = DecoderLayer(*sizes, rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match="with norms"):
        layer.quantize_weights()
    with pytest.raises(ValueError, match="needs norm='rms'"):
        DecoderLayer(*sizes, norm="layer", rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0},
        {"window": 5, "local_layers": (True,)},
        {"local_layers": (True, False)},
        {"local_rope_theta": 100.0},
        {"attention_softcap": -1.0},
        {"logit_softcap": 0.0},
        {"qk_norm": "row"},
        {"norm_placement": "around"},
    ],
)
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(ValueError, match=r"must|need"):
        llama.Llama(small_models.config(**options), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "yarn", "factor": 2.0},
        {"kind": "linear", "factor": 0.0},
        {"kind": "llama3", "factor": 2.0, "low_frequency_factor": 4.0},
    ],
)
def test_scalings_of_rope_that_are_unknown_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        RopeScaling(**options)
