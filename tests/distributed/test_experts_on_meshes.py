"""Tests that models with experts compute on meshes what they compute on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.gradients import cosine
from helpers.marks import slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.memory.shards import default_shardings
from coat_jax.models import llama

pytestmark = pytest.mark.distributed
TOKENS = np.random.default_rng(0).integers(0, 96, (8, 17))


def config_of(recipe: str, **changes) -> llama.LlamaConfig:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 32}
    heads = {"num_layers": 1, "num_heads": 8, "num_kv_heads": 8}
    return llama.LlamaConfig(**sizes, **heads | {"recipe": recipe} | changes)


def results(recipe: str, mesh=None):
    """Returns the loss, the load of each expert, and the gradients of a model."""
    config = config_of(
        recipe,
        dtype=jnp.bfloat16,
        batch_axes=None if mesh is None else "fsdp",
        experts=llama.Experts(num_experts=8, top_k=2, num_shared=0),
    )
    graph, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
    tokens, options = jnp.asarray(TOKENS), {}
    if mesh is not None:
        places = default_shardings(params, mesh)
        assert places["layers"]["gate_up"].spec == P(None, "fsdp", None, None, None)
        params = jax.tree.map(jax.device_put, params, places)
        tokens = jax.device_put(tokens, NamedSharding(mesh, P("fsdp")))
        options = {"out_shardings": (None, places)}

    def loss(params, tokens):
        model = nnx.merge(graph, params)
        return llama.training_loss(model, tokens[:, :-1], tokens[:, 1:])

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), **options)
    (value, losses), grads = run(params, tokens)
    return float(value), np.asarray(losses.routing.load), nnx.to_pure_dict(grads)


@pytest.mark.parametrize("recipe", ["bf16", "coat", "coat_bf16"])
def test_experts_split_over_devices(recipe):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    value, load, grads = results(recipe)
    value_there, load_there, grads_there = results(recipe, mesh)
    # Sums in another order move a few roundings, and choices among near experts.
    assert value_there == pytest.approx(value, rel=1e-3)
    np.testing.assert_allclose(load_there, load, atol=0.02)
    assert cosine(grads_there, grads) > 0.999
    for name in ("router", "gate_up", "down"):
        pair = (g["layers"][name] for g in (grads_there, grads))
        assert cosine(*pair) > 0.99


@pytest.mark.parametrize(
    ("recipe", "check_vma"), [("bf16", True), ("coat", False), slow("coat", True)]
)
def test_losses_within_shard_map_are_those_of_the_whole_batch(recipe, check_vma):
    config = config_of(
        recipe,
        num_heads=4,
        num_kv_heads=2,
        dtype=jnp.float32,
        experts=llama.Experts(num_experts=4, top_k=2, balance_weight=0.5),
    )
    model = llama.Llama(config, rngs=nnx.Rngs(0))
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss(params, tokens):
        model = nnx.merge(graph, params, others)
        return llama.training_loss(model, tokens[:, :-1], tokens[:, 1:])

    def mean_loss(params, tokens):
        return jax.tree.map(lambda x: jax.lax.pmean(x, "data"), loss(params, tokens))

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    manual = jax.shard_map(mean_loss, mesh=mesh, **specs, check_vma=check_vma)
    (expected, losses), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        params, jnp.asarray(TOKENS)
    )
    (value, parts), actual = jax.jit(jax.value_and_grad(manual, has_aux=True))(
        params, jnp.asarray(TOKENS)
    )
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(parts.routing.load, losses.routing.load, atol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (actual, grads)), strict=True):
        assert np.linalg.norm(a - b) < 1e-4 * np.linalg.norm(b) + 1e-9
