"""Tests of norms that a condition modulates, as in diffusion transformers.

The scale and the shift have a row for each sequence. Plain JAX is the oracle.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers.dots import linear, rms
from helpers.gradients import FP8, distances, saved, value_and_vjp
from helpers.models import normal

import pallas_kernels as pk
from coat_jax import fp8_remat

B, S, K = 4, 64, 128
BF16 = jnp.bfloat16


def layer(x):
    return nn.LayerNorm(use_scale=False, use_bias=False, dtype=BF16).apply({}, x)


def both(x, c):
    return layer(x) * (1 + c[:, None, :K]) + c[:, None, K:]


def scaled(x, c):
    return rms(x) * c[:, None, :K]


def shifted(x, c):
    return c[:, None, K:] + layer(x)


def in_float32(x, c):
    wide = c.astype(jnp.float32)[:, None]
    return (layer(x) * wide[..., :K] + wide[..., K:]).astype(BF16)


HITS = [both, scaled, shifted, in_float32]


def by_tokens(x, c):
    """Scales by a number for each token, and adds the first sequence."""
    return layer(x) * jnp.broadcast_to(c[0, :S, None], (S, 1)) + x[:1]


def numbers(x, c):
    """Scales by a number for each sequence."""
    return layer(x) * c[:, None, :1]


def other_sequences(x, c):
    """Adds rows that are broadcast by hand before they are added."""
    spread = jnp.broadcast_to(c[:, None, :K], (B, S, K))
    return layer(x) + spread


def second_axis(x, c):
    """Scales by rows that are shared along the first of two batch axes."""
    parts = layer(x.reshape(2, B // 2, S, K)) * c[: B // 2, None, :K]
    return parts.reshape(B, S, K)


MISSES = [by_tokens, numbers, other_sequences, second_axis]


def block(norm):
    def fn(weights, x, c):
        h = norm(x, c)
        return jnp.tanh(linear(h, weights[0])) * linear(h, weights[1])

    return fn


def given():
    weights = [normal(i, K, K, scale=0.1, dtype=BF16) for i in range(2)]
    x, c = normal(3, B, S, K, dtype=BF16), normal(4, B, 2 * K, dtype=BF16)
    return weights, x, c, normal(5, B, S, K, dtype=BF16)


def norms(fn, *args):
    def run(*args):
        y, pullback = jax.vjp(fn, *args)
        return pullback(y)

    choices = pk.explain(run, *args).choices
    return {c.operation for c in choices} & {"norm", "norm_grad"}


@pytest.mark.internals
@pytest.mark.parametrize("norm", HITS)
def test_a_modulated_norm_saves_one_copy_of_its_input(norm):
    weights, x, c, dy = given()
    fn = block(norm)
    assert norms(fp8_remat(fn), weights, x, c) == {"norm", "norm_grad"}
    copies = [r.shape for r in saved(fp8_remat(fn), weights, x, c) if r.dtype in FP8]
    # The others are the two results that are multiplied.
    assert copies == [(B, S, K)] * 3
    if norm is both:
        arguments = dy, weights, x, c
        light, plain = (value_and_vjp(f, *arguments) for f in (fp8_remat(fn), fn))
        assert max(distances(light, plain)) <= 0.15


@pytest.mark.internals
@pytest.mark.parametrize("norm", MISSES)
def test_other_arrays_are_no_modulation(norm):
    weights, x, c, _ = given()
    assert "norm" not in norms(fp8_remat(block(norm)), weights, x, c)
