"""Tests `fp8_remat` of functions of one example, within `jax.vmap`."""

import warnings
from inspect import signature

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gradients import flat
from helpers.marks import slow
from jax import lax

import coat_jax as coat
from coat_jax.remat import vjp

pytestmark = pytest.mark.internals


@pytest.fixture(autouse=True)
def every_warning(monkeypatch):
    """Lets each test see the warnings that are given once in a process."""
    monkeypatch.setattr(vjp, "warn_once", warnings.warn)


WIDTH, ROWS = 128, 64


def normed(params, x):
    """Computes a block of one example, with the batch norm of all examples."""
    h = x @ params["a"]
    h = h - lax.pmean(h, "batch")
    h = h * lax.rsqrt(lax.pmean(h * h, "batch") + 1e-5)
    return x + jax.nn.gelu(h) @ params["b"]


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    a, b = (0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[:2])
    return {"a": a, "b": b}, jax.random.normal(keys[2], (4, ROWS, WIDTH))


def gradient(fn, params, x):
    def loss(params):
        y = jax.vmap(fn, (None, 0), axis_name="batch")(params, x)
        return jnp.mean(jnp.square(y))

    return jax.grad(loss)(params)


@pytest.mark.parametrize("compiled", [slow(False), True])
@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.dots_saveable], ids=["none", "dots"]
)
def test_collectives_over_mapped_axes(policy, compiled):
    light = coat.fp8_remat(normed, policy=policy)
    run = jax.jit(gradient, static_argnums=0) if compiled else gradient
    expected = flat(jax.jit(gradient, static_argnums=0)(normed, *arrays()))
    difference = np.linalg.norm(flat(run(light, *arrays())) - expected)
    assert 0 < difference < 0.1 * np.linalg.norm(expected)


@jax.custom_vjp
def reduced_later(x):
    """Returns x; its gradient is averaged over the axis, as in tensor parallelism."""
    return x


reduced_later.defvjp(lambda x: (x, None), lambda _, dy: (lax.psum(dy, "batch") / 4,))


def later(params, x):
    return reduced_later(jax.nn.silu(x @ params["a"])) ** 2 @ params["b"]


@pytest.mark.parametrize("compiled", [False, True])
def test_collectives_of_derivatives(compiled):
    run = jax.jit(gradient, static_argnums=0) if compiled else gradient
    expected = flat(jax.jit(gradient, static_argnums=0)(later, *arrays()))
    difference = np.linalg.norm(flat(run(coat.fp8_remat(later), *arrays())) - expected)
    assert 0 < difference < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("compiled", [slow(False), True])
def test_collectives_over_an_outer_axis(compiled):
    params, x = arrays()

    def gradient(fn, params):
        mapped = jax.vmap(jax.vmap(fn, (None, 0)), (None, 0), axis_name="batch")

        def loss(params):
            return jnp.mean(jnp.square(mapped(params, jnp.stack([x, x[::-1]]))))

        return jax.grad(loss)(params)

    expected = flat(jax.jit(gradient, static_argnums=0)(normed, params))
    run = jax.jit(gradient, static_argnums=0) if compiled else gradient
    difference = np.linalg.norm(flat(run(coat.fp8_remat(normed), params)) - expected)
    assert 0 < difference < 0.1 * np.linalg.norm(expected)


SHARES_RESULTS = "generic_batching" in signature(jax.custom_vjp.defvjp).parameters


@pytest.mark.skipif(not SHARES_RESULTS, reason="needs jax 0.12")
@pytest.mark.parametrize("inside", [False, True])
def test_a_result_that_all_examples_share_counts_once(inside):
    params, x = arrays()

    def mean_of_cubes(params, x):
        return lax.pmean(jnp.mean(normed(params, x) ** 3), "batch")

    def gradient(fn):
        fn = jax.grad(fn) if inside else fn
        mapped = jax.vmap(fn, (None, 0), 0 if inside else None, axis_name="batch")
        return (mapped if inside else jax.grad(mapped))(params, x)

    expected = flat(gradient(mean_of_cubes))
    difference = flat(gradient(coat.fp8_remat(mean_of_cubes))) - expected
    assert 0 < np.linalg.norm(difference) < 0.1 * np.linalg.norm(expected)


