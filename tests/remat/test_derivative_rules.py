"""Tests that a user's derivative rules decide gradients under `fp8_remat`.

A kernel computes the plain derivative of a norm, an activation or a gate, so it may not
replace a function with another derivative. Plain JAX is the oracle.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.dots import linear, rms
from helpers.gradients import value_and_vjp
from helpers.marks import slow, slow_except
from helpers.models import normal

import pallas_kernels as pk
from coat_jax import fp8_remat

K = 128
BF16 = jnp.bfloat16


@jax.custom_jvp
def straight_through(x):
    return jax.nn.silu(x)


@straight_through.defjvp
def _(primals, tangents):
    return straight_through(*primals), tangents[0]


@jax.custom_vjp
def clipped(x):
    return x * 1


clipped.defvjp(
    lambda x: (x * 1, None), lambda _, g: (jnp.clip(g, -0.01, 0.01).astype(g.dtype),)
)


@jax.custom_vjp
def frozen_rms(x, scale):
    return rms(x, scale)


def _frozen_forward(x, scale):
    y, pullback = jax.vjp(rms, x, scale)
    return y, (pullback, scale)


def _frozen_backward(saved, dy):
    pullback, scale = saved
    return pullback(dy)[0], jnp.ones_like(scale)


frozen_rms.defvjp(_frozen_forward, _frozen_backward)


@jax.custom_jvp
def frozen_rms_jvp(x, scale):
    return rms(x, scale)


@frozen_rms_jvp.defjvp
def _(primals, tangents):
    x, scale = primals
    return rms(x, scale), tangents[0] * scale.astype(tangents[0].dtype)


def mlp(activation, up=lambda x: x):
    def fn(p, x):
        return linear(activation(linear(x, p["a"])) * up(linear(x, p["b"])), p["c"])

    return fn


def activated(activation):
    return lambda p, x: linear(activation(linear(x, p["a"])), p["c"])


def normed(norm):
    return lambda p, x: linear(norm(x, p["scale"]), p["a"])


FORMS = {
    "activation": activated(straight_through),
    "jitted activation": activated(jax.jit(straight_through)),
    "gate": mlp(straight_through),
    "clip within a jitted activation": activated(
        jax.jit(lambda x: jax.nn.silu(clipped(x)))
    ),
    "clip before an activation": activated(lambda x: jax.nn.gelu(clipped(x))),
    "clip after an activation": activated(lambda x: clipped(jax.nn.silu(x))),
    "clip before a gate's product": mlp(jax.nn.silu, jax.jit(clipped)),
    "norm with a frozen scale": normed(frozen_rms),
    "jitted norm with a frozen scale": normed(jax.jit(frozen_rms)),
    "norm with a forward rule": normed(frozen_rms_jvp),
    "clip before a norm": normed(lambda x, scale: rms(clipped(x), scale)),
    "clip after a norm": normed(lambda x, scale: clipped(rms(x, scale))),
    "clip after a bias": lambda p, x: clipped(linear(x, p["a"]) + p["bias"]),
    "clip before a bias": lambda p, x: clipped(linear(x, p["a"])) + p["bias"],
    "clip before a residual": lambda p, x: x + clipped(linear(rms(x, 1.0), p["a"])),
    "stopped statistic": normed(
        lambda x, scale: x * jax.lax.stop_gradient(rms(x, scale) / x)
    ),
}


# A kernel computes what a clip of the gradient is not within.
WITH_KERNELS = {
    "clip within a jitted activation": {"gated", "gated_grad"},
    "clip before an activation": {"gated", "gated_grad"},
    "clip before a norm": {"norm", "norm_grad"},
    "clip before a residual": {"norm", "norm_grad"},
}
SIMILAR = {"jitted activation", "clip before an activation"}
RUN = (
    "clip within a jitted activation",
    "norm with a frozen scale",
    "clip before a norm",
)


@pytest.mark.internals
@pytest.mark.parametrize("name", slow_except(FORMS.keys() - SIMILAR, FORMS))
def test_the_rule_decides(name):
    fn = FORMS[name]
    p = {n: normal(i, K, K, scale=0.1, dtype=BF16) for i, n in enumerate("abc")}
    p |= {"scale": jnp.ones(K, BF16), "bias": normal(7, K, dtype=BF16)}
    x, dy = normal(8, 64, K, dtype=BF16), normal(9, 64, K, dtype=BF16)

    def gradients(fn, p, x):
        return jax.vjp(fn, p, x)[1](dy)

    light = functools.partial(gradients, fp8_remat(fn))
    operations = {choice.operation for choice in pk.explain(light, p, x).choices}
    kernels = operations & {"gated", "gated_grad", "norm", "norm_grad"}
    assert kernels == WITH_KERNELS.get(name, set())
    # The clip's bound is in the program of the gradient.
    assert ("-0.01" in str(jax.make_jaxpr(light)(p, x))) == ("clip" in name)
    if name not in RUN:
        return
    plain, light = (
        jax.jit(gradients, static_argnums=0)(f, p, x) for f in (fn, fp8_remat(fn))
    )
    for a, b in zip(jax.tree.leaves(light), jax.tree.leaves(plain), strict=True):
        a, b = (np.asarray(g, np.float64) for g in (a, b))
        assert np.linalg.norm(a - b) <= 0.25 * np.linalg.norm(b)


@pytest.mark.internals
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, slow(jax.checkpoint)])
def test_gradients_that_are_clipped_twice_are_added_then(wrap):
    """Two equal calls stay two, since clipped gradients are summed after clipping."""

    def fn(w, x):
        first, second = (wrap(lambda w: clipped(w))(w) for _ in range(2))
        return linear(x, first) + 2 * linear(x, second)

    w, x = normal(1, K, K, scale=0.1), normal(2, 64, K)
    dy = normal(3, 64, K)
    _, (dw, _) = value_and_vjp(fp8_remat(fn), dy, w, x)
    exact = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
    expected = np.clip(exact, -0.01, 0.01) + np.clip(2 * exact, -0.01, 0.01)
    # Rounding changes the sign of small gradients. Once clipped, they would be half.
    assert np.linalg.norm(dw - expected) <= 0.35 * np.linalg.norm(expected)


_CONSTANT = np.random.default_rng(0).uniform(0.5, 2.0, (64, K)).astype(np.float32)


def _scaled_rows(w, x):
    return (x * jnp.asarray(_CONSTANT)) @ w


def _scaled_backward(saved, dy):
    w, x, constant = saved
    return (x * constant).T @ dy, (dy @ w.T) * constant


_RULED_CALLS = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "scan": lambda fn: (
        lambda w, x: jax.lax.scan(
            lambda total, _: (total + fn(w, x), None), jnp.zeros_like(x), length=3
        )[0]
    ),
}


@pytest.mark.internals
@pytest.mark.parametrize("name", _RULED_CALLS)
@pytest.mark.parametrize("saved", [True, False])
def test_rules_read_constants_of_their_own(name, saved):
    """JAX first sees a constant of a rule when it differentiates the function."""
    ruled = jax.custom_vjp(_scaled_rows)

    def forward(w, x):
        return _scaled_rows(w, x), (w, x, jnp.asarray(_CONSTANT))

    if saved:
        ruled.defvjp(forward, _scaled_backward)
    else:
        ruled.defvjp(
            lambda w, x: (_scaled_rows(w, x), (w, x)),
            lambda saved, dy: jax.vjp(_scaled_rows, *saved)[1](dy),
        )
    w, x, dy = normal(1, K, K, scale=0.1), normal(2, 64, K), normal(3, 64, K)
    call = _RULED_CALLS[name](fp8_remat(ruled))
    dw, dx = jax.jit(lambda w, x: jax.vjp(call, w, x)[1](dy))(w, x)
    w, x, dy = (np.asarray(a, np.float64) for a in (w, x, dy))
    times = 3 if name == "scan" else 1
    np.testing.assert_allclose(dx, times * (dy @ w.T) * _CONSTANT, rtol=1e-4, atol=1e-4)
    expected = times * (x * _CONSTANT).T @ dy
    assert np.linalg.norm(dw - expected) <= 0.05 * np.linalg.norm(expected)
