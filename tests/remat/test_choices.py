"""Tests that arrays by which a backward pass chooses elements have no FP8 copies.

Plain JAX is the oracle.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers.gradients import FP8, distances, saved, value_and_vjp
from helpers.marks import slow_except
from helpers.models import normal

import coat_jax as coat

pytestmark = pytest.mark.internals

K = 128


@jax.custom_vjp
def binary(x):
    return jnp.sign(x)


binary.defvjp(lambda x: (binary(x), x), lambda x, g: (g * (jnp.abs(x) <= 0.3),))


@jax.custom_vjp
def stepped(x, step):
    return jnp.clip(jnp.round(x / step), -8, 7) * step


def _step_gradients(saved, g):
    """Returns the gradients of LSQ, learned step size quantization."""
    x, step = saved
    levels = x / step
    fits = (levels >= -8) & (levels <= 7)
    error = jnp.where(fits, jnp.round(levels) - levels, jnp.clip(levels, -8, 7))
    return g * fits, jnp.sum(g * error)


stepped.defvjp(lambda x, step: (stepped(x, step), (x, step)), _step_gradients)


def pool(x):
    images = x.reshape(-1, 8, 8, K)
    return nn.max_pool(images + 5, (2, 2), (2, 2))


def in_scan(fn):
    """Returns a function that sums `fn` of several arrays within a loop."""

    def run(x):
        parts = x.reshape(4, -1, 64, K)
        return jax.lax.scan(lambda y, part: (y, fn(part)), 0.0, parts)[1]

    return run


def again(fn):
    """Returns a function that the backward pass computes again from its argument."""
    return jax.checkpoint(lambda x: fn(jnp.flip(x, 0) @ jnp.eye(K)))


def best(x):
    values, indices = jax.lax.top_k(x, 4)
    return values * jnp.take_along_axis(jnp.cos(x), indices, -1)


FORMS = {
    "maximum of windows": pool,
    "maximum of windows after relu": lambda x: pool(nn.relu(x)),
    "maximum of windows in a loop": in_scan(pool),
    "threshold": binary,
    "threshold in a loop": in_scan(binary),
    "maximum of windows again": again(pool),
    "maximum of an axis again": again(lambda x: jnp.max(x.reshape(-1, 8, K) + 5, 1)),
    "best again": again(best),
    "sorting again": again(lambda x: jnp.sort(x, -1) * jnp.arange(K)),
    "rounding": lambda x: stepped(jnp.tanh(x), jnp.float32(0.1)),
}


QUICK = "maximum of windows", "maximum of an axis again", "best again", "rounding"


@pytest.mark.parametrize("name", slow_except(QUICK, FORMS))
def test_gradients_go_to_the_elements_that_were_chosen(name):
    def fn(w, x):
        return FORMS[name](jnp.sin(x @ w))

    w, x = normal(0, K, K, scale=0.1), normal(1, 8, 64, K)
    dy = normal(2, *jax.eval_shape(fn, w, x).shape)
    light, plain = (value_and_vjp(f, dy, w, x) for f in (coat.fp8_remat(fn), fn))
    assert max(distances(light, plain)) <= 0.04


def test_reports_say_that_backward_chooses():
    def fn(w, x):
        return pool(x @ w)

    report = coat.residual_report(
        coat.fp8_remat(fn), normal(0, K, K), normal(1, 8, 64, K)
    )
    assert "backward chooses by it" in str(report)


@jax.custom_vjp
def squared(z):
    return z * z


squared.defvjp(
    lambda z: (squared(z), z), lambda z, g: (jnp.where(z == 0j, 0j, 2 * z * g),)
)


def test_complex_numbers_may_be_compared():
    def fn(w, x):
        return squared(x @ w + 1j * x).real

    arrays = normal(0, K, K, scale=0.1), normal(1, 8, K)
    light, plain = (
        value_and_vjp(f, normal(2, 8, K), *arrays) for f in (coat.fp8_remat(fn), fn)
    )
    assert max(distances(light, plain)) <= 0.04


def gated(zero):
    """Returns relu with a derivative rule that compares with `zero` of an array."""

    @jax.custom_vjp
    def relu(x):
        return jnp.maximum(x, 0)

    relu.defvjp(lambda x: (relu(x), x), lambda x, g: (jnp.where(x > zero(x), g, 0),))
    return relu


@pytest.mark.parametrize(
    "fn",
    [
        gated(lambda x: 0),
        gated(jnp.zeros_like),
        lambda x: jax.lax.map(gated(jnp.zeros_like), x[None]),
        jax.checkpoint(lambda x: jnp.clip(x, -0.3, 0.3) ** 2),
    ],
)
def test_signs_and_what_is_computed_again_need_no_exact_array(fn):
    light = coat.fp8_remat(lambda w, x: fn(jnp.sin(x @ w)))
    residuals = saved(light, normal(0, K, K), normal(1, 256, K), params=1)
    wide = [r for r in residuals if r.dtype not in FP8 and r.nbytes >= 256 * K]
    assert all(r.argument is not None for r in wide)
