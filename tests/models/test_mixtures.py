"""Tests language models with experts: losses, steps, generation and memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.gradients import compiled

import coat_jax as coat
from coat_jax.layers.experts.routing import Experts
from coat_jax.models import llama

EXPERTS = Experts(num_experts=6, top_k=2, balance_weight=0.3, z_weight=0.02)
CONFIG = llama.LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    recipe="bf16",
    dtype=jnp.float32,
    experts=EXPERTS,
)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 13))


def model_of(config):
    """Returns a model's structure and parameters that are far from zero."""
    graph, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda p: p + np.float32(0.1) * rng.standard_normal(p.shape, np.float32), params
    )
    return graph, params


def loss_of(graph):
    def loss(params):
        model = nnx.merge(graph, params)
        return llama.training_loss(model, TOKENS[:, :-1], TOKENS[:, 1:])

    return loss


def test_the_loss_has_auxiliary_losses_of_all_layers():
    graph, params = model_of(CONFIG)

    def run(params):
        model = nnx.merge(graph, params)
        loss, losses = loss_of(graph)(params)
        x, loads = model.embed(TOKENS[:, :-1]), []
        inner, stacked = nnx.split(model.layers)
        for i in range(2):
            layer = nnx.merge(inner, jax.tree.map(lambda p, i=i: p[i], stacked))
            x, routing = layer.with_routing(x)
            loads.append(routing)
        plain = llama.cross_entropy(model, TOKENS[:, :-1], TOKENS[:, 1:])
        return loss, losses, loads, plain

    loss, losses, loads, plain = compiled(run, params)
    np.testing.assert_allclose(losses.cross_entropy, plain, rtol=1e-5)
    load, balance, z = (np.stack(x) for x in zip(*loads, strict=True))
    np.testing.assert_allclose(losses.routing.load, load, atol=1e-6)
    np.testing.assert_allclose(load.sum(axis=1), 1, rtol=1e-5)
    expected = plain + 0.3 * balance.mean() + 0.02 * z.mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_generation_is_that_of_whole_passes():
    graph, params = model_of(CONFIG)
    model = nnx.merge(graph, params)
    generation = coat.generate(model, TOKENS[:, :5], max_new_tokens=4)
    tokens = np.concatenate([TOKENS[:, :5], generation.tokens], axis=1)
    logits = compiled(lambda p: nnx.merge(graph, p)(tokens), params)
    np.testing.assert_array_equal(np.argmax(logits[:, 4:-1], -1), generation.tokens)


def test_the_estimate_knows_saved_rows_of_experts():
    def saved(top_k):
        experts = dataclasses.replace(EXPERTS, top_k=top_k)
        config = dataclasses.replace(CONFIG, recipe="coat", experts=experts)
        estimate = coat.estimate_memory(config, batch=2, sequence=64)
        return estimate.saved_bytes, estimate.peak.parameters

    (one, parameters), (two, _) = saved(2), saved(3)
    # Codes of gate and up, the largest scale, the expert and the order.
    of_a_row = 2 * 32 * (1 + 2 / 16) + 3 * 4
    assert two - one == CONFIG.num_layers * 2 * 64 * of_a_row
    _, params = nnx.split(nnx.eval_shape(lambda: llama.Llama(CONFIG, rngs=nnx.Rngs(0))))
    assert parameters == 4 * sum(p.size for p in jax.tree.leaves(params))


def test_the_estimate_knows_experts_of_a_mesh_axis():
    experts = dataclasses.replace(EXPERTS, num_experts=8, buffer=1.0)
    config = dataclasses.replace(CONFIG, recipe="coat", experts=experts)

    def estimate(batch, buffer=1.0, **sizes):
        mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        there = dataclasses.replace(experts, buffer=buffer)
        there = dataclasses.replace(config, experts=there)
        return coat.estimate_memory(there, batch=batch, sequence=8, mesh=mesh)

    whole = coat.estimate_memory(config, batch=4, sequence=8)
    split = estimate(16, expert=4)
    # The rows of equal loads take as much as on one GPU. For each of 2 layers, 4 * 4
    # numbers of rows for 2 experts replace the numbers of rows of 8 experts, and the
    # order of the rows that are sent has none of the 128 rows of padding. Two weights
    # have a scale for each of 2 experts in place of 8.
    numbers = 4 * 4 * 2 - 8 - 128 - 2 * (8 - 2)
    assert split.saved_bytes - whole.saved_bytes == 2 * 4 * numbers
    arrays = 3 * 2 * 32 * 32 * 8 * 4  # Two layers, float32.
    assert whole.update.parameters - split.update.parameters > arrays * 3 // 4
    # All rows may arrive at one of 4 devices.
    rows = 4 * 8 * 2
    of_a_row = 2 * 32 * (1 + 2 / 16) + 4  # The largest scale is last.
    more = estimate(16, buffer=None, expert=4).saved_bytes - split.saved_bytes
    assert more == 2 * 3 * rows * of_a_row
    for sizes, rule in (
        ({"expert": 3}, "must divide num_experts 8, got 3"),
        ({"expert": 2, "tensor": 2}, "expert or tensor, not both"),
    ):
        with pytest.raises(ValueError, match=rule):
            estimate(12, **sizes)
    dense = dataclasses.replace(config, experts=None)
    mesh = jax.sharding.AbstractMesh((2,), ("expert",))
    with pytest.raises(ValueError, match="expert needs a model with experts, got None"):
        coat.estimate_memory(dense, batch=2, sequence=8, mesh=mesh)


def test_experts_need_a_recipe_that_has_them():
    with pytest.raises(ValueError, match="experts need a recipe among"):
        dataclasses.replace(CONFIG, recipe="coat_block")


@pytest.mark.parametrize("recipe", ["bf16", "te", "coat", "coat_max"])
def test_no_rank_is_promoted(recipe):
    experts = dataclasses.replace(
        EXPERTS, num_shared=1, scores="sigmoid", selection_bias=True
    )
    kind = {"window": 4, "local_layers": (True, False)}
    config = dataclasses.replace(CONFIG, recipe=recipe, experts=experts, **kind)
    model = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def grads(params, others):
        def loss(params):
            model = nnx.merge(graph, params, others)
            return llama.training_loss(model, TOKENS, TOKENS)[0]

        return jax.grad(loss)(params)

    def tokens(params, others):
        model, key = nnx.merge(graph, params, others), jax.random.key(0)
        options = {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "key": key}
        return coat.generate(model, TOKENS, max_new_tokens=2, **options)

    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(grads, params, others)
        jax.eval_shape(tokens, params, others)
