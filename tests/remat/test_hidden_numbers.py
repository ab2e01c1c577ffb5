"""Tests arrays in which large numbers hide others: they have no FP8 copies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gradients import flat
from jax import nn

import coat_jax as coat

pytestmark = pytest.mark.internals

B, S, D = 2, 64, 128
MASK = jnp.tril(jnp.ones((S, S), bool))


def selected(scores, mask, low):
    return jnp.where(mask, scores, low)


def added(scores, mask, low):
    return scores + jnp.where(mask, 0.0, low)


def multiplied(scores, mask, low):
    return scores + (1 - mask.astype(scores.dtype)) * low


def scaled(scores, mask, low):
    return 0.5 * (jnp.where(mask, 2 * scores, low) - 0.3)


def negated(scores, mask, low):
    return -jnp.where(mask, -scores, -low)


def biased(x):
    """Returns a function of which autodiff saves the argument."""
    return nn.silu(x) + nn.sigmoid(x)


def attend(hide, function, low, params, x, mask):
    q, k, v = (x @ params[name] for name in "qkv")
    scores = jnp.einsum("btd,bsd->bts", q, k) / D**0.5
    return function(hide(scores, mask, low)) @ v


def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        n: jax.random.normal(k, (D, D)) / D**0.5
        for n, k in zip("qkv", keys, strict=False)
    }
    return params, *(jax.random.normal(key, (B, S, D)) for key in keys[3:])


def error(fn, mask):
    params, x, dy = arrays()

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(fn, params, mask):
        return jax.grad(lambda params: jnp.sum(fn(params, x, mask) * dy))(params)

    actual, expected = (
        flat(gradient(f, params, mask)) for f in (coat.fp8_remat(fn), fn)
    )
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


HIDES = [selected, added, multiplied, scaled, negated]
CASES = [
    (hide, function, -1e6)
    for hide in HIDES
    for function in (nn.sigmoid, nn.silu, nn.gelu, biased)
]
# Other functions and products compute 0 * inf in the program itself.
CASES += [(hide, nn.sigmoid, -jnp.inf) for hide in HIDES if hide is not multiplied]


@pytest.mark.parametrize(("hide", "function", "low"), CASES)
def test_gradients_are_as_near_as_without_large_numbers(hide, function, low):
    run = functools.partial(attend, hide, function)
    of_small = functools.partial(run, -20.0)
    assert error(functools.partial(run, low), MASK) < 1.1 * error(of_small, MASK) + 0.01


@pytest.mark.parametrize(("hide", "share"), [(selected, 1.0), (added, 1.12)])
def test_arrays_with_a_constant_mask_take_few_more_bytes(hide, share):
    params, x, _ = arrays()

    def saved(low):
        fn = functools.partial(attend, hide, nn.sigmoid, low)
        run = coat.fp8_remat(lambda params, x: fn(params, x, MASK))
        return coat.residual_report(run, params, x).nbytes

    assert saved(-1e9) <= share * saved(-20.0)


def test_reports_say_why_an_array_has_no_copy():
    """A sum with two activations is not computed again from one of them."""
    params, x, _ = arrays()

    def fn(params, x):
        scores, gate = x @ params["q"], nn.sigmoid(x @ params["k"])
        return nn.silu(scores + (1 - gate) * -1e9) @ params["v"]

    report = coat.residual_report(coat.fp8_remat(fn), params, x)
    kept = {row.kept for row in report.rows if row.shape == x.shape}
    assert "wide, large numbers hide others in it" in kept


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: jnp.maximum(x, 0),
        jnp.tanh,
        lambda x: jnp.minimum(-x, 0),
        lambda x: jnp.clip(x, -5, 5),
    ],
)
def test_functions_that_cut_large_numbers_off_leave_copies(cut):
    params, x, _ = arrays()

    def fn(params, x):
        scores = x @ params["q"]
        hidden = cut(jnp.where(scores > x, scores, -1e9))
        return (hidden * jnp.sin(hidden)) @ params["v"]

    report = coat.residual_report(coat.fp8_remat(fn), params, x)
    assert not any("hide" in row.kept for row in report.rows)