@pytest.mark.skipif(SHARES_RESULTS, reason="jax 0.12 and newer count it once")
def test_a_result_that_all_examples_share_gives_a_warning_before():
    params, x = arrays()

    def mean(params, x):
        return lax.pmean(jnp.mean(normed(params, x)), "batch")

    mapped = jax.vmap(coat.fp8_remat(mean), (None, 0), None, axis_name="batch")
    with pytest.warns(UserWarning, match="put fp8_remat around the jax.vmap"):
        jax.grad(mapped)(params, x)


def test_collectives_of_equinox():
    class Model(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        last: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(WIDTH, 4096, key=keys[0])
            self.norm = eqx.nn.BatchNorm(4096, axis_name="batch", mode="batch")
            self.last = eqx.nn.Linear(4096, WIDTH, key=keys[1])

        def __call__(self, x, state):
            h, state = self.norm(self.first(x), state)
            return self.last(jax.nn.gelu(h)), state

    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, WIDTH))

    @eqx.filter_jit
    def gradient(model):
        def loss(model):
            mapped = jax.vmap(model, (0, None), (0, None), axis_name="batch")
            return jnp.mean(jnp.square(mapped(x, state)[0]))

        return eqx.filter_grad(loss)(model)

    expected = flat(gradient(model))
    difference = np.linalg.norm(flat(gradient(coat.fp8_remat(model))) - expected)
    assert 0 < difference < 0.1 * np.linalg.norm(expected)


def mlp():
    return eqx.nn.MLP(WIDTH, WIDTH, 512, depth=2, key=jax.random.key(0))


def saved_bytes(fn):
    model, static = eqx.partition(mlp(), eqx.is_array)
    x = jnp.ones((2048, WIDTH))
    report = coat.residual_report(lambda p, x: fn(eqx.combine(p, static), x), model, x)
    return report.nbytes


@pytest.mark.parametrize("wrap", [coat.fp8_remat, coat.fp8])
def test_examples_that_are_too_small_for_copies_give_a_warning(wrap):
    plain = saved_bytes(lambda model, x: jax.vmap(model)(x))
    with pytest.warns(UserWarning, match="of 2,048 examples under jax.vmap"):
        saved_bytes(lambda model, x: jax.vmap(wrap(model))(x))
    around = wrap(lambda model, x: jax.vmap(model)(x))
    assert saved_bytes(around) < 0.4 * plain


def test_a_matmul_of_few_rows_is_the_same_with_and_without_gradients():
    """Under `vmap` a matmul has the rows of all examples if no gradient is computed."""
    model, x = coat.fp8(mlp()), jax.random.normal(jax.random.key(1), (2048, WIDTH))
    with pytest.warns(UserWarning, match="of 2,048 examples"):
        y, _ = eqx.filter_vjp(lambda model: jax.vmap(model)(x), model)
    np.testing.assert_array_equal(y, jax.vmap(model)(x))
    np.testing.assert_allclose(y, jax.vmap(mlp())(x), rtol=1e-5, atol=1e-6)


def test_inference_gives_no_warning():
    model = coat.fp8_remat(mlp())
    jax.vmap(model)(jnp.ones((2048, WIDTH)))


def test_casts_of_weights_do_not_hide_the_warning():
    params = {name: jnp.ones((256, 256)) for name in "ab"}

    def fn(params, x):
        a, b = (params[name].astype(jnp.bfloat16) for name in "ab")
        return jax.nn.silu(x.astype(jnp.bfloat16) @ a) @ b

    def loss(params):
        return jax.vmap(coat.fp8_remat(fn), (None, 0))(params, x).sum()

    x = jnp.ones((4096, 256))
    with pytest.warns(UserWarning, match="of 4,096 examples"):
        jax.eval_shape(jax.grad(loss), params)
