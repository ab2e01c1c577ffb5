"""Tests that shares in sums of exponentials are saved unquantized."""

import jax
import jax.numpy as jnp
import pytest
from helpers.marks import slow
from helpers.models import normal

import coat_jax as coat

pytestmark = pytest.mark.internals

NOTE = "shares of a sum add up to 1"
WEIGHTS = {
    "gate": normal(0, 64, 64, scale=0.125),
    "value": normal(1, 64, 64, scale=0.1),
}
X = normal(2, 8, 256, 64)


def gated(params, x):
    """Computes a gated recurrence in logarithms, in parallel, as minGRU does."""
    gate = x @ params["gate"]
    decay = jnp.cumsum(-jax.nn.softplus(gate), axis=1)
    values = -jax.nn.softplus(-gate) + jax.nn.log_sigmoid(x @ params["value"])
    return jnp.exp(decay + jax.lax.cumlogsumexp(values - decay, axis=1))


def scanned(params, x):
    """Computes a recurrence in logarithms by an associative scan."""

    def join(first, second):
        (decay, total), (next_decay, value) = first, second
        return decay + next_decay, jnp.logaddexp(total + next_decay, value)

    terms = jax.nn.log_sigmoid(x @ params["gate"]), x @ params["value"]
    return jnp.exp(jax.lax.associative_scan(join, terms, axis=1)[1])


def notes(fn):
    report = coat.residual_report(coat.fp8_remat(fn), WEIGHTS, X)
    return [row.kept.removeprefix("wide, ") for row in report.rows]


@pytest.mark.parametrize("fn", [slow(gated), scanned])
def test_gradients_of_running_sums_in_logarithms(fn):
    report = coat.gradient_report(coat.fp8_remat(fn), fn, WEIGHTS, X)
    assert max(row.error for row in report.rows) < 0.12


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda p, x: jnp.logaddexp(x @ p["gate"], x @ p["value"]), 2),
        (lambda p, x: jax.jit(jnp.logaddexp)(x @ p["gate"], x @ p["value"]), 2),
        (lambda p, x: jax.nn.softplus(x @ p["gate"]) @ p["value"], 0),
        (lambda p, x: jnp.logaddexp(1.5, x @ p["gate"]) @ p["value"], 0),
        (lambda p, x: jax.nn.log_sigmoid(x @ p["gate"]) @ p["value"], 0),
        (lambda p, x: jax.nn.softmax(x @ p["gate"]) @ p["value"], 0),
        (lambda p, x: jnp.exp(x @ p["gate"] - x @ p["value"]), 0),
    ],
)
def test_shares_of_two_arrays_are_exact(fn, count):
    assert notes(fn).count(NOTE) == count
