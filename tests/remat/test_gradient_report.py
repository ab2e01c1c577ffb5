"""Tests of `coat.gradient_report`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.models import normal, two_product_arguments, two_products

import coat_jax as coat


@jax.custom_vjp
def steered(x, gradient):
    """Returns the sum of x; `gradient` is its gradient."""
    return x.sum()


steered.defvjp(lambda x, gradient: (x.sum(), gradient), lambda g, dy: (dy * g, None))


def report_of(gradient, expected):
    """Returns the only row of a report on an array with these two gradients."""
    x = jnp.zeros_like(expected)
    report = coat.gradient_report(
        lambda x: steered(x, gradient), lambda x: steered(x, expected), x
    )
    (row,) = report.rows
    return row


def test_errors_are_relative_to_the_reference():
    row = report_of(jnp.array([3.0, 5.0]), jnp.array([3.0, 4.0]))
    assert (row.path, row.shape, row.norm, row.share) == ("0", (2,), 5.0, 1.0)
    np.testing.assert_allclose(row.error, 1 / 5)
    np.testing.assert_allclose(row.cosine, 29 / (5 * 34**0.5))
    assert not row.is_usual


@pytest.mark.parametrize(
    ("gradient", "expected", "error", "usual"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, True),
        ([1.1, 2.2], [1.0, 2.0], 0.1, True),
        ([0.0, 0.0], [0.0, 0.0], 0.0, True),
        ([1.0, 0.0], [0.0, 0.0], np.inf, False),
        ([np.nan, 0.0], [1.0, 0.0], np.nan, False),
        ([np.inf, 0.0], [1.0, 0.0], np.inf, False),
        ([1.0, 0.0], [np.nan, 0.0], np.nan, False),
    ],
)
def test_edge_cases(gradient, expected, error, usual):
    row = report_of(jnp.array(gradient), jnp.array(expected))
    np.testing.assert_allclose(row.error, error, rtol=1e-6)
    assert row.is_usual == usual


def test_the_gradient_is_of_a_sum_with_random_weights():
    # This gradient would be zero with equal weights.
    def reference(x, n):
        y = x - x.mean()
        return {"y": y, "n": n}

    def doubled(x, n):
        return {"y": 2 * reference(x, n)["y"], "n": n}

    report = coat.gradient_report(doubled, reference, normal(0, 16, 8), n=3)
    (row,) = report.rows
    assert row.norm > 1
    results = [row.error, row.cosine, report.output_error]
    np.testing.assert_allclose(results, 1, rtol=1e-6)


def test_errors_that_are_next_to_nothing_are_usual():
    def shifted(params, x, error):
        a, b = params
        return steered(a, jnp.ones(2)) + steered(b, jnp.full(2, error)) + 0 * x.sum()

    arguments = [(jnp.zeros(2), jnp.zeros(2)), jnp.zeros(2)]
    for error, usual in [(0.9e-3, True), (1.1e-3, False)]:
        report = coat.gradient_report(
            lambda params, x, e=error: shifted(params, x, e),
            lambda params, x: shifted(params, x, 0.0),
            *arguments,
        )
        assert [row.share for row in report.rows] == [1, 0, 0]
        assert [row.is_usual for row in report.rows] == [True, usual, True]


def test_fp8_remat_changes_gradients_little_and_results_not_at_all():
    params, x = two_product_arguments()
    report = coat.gradient_report(coat.fp8_remat(two_products), two_products, params, x)
    assert [row.path for row in report.rows] == ["0/a", "0/b", "1"]
    assert report.output_error == 0
    assert 0 < max(row.error for row in report.rows) < 0.06
    assert not report.unusual


def test_unusual_errors_are_marked_and_the_largest_comes_first():
    def reference(weights, x):
        return x @ weights["a"] @ weights["b"]

    def wrong(weights, x):
        scaled = {"a": 1.3 * weights["a"], "b": 0.4 * weights["b"]}
        fixed = {k: jax.lax.stop_gradient(weights[k] - v) for k, v in scaled.items()}
        return reference({k: v + fixed[k] for k, v in scaled.items()}, x)

    weights = {"a": normal(0, 8, 8), "b": normal(1, 8, 8)}
    report = coat.gradient_report(wrong, reference, weights, normal(2, 4, 8))
    assert [row.path for row in report.unusual] == ["0/b", "0/a"]
    np.testing.assert_allclose([row.error for row in report.unusual], [0.6, 0.3], 1e-5)
    marked = [line.split()[0] for line in str(report).splitlines() if "unusual" in line]
    assert marked == ["0/a", "0/b"]


def test_modules_and_integers_are_arguments():
    module = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    ids = jnp.arange(4)

    def reference(module, table, ids):
        return module(table[ids])

    def light(module, table, ids):
        return coat.fp8_remat(module)(table[ids])

    report = coat.gradient_report(light, reference, module, normal(0, 8, 64), ids)
    assert [row.path for row in report.rows] == ["0/bias/value", "0/kernel/value", "1"]


def test_bad_arguments():
    with pytest.raises(TypeError, match="needs arguments with values, got abstract"):
        jax.jit(lambda x: coat.gradient_report(jnp.sin, jnp.sin, x))(jnp.ones(2))
    with pytest.raises(TypeError, match="gradient_report takes a function, got 3"):
        coat.gradient_report(jnp.sin, 3, jnp.ones(2))
    with pytest.raises(ValueError, match="needs a floating array among the arguments"):
        coat.gradient_report(jnp.sum, jnp.sum, jnp.arange(2))
    with pytest.raises(ValueError, match="needs a function with a floating result"):
        coat.gradient_report(jnp.argmax, jnp.argmax, jnp.ones(2))
    with pytest.raises(ValueError, match=r"the same shapes, got \(2,\) and"):
        coat.gradient_report(jnp.sin, jnp.sum, jnp.ones(2))
