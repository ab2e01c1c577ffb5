"""Tests vision-language models: where images go, losses and recipes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import released, small_models, vision
from helpers.gradients import assert_close, compiled, cosine
from helpers.marks import slow
from helpers.models import normal, parameters
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.models import llama, vit, vlm

IMAGE = 127


def config(recipe="bf16", dtype=jnp.bfloat16, text=(), **changes) -> vlm.VlmConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "dtype": dtype}
    encoder = {"image_size": 16, "patch_size": 4, "num_layers": 1, "num_heads": 4}
    text = {"recipe": recipe, "tie_embeddings": False, **sizes, **dict(text)}
    return vlm.VlmConfig(
        **{
            "vision": vit.VitConfig(recipe=recipe, **sizes, **encoder),
            "text": small_models.config(**text),
            "image_token": IMAGE,
            "merge_size": 2,
            **changes,
        }
    )


def make(config: vlm.VlmConfig) -> vlm.VisionLanguageModel:
    return vlm.VisionLanguageModel(config, rngs=nnx.Rngs(0))


@functools.cache
def moved(merge_size: int):
    """Returns parameters, none of them exactly 0 or 1."""
    settings = config(dtype=jnp.float32, merge_size=merge_size)
    _, params = parameters(lambda: make(settings))
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda p: p + np.float32(0.05) * rng.standard_normal(p.shape, np.float32),
        params,
    )


@functools.cache
def split(config: vlm.VlmConfig):
    """Returns a model's structure, and parameters that are the same for all recipes."""
    graph, params = nnx.split(nnx.eval_shape(lambda: make(config)))
    actual = moved(config.merge_size)
    assert jax.tree.structure(actual) == jax.tree.structure(params)
    return graph, actual


def images(count: int = 1):
    return normal(2, 2, count, 16, 16, 3)


def tokens(images: int = 1):
    """Returns text with four image tokens for each image, in front and within."""
    rng = np.random.default_rng(3)
    actual = rng.integers(0, IMAGE, (2, 20), np.int32)
    actual[:, :4] = IMAGE
    if images == 2:
        actual[0, 9:13] = actual[1, 5:9] = IMAGE
    return actual


@pytest.mark.parametrize("merge_size", [slow(1), 2])
def test_image_embeddings(merge_size):
    settings, count = config(dtype=jnp.float32, merge_size=merge_size), 2
    graph, params = split(settings)
    arguments = images(count)
    actual = compiled(lambda p, x: nnx.merge(graph, p).encode(x), params, arguments)
    plain = jax.tree.map(lambda p: np.float64(p), nnx.to_pure_dict(params))
    features = [vision.encoded(settings.vision, plain["vision"], x) for x in arguments]
    expected = [vision.projected(settings, plain["projector"], x) for x in features]
    assert actual.shape == (2, count * settings.tokens_per_image, 64)
    assert_close(actual, np.stack(expected).reshape(actual.shape), 1e-5)


def test_images_are_read_in_place_of_image_tokens():
    """The oracle is a Llama with one more word for each image embedding."""
    settings, count = config(dtype=jnp.float32), 2
    graph, params = split(settings)
    embeddings = normal(4, 2, 4 * count, 64)
    arguments = tokens(count)
    logits = compiled(
        lambda p, e: (m := nnx.merge(graph, p)).logits(m.hidden(e, arguments)),
        params,
        embeddings,
    )
    words = arguments.copy()
    words[arguments == IMAGE] = np.arange(8 * count) + 128
    larger = small_models.config(
        hidden_size=64,
        intermediate_size=96,
        tie_embeddings=False,
        dtype=jnp.float32,
        vocab_size=128 + 8 * count,
    )
    table = params["text"]["embedding"][...]
    table = jnp.concatenate([table, embeddings.reshape(-1, 64)])
    llama_graph, _ = parameters(lambda: llama.Llama(larger, rngs=nnx.Rngs(0)))
    text = nnx.State({**params["text"], "embedding": nnx.Param(table)})
    expected = compiled(lambda p: nnx.merge(llama_graph, p)(words), text)
    assert_close(logits, expected, 1e-5)


@pytest.mark.parametrize(
    ("shape", "rows"), [((1, 4, 64), 2), ((2, 4, 64), 1), ((2, 4, 1), 2), ((4, 64), 2)]
)
def test_images_of_other_sequences_are_refused(shape, rows):
    """Embeddings of one sequence are not repeated for the others."""
    graph, params = split(config(dtype=jnp.float32))
    message = re.escape(f"[b, n, 64], got {list(shape)} for tokens [{rows}, 20]")
    with pytest.raises(ValueError, match=message):
        nnx.merge(graph, params).hidden(jnp.zeros(shape), tokens()[:rows])


