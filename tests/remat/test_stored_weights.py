"""Tests weights of FP8 matmuls that programs store as their transposes."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import dots, oracle
from helpers.gradients import fake, value_and_vjp

from coat_jax import fp8_dot_general, fp8_remat

BF16 = jnp.bfloat16
K, F, TOKENS = 64, 96, 128


def _multiply(x, w, of_w):
    contracted = ((x.ndim - 1,), (of_w,)), ((), ())
    return fp8_dot_general(x, w, contracted, preferred_element_type=x.dtype)


def _plain(weights, x, of_w):
    return _multiply(x, weights[0], of_w)


def _gated(weights, x, of_w):
    gate, up, down = weights
    a = nnx.silu(_multiply(x, gate, of_w)) * _multiply(x, up, of_w)
    return _multiply(a, down, of_w)


def _activated(weights, x, of_w):
    return _multiply(nnx.gelu(_multiply(x, weights[0], of_w)), weights[2], of_w)


every_function = pytest.mark.parametrize("fn", [_plain, _gated, _activated])


def _arguments(fn):
    """Returns weights with outputs first, activations and a gradient."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (F, K), (F, K), (K, F)
    # Outputs are of several sizes, as scales of their own show.
    weights = [
        jax.random.normal(k, s, BF16) / 32 * (1 + jnp.arange(s[0]) % 7)[:, None]
        for k, s in zip(keys, shapes, strict=False)
    ]
    weights = [w.astype(BF16) for w in weights]
    x = jax.random.normal(keys[3], (TOKENS, K), BF16)
    return weights, x, jax.random.normal(keys[4], (TOKENS, len(fn(weights, x, 1).T)))


def _passes(fn, of_w):
    def run(weights, x, dy):
        y, vjp = jax.vjp(fp8_remat(lambda weights, x: fn(weights, x, of_w)), weights, x)
        return y, *vjp(dy.astype(y.dtype))

    return jax.jit(run)


@pytest.mark.distributed
@every_function
def test_they_are_used_as_they_are_stored(fn):
    """Results on several devices have the bits of weights stored the other way."""
    weights, x, dy = _arguments(fn)
    y, dws, dx = _passes(fn, 1)(weights, x, dy)
    other = _passes(fn, 0)([w.T for w in weights], x, dy)
    expected = other[0], [dw.T for dw in other[1]], other[2]
    for actual, right in zip(
        jax.tree.leaves((y, dws, dx)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(actual, right)


@every_function
def test_no_weight_is_moved(fn):
    weights, x, dy = _arguments(fn)
    moved = _passes(fn, 1).lower(weights, x, dy).as_text().splitlines()
    assert not [line for line in moved if "transpose" in line and "bf16" in line]


def test_outputs_have_scales_of_their_own():
    weights, x, dy = _arguments(_plain)
    y, dws, dx = _passes(_plain, 1)(weights, x, dy)
    w, *_ = weights
    gradient = dots.tensor(dy.astype(BF16), oracle.E5M2)
    activations, of_outputs = (_of_rows(array) for array in (x, w))
    dots.assert_near(y, activations @ of_outputs.T, 5e-3)
    dots.assert_near(dx, gradient @ dots.tensor(w), 5e-3)
    # A scale that is a binade larger rounds the smallest numbers to other codes.
    dots.assert_near(dws[0], gradient.T @ dots.tensor(_saved(x)), 2e-2)
    # One scale for all outputs gives other results than these.
    with pytest.raises(AssertionError):
        dots.assert_near(y, activations @ dots.tensor(w).T, 5e-3)


def test_backward_reads_weights_of_several_scales():
    """Results and gradients differ from exact matmuls by FP8 alone."""
    weights, x, dy = _arguments(_gated)
    results = _passes(_gated, 1)(weights, x, dy)
    y, (dws, dx) = value_and_vjp(_exact(_gated), dy.astype(BF16), weights, x)
    expected = y, dws, dx
    leaves = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    for actual, right in leaves:
        dots.assert_near(actual, np.asarray(right, float), 0.15)


def _of_rows(x):
    """Quantizes with a scale for each row and dequantizes, in float64."""
    return fake(np.asarray(x, np.float32), K).astype(np.float64)


def _saved(x):
    """Returns activations as the backward pass reads them, in groups of 16."""
    return fake(np.asarray(x, np.float32), 16)


def _exact(fn):
    """Returns `fn` with BF16 matmuls, as a function of weights and x."""

    def run(weights, x):
        with mock.patch.dict(globals(), {"_multiply": lambda x, w, _: x @ w.T}):
            return fn(weights, x, 1)

    return run
