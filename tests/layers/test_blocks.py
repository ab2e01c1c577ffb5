"""Tests layers and Llamas by recipe: their results and numbers of parameters."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import layers, small_models
from helpers.gradients import assert_close, compiled, cosine, saved, value_and_vjp
from helpers.marks import slow
from helpers.models import initialization, normal, parameters

import pallas_kernels
from coat_jax.layers import recipes as blocks
from coat_jax.layers.attention import causal_attention
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.models import llama
from coat_jax.models import loss as loss_module
from pallas_kernels.versions import bodies_in_params

RECIPES = ["bf16", "te", "coat", "coat_max", "coat_block"]
FP8_RECIPES = RECIPES[1:]


def small(**options) -> llama.LlamaConfig:
    defaults = {"hidden_size": 64, "intermediate_size": 96}
    defaults |= {"tie_embeddings": False, "recipe": "coat"}
    return small_models.config(**{**defaults, **options})


def wide(tree):
    return jax.tree.map(lambda a: np.asarray(a).astype(np.float64), tree)


@functools.cache
def initial(config: llama.LlamaConfig):
    """Returns a model's parameters, doubled if they are matrices."""
    _, params = parameters(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda p: p * 2 if p.ndim > 1 else p, params)


def split(config: llama.LlamaConfig):
    """Returns a model's structure and its parameters, which all recipes share."""
    model = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    return nnx.split(model)[0], initial(dataclasses.replace(config, recipe="bf16"))


def tokens(length: int = 64) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, length), 0, 128)


# Published shapes.


def published(vocab: int, hidden: int, intermediate: int, layers: int, *, norms=True):
    """Counts by hand the untied parameters of a model with full attention."""
    layer = 4 * hidden**2 + 3 * hidden * intermediate + 2 * hidden * norms
    return 2 * vocab * hidden + layers * layer + hidden * norms


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("124m", published(50_304, 768, 2048, 12) - 50_304 * 768),
        ("olmo-1b", 1_176_764_416),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama3-8b", 8_030_261_248),
        ("llama-30b", 32_528_943_616),
    ],
)
def test_configs_have_the_published_parameters(name, expected):
    model = nnx.eval_shape(lambda: llama.Llama(llama.CONFIGS[name], rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(math.prod(p.shape) for p in leaves) == expected


def test_counting_by_hand_gives_the_published_numbers():
    assert published(32_000, 4096, 11_008, 32) == 6_738_415_616
    assert published(32_000, 5120, 13_824, 40) == 13_015_864_320
    assert published(32_000, 6656, 17_920, 60) == 32_528_943_616
    olmo = published(50_304, 2048, 8192, 16, norms=False) - 50_304 * 2048
    assert olmo == 1_176_764_416
    assert round(published(50_304, 768, 2048, 12) / 1e6 - 50.304 * 0.768) == 124


# Comparison with NumPy in float64.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 1, "head_dim": 32, "rope_theta": 500.0},
        {"num_kv_heads": 4, "norm": "layer", "tie_embeddings": True},
        {"gate": "gelu", "norm_eps": 1e-2},
    ],
    ids=["grouped queries", "head_dim", "OLMo", "gelu"],
)
def test_logits(options):
    config = small(dtype=jnp.float32, recipe="bf16", **options)
    graph, params = split(config)
    logits = compiled(lambda p, t: nnx.merge(graph, p)(t), params, tokens(16))
    assert logits.dtype == jnp.float32
    plain = wide(nnx.to_pure_dict(params))
    assert ("head" in plain) != config.tie_embeddings
    assert ("norm" in plain) == (config.norm == "rms")
    assert_close(logits, layers.llama(config, plain, np.asarray(tokens(16))), 1e-5)


