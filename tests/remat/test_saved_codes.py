"""Tests policies of `fp8_remat` that save FP8 codes, or products of codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import normal

from coat_jax import fp8_dot_general, fp8_remat
from coat_jax.remat.policies import products_saveable


@pytest.mark.internals
@pytest.mark.parametrize("name", ["dots", "products", "nothing"])
def test_saved_codes_keep_their_scales_under_a_policy(name):
    """The scale of an amax of 3.624 is half the scale of its copy, 3.637."""
    policy = {
        "dots": jax.checkpoint_policies.dots_saveable,
        "products": products_saveable,
        "nothing": jax.checkpoint_policies.nothing_saveable,
    }[name]

    def operand(seed, *shape):
        x = normal(seed, *shape)
        return 3.624 * x / jnp.max(jnp.abs(x))

    def fn(w, a, b):
        y = fp8_dot_general(1.0 * a, 1.0 * b, (((1,), (0,)), ((), ())))
        return jnp.sin(y / 8) @ w

    w, dy = normal(1, 64, 96), normal(2, 64, 96)
    a, b = operand(3, 64, 128), operand(4, 128, 64)
    light = fp8_remat(fn, policy=policy)
    actual = jax.jit(lambda w, a, b: jax.vjp(light, w, a, b)[1](dy))(w, a, b)
    w, a, b, dy = (np.asarray(x, np.float64) for x in (w, a, b, dy))
    y = a @ b / 8
    dproduct = dy @ w.T * np.cos(y) / 8
    expected = np.sin(y).T @ dy, dproduct @ b.T, a.T @ dproduct
    for gradient, exact in zip(actual, expected, strict=True):
        assert np.linalg.norm(gradient - exact) <= 0.12 * np.linalg.norm(exact)
