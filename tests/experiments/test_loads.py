"""Tests the entries about loads of experts in rows of metrics."""

import jax.numpy as jnp

from coat_jax.models.llama import Routing
from experiments.training.loads import loads
from experiments.training.settings import PRESETS
from experiments.training.speed import flops_per_token


def test_loads_are_relative_to_equal_ones():
    load = jnp.array([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.125, 0.375]])
    assert loads(Routing(load, jnp.float32(1.5), jnp.float32(2.5))) == {
        "largest_load": 2.0,
        "smallest_load": 0.0,
        "idle_experts": 2,
        "balance_loss": 1.5,
        "z_loss": 2.5,
    }
    assert loads(None) == {}


def test_a_token_counts_the_work_of_its_own_experts():
    config = PRESETS["moe-300m"].model
    hidden, inner, top_k, count = 768, 128, 8, 64
    attention = 4 * hidden * hidden + hidden * 1024
    layer = attention + hidden * (3 * inner * top_k + count)
    weights = 12 * layer + 50_304 * hidden
    assert flops_per_token(config, 1024) == 6 * weights
