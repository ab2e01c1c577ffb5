"""Tests programs and optimizers that could break a step in the backward pass."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import coat_jax as coat

SGD = optax.sgd(0.1)


def array(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) * 0.3, jnp.float32)


X = array(4, 8, seed=1)
PARAMS = {"stack": array(3, 8, 8), "one": array(8, 8, seed=2)}


def layer(w, x):
    return jnp.tanh(x @ w)


def two_layers(params, x):
    return jnp.mean(layer(params["b"], layer(params["a"], x)) ** 2)


def stack(params, x):
    return jnp.mean(coat.scan_layers(layer, x, params["stack"]) ** 2)


TWO = {"a": array(8, 8), "b": array(8, 8, seed=2)}


def assert_steps_equal(loss, tx, params, transform=jax.jit):
    state = tx.init(params)
    value, grads = transform(jax.value_and_grad(loss))(params, X)
    updates, after = tx.update(grads, state, params)
    expected = value, optax.apply_updates(params, updates), after
    actual = jax.jit(coat.value_and_update(loss, tx))(params, state, X)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def refused(loss, tx, params, match):
    step = coat.value_and_update(loss, tx)
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(step, params, tx.init(params), X)


# --- Transformations around layers add cotangents up, or make them zero. ---
def in_scan(p, x):
    def body(x, _):
        return coat.apply_layer(layer, x, p["one"]), None

    return lax.scan(body, x, None, length=3)[0]


def in_cond(p, x):
    run = lambda x: coat.apply_layer(layer, x, p["one"])  # noqa: E731
    return lax.cond(x[0, 0] > 1e3, run, lambda x: x, x)


def in_vmap(p, x):
    return jax.vmap(lambda x: coat.apply_layer(layer, x, p["one"]))(x)


def stack_in_vmap(p, x):
    return jax.vmap(lambda x: coat.scan_layers(layer, x, p["stack"]))(x)


def in_a_stack(p, x):
    def both(w, x):
        return coat.apply_layer(layer, layer(w, x), p["one"])

    return coat.scan_layers(both, x, p["stack"])


def stack_in_a_layer(p, x):
    def both(w, x):
        return coat.scan_layers(layer, layer(w, x), p["stack"])

    return coat.apply_layer(both, x, p["one"])


def in_grad(p, x):
    return jax.grad(lambda x: jnp.sum(coat.scan_layers(layer, x, p["stack"]) ** 2))(x)


WITHIN = [
    in_scan,
    in_cond,
    in_vmap,
    stack_in_vmap,
    in_a_stack,
    stack_in_a_layer,
    in_grad,
]


@pytest.mark.parametrize("run", WITHIN, ids=lambda run: run.__name__)
def test_layers_within_a_transformation_step_once_and_warn(run):
    with pytest.warns(UserWarning, match="inside a transformation of JAX"):
        assert_steps_equal(lambda p, x: jnp.mean(run(p, x) ** 2), SGD, PARAMS)


# --- Optimizers that couple parameters or layers, but not always. ---
@pytest.mark.parametrize("limit", [1.0, 1e3])
def test_a_norm_of_a_stack_above_a_limit_is_refused(limit):
    tx = optax.chain(optax.clip_by_block_rms(limit), SGD)
    refused(stack, tx, PARAMS, "mixes layers")


def test_a_norm_of_a_stack_that_waits_for_steps_is_refused():
    rates = map(optax.constant_schedule, (0.0, 0.1))
    late = optax.join_schedules(list(rates), [10])
    refused(stack, optax.lamb(late), PARAMS, "mixes layers")


def divided_by(norm_of):
    """Returns an optimizer that divides updates by `norm_of(state, params)`.

    Its state holds the updates of the last step.
    """

    def init(params):
        return optax.TraceState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params):
        divided = jax.tree.map(lambda u: u / norm_of(state, params), updates)
        return divided, optax.TraceState(updates)

    return optax.GradientTransformation(init, update)


def test_a_norm_of_all_parameters_is_refused():
    tx = divided_by(lambda _, params: optax.tree.norm(params))
    refused(two_layers, tx, TWO, r"the values or the state of params\['b'\]")


def test_a_norm_of_all_states_is_refused():
    tx = divided_by(lambda state, _: 1 + optax.tree.norm(state))
    refused(two_layers, tx, TWO, r"the values or the state of params\['b'\]")


def test_random_updates_are_refused():
    tx = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), SGD)
    refused(two_layers, tx, TWO, "draws random numbers")


def test_states_of_booleans_step():
    assert_steps_equal(two_layers, optax.chain(optax.zero_nans(), SGD), TWO)


# --- Losses. ---
@pytest.mark.parametrize(
    "value", [jnp.ones(2), jnp.int32(1), (jnp.float32(1), 2), None], ids=str
)
def test_losses_are_floating_scalars(value):
    step = coat.value_and_update(lambda params, x: value, SGD)
    with pytest.raises(TypeError, match="loss must return a floating scalar"):
        step(TWO, SGD.init(TWO), X)


# --- Names and shapes by which arrays of a state could be taken for another's. ---
class Hyper(NamedTuple):
    hyperparams: jax.Array
    w: jax.Array


class Counted(NamedTuple):
    count: jax.Array
    w: jax.Array


def one_layer(params, x):
    *_, w = jax.tree.leaves(params)
    return jnp.mean(layer(w, x) ** 2) + sum(
        jnp.sum(jnp.sin(p)) for p in jax.tree.leaves(params)
    )


LOOKALIKES = [
    Counted(count=array(), w=array(8, 8)),
    Counted(count=array(8), w=array(8, 8)),
    # A factored moment of the second has the shape of the first.
    {"w": array(8), "z": {"w": array(8, 8)}},
    Hyper(array(8), array(8, 8)),
    {"learning_rate": array(8), "w": array(8, 8)},
    {"learning_rate": array(), "w": array(8, 8)},
    {"mu": {"nu": array(8, 8)}, "nu": array(8, 8)},
    [array(8), (array(8, 8), array(8, 8))],
]


@pytest.mark.parametrize(
    "params", LOOKALIKES, ids=lambda p: str(jax.tree.map(jnp.shape, p))
)
@pytest.mark.parametrize(
    "tx",
    [
        optax.inject_hyperparams(coat.fp8_adamw)(learning_rate=1e-2),
        optax.adafactor(1e-2, min_dim_size_to_factor=4, clipping_threshold=None),
    ],
    ids=["fp8_adamw", "adafactor"],
)
def test_states_are_their_parameters_whatever_the_names(params, tx):
    # The operations of all cases are compiled once each.
    assert_steps_equal(one_layer, tx, params, transform=lambda fn: fn)


def bare_count(rate):
    """Returns an optimizer with a single array as its state, a count."""

    def update(updates, count, params=None):
        return jax.tree.map(lambda u: -rate * u / (1 + count), updates), count + 1

    return optax.GradientTransformation(lambda _: jnp.zeros(()), update)


@pytest.mark.parametrize("place", [0, 1])
def test_a_count_in_a_tuple_like_the_parameters_is_no_moment(place):
    parts = [optax.trace(0.9)]
    parts.insert(place, bare_count(0.1))
    params = (array(8, 8), array(8, 8, seed=1))

    def loss(params, x):
        return two_layers({"a": params[0], "b": params[1]}, x)

    assert_steps_equal(loss, optax.chain(*parts), params)


@pytest.mark.parametrize("tx", [optax.adam(1e-2), optax.novograd(1e-2)])
def test_one_scalar_steps(tx):
    assert_steps_equal(lambda w, x: jnp.mean(jnp.tanh(w * x) ** 2), tx, array())
