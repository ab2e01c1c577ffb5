"""Tests schemes of storing Adam's moments against NumPy and against the library."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import oracle
from helpers.marks import slow

import coat_jax as coat
from experiments.optimizer import error_studies as studies
from experiments.optimizer import moments, schemes

_FORMATS = {"E4M3": oracle.E4M3, "E5M2": oracle.E5M2, "DE8": oracle.DE8}
_BLOCK = (128,)
_KEY = jax.random.key(0)


def _random_moments(rng, groups=72, spread=1.0):
    """Returns samples of moments, and the gradients that they follow from.

    The sizes of gradients vary within a group and between groups.
    """
    size = rng.lognormal(-8, 2, (groups, 1)) * rng.lognormal(0, spread, (groups, 128))
    gradients = (size * rng.standard_normal((30, groups, 128))).astype(np.float32)
    mu, nu = oracle.adam(np.zeros_like(size), np.zeros_like(size), gradients)[-1]
    nu[0], mu[0] = 0, 0
    nu[1, 5:], mu[1, 5:] = 0, 0
    actual = {"mu": mu.astype(np.float32), "nu": nu.astype(np.float32)}
    return moments.MomentSamples(step=30, loss=1.0, **actual), gradients


def _capture(actual, gradients):
    return moments.Capture(
        moments=(actual,), start=actual, gradients=gradients, b1=0.9, parameters=1
    )


_SMALLEST = {
    "E4M3+Expand": 2.0**-9,
    "E5M2+Expand": 2.0**-16,
    "DE8+Expand": np.abs(oracle.de8_table()[oracle.de8_table() != 0]).min(),
}


def _oracle_read(x, name):
    """Returns `x` in float64 as read after storing it in the format called `name`."""
    format = _FORMATS[name.removesuffix("+Expand")]
    if not name.endswith("+Expand"):
        scales, values = oracle.quantize(x, format, _BLOCK)
        return oracle.dequantize(values, scales, _BLOCK, None, format)
    x = oracle.flush(x)
    scales, powers, values = {}, {}, np.zeros_like(x)
    for index, where in oracle.groups(x.shape, _BLOCK):
        scales[index] = oracle.moment_scale(x[where], format)
        bounds = oracle.power_bounds(x[where], scales[index], format, oracle.OCTAVES)
        powers[index] = bounds[0]
        bounds = oracle.expanded_bounds(x[where], scales[index], powers[index], format)
        low = bounds[0]
        # No nonzero number becomes zero.
        least = np.copysign(np.maximum(np.abs(low), _SMALLEST[name]), low)
        values[where] = np.where(x[where] == 0, low, least)
    return oracle.dequantize(values, scales, _BLOCK, powers, format)


def test_pairs_agree_with_numpy(rng):
    actual, gradients = _random_moments(rng, spread=2.5)
    rows = studies.pair_rows(_capture(actual, gradients))
    assert [(r["mu"], r["nu"]) for r in rows] == list(
        itertools.product(studies.CODES, studies.CODES)
    )
    mu, nu = actual.mu.astype(np.float64), actual.nu.astype(np.float64)
    counted = nu > 0
    exact = mu[counted] / np.sqrt(nu[counted])

    def squares(a, b):
        read_nu = _oracle_read(actual.nu, b)[counted]
        root = np.where(read_nu == 0, 1e-8, np.sqrt(read_nu))
        return (_oracle_read(actual.mu, a)[counted] / root - exact) ** 2, read_nu == 0

    unit = 12.31 / squares("E4M3+Expand", "E4M3+Expand")[0].mean()
    for row in rows:
        error, lost = squares(row["mu"], row["nu"])
        # Float32 and float64 break a few ties differently.
        assert row["error"] == pytest.approx(unit * error[~lost].mean(), rel=5e-3)
        assert row["error_with_lost"] == pytest.approx(unit * error.mean(), rel=5e-3)
        assert row["lost_percent"] == pytest.approx(100 * lost.mean(), rel=1e-5)
    lost = {row["nu"] for row in rows if row["lost_percent"]}
    assert lost == {"E4M3", "E5M2", "DE8"}


@pytest.mark.parametrize("normalize", [False, True])
def test_schemes_are_those_of_the_library(rng, normalize):
    actual, _ = _random_moments(rng)
    like = coat.scale_by_fp8_adam(
        normalize_mu=normalize, rounding="nearest", nu_format=coat.E4M3
    ).init(jnp.asarray(actual.mu))
    state = optax.ScaleByAdamState(
        jnp.int32(1), jnp.asarray(actual.mu), jnp.asarray(actual.nu)
    )
    expected = coat.to_optax_state(coat.from_optax_state(state, like))
    scheme = studies.DEFAULT if normalize else studies.COAT
    inputs = schemes.read_back(scheme, actual.mu, actual.nu, _KEY)
    np.testing.assert_array_equal(inputs[0], expected.mu)
    np.testing.assert_array_equal(inputs[1], expected.nu)
    stored = scheme.store(actual.mu, actual.nu, _KEY)
    nbytes = sum(piece.nbytes for piece in stored) / actual.mu.size
    assert scheme.bytes_per_parameter == nbytes


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantized(x, format, expand):
    return coat.quantize(x, format=format, expand=expand)


@pytest.mark.parametrize(
    ("format", "expand"), [slow(coat.E4M3, False), (coat.E4M3, True), (coat.E5M2, 3.0)]
)
def test_stochastic_rounding_has_the_right_mean(rng, format, expand):
    x = jnp.asarray(rng.lognormal(0, 2, (6, 128)) * rng.choice([-1, 1], (6, 128)))
    x = x.astype(jnp.float32)
    q = _quantized(x, format, expand)

    @jax.jit
    @jax.vmap
    def draw(key):
        return schemes.round_stochastically(x, q, key).dequantize()

    actual = np.asarray(draw(jax.random.split(_KEY, 2000)), np.float64)
    low, high = actual.min(axis=0), actual.max(axis=0)
    assert ((actual == low) | (actual == high)).all()
    x = np.asarray(x, np.float64)
    top = np.asarray(q.scale, np.float64) * format.max
    x = np.sign(x) * np.minimum(np.abs(x), top)
    slack = 1e-5 * np.abs(x)
    gap = high - low
    assert (low <= x + slack)[gap > 0].all()
    assert (high >= x - slack)[gap > 0].all()
    deviation = np.sqrt(np.abs((x - low) * (high - x)) / len(actual))
    often = np.minimum(x - low, high - x) > 0.01 * gap
    assert often.mean() > 0.9
    score = (actual.mean(axis=0) - x)[often] / deviation[often]
    assert np.abs(score).max() < 5
    assert score.std() == pytest.approx(1, abs=0.15)


def test_given_powers_are_stored_as_the_library_stores_its_own(rng):
    x = jnp.asarray(rng.lognormal(0, 2, (8, 128)), jnp.float32)
    expected = _quantized(x, coat.E4M3, True)
    by_powers = jax.jit(schemes.quantize_by, static_argnums=2)
    actual = by_powers(x, expected.exponent, coat.E4M3)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_best_power_is_the_best_of_all(rng):
    x = rng.standard_normal((5, 128)).astype(np.float32) ** 3
    weight = rng.lognormal(0, 1, x.shape)
    actual = schemes.best_power(jnp.asarray(x), jnp.asarray(weight), coat.E4M3)

    def errors(steps):
        total = np.zeros(len(x))
        for i, group in enumerate(x):
            scale = oracle.scale_of(group, oracle.E4M3, _BLOCK)
            values, _ = oracle.expanded_bounds(group, scale, steps, oracle.E4M3)
            inputs = oracle.dequantize(
                values, {(0,): scale}, _BLOCK, {(0,): steps}, oracle.E4M3
            )
            total[i] = np.sum(((inputs - group) * weight[i]) ** 2)
        return total

    every = np.array([errors(steps) for steps in range(1, 161)])
    steps = np.asarray(actual)[:, 0].astype(int)
    chosen = every[steps - 1, np.arange(len(x))]
    np.testing.assert_allclose(chosen, every.min(axis=0), rtol=1e-3)
    assert (every[15] > 2 * chosen).all()


def test_peak_over_rms(rng):
    x = rng.standard_normal((4, 128)).astype(np.float32)
    peak, rms = np.abs(x).max(axis=1), np.sqrt((x**2).mean(axis=1))
    expected = np.floor(16 * 4 / np.log2(peak / rms))
    x[3], expected[3] = 1.0, 96
    actual = schemes.PeakOverRms(4.0)(jnp.asarray(x), None, coat.E4M3)
    np.testing.assert_array_equal(actual[:, 0], expected)


@pytest.mark.parametrize("normalize", [slow(False), True])
def test_replays_are_those_of_the_library(rng, normalize):
    actual, gradients = _random_moments(rng)
    gradients = gradients[:12]
    tx = coat.scale_by_fp8_adam(
        b1=0.9,
        b2=0.99,
        eps=0,
        normalize_mu=normalize,
        rounding="nearest",
        nu_format=coat.E4M3,
    )
    # After this many steps the bias correction is 1.
    start = optax.ScaleByAdamState(
        jnp.int32(10**6), jnp.asarray(actual.mu), jnp.asarray(actual.nu)
    )
    state = coat.from_optax_state(start, tx.init(jnp.asarray(actual.mu)))
    exact = oracle.adam(actual.mu, actual.nu, gradients, b2=0.99)
    scheme = studies.DEFAULT if normalize else studies.COAT
    how = {"key": _KEY, "b1": 0.9, "b2": 0.99}
    replay = schemes.replay(scheme, actual.mu, actual.nu, gradients, **how)
    sums, update_of = np.zeros((2, *actual.mu.shape)), jax.jit(tx.update)
    for step, (gradient, (mu, nu)) in enumerate(zip(gradients, exact, strict=True)):
        update, state = update_of(jnp.asarray(gradient), state)
        both = [mu / np.sqrt(nu), np.asarray(update, np.float64)]
        sums += both
        for values, (a, b) in ((replay.update_error, both), (replay.sum_error, sums)):
            expected = np.mean((b - a) ** 2) / np.mean(a**2)
            assert values[step] == pytest.approx(expected, rel=0.02)
            assert 1e-6 < expected < 1e-2
