"""Tests policies that save FP8 codes, or products of codes, under `fp8_remat`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.marks import slow_except
from helpers.models import normal

from coat_jax import fp8_dot_general, fp8_remat
from coat_jax.remat.policies import products_saveable

POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "products": products_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def in_scan(fn):
    """Returns a function that computes `fn` in a loop of one turn."""
    return lambda *args: jax.lax.scan(
        lambda _, x: (None, fn(*args)), None, None, length=1
    )[1][0]


PLACES = {
    "fp8_remat": lambda fn, policy: fp8_remat(fn, policy=policy),
    "checkpoint": lambda fn, policy: fp8_remat(jax.checkpoint(fn, policy=policy)),
    "loop": lambda fn, policy: fp8_remat(in_scan(jax.checkpoint(fn, policy=policy))),
}


@pytest.mark.internals
@pytest.mark.parametrize(
    ("name", "place"),
    slow_except(
        zip(POLICIES, PLACES, strict=True), itertools.product(POLICIES, PLACES)
    ),
)
def test_saved_codes_keep_their_scales(name, place):
    """The scale of an amax of 3.624 is half the scale of its copy, 3.637."""

    def operand(seed, *shape):
        x = normal(seed, *shape)
        return 3.624 * x / jnp.max(jnp.abs(x))

    def fn(w, a, b):
        y = fp8_dot_general(1.0 * a, 1.0 * b, (((1,), (0,)), ((), ())))
        return jnp.sin(y / 8) @ w

    w, dy = normal(1, 64, 96), normal(2, 64, 96)
    a, b = operand(3, 64, 128), operand(4, 128, 64)
    light = PLACES[place](fn, POLICIES[name])
    actual = jax.jit(lambda w, a, b: jax.vjp(light, w, a, b)[1](dy))(w, a, b)
    w, a, b, dy = (np.asarray(x, np.float64) for x in (w, a, b, dy))
    y = a @ b / 8
    dproduct = dy @ w.T * np.cos(y) / 8
    expected = np.sin(y).T @ dy, dproduct @ b.T, a.T @ dproduct
    for gradient, exact in zip(actual, expected, strict=True):
        assert np.linalg.norm(gradient - exact) <= 0.12 * np.linalg.norm(exact)
