"""Tests that 8-bit moments follow float32 moments at any b2."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.kernels import OPTIMIZED
from helpers.marks import slow

import coat_jax as coat

SHAPE, COLUMN = (64, 128), 5
LOUD = {
    "stationary": lambda i, n: 1.0,
    "falling 100 times": lambda i, n: 10.0 ** (-2 * i / n),
    "all spike": lambda i, n: jnp.where(i < 20, 1.0, 1e-2),
    "one of a group spikes": lambda i, n: jnp.where(
        (jnp.arange(SHAPE[1]) == COLUMN) & (i < 20), 100.0, 1.0
    ),
    "a fourth is frozen and released": lambda i, n: jnp.where(
        (jnp.arange(SHAPE[1]) % 4 == 0) & (n // 8 < i) & (i < n // 4), 0.0, 1.0
    ),
}


def ratios(story, b2, steps, **options):
    """Returns mean, RMS error and maximum of ratios of FP8 Adam's to exact updates.

    The ratios are taken over the last fifth of the steps of a story, named as in
    `LOUD`.
    """
    run = _program(b2, steps, tuple(options.items()))
    actual = np.asarray(run(list(LOUD).index(story)))[-steps // 5 :]
    return actual[:, 0].mean(), np.sqrt(actual[:, 1].mean()), actual[:, 2].max()


@functools.cache
def _program(b2, steps, options):
    """Returns a function that runs all steps of a story, given by its number.

    The function is compiled once for all stories. It returns the mean ratio, the mean
    squared error and the largest ratio of each step.
    """
    tx = coat.scale_by_fp8_adam(b2=b2, **dict(options))
    exact = optax.scale_by_adam(b2=b2)
    size = jnp.exp(jax.random.normal(jax.random.key(9), SHAPE))
    counted = jnp.arange(SHAPE[1]) != COLUMN

    def loud(story, i):
        stories = [
            lambda i, f=f: jnp.broadcast_to(f(i, steps), SHAPE) for f in LOUD.values()
        ]
        return jax.lax.switch(story, stories, i)

    def step(story, states, i):
        key = jax.random.fold_in(jax.random.key(1), i)
        g = size * loud(story, i) * jax.random.normal(key, SHAPE)
        _, mine = tx.update(g, states[0])
        _, theirs = exact.update(g, states[1])
        ratio = jnp.sqrt(theirs.nu / coat.to_optax_state(mine).nu)
        ratio = jnp.where(counted, ratio, 1.0)
        actual = jnp.mean(ratio), jnp.mean((ratio - 1) ** 2), jnp.max(ratio)
        return (mine, theirs), jnp.stack(actual)

    @functools.partial(jax.jit, compiler_options=OPTIMIZED)
    def run(story):
        zeros = jnp.zeros(SHAPE)
        states = tx.init(zeros), exact.init(zeros)
        each = functools.partial(step, story)
        return jax.lax.scan(each, states, jnp.arange(steps))[1]

    return run


@pytest.mark.parametrize("story", LOUD)
@pytest.mark.parametrize(
    ("b2", "rms", "steps"), [(0.95, 0.04, 500), slow(0.999, 0.14, 2000)]
)
def test_updates_are_exact_ones_on_average(story, b2, rms, steps):
    mean, error, largest = ratios(story, b2, steps)
    assert mean == pytest.approx(1, abs=0.05)
    assert error < rms
    assert largest < 2.5


@pytest.mark.parametrize("steps", [3000, slow(20_000)])
def test_nothing_adds_up_over_many_steps(steps):
    mean, error, largest = ratios("stationary", 0.9999, steps)
    assert mean == pytest.approx(1, abs=0.05)
    assert error < 0.14
    assert largest < 3


@pytest.mark.parametrize(
    ("make", "b1"),
    [
        (coat.scale_by_fp8_adam, 0.9),
        slow(coat.scale_by_fp8_adam, 0.999),
        slow(optax.trace, 0.99),
        slow(optax.trace, 0.999),
    ],
)
def test_first_moments_follow_as_well(b1, make):
    """Small steady gradients do not suffer next to large ones of changing sign."""
    steps, shape = (3000 if b1 == 0.999 else 1000), (64, 128)
    steady = jnp.arange(shape[1]) % 2 == 0
    if make is optax.trace:
        tx, exact = coat.with_quantized_state(optax.trace(b1)), optax.trace(b1)
        field = "trace"
    else:
        tx, exact = make(b1), optax.scale_by_adam(b1)
        field = "mu"

    def step(states, i):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), shape)
        g = jnp.where(steady, 0.02, noise)
        states = tx.update(g, states[0])[1], exact.update(g, states[1])[1]
        return states, None

    zeros = jnp.zeros(shape)
    run = jax.jit(
        lambda states: jax.lax.scan(step, states, jnp.arange(steps))[0],
        compiler_options=OPTIMIZED,
    )
    mine, theirs = run((tx.init(zeros), exact.init(zeros)))
    actual = np.asarray(getattr(coat.to_optax_state(mine), field), np.float64)
    expected = np.asarray(getattr(theirs, field), np.float64)
    loud = actual[:, 1::2].ravel(), expected[:, 1::2].ravel()
    assert loud[0] @ loud[1] / (loud[1] @ loud[1]) == pytest.approx(1, abs=0.05)
    quiet = actual[:, ::2].mean() / expected[:, ::2].mean()
    assert quiet == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("decay", "error"), [slow(0.9, 0.04), (0.99, 0.13), slow(0.999, 0.42)]
)
def test_noise_of_a_first_moment_grows_with_its_decay(decay, error):
    inner = optax.ema(decay, debias=False)
    tx = coat.with_quantized_state(inner)

    def step(states, i):
        g = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (64, 128))
        states = tx.update(g, states[0])[1], inner.update(g, states[1])[1]
        return states, None

    steps = jnp.arange(int(4 / (1 - decay)))
    zeros = jnp.zeros((64, 128))
    run = jax.jit(
        lambda states: jax.lax.scan(step, states, steps)[0], compiler_options=OPTIMIZED
    )
    mine, theirs = run((tx.init(zeros), inner.init(zeros)))
    expected = np.asarray(theirs.ema)
    difference = np.asarray(coat.to_optax_state(mine).ema) - expected
    actual = np.linalg.norm(difference) / np.linalg.norm(expected)
    assert actual == pytest.approx(error, rel=0.15)


def updates_with_maxima(name, grads):
    """Computes the last update of AMSGrad or Adamax in float64."""
    mu = nu = largest = np.zeros(grads.shape[1:])
    for step, g in enumerate(grads.astype(np.float64), 1):
        mu = 0.9 * mu + 0.1 * g
        if name == "amsgrad":
            nu = 0.999 * nu + 0.001 * g**2
            largest = np.maximum(largest, nu / (1 - 0.999**step))
        else:
            nu = np.maximum(np.abs(g) + 1e-8, 0.999 * nu)
    divisor = np.sqrt(largest) + 1e-8 if name == "amsgrad" else nu
    return mu / (1 - 0.9**step) / divisor


@pytest.mark.parametrize(("name", "error"), [("amsgrad", 0.04), ("adamax", 0.06)])
@pytest.mark.parametrize("steps", [50, 1000, slow(5000)])
def test_maxima_over_steps_do_not_grow_by_noise(steps, name, error):
    tx = coat.with_quantized_state(getattr(optax, f"scale_by_{name}")())
    size = jnp.exp(jax.random.normal(jax.random.key(9), SHAPE))

    def step(state, i):
        g = size * jax.random.normal(jax.random.fold_in(jax.random.key(1), i), SHAPE)
        update, state = tx.update(g, state)
        return state, (g, update)

    run = jax.jit(
        lambda state: jax.lax.scan(step, state, jnp.arange(steps))[1],
        compiler_options=OPTIMIZED,
    )
    grads, updates = map(np.asarray, run(tx.init(jnp.zeros(SHAPE))))
    expected = updates_with_maxima(name, grads)
    actual, square = updates[-1], np.sum(expected**2)
    assert np.sum(actual * expected) / square == pytest.approx(1, abs=0.01)
    assert np.linalg.norm(actual - expected) < error * np.sqrt(square)


def test_log8_is_as_near():
    mean, error, _ = ratios("stationary", 0.999, steps=1000, nu_format=coat.LOG8)
    assert mean == pytest.approx(1, abs=0.02)
    assert error < 0.09


def test_to_nearest_moments_stall():
    """Moments rounded to nearest stall, so the default rounding is stochastic."""
    options = {"rounding": "nearest", "nu_format": coat.E4M3}
    mean, _, _ = ratios("one of a group spikes", 0.999, steps=2000, **options)
    assert mean > 1.05
