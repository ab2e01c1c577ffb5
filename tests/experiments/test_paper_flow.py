"""Tests the paper's own flow against NumPy, and that models train with it."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.gradients import value_and_vjp

import coat_jax as coat
from coat_jax.layers.recipes import RECIPES
from experiments.pretrain import paper_flow, small
from experiments.training.settings import PRESETS, model_config
from experiments.training.trainer import Trainer


def rounded(x, dtype):
    """Rounds to FP8 with one scale, the smallest power of two that lets x fit."""
    x = np.asarray(x, np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / float(ml_dtypes.finfo(dtype).max)))
    return (x / scale).astype(dtype).astype(np.float64) * scale


@pytest.mark.parametrize("outputs", [(24,), (2, 12)])
def test_products_and_gradients_are_those_of_rounded_tensors(outputs):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5, 16)).astype(np.float32)
    w = rng.normal(size=(*outputs, 16)).astype(np.float32)
    dy = 1e-4 * rng.normal(size=(3, 5, *outputs)).astype(np.float32)
    y, (dx, dw) = value_and_vjp(paper_flow.linear, dy, x, w)
    x8, w8 = (rounded(each, ml_dtypes.float8_e4m3fn) for each in (x, w))
    d8 = rounded(dy, ml_dtypes.float8_e5m2)
    np.testing.assert_allclose(y, np.tensordot(x8, w8, (-1, -1)), atol=1e-4)
    expected = np.tensordot(d8, w8, len(outputs))
    np.testing.assert_allclose(dx, expected, atol=1e-8)
    expected = np.tensordot(d8, x8, ((0, 1), (0, 1)))
    np.testing.assert_allclose(dw, expected, atol=1e-8)


def test_dtypes_are_those_of_the_operands():
    x, w = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((2, 8), jnp.float32)
    dy = jnp.ones((4, 2), jnp.bfloat16)
    y, gradients = value_and_vjp(paper_flow.linear, dy, x, w)
    assert y.dtype == jnp.bfloat16
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]


def test_it_is_a_recipe_while_the_context_lasts():
    with paper_flow.known() as name:
        assert RECIPES[name] is paper_flow.RECIPE
    assert name not in RECIPES


@pytest.mark.slow
def test_a_model_saves_less_and_its_moments_are_e4m3():
    settings = PRESETS["tiny"].settings
    with paper_flow.known() as name:
        trainer = Trainer(model_config(settings, name, 257), settings, steps=4)
        plain = Trainer(model_config(settings, "bf16", 257), settings, steps=4)
        state = trainer.init()
        assert trainer.saved_activation_bytes() < 0.6 * plain.saved_activation_bytes()
    moments = {row["format"] for row in coat.moment_report(state.opt_state).rows()}
    assert moments == {"E4M3"}


@pytest.mark.slow
def test_small_trainings_have_it_beside_the_recipes():
    settings = dataclasses.replace(
        PRESETS["tiny"].settings, steps=3, eval_every=3, recipes=("bf16",)
    )
    actual = small.train(settings, seeds=1)
    assert {row["recipe"] for row in actual.texts} == {"bf16", paper_flow.NAME}
    losses = {
        row["recipe"]: row["loss"]
        for row in actual.texts
        if row["text"] == small.VALIDATION
    }
    assert losses[paper_flow.NAME] != losses["bf16"]
    assert losses[paper_flow.NAME] == pytest.approx(losses["bf16"], rel=0.01)
