"""Tests stochastic rounding of bfloat16 parameters in `coat.fused_update`."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.fused_steps import (
    ADAMW,
    BF16,
    F32,
    SHAPE,
    WITHOUT_DECAY,
    distance,
    fused,
    grown,
    jitted,
    tree,
)
from helpers.marks import slow
from helpers.optimizers import assert_same_bits

import coat_jax as coat
from pallas_kernels.rounding import element_bits, hash32


def stochastic(key, tx=WITHOUT_DECAY):
    return fused(tx, grown(tree(0, BF16)), [tree(1, BF16)], key=key)


@pytest.mark.parametrize("quantize_mask", [None, slow(False)])
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(quantize_mask):
    tx = coat.fp8_adamw(1e-3, weight_decay=0.0, quantize_mask=quantize_mask)
    wide = jax.tree.map(lambda x: x.astype(F32), (grown(tree(0, BF16)), tree(1, BF16)))
    exact = np.asarray(fused(tx, wide[0], [wide[1]])[0]["w"])
    low = (exact.view(np.uint32) & 0xFFFF0000).view(np.float32)
    high = ((exact.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    up, draws = np.zeros(exact.shape), 16
    for seed in range(draws):
        after = stochastic(jax.random.key(seed), tx=tx)[0]["w"]
        after = np.asarray(after).astype(np.float32)
        assert np.all((after == low) | (after == high))
        up += after == high
    expected = (exact.astype(np.float64) - low) / (high.astype(np.float64) - low)
    assert expected.std() > 0.1
    deviation = np.sqrt(np.sum(expected * (1 - expected)) / draws)
    assert abs(np.sum(up / draws - expected)) < 4 * deviation
    # Elements with exact results nearer to one neighbour take it more often.
    slope = np.sum((expected - expected.mean()) * up / draws) / np.sum(
        (expected - expected.mean()) ** 2
    )
    assert slope == pytest.approx(1, abs=0.05)


def test_states_and_float32_parameters_do_not_depend_on_the_key():
    nearest, state = stochastic(None)
    rounded, other = stochastic(jax.random.key(0))
    assert_same_bits(state, other)
    assert_same_bits(rounded["wide"], nearest["wide"])
    for path in (
        lambda t: t["w"],
        lambda t: t["nested"][0],
        lambda t: t["nested"][1]["b"],
    ):
        assert np.any(distance(path(rounded), path(nearest)))


def test_the_same_key_and_step_round_the_same_way():
    expected = stochastic(jax.random.key(3))
    assert_same_bits(stochastic(jax.random.key(3)), expected)
    params, grads = grown(tree(0, BF16))["w"], tree(1, BF16)["w"]
    state, key = WITHOUT_DECAY.init(params), jax.random.key(3)
    by_jit, _ = jitted(WITHOUT_DECAY)(grads, state, params, key=key)
    eager, _ = coat.fused_update(WITHOUT_DECAY, grads, state, params, key=key)
    # Exact results differ in their last bits.
    assert np.mean(distance(eager, by_jit) > 0) < 1e-2


def test_keys_steps_and_paths_have_random_bits_of_their_own():
    """Equal parameters and gradients round differently by key, step and path."""
    params = {"a": jnp.ones(SHAPE, BF16), "b": jnp.ones(SHAPE, BF16)}
    state = WITHOUT_DECAY.init(params)

    def rounded(name: str, key: int, count: int) -> np.ndarray:
        at = (state[0]._replace(rounding_step=jnp.int32(count)), *state[1:])
        after, _ = fused(WITHOUT_DECAY, params, [params], at, key=jax.random.key(key))
        return np.asarray(after[name] < 1)

    draws = [
        rounded(*which)
        for which in (("a", 0, 0), ("b", 0, 0), ("a", 1, 0), ("a", 0, 1))
    ]
    for i, one in enumerate(draws):
        assert 0.1 < one.mean() < 0.9
        for other in draws[i + 1 :]:
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.15
        # Within a group, bits are spread evenly. Bits of two groups are independent.
        groups = one[:, :256].reshape(-1, 128).astype(float)
        assert abs(np.corrcoef(groups)[np.triu_indices(len(groups), 1)].mean()) < 0.06


def test_random_bits_of_an_element_are_uniform_and_anew_in_every_step():
    draws = 2**17
    words = hash32(jnp.arange(draws, dtype=jnp.uint32)[:, None])
    bits = element_bits(words, jnp.arange(128, dtype=jnp.uint32)[None]) >> 16
    assert bits.max() == 0xFFFF
    # Three bits of each element are counted jointly over three consecutive steps.
    eighths = np.asarray(bits >> 13)
    expected = (draws - 2) / 512
    for j in (0, 1, 64, 127):
        a, b, c = (eighths[i : draws - 2 + i, j] for i in range(3))
        counts = np.bincount(a * 64 + b * 8 + c, minlength=512)
        squares = np.sum((counts - expected) ** 2) / expected
        assert abs(squares - 511) < 6 * np.sqrt(2 * 511), j


def test_stochastic_rounding_follows_steps_that_nearest_loses():
    """Rounding to nearest loses steps of 1/64 of bfloat16's resolution at 1."""
    param, grad = jnp.ones(SHAPE, BF16), jnp.ones(SHAPE, BF16)
    tx = coat.fp8_adamw(2.0**-14, weight_decay=0.0)
    lost, _ = fused(tx, param, [grad] * 32)
    assert np.all(np.asarray(lost) == 1)
    followed, _ = fused(tx, param, [grad] * 32, key=jax.random.key(0))
    mean = np.asarray(followed).astype(np.float64).mean()
    assert mean == pytest.approx(1 - 32 * 2.0**-14, abs=1e-4)


def test_not_finite_results_stay_what_they_are():
    grad = jnp.ones(SHAPE, BF16).at[0, 0].set(jnp.nan).at[1, 0].set(jnp.inf)
    after, _ = fused(ADAMW, jnp.ones(SHAPE, BF16), [grad], key=jax.random.key(0))
    lost = np.isnan(np.asarray(after).astype(np.float32))
    assert np.argwhere(lost).tolist() == [[0, 0], [1, 0]]
    assert after.dtype == ml_dtypes.bfloat16
