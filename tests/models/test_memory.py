"""Tests predicted memory against plain formulas and against measurements on GPUs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers.marks import slow
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.memory.kinds import GIB, Kinds
from coat_jax.models import llama

H, F, L, HEADS, KV, V, S = 256, 512, 3, 4, 2, 1024, 128
CONFIG = llama.LlamaConfig(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=F,
    num_layers=L,
    num_heads=HEADS,
    num_kv_heads=KV,
    param_dtype=jnp.bfloat16,
)
QKV = H * (HEADS + 2 * KV) // HEADS
MATRICES = L * (QKV * H + H * H + 3 * F * H) + 2 * V * H
NORMS = (2 * L + 1) * H


def estimate(**changes):
    options = {"batch": 2, "sequence": S, "recipe": "bf16"} | changes
    return coat.estimate_memory(CONFIG, **options)


def mesh(**sizes) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


@pytest.mark.parametrize("recipe", ["bf16", "coat"])
def test_parameters_gradients_and_float32_moments_follow_from_the_sizes(recipe):
    actual = estimate(recipe=recipe)
    count = MATRICES + NORMS
    assert actual.update.parameters == actual.update.gradients == 2 * count
    if recipe == "bf16":
        assert actual.update.optimizer == 8 * count + 4
    else:  # Codes, and scales of groups of 128 elements.
        assert 2.03 * count < actual.update.optimizer < 2.4 * count
    assert actual.update.total == actual.peak_bytes or actual.peak_phase != "update"
    for kinds in actual.phases.values():
        assert kinds.total == sum(dataclasses.asdict(kinds).values())
        assert all(value >= 0 for value in dataclasses.asdict(kinds).values())


def test_the_loss_holds_logits_and_the_whole_saved():
    actual = estimate(recipe="coat")
    tokens = 2 * S
    assert actual.loss.logits >= tokens * V * (4 + 2)
    assert actual.loss.saved <= actual.saved_bytes
    # The stream in groups of 16 twice a layer, gate and up, and four BF16 arrays.
    grouped = 1 + 2 / 16
    layer = 2 * H * grouped + 2 * F * grouped + 2 * (2 * H + 2 * KV * H // HEADS)
    assert actual.saved_bytes >= L * tokens * layer
    assert actual.saved_bytes <= 1.2 * (L * tokens * layer + 2 * tokens * H + 2 * V * H)


def test_saved_activations_and_workspace_grow_with_the_batch():
    small, large = estimate(batch=2), estimate(batch=8)
    # The gradient of the head does not grow, nor do a few scales and angles.
    head = 2 * V * H
    assert large.saved_bytes - head == pytest.approx(
        4 * (small.saved_bytes - head), 1e-2
    )
    assert large.backward.parameters == small.backward.parameters


@pytest.mark.parametrize("recipe", ["te", slow("coat")])
def test_fsdp_divides_all_that_its_specs_divide(recipe):
    alone = estimate(batch=2, recipe=recipe)
    four = estimate(batch=8, mesh=mesh(fsdp=4), recipe=recipe)
    assert four.gpus == 4
    assert four.update.parameters == 2 * (MATRICES // 4 + NORMS)
    assert four.update.gradients == four.update.parameters
    if recipe == "te":
        assert four.update.optimizer == 8 * (MATRICES // 4 + NORMS) + 4
    # Each GPU has as many tokens as one GPU alone.
    assert four.saved_bytes == alone.saved_bytes
    assert four.loss.gathered == alone.loss.gathered + 2 * V * H  # The head.


def test_tensor_parallel_divides_layers_and_data_parallel_the_batch_alone():
    alone = estimate(batch=2)
    two = estimate(batch=2, mesh=mesh(tensor=2))
    embeddings = 2 * V * H
    assert two.update.parameters == 2 * (
        (MATRICES - embeddings) // 2 + embeddings + NORMS
    )
    assert 0.4 * alone.saved_bytes < two.saved_bytes < 0.8 * alone.saved_bytes
    data = estimate(batch=4, mesh=mesh(data=2))
    assert dataclasses.asdict(data) == dataclasses.asdict(alone) | {"gpus": 2}


def test_context_parallel_divides_activations_and_parameters():
    kwargs = {"batch": 2, "sequence": 2 * S}
    alone = estimate(**kwargs)
    two = estimate(**kwargs, mesh=mesh(context=2))
    assert two.update == estimate(**kwargs, mesh=mesh(fsdp=2)).update
    # Each of two GPUs saves half, and the whole gradient of the head. Rows have RoPE's
    # angles of their own.
    head = 2 * V * H
    half = (alone.saved_bytes - head) / 2
    assert two.saved_bytes - head == pytest.approx(half, rel=1e-2)
    with pytest.raises(ValueError, match=r"sequence must be a multiple of 3, .* got"):
        estimate(batch=2, sequence=S, mesh=mesh(context=3))


def test_given_shardings_and_optimizers_count():
    actual = mesh(fsdp=2)
    model = nnx.eval_shape(lambda: llama.Llama(CONFIG, rngs=nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    complete = jax.tree.map(lambda p: NamedSharding(actual, P()), params)
    sgd = estimate(batch=2, mesh=actual, shardings=complete, optimizer=optax.sgd(1e-3))
    assert sgd.update.parameters == 2 * (MATRICES + NORMS)
    assert sgd.update.optimizer == 0
    assert sgd.loss.gathered == 0


@pytest.mark.parametrize("recipe", [slow("bf16"), "coat"])
def test_released_gradients_are_those_of_one_layer(recipe):
    ordinary, released = (
        estimate(recipe=recipe, released=choice) for choice in (False, True)
    )
    layer = 2 * (QKV * H + H * H + 3 * F * H + 2 * H)
    others = 2 * (2 * V * H + H)
    assert ordinary.update.gradients == L * layer + others
    assert released.update.gradients == layer + others
    assert layer <= released.backward.gradients <= layer + others
    for name in ("parameters", "optimizer"):
        assert getattr(released.peak, name) == getattr(ordinary.peak, name)
    assert released.saved_bytes == ordinary.saved_bytes
    assert released.peak_bytes < ordinary.peak_bytes


def test_it_prints_a_table():
    lines = str(estimate()).splitlines()
    assert lines[0].split() == [
        "GiB",
        "a",
        "GPU",
        "forward",
        "loss",
        "backward",
        "update",
    ]
    assert [line.split()[0] for line in lines[1:]] == [
        *(field.name for field in dataclasses.fields(Kinds)),
        "total",
    ]


def test_the_largest_batch_fits_and_the_next_does_not():
    options = {"sequence": S, "recipe": "bf16", "mesh": mesh(fsdp=2)}
    limit = coat.estimate_memory(CONFIG, batch=12, **options).peak_bytes / GIB
    assert coat.largest_batch(CONFIG, memory_gib=limit, **options) == 12
    below = math.nextafter(limit, 0) * 0.999
    assert coat.largest_batch(CONFIG, memory_gib=below, **options) == 10
    assert coat.largest_batch(CONFIG, memory_gib=1e-4, **options) == 0
