"""Tests of Adam's step on large arrays in blocks, on devices without the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.marks import slow
from helpers.optimizers import assert_same_bits

import coat_jax as coat
from coat_jax.optimizers import blocks

# Blocks of 4,096 elements divide the first. The others have a rest, short last groups,
# and one axis.
SHAPES = [(64, 256), (2, 25, 384), (70, 200), (128 * 97,)]


def _plain(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _fused(tx, key=None):
    def step(grads, state, params):
        return coat.fused_update(tx, grads, state, params, key=key)

    return step


def _trained(shape, dtype, key, size, monkeypatch, fused):
    """Returns parameters and state after two steps in blocks of `size` elements."""
    monkeypatch.setattr(blocks, "_BLOCK", size)
    # Larger arrays than these are not joined with others, as those in blocks are.
    monkeypatch.setattr("coat_jax.optimizers.batch._LARGEST", 0)
    jax.clear_caches()
    tx, rng = coat.fp8_adamw(1e-2, weight_decay=0.1), np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=shape), dtype)
    state = tx.init(params)

    step = jax.jit(_fused(tx, key) if fused else _plain(tx))
    for _ in range(2):
        grads = jnp.asarray(rng.normal(size=shape), dtype)
        params, state = step(grads, state, params)
    return params, state


PLAIN, FUSED = (jnp.float32, False), (jnp.bfloat16, True)


@pytest.mark.parametrize(
    ("shape", "dtype", "fused"),
    [
        slow(SHAPES[0], *PLAIN),
        slow(SHAPES[0], *FUSED),
        slow(SHAPES[1], *PLAIN),
        (SHAPES[2], *FUSED),
        slow(SHAPES[3], *PLAIN),
    ],
)
def test_blocks_have_the_bits_of_the_whole(shape, dtype, fused, monkeypatch):
    arguments = shape, dtype, jax.random.key(3)
    complete = _trained(*arguments, 2**30, monkeypatch, fused)
    assert not blocks.has_blocks(shape)
    parts = _trained(*arguments, 4096, monkeypatch, fused)
    assert blocks.has_blocks(shape)
    assert_same_bits(parts, complete)


@pytest.mark.parametrize("fused", [True, False])
def test_a_large_leaf_takes_less_memory_than_optaxs(fused):
    """The peak has the step's arguments, results and temporaries, with donation."""

    def peak(step, tx):
        params = jax.ShapeDtypeStruct((2**13, 2**13), jnp.float32)
        state = jax.eval_shape(tx.init, params)
        jitted = jax.jit(step(tx), donate_argnums=(1, 2))
        actual = jitted.lower(params, state, params).compile().memory_analysis()
        sizes = actual.argument_size_in_bytes + actual.output_size_in_bytes
        return sizes + actual.temp_size_in_bytes - actual.alias_size_in_bytes

    ours = peak(_fused if fused else _plain, coat.fp8_adamw(1e-3))
    assert ours <= (0.6 if fused else 0.75) * peak(_plain, optax.adamw(1e-3))
