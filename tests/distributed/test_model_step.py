"""Tests that a step is measured on several devices as on one."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.marks import slow

from experiments.bench import model_step
from experiments.common import meshes

pytestmark = pytest.mark.distributed
MODEL = model_step.ModelSize(
    hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1, vocab=256, seq=32
)


@pytest.mark.parametrize("case", ["coat", slow("bf16"), slow("te")])
def test_a_step_on_two_devices_has_the_losses_of_one(case):
    """Two devices with two sequences each train as one device with all four."""
    one = model_step.measure(case, MODEL, 4, 2, model_step.ONE_GPU)
    two = model_step.measure(case, MODEL, 2, 2, model_step.Spread(gpus=2))
    assert (two["mesh"], two["gpus"]) == ("fsdp=2", 2)
    assert two["first_loss"] == pytest.approx(one["first_loss"], rel=2e-3)
    assert two["last_loss"] == pytest.approx(one["last_loss"], rel=2e-3)
    assert two["last_loss"] < two["first_loss"]
    assert two["tokens_per_s_per_gpu"] == two["tokens_per_s"] / 2
    assert two["parameters_gib"] == one["parameters_gib"] / 2


@pytest.mark.slow
def test_a_step_by_hand_has_the_losses_of_jit():
    by_jit = model_step.measure("bf16", MODEL, 2, 2, model_step.Spread(gpus=2))
    by_hand = model_step.measure(
        model_step.BY_HAND, MODEL, 2, 2, model_step.Spread(gpus=2)
    )
    for name in ("first_loss", "last_loss"):
        assert by_hand[name] == pytest.approx(by_jit[name], rel=2e-3)
    for name in ("parameters_gib", "optimizer_gib"):
        assert by_hand[name] == by_jit[name]


def test_gradients_by_hand_are_those_of_jit():
    mesh = meshes.make({"fsdp": 2}, devices=2)
    tokens = model_step._random_tokens(MODEL, 4)
    actual = []
    for case in ("bf16", model_step.BY_HAND):
        loss, (params, histories) = model_step.loss_function(case, MODEL, mesh)
        params = model_step.random_params(params)
        placements = meshes.param_shardings(params, mesh)
        params = jax.device_put(params, placements)
        grads = jax.jit(jax.grad(loss))(params, histories, tokens)
        actual.append(jax.tree.leaves(jax.device_get(grads)))
    for a, b in zip(*actual, strict=True):
        a, b = a.astype(float), b.astype(float)
        np.testing.assert_allclose(b, a, atol=2.0**-6 * np.max(np.abs(a)))


def test_a_step_by_hand_needs_several_devices():
    with pytest.raises(ValueError, match="needs several devices, got one"):
        model_step.measure(model_step.BY_HAND, MODEL, 2, 2)


def test_a_step_with_spread_experts_is_measured():
    model = model_step.ModelSize.of("moe-300m", seq=32)
    model = dataclasses.replace(model, layers=1)
    spread = model_step.Spread(gpus=2, expert=2, buffer=2.0)
    row = model_step.measure("bf16", model, 1, 1, spread)
    assert (row["mesh"], row["expert"], row["buffer"]) == ("expert=2", 2, 2.0)
    assert row["first_loss"] > row["last_loss"]


def test_experts_are_spread_over_divisors_of_models_that_have_them():
    spread = model_step.Spread(gpus=2, expert=2)
    with pytest.raises(ValueError, match="the model has none"):
        model_step.measure("bf16", MODEL, 2, 1, spread)
    with pytest.raises(ValueError, match="2 GPUs cannot be split into groups of 4"):
        model_step.Spread(gpus=2, expert=4).mesh(MODEL)