def test_loss_is_that_of_answers():
    graph, params = split(config(dtype=jnp.float32))
    arguments, targets = tokens()[:, :-1], tokens()[:, 1:]
    is_answer = np.zeros(targets.shape, bool)
    is_answer[0, 8:11] = is_answer[1, 12:18] = True

    def loss_of(params, is_answer):
        arrays = arguments, targets, is_answer
        return vlm.cross_entropy(nnx.merge(graph, params), images(), *arrays)

    run = jax.jit(jax.value_and_grad(loss_of))
    loss, _ = run(params, is_answer)
    model = jax.jit(lambda params: nnx.merge(graph, params)(images(), arguments))
    logits = np.float64(model(params))
    chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    losses = np.log(np.exp(logits).sum(-1)) - chosen
    assert float(loss) == pytest.approx(losses[is_answer].mean(), rel=1e-5)
    # A loss without answers is zero.
    loss, grads = run(params, np.zeros(targets.shape, bool))
    assert loss == 0
    assert not any(np.any(g) for g in jax.tree.leaves(grads))


@functools.cache
def loss_and_gradients(recipe: str):
    graph, params = split(config(recipe))
    arguments, targets = tokens(2)[:, :-1], tokens(2)[:, 1:]

    def loss(params):
        model = nnx.merge(graph, params)
        return vlm.cross_entropy(model, images(2), arguments, targets, targets != IMAGE)

    return compiled(jax.value_and_grad(loss), params)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["vision", "projector", "text"])
@pytest.mark.parametrize("recipe", ["te", "coat_max"])
def test_gradient_of_each_recipe_is_near_that_of_bf16(recipe, part):
    (plain, expected), (mine, grads) = map(loss_and_gradients, ("bf16", recipe))
    assert float(mine) == pytest.approx(float(plain), rel=0.01)
    assert all(np.any(g) for g in jax.tree.leaves(grads[part]))
    assert 0.97 < cosine(grads[part], expected[part]) < 1 - 1e-5


def test_a_sequence_with_more_image_tokens_than_embeddings_is_nan():
    graph, params = split(config(dtype=jnp.float32))
    arguments = np.stack([tokens(1)[0], tokens(2)[0]])
    hidden = compiled(
        lambda p: nnx.merge(graph, p).hidden(normal(4, 2, 4, 64), arguments), params
    )
    assert np.all(np.isfinite(hidden[0]))
    assert np.all(np.isnan(hidden[1, 9:]))


def test_image_tokens_are_counted():
    settings = config()
    vlm.check_tokens(settings, tokens(), 1)
    vlm.check_tokens(settings, tokens(2), 2)
    arguments = tokens(2)
    arguments[1, 5] = 0
    with pytest.raises(ValueError, match="needs 8 image tokens, sequence 1 has 7"):
        vlm.check_tokens(settings, arguments, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merge_size": 3}, "merge_size must divide the patches in a row, got 3, 4"),
        ({"merge_size": 0}, "merge_size"),
        ({"image_token": 128}, "image_token must be in the vocabulary of 128, got 128"),
        ({"image_token": -1}, "image_token must be .* got -1"),
        ({"text": {"dtype": jnp.float32}}, "one dtype, got bfloat16, float32"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("name", ["targets", "is_answer"])
def test_shapes_that_do_not_fit_are_refused(name):
    arguments = {"tokens": tokens(), "targets": tokens(), "is_answer": tokens() > 0}
    arguments[name] = arguments[name][:, 1:]
    model = nnx.eval_shape(lambda: vlm.VisionLanguageModel(config(), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=rf"{name} must have .*\(2, 20\) of tokens"):
        vlm.cross_entropy(model, images(), **arguments)


@pytest.mark.parametrize("recipe", ["bf16", "coat"])
def test_loss_and_gradients_trace_within_shard_map(recipe):
    graph, params = split(config(recipe))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def loss(params, images, tokens):
        arrays = images, tokens, tokens, tokens > 0
        return vlm.cross_entropy(nnx.merge(graph, params), *arrays)

    def gradients(*arrays):
        value, grads = jax.value_and_grad(loss)(*arrays)
        return jax.lax.pmean(value, "data"), grads

    specs = P(), P("data"), P("data")
    run = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=P())
    value, grads = jax.eval_shape(run, params, images(), tokens())
    assert value.shape == ()
    assert jax.tree.structure(grads) == jax.tree.structure(params)


def test_images_need_the_axis_of_sequences():
    model = nnx.eval_shape(lambda: vlm.VisionLanguageModel(config(), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"\[b, i, h, w, c\], got \(2, 16, 16, 3\)"):
        model.encode(images()[:, 0])


def test_sequences_without_images_are_refused_by_name():
    model = nnx.eval_shape(lambda: make(config()))
    with pytest.raises(ValueError, match="one image or more"):
        model.encode(jnp.zeros((2, 0, 16, 16, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "coat"])
def test_encoder_and_text_step_inside_backward(recipe):
    graph, params = split(config(recipe))
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    arguments, targets = tokens()[:, :-1], tokens()[:, 1:]

    def loss(params, images):
        model = nnx.merge(graph, params)
        return vlm.cross_entropy(model, images, arguments, targets, targets != IMAGE)

    tx, key = coat.fp8_adamw(1e-3), jax.random.key(0)
    released.assert_steps_equal(loss, tx, params, images(), key=key)