def test_attention_and_its_gradient():
    q, k, v = normal(1, 2, 12, 4, 8), normal(2, 2, 12, 2, 8), normal(3, 2, 12, 2, 8)
    dy = normal(4, *q.shape)
    y, gradients = value_and_vjp(causal_attention, dy, q, k, v)
    at = wide([q, k, v])
    assert_close(y, layers.attention(*at, causal=True), 1e-5)
    for i, gradient in enumerate(wide(gradients)):
        direction = np.random.default_rng(i).standard_normal(gradient.shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = [*at[:i], at[i] + step * direction, *at[i + 1 :]]
            ends.append(layers.attention(*moved, causal=True))
        slope = np.sum((ends[0] - ends[1]) * wide(dy)) / 2e-5
        assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_copies_are_saved_in_place_of_what_attention_reads():
    q, k, v = (normal(i, 2, 12, n, 8) for i, n in enumerate((4, 2, 2)))
    copies = tuple(map(jnp.copy, (q, k, v)))
    residuals = saved(
        lambda *arguments: causal_attention(*arguments[:3], arguments[3:]),
        q,
        k,
        v,
        *copies,
    )
    assert sorted(r.argument for r in residuals if r.nbytes > 8) == [3, 4, 5]
    dy = normal(4, *q.shape)
    _, plain = value_and_vjp(causal_attention, dy, q, k, v)
    _, of_copies = value_and_vjp(
        lambda q, k, v: causal_attention(q, k, v, (2 * q, k, v)), dy, q, k, v
    )
    _, (*expected, dkept) = value_and_vjp(causal_attention, dy, q, k, v, copies)
    jax.tree.map(np.testing.assert_array_equal, tuple(expected), plain)
    assert not any(np.any(x) for x in dkept)
    assert np.any(of_copies[1] != plain[1])  # Backward reads the saved copies.


def test_later_tokens_leave_earlier_logits():
    graph, params = split(small(recipe="bf16"))
    changed = tokens().at[:, 40].add(1)
    pair = jnp.stack([tokens(), changed % 128])
    before, after = compiled(
        lambda p, pair: jax.lax.map(lambda t: nnx.merge(graph, p)(t), pair),
        params,
        pair,
    )
    np.testing.assert_array_equal(before[:, :40], after[:, :40])
    assert np.all(np.any(before[:, 40:] != after[:, 40:], axis=-1))


# Recipes.


def test_recipes_share_initialization_and_structure():
    def made(recipe):
        return llama.Llama(small(recipe=recipe), rngs=nnx.Rngs(0))

    first, *remaining = [
        initialization(functools.partial(made, recipe)) for recipe in RECIPES
    ]
    assert all(other == first for other in remaining)


@functools.cache
def logits_of(recipe: str):
    """Returns a small model's logits."""
    graph, params = split(small(recipe=recipe))
    return compiled(lambda p: nnx.merge(graph, p)(tokens()), params)


@functools.cache
def loss_and_gradient(recipe: str):
    """Returns the value and the gradient of a small model's loss."""
    graph, params = split(small(recipe=recipe))

    def loss(params):
        model = nnx.merge(graph, params)
        return llama.cross_entropy(model, tokens()[:, :-1], tokens()[:, 1:])

    return compiled(jax.value_and_grad(loss), params)


def test_fp8_recipes_compute_nearly_the_same_logits():
    """Logits do not depend on the residuals saved, but on the kind of scales."""
    te, coat, coat_max, coat_block = map(logits_of, FP8_RECIPES)
    np.testing.assert_array_equal(coat, coat_max)
    wide_logits = logits_of("bf16")
    for logits in (te, coat, coat_block):
        assert 0.99 < cosine(logits, wide_logits) < 1 - 1e-5
    assert cosine(te, coat) > 0.99


@pytest.mark.parametrize(
    "recipe", ["coat", *map(slow, ("te", "coat_max", "coat_block"))]
)
def test_gradient_of_each_recipe_is_near_that_of_bf16(recipe):
    """The measured cosine is 0.991 to 0.993, the cost of E5M2 in all FP8 recipes."""
    te, bf16, mine = (loss_and_gradient(r)[1] for r in ("te", "bf16", recipe))
    assert 0.98 < cosine(mine, bf16) < 1 - 1e-5
    assert 1 - cosine(mine, bf16) < 1.35 * (1 - cosine(te, bf16))


def test_scanned_layers_equal_a_loop():
    config = small(dtype=jnp.float32, recipe="coat")
    graph, params = split(config)

    def scanned(params):
        return nnx.merge(graph, params).hidden(tokens())

    def looped(params):
        model = nnx.merge(graph, params)
        x = model.embedding[...][tokens()]
        layer_graph, layers = nnx.split(model.layers)
        for i in range(config.num_layers):
            one = jax.tree.map(lambda p, i=i: p[i], layers)
            x = nnx.merge(layer_graph, one)(x)
        return coat_norm(x, model.norm[...])

    def coat_norm(x, weight):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight

    dy = normal(2, 2, 64, 64)
    (y, dp), (expected, dp_expected) = (
        value_and_vjp(f, dy, params) for f in (scanned, looped)
    )
    # An FP8 rounding may go the other way.
    assert cosine(y, expected) > 0.99999
    assert cosine(dp, dp_expected) > 0.9999


def test_cross_entropy_in_any_number_of_chunks(monkeypatch):
    graph, params = split(small(recipe="bf16", dtype=jnp.float32))
    inputs, targets = tokens(61)[:, :-1], tokens(61)[:, 1:]

    def loss(params):
        return llama.cross_entropy(nnx.merge(graph, params), inputs, targets)

    def plain(params):
        logits = nnx.merge(graph, params)(inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    expected = compiled(jax.value_and_grad(plain), params)
    for logits_per_chunk in (2**26, 128 * 50):
        monkeypatch.setattr(loss_module, "_LOGITS_PER_CHUNK", logits_per_chunk)
        # A new function makes jit trace again.
        actual = compiled(jax.value_and_grad(lambda p: loss(p)), params)
        assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize(
    ("logits_per_chunk", "chunks"),
    [(2**26, 1), (128 * 40, 3), (128 * 50, 3), (128, 120)],
)
def test_chunks_divide_the_tokens(monkeypatch, logits_per_chunk, chunks):
    monkeypatch.setattr(loss_module, "_LOGITS_PER_CHUNK", logits_per_chunk)
    graph, params = split(small(recipe="bf16", dtype=jnp.float32))
    jaxpr = jax.make_jaxpr(lambda p, t: llama.cross_entropy(nnx.merge(graph, p), t, t))(
        params, tokens(60)
    )
    eqns = list(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "custom_vjp_call":
            eqns += [e for body in bodies_in_params(eqn.params) for e in body.eqns]
    lengths = [e.params["length"] for e in eqns if e.primitive.name == "scan"]
    assert lengths == [2, chunks]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((64, 96, 4, 3, 16), "num_kv_heads must divide num_heads, got 3, 4"),
        ((64, 0, 4, 2, 16), "intermediate_size must be positive, got 0"),
        ((64, 96, 4, 2, 15), "head_dim must be even for rotary embeddings, got 15"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        DecoderLayer(*sizes, rngs=nnx.Rngs(0))


def test_inputs_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"must divide hidden_size .* got 5, 64"):
        small(num_heads=5)
    assert small(num_heads=5, num_kv_heads=5, head_dim=16).head_dim == 16
    model = nnx.merge(*split(small()))
    with pytest.raises(ValueError, match=r"shape \(2, 64\) of tokens, got \(64, 2\)"):
        llama.cross_entropy(model, tokens(), tokens().T)
    layer = DecoderLayer(64, 96, 4, 2, 16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="bfloat16 or float32, got float16"):
        layer(jnp.ones((1, 8, 64), jnp.float16))


@pytest.mark.parametrize("recipe", ["coat", slow("coat_max")])
def test_weights_quantized_before_give_the_same(recipe):
    graph, params = split(small(recipe=recipe))

    @jax.jit
    @jax.value_and_grad
    def loss(params, codes):
        model = nnx.merge(saved, params, codes)
        return llama.cross_entropy(model, tokens()[:, :-1], tokens()[:, 1:])

    model = nnx.merge(graph, params)
    nnx.jit(llama.Llama.quantize_weights)(model)
    saved, same, codes = nnx.split(model, nnx.Param, ...)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    layer = sum(p[0].size for p in jax.tree.leaves(params["layers"]) if p.ndim > 2)
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(codes))
    # Output features of a layer's weights, each with a scale.
    outputs = 128 + 64 + 2 * 96 + 64
    assert nbytes == 2 * (2 * layer + 4 * outputs + 4 * 4)
    value, expected = loss_and_gradient(recipe)
    actual_value, actual = loss(params, codes)
    assert actual_value == value
    assert_close(actual, expected, 1e-6)
    # Stale codes are used as they are.
    doubled = jax.tree.map(lambda p: p * 2 if p.ndim > 2 else p, params)
    assert loss(doubled, codes)[0] == pytest.approx(value)


@pytest.mark.parametrize("recipe", ["bf16", "te"])
def test_plain_recipes_have_no_codes(recipe):
    layer = DecoderLayer(64, 96, 4, 2, 16, recipe=recipe, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=f"only the FP8 flow takes codes, .*{recipe}"):
        layer.quantize_weights()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float32)])
