"""Tests of logits that routers compute from a norm's input, and of their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import normal

from coat_jax.layers.experts.routing import (
    Experts,
    Shares,
    chosen_experts,
    logits_gradient,
    normed_logits,
    routed,
)
from coat_jax.layers.parts import Norm

TOKENS, HIDDEN, EXPERTS = 32, 256, 8
CASES = [
    # Kind of norm, dtype of the input, dtype of parameters, and largest error.
    ("rms", jnp.bfloat16, jnp.bfloat16, 2e-6),
    ("rms", jnp.bfloat16, jnp.float32, 1e-5),
    ("rms", jnp.float32, jnp.float32, 2e-5),
    ("layer", jnp.bfloat16, jnp.bfloat16, 2e-5),
]


def arrays(dtype, of_params):
    # Inputs have a mean, and one token is much larger than the others.
    x = (1 + normal(0, TOKENS, HIDDEN)).at[3].multiply(1e4)
    weight = 1 + normal(1, HIDDEN, scale=0.2)
    router = normal(2, EXPERTS, HIDDEN, scale=0.1)
    return x.astype(dtype), weight.astype(of_params), router.astype(of_params)


def normed(kind, x, weight):
    """Computes a norm in float64."""
    x, weight = (np.asarray(v, np.float64) for v in (x, weight))
    x = x - x.mean(1, keepdims=True) if kind == "layer" else x
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6) * weight


@pytest.mark.parametrize(("kind", "dtype", "of_params", "error"), CASES)
def test_logits_are_those_of_float64(kind, dtype, of_params, error):
    x, weight, router = arrays(dtype, of_params)
    norm = Norm(kind=kind, eps=1e-6)
    logits = jax.jit(normed_logits, static_argnums=0)(norm, x, weight, router)
    expected = normed(kind, x, weight) @ np.asarray(router, np.float64).T
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=error * np.abs(expected).max())


def test_one_token_may_have_one_expert():
    x, _, router = (v[:1] for v in arrays(jnp.float32, jnp.float32))
    norm = Norm(kind="rms", eps=1e-6)
    logits = jax.jit(normed_logits, static_argnums=0)(norm, x, None, router)
    expected = normed("rms", x, 1.0) @ np.asarray(router, np.float64).T
    np.testing.assert_allclose(logits, expected, rtol=1e-5)
    gradient = jax.jit(logits_gradient, static_argnums=0)
    dh, _ = gradient(norm, x, None, router, jnp.full((1, 1), 2.0))
    np.testing.assert_allclose(dh, 2 * router, rtol=1e-6)


def test_a_norm_may_have_no_weight():
    x, weight, router = arrays(jnp.bfloat16, jnp.float32)
    norm = Norm(kind="rms", eps=1e-6)
    one = normed_logits(norm, x, jnp.ones_like(weight), router)
    np.testing.assert_allclose(normed_logits(norm, x, None, router), one, atol=1e-5)


@pytest.mark.parametrize(("kind", "dtype", "of_params", "error"), CASES)
def test_gradients_are_those_of_float64(kind, dtype, of_params, error):
    x, weight, router = arrays(dtype, of_params)
    dlogits = normal(3, TOKENS, EXPERTS)
    norm = Norm(kind=kind, eps=1e-6)
    compute = jax.jit(logits_gradient, static_argnums=0)
    dh, d_router = compute(norm, x, weight, router, dlogits)
    assert dh.dtype == dtype
    assert d_router.dtype == of_params
    wide = np.asarray(dlogits, np.float64)
    expected = wide @ np.asarray(router, np.float64), wide.T @ normed(kind, x, weight)
    # Results in bfloat16 are rounded once, and a wide router is rounded before.
    roundings = (1 + (of_params != dtype), 1) if dtype == jnp.bfloat16 else (0, 0)
    for a, b, count in zip((dh, d_router), expected, roundings, strict=True):
        count *= a.dtype == jnp.bfloat16
        a, most = np.asarray(a, np.float64), np.abs(b).max()
        np.testing.assert_allclose(a, b, atol=(2e-5 + count * 2**-8) * most)


@pytest.mark.parametrize("mean", [0, -60, -150])
def test_sigmoids_may_all_be_almost_zero(mean):
    """The squares of their sums underflow in float32, and then even the sums."""
    experts = Experts(num_experts=EXPERTS, top_k=2, scores="sigmoid")
    logits = mean + normal(0, TOKENS, EXPERTS)
    ids = jnp.argsort(-logits, axis=1)[:, :2]
    of_weights, of_scores = normal(1, TOKENS, 2), normal(2, EXPERTS)

    @jax.jit
    def gradient(logits):
        (weights, shares), vjp = jax.vjp(lambda x: routed(x, ids, experts), logits)
        of_shares = Shares(jnp.zeros((1, EXPERTS)), of_scores[None], jnp.zeros(1))
        return weights, shares.score[0], *vjp((of_weights, of_shares))

    def normalized(scores, gradient):
        """Returns normalized scores, and the gradient of the scores' logarithms."""
        y = scores / scores.sum(1, keepdims=True)
        return y, y * (gradient - np.sum(y * gradient, 1, keepdims=True))

    sigmoid = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    at = np.arange(TOKENS)[:, None], ids
    weights, of_chosen = normalized(sigmoid[at], np.asarray(of_weights))
    score, of_logs = normalized(sigmoid, np.asarray(of_scores) / TOKENS)
    np.add.at(of_logs, at, of_chosen)
    expected = weights, score.mean(0), of_logs * (1 - sigmoid)
    for a, b in zip(gradient(logits), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_the_input_of_an_rms_norm_is_read_in_its_dtype():
    x, weight, router = arrays(jnp.bfloat16, jnp.bfloat16)
    norm = Norm(kind="rms", eps=1e-6)
    program = jax.make_jaxpr(lambda *v: normed_logits(norm, *v))(x, weight, router)
    (dot,) = (e for e in program.eqns if e.primitive.name == "dot_general")
    assert dot.invars[0] is program.jaxpr.invars[0]


def test_the_best_experts_are_chosen_each_once():
    """Equal scores are chosen by index, also zeros and scores of excluded experts."""
    experts = Experts(num_experts=32, top_k=6, num_shared=1, scores="sigmoid")
    logits = jnp.round(4 * normal(0, 64, 32)) / 4
    bias = normal(1, 32).at[:8].set(-jnp.inf)
    logits = logits.at[0].set(-jnp.inf)  # All scores are 0.
    for of_experts in (bias, bias.at[:29].set(-jnp.inf), jnp.zeros(32).at[3].set(-0.0)):
        ids = jax.jit(chosen_experts, static_argnums=1)(logits, experts, of_experts)
        scores = np.asarray(jax.nn.sigmoid(logits) + of_experts)
        expected = np.argsort(-scores, axis=1, stable=True)[:, :6]
        np.testing.assert_array_equal(ids[:, :6], expected)
        assert (ids[:, 6] == 32).all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF])
def test_experts_are_chosen_once_among_scores_that_are_not_numbers(bits):
    """No expert is chosen twice: the exchange of rows between devices needs that."""
    nan = np.array(bits, np.uint32).view(np.float32)
    logits = np.asarray(normal(0, 5, 8)).copy()
    logits[0], logits[1, ::2], logits[2, 5] = nan, nan, nan
    experts = Experts(num_experts=8, top_k=6, scores="sigmoid")
    for bias in (jnp.zeros(8), jnp.asarray(logits[1])):
        ids = jax.jit(chosen_experts, static_argnums=1)(logits, experts, bias)
        assert all(len(set(row)) == 6 for row in np.asarray(ids).tolist())
