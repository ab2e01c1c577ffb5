"""Compares the image encoder with NumPy in float64, and its recipes with BF16."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import vision
from helpers.gradients import FP8, assert_close, compiled, cosine, saved, saved_bytes
from helpers.marks import slow
from helpers.models import initialization, normal, parameters

from coat_jax.models import vit

RECIPES = ["bf16", "te", "coat", "coat_max"]


def config(**changes) -> vit.VitConfig:
    shape = {"image_size": 32, "patch_size": 4, "num_layers": 2, "num_heads": 4}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "recipe": "bf16"}
    return vit.VitConfig(**{**shape, **sizes, **changes})


@functools.cache
def moved(config: vit.VitConfig):
    """Returns parameters, none of them exactly 0 or 1."""
    _, params = parameters(lambda: vit.Vit(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda p: p + np.float32(0.1) * rng.standard_normal(p.shape, np.float32), params
    )


def split(config: vit.VitConfig):
    """Returns a model's structure, and parameters that are the same for all recipes."""
    model = nnx.eval_shape(lambda: vit.Vit(config, rngs=nnx.Rngs(0)))
    return nnx.split(model)[0], moved(dataclasses.replace(config, recipe="bf16"))


def images(size: int = 32, channels: int = 3):
    return normal(2, 2, size, size, channels)


@pytest.mark.parametrize(
    "changes",
    [
        slow({}),
        slow({"patch_size": 8, "num_heads": 2, "norm_eps": 1e-2}),
        {"image_size": 12, "num_channels": 1},
    ],
    ids=["four by four", "larger patches", "one channel"],
)
def test_features(changes):
    settings = config(dtype=jnp.float32, **changes)
    graph, params = split(settings)
    arguments = images(settings.image_size, settings.num_channels)
    features = compiled(lambda p, x: nnx.merge(graph, p)(x), params, arguments)
    assert features.shape == (2, settings.grid_size**2, settings.hidden_size)
    plain = jax.tree.map(lambda p: np.float64(p), nnx.to_pure_dict(params))
    assert_close(features, vision.encoded(settings, plain, arguments), 1e-5)


@functools.cache
def computed(recipe: str):
    """Returns features and the gradients of a loss."""
    graph, params = split(config(recipe=recipe))

    def loss(params):
        features = nnx.merge(graph, params)(images())
        return jnp.sum(jnp.sin(features.astype(jnp.float32))), features

    gradient, features = compiled(jax.grad(loss, has_aux=True), params)
    return features, gradient


def residuals(recipe: str):
    """Returns the residuals of the features' gradients."""
    graph, params = split(config(recipe=recipe))
    return saved(lambda p: nnx.merge(graph, p)(images()), params)


def test_features_have_the_dtype_of_the_configuration():
    graph, params = split(config())
    features = jax.eval_shape(lambda p: nnx.merge(graph, p)(images()), params)
    assert features.dtype == jnp.bfloat16


def test_recipes_share_initialization_and_structure():
    def made(recipe):
        return vit.Vit(config(recipe=recipe), rngs=nnx.Rngs(0))

    first, *remaining = [
        initialization(functools.partial(made, recipe)) for recipe in RECIPES
    ]
    assert all(other == first for other in remaining)


@pytest.mark.slow
def test_fp8_recipes_compute_nearly_the_same_features():
    """Within `fp8_remat` matmuls have a scale for each token, so recipes differ."""
    plain, *remaining = (computed(recipe)[0] for recipe in RECIPES)
    for features in remaining:
        assert 0.99 < cosine(features, plain) < 1 - 1e-5
        assert cosine(features, remaining[0]) > 0.99


@pytest.mark.parametrize("recipe", [slow("te"), slow("coat"), "coat_max"])
def test_gradient_of_each_recipe_is_near_that_of_bf16(recipe):
    plain, mine = computed("bf16")[1], computed(recipe)[1]
    assert 0.98 < cosine(mine, plain) < 1 - 1e-5


def test_recipes_save_what_they_say():
    actual = {recipe: residuals(recipe) for recipe in RECIPES}
    sizes = [saved_bytes(actual[recipe]) for recipe in RECIPES]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[0] / 2
    heads = (2, 2, 64, 4, 16)  # Layers, images, patches, heads, size of a head.
    dtypes = {
        recipe: {r.dtype for r in arrays if r.shape == heads}
        for recipe, arrays in actual.items()
    }
    assert dtypes["coat"] == {jnp.dtype(jnp.bfloat16)}
    assert dtypes["coat_max"] == {jnp.dtype(FP8[0])}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 5}, "patch_size must divide image_size, got 5, 32"),
        ({"num_heads": 3}, "num_heads must divide hidden_size, got 3, 64"),
        ({"num_layers": 0}, "num_layers"),
        ({"recipe": "fp4"}, "recipe must be one of bf16, te, .*, got 'fp4'"),
        ({"dtype": jnp.int8}, "dtype must be a floating dtype, got int8"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((2, 32, 31, 3), np.float32), r"shape \[b, 32, 32, 3\], got \(2, 32"),
        (np.zeros((32, 32, 3), np.float32), r"shape \[b, 32, 32, 3\], got \(32, 32"),
        (np.zeros((2, 32, 32, 3), np.uint8), "must be floating, got dtype uint8"),
    ],
)
def test_images_that_do_not_fit_are_refused(given, message):
    model = nnx.eval_shape(lambda: vit.Vit(config(), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        model(jnp.asarray(given))