def test_gradients_go_through_layers_with_their_scales(dtype):
    recipe = blocks.RECIPES["coat"]
    layers = [DecoderLayer(64, 96, 4, 2, 16, rngs=nnx.Rngs(i)) for i in range(2)]
    x = normal(0, 2, 8, 64, dtype=dtype)

    def loss(layers, x, through):
        x = recipe.enter(x) if through else x
        for layer in layers:
            x = layer(x)
        x = recipe.leave(x) if through else x
        return jnp.mean(x.astype(jnp.float32) ** 2)

    graph, params = nnx.split(layers)
    results, passes = [], []
    for through in (False, True):

        def gradient(params, x, through=through):
            def of_params(params, x):
                return loss(nnx.merge(graph, params), x, through)

            return jax.grad(of_params, (0, 1))(params, x)

        results.append(compiled(gradient, params, x))
        choices = pallas_kernels.explain(gradient, params, x).choices
        passes.append(sum(choice.operation == "maxima" for choice in choices))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert passes[0] - passes[1] == 1  # The pass between the layers.


@pytest.mark.slow
def test_layers_take_numpy_arrays():
    layer = DecoderLayer(64, 96, 4, 2, 16, rngs=nnx.Rngs(0))
    x = normal(0, 1, 8, 64)
    np.testing.assert_array_equal(layer(np.asarray(x)), layer(x))
