"""Tests that the factors of recurrences, at which errors add up, have no FP8 copies.

Plain JAX is the oracle.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers.gradients import FP8, distances, saved, value_and_vjp
from helpers.marks import slow_except
from helpers.models import normal
from jax import lax

import coat_jax as coat

pytestmark = pytest.mark.internals

STEPS, ROWS, K = 512, 4, 64


def scanned(step):
    """Returns the states of a recurrence that starts at zero."""

    def run(decay, x):
        def body(h, inputs):
            h = step(h, *inputs)
            return h, h

        return lax.scan(body, jnp.zeros(x.shape[1:]), (decay, x))[1]

    return run


def in_two_parts(decay, x):
    """Computes a recurrence of pairs that are rotated a little at every step."""

    def body(state, inputs):
        (p, q), (decay, x) = state, inputs
        c, s = 0.998 * decay, 0.05 * decay
        state = c * p - s * q + x, s * p + c * q
        return state, state[0]

    zeros = jnp.zeros(x.shape[1:])
    return lax.scan(body, (zeros, zeros), (decay, x))[1]


def in_chunks(decay, x):
    """Computes a recurrence in chunks, which the backward pass computes again."""

    @jax.checkpoint
    def chunk(h, inputs):
        return lax.scan(lambda h, i: ((y := i[0] * h + i[1]), y), h, inputs)

    cut = (a.reshape(16, -1, *a.shape[1:]) for a in (decay, x))
    states = lax.scan(chunk, jnp.zeros(x.shape[1:]), tuple(cut))[1]
    return states.reshape(x.shape)


def combined(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


@jax.custom_vjp
def associative(decay, x):
    return lax.associative_scan(combined, (decay, x))[1]


def associative_gradients(saved, dy):
    decay, h = saved
    later = jnp.concatenate([decay[1:], jnp.zeros_like(decay[:1])])
    dx = associative(later[::-1], dy[::-1])[::-1]
    return dx * jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]]), dx


associative.defvjp(
    lambda decay, x: ((h := associative(decay, x)), (decay, h)), associative_gradients
)

FORMS = {
    "scan": scanned(lambda h, decay, x: decay * h + x),
    "checkpoint": scanned(jax.checkpoint(lambda h, decay, x: decay * h + x)),
    "two parts": in_two_parts,
    "chunks": in_chunks,
    "associative scan": associative,
}


@pytest.mark.parametrize("name", slow_except(("scan", "associative scan"), FORMS))
def test_errors_of_copies_do_not_add_up(name):
    def fn(w, x):
        decay = jax.nn.sigmoid(x @ w + 5)  # About 0.99.
        return FORMS[name](decay, (1 - decay) * x)

    w, x = normal(0, K, K, scale=0.05), normal(1, STEPS, ROWS, K)
    dy = normal(2, *x.shape)
    light, plain = (value_and_vjp(f, dy, w, x) for f in (coat.fp8_remat(fn), fn))
    assert max(distances(light, plain)) <= 0.05


def test_reports_say_that_backward_multiplies_again_and_again():
    fn = FORMS["scan"]
    report = coat.residual_report(
        coat.fp8_remat(lambda w, x: fn(jax.nn.sigmoid(x @ w), x)),
        normal(0, K, K),
        normal(1, STEPS, ROWS, K),
    )
    assert "backward multiplies by it again and again" in str(report)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w: x + jax.nn.silu(x @ w),
        lambda x, w: jnp.tanh(x @ w),
        lambda x, w: x + jnp.tanh(x) * 0.1,
    ],
    ids=["residual stream", "matmul", "steps of an equation"],
)
def test_layers_in_a_loop_need_no_exact_array(layer):
    @coat.fp8_remat
    def stack(w, x):
        return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]

    residuals = saved(stack, normal(0, 4, K, K), normal(1, STEPS, K), params=1)
    wide = [r for r in residuals if r.dtype not in FP8 and r.nbytes >= STEPS * K]
    assert all(r.argument is not None for r in wide)
