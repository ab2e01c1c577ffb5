"""Tests trainings with the optimizer inside the backward pass."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.training import arguments
from experiments.training import trainer as training
from experiments.training.bad_steps import description
from experiments.training.settings import PRESETS, Settings, model_config


def settings_of(**changes) -> Settings:
    tiny = PRESETS["tiny"].settings
    return dataclasses.replace(tiny, recipes=("coat",), batch_size=2, **changes)


def after(batches, recipe="bf16", **changes):
    settings = settings_of(**changes)
    config = model_config(settings, recipe, 257)
    trainer = training.Trainer(config, settings, steps=max(len(batches), 10))
    state, metrics = trainer.init(), []
    for batch in batches:
        state, measured = trainer.step(state, batch)
        metrics.append(jax.device_get(measured))
    return state, metrics, trainer


@pytest.fixture(scope="module")
def batches():
    shape = 3, 2, PRESETS["tiny"].settings.seq_len + 1
    return np.random.default_rng(0).integers(0, 257, shape, np.int32)


@pytest.fixture(scope="module")
def ordinary(batches):
    return after(batches)


@pytest.mark.slow  # Bits of released steps are tests of release.
def test_released_steps_follow_ordinary_ones(ordinary, batches):
    """Gradients are clipped to a norm of 1, which the first ones exceed."""
    expected, metrics, _ = ordinary
    state, released, _ = after(batches, release="clip", bad_step="skip")
    assert metrics[0].grad_norm > 1
    for a, b in zip(released, metrics, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-4)
        np.testing.assert_allclose(a.grad_norm, b.grad_norm, rtol=1e-3)
        np.testing.assert_allclose(a.grad_norms, b.grad_norms, rtol=5e-2, atol=1e-4)
        assert a.ok
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "coat"])
def test_losses_stay_those_of_clipping_for_300_steps(recipe):
    shape = 300, 2, PRESETS["tiny"].settings.seq_len + 1
    batches = np.random.default_rng(1).integers(0, 8, shape, np.int32)
    _, ordinary, _ = after(batches, recipe)
    _, released, _ = after(batches, recipe, release="clip", bad_step="skip")
    clipped = sum(step.grad_norm > 1 for step in ordinary)
    assert 50 < clipped < 300
    # Norms are summed in another order, and FP8 codes make more of a last bit.
    losses = np.array([[s.loss for s in steps] for steps in (released, ordinary)])
    np.testing.assert_allclose(*losses, rtol=3e-3)
    np.testing.assert_allclose(*losses.reshape(2, -1, 20).mean(axis=2), rtol=1e-3)


def test_steps_without_clipping_know_no_norms(ordinary, batches):
    _, (first, *_), _ = ordinary
    settings = settings_of(release="once")
    trainer = training.Trainer(model_config(settings, "bf16", 257), settings, steps=10)
    _, traced = jax.eval_shape(
        trainer._step, trainer.abstract_state(), batches[0], np.float32(1)
    )
    assert traced.grad_norms.shape == (0,)
    unknown = {"grad_norm": np.float32(np.nan), "grad_norms": np.zeros(0)}
    measured = first._replace(**unknown)
    text = description(measured, trainer.parameter_names, 1.0)
    assert text == f"loss {measured.loss:.4g} is above 1"


@pytest.mark.parametrize(
    ("name", "value"), [("accumulate", 2), ("scaling", "delayed"), ("health_every", 5)]
)
def test_settings_that_need_all_gradients_are_refused(name, value):
    with pytest.raises(ValueError, match=f"release='clip' needs {name}=.*; got"):
        settings_of(release="clip", **{name: value})


@pytest.mark.parametrize(
    ("flags", "release"),
    [([], None), (["--release"], "clip"), (["--release", "once"], "once")],
)
def test_the_flag_names_how_the_step_is_released(flags, release):
    assert arguments.parse(flags).given.get("release") == release
