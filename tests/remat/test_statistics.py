"""Tests that statistics of rows have no FP8 copies, and that other sums have copies.

Plain JAX is the oracle.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers.gradients import distances, saved, value_and_vjp
from helpers.models import normal
from jax import lax

import coat_jax as coat

pytestmark = pytest.mark.internals

ROWS, TERMS, WIDTH = 64, 16, 128


def rms_norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def states(x):
    """Adds up the states of a state-space model."""
    return jnp.sum(x * jnp.cos(jnp.arange(1.0, TERMS + 1))[:, None], axis=1)


def slots(x):
    """Adds up slots of a memory, each with its weight."""
    weights = jax.nn.softmax(x[..., 0])
    return jnp.sum(weights[..., None] * x, axis=1)


def pooled(x):
    return rms_norm(jnp.mean(x, axis=1))


@pytest.mark.parametrize("reduced", [states, slots, pooled])
def test_sums_that_are_activations_have_copies(reduced):
    def fn(w, x):
        return jax.nn.silu(reduced(x) @ w["gate"]) @ w["down"]

    w = {"gate": normal(1, WIDTH, WIDTH) / 8, "down": normal(2, WIDTH, WIDTH) / 8}
    x, dy = normal(3, ROWS, TERMS, WIDTH), normal(4, ROWS, WIDTH)
    light = coat.fp8_remat(fn)
    shape = (ROWS, WIDTH)
    kept = [each.dtype for each in saved(light, w, x, params=2) if each.shape == shape]
    assert set(kept) == {jnp.dtype(jnp.float8_e4m3fn)}
    _, expected = value_and_vjp(fn, dy, w, x)
    assert max(distances(value_and_vjp(light, dy, w, x)[1], expected)) < 0.05


def losses(logits):
    return jax.nn.logsumexp(logits, axis=-1) - logits[..., 0]


def chances(logits):
    chance = jax.nn.sigmoid(jnp.sum(logits, axis=-1))
    return chance * jnp.exp(-chance)


@pytest.mark.parametrize("reduced", [losses, chances])
def test_one_number_of_each_token_has_no_copy(reduced):
    """The numbers alone would have enough elements for a copy."""
    tokens, w, x = 4096, normal(1, 32, 32) / 8, normal(2, 4096, 32)
    light = coat.fp8_remat(lambda w, x: jnp.sin(reduced(x @ w)))
    kept = [each for each in saved(light, w, x, params=1) if each.argument is None]
    copies = {each.shape for each in kept if each.dtype == jnp.float8_e4m3fn}
    assert copies == {(tokens, 32)}
    assert (tokens,) in {each.shape for each in kept}


def layer_norm(x):
    mean = jnp.mean(x, axis=-1)
    variance = jnp.mean(x * x, axis=-1) - mean * mean
    return (x - mean[:, None]) * lax.rsqrt(variance + 1e-6)[:, None]


def scaled_by_a_matmul(x):
    return jnp.einsum("s,sd->sd", lax.rsqrt(jnp.mean(x * x, axis=-1) + 1e-6), x)


def directly(layer, w, x):
    return layer(w[0], x)


def in_a_loop(layer, w, x):
    return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def in_a_branch(layer, w, x):
    return lax.cond(jnp.sum(x) < jnp.inf, layer, lambda w, x: x, w[0], x)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm, scaled_by_a_matmul])
@pytest.mark.parametrize("run", [directly, in_a_loop, in_a_branch])
def test_statistics_have_no_copies(norm, run):
    """All statistics here have enough elements for a copy."""
    steps, tokens = 2, 4096
    w, x = normal(1, steps, 32, 32) / 8, normal(2, tokens, 32)
    fn = coat.fp8_remat(lambda w, x: run(lambda w, x: jnp.tanh(norm(x) @ w), w, x))
    rows = coat.residual_report(fn, w, x).rows
    notes = {row.kept for row in rows if tokens in row.shape and 32 not in row.shape}
    notes -= {"scales of groups of 16", "scales of groups of 128"}
    assert notes == {"wide, statistics of longer rows"}
