"""Tests weights of FP8 matmuls that programs store as their transposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

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


@pytest.mark.parametrize("fn", [_plain, _gated, _activated])
def test_they_are_used_as_they_are_stored(fn):
    """Values and gradients have the bits of the other order, and nothing is moved."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (F, K), (F, K), (K, F)  # Outputs come first.
    weights = [
        jax.random.normal(k, s, BF16) for k, s in zip(keys, shapes, strict=False)
    ]
    x = jax.random.normal(keys[3], (TOKENS, K), BF16)
    dy = jax.random.normal(keys[4], (TOKENS, F if fn is _plain else K), BF16)

    def passes(weights, x, dy, of_w):
        y, vjp = jax.vjp(fp8_remat(lambda weights, x: fn(weights, x, of_w)), weights, x)
        return y, *vjp(dy)

    jitted = jax.jit(passes, static_argnums=3)
    y, dws, dx = jitted(weights, x, dy, 1)
    other = jitted([w.T for w in weights], x, dy, 0)
    expected = other[0], [dw.T for dw in other[1]], other[2]
    for actual, right in zip(
        jax.tree.leaves((y, dws, dx)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(actual, right)
    moved = jitted.lower(weights, x, dy, 1).as_text().splitlines()
    assert not [line for line in moved if "transpose" in line and "bf16" in line]
