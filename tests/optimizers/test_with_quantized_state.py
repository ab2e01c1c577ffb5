"""Tests that `with_quantized_state` stores averages, and only these, in 8 bits."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.marks import slow, slow_except

import coat_jax as coat
from coat_jax.quantization.array import QuantizedArray

SHAPE = (64, 256)
BF16 = jnp.bfloat16
PARAMS = {"w": jnp.ones(SHAPE), "b": jnp.ones(8)}
SIZE = SHAPE[0] * SHAPE[1]

# Each optimizer with the number of its fields that are averages.
OPTIMIZERS = {
    "adam": (lambda: optax.adam(1e-2), 2),
    "adabelief": (lambda: optax.adabelief(1e-2), 2),
    "adadelta": (lambda: optax.adadelta(1e-2), 2),
    "adamax": (lambda: optax.adamax(1e-2), 2),
    "adan": (lambda: optax.adan(1e-2), 3),
    "adopt": (lambda: optax.chain(optax.contrib.adopt(1e-2)), 2),
    "ademamix": (lambda: optax.contrib.ademamix(1e-2), 2),
    "amsgrad": (lambda: optax.amsgrad(1e-2), 2),
    "ema": (lambda: optax.ema(0.9), 1),
    "lamb": (lambda: optax.lamb(1e-2), 2),
    "lion": (lambda: optax.lion(1e-3), 1),
    "momentum": (lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True), 1),
    "muon": (lambda: optax.contrib.muon(1e-2), 1),
    "nadam": (lambda: optax.nadam(1e-2), 2),
    "rmsprop": (lambda: optax.rmsprop(1e-2), 1),
    "schedule-free": (lambda: optax.contrib.schedule_free_adamw(1e-2), 1),
}
_FAST = [OPTIMIZERS[name] for name in ("adopt", "momentum", "rmsprop", "schedule-free")]
every_optimizer = pytest.mark.parametrize(
    ("make", "averages"), slow_except(_FAST, OPTIMIZERS.values()), ids=OPTIMIZERS
)


def gradients(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(size=SHAPE))
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return {"w": draw(SHAPE) * size, "b": draw((8,))}


def quantized_leaves(state) -> list[QuantizedArray]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, QuantizedArray))
    return [leaf for leaf in leaves if isinstance(leaf, QuantizedArray)]


def stepped(tx, steps: int, params=PARAMS):
    update = jax.jit(tx.update)
    state = tx.init(params)
    for i in range(steps):
        updates, state = update(gradients(i), state, params)
    return updates, state


@every_optimizer
def test_the_first_step_is_the_plain_ones(make, averages):
    """The first step agrees, as zeros are stored exactly and steps are float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # All fields are known.
        tx = coat.with_quantized_state(make())
        actual, state = stepped(tx, 1)
    expected, exact = stepped(make(), 1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-8),
        actual,
        expected,
    )
    moments = quantized_leaves(state)
    assert [q.shape for q in moments] == [SHAPE] * averages
    for q in moments:
        size = sum(x.nbytes for x in jax.tree.leaves(q))
        assert size <= 1.04 * SIZE
    # Fields that are no averages, and the small parameter's, are not changed.
    wide = coat.to_optax_state(state)
    assert jax.tree.structure(wide) == jax.tree.structure(exact)
    for a, b in zip(jax.tree.leaves(wide), jax.tree.leaves(exact), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.shape != SHAPE:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9)


@every_optimizer
def test_later_steps_stay_beside_the_plain_ones(make, averages):
    del averages
    actual, _ = stepped(coat.with_quantized_state(make()), 20)
    expected, _ = stepped(make(), 20)
    a, b = (np.asarray(x["w"], np.float64).ravel() for x in (actual, expected))
    assert a @ b / (b @ b) == pytest.approx(1, abs=0.03)
    # Lion's updates are signs. Some signs differ where the average is near zero.
    assert np.corrcoef(a, b)[0, 1] > 0.9


def adopt_in(name):
    adopt = optax.contrib.adopt
    if name == "jit":
        tx = adopt(1e-2)
        return optax.GradientTransformation(tx.init, jax.jit(tx.update))
    if name == "hyperparameters":
        make = optax.inject_hyperparams(adopt, static_args=("clip_value_fn",))
        return make(learning_rate=1e-2)
    if name == "steps":
        return optax.MultiSteps(adopt(1e-2), 2).gradient_transformation()
    by_name = {"w": adopt(1e-2), "b": optax.adam(1e-2)}
    return optax.partition(by_name, {"w": "w", "b": "b"})


@pytest.mark.parametrize("name", ["jit", "hyperparameters", "steps", "partition"])
def test_a_first_moment_of_ratios_is_no_ratio_itself(name):
    """ADOPT has Adam's state, and averages gradients over the second moment's root."""
    state = jax.eval_shape(coat.with_quantized_state(adopt_in(name)).init, PARAMS)
    (mu,) = (
        m
        for path, m in state.layout.moments
        if path[-1].name == "mu" and "b" not in jax.tree_util.keystr(path)
    )
    assert mu.over_root_of is None


def test_a_first_moment_of_gradients_is_a_ratio():
    steps = optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()
    for tx in (optax.adamw(1e-2), steps, optax.adabelief(1e-2)):
        state = jax.eval_shape(coat.with_quantized_state(tx).init, PARAMS)
        (mu,) = (m for path, m in state.layout.moments if path[-1].name == "mu")
        assert mu.over_root_of == "nu"


def injected(tx):
    def make(rate):
        return optax.chain(tx, optax.scale(rate))

    return optax.inject_hyperparams(make)(rate=0.5)


def steps_of_clipped(tx):
    chain = optax.chain(optax.clip_by_global_norm(1.0), injected(tx))
    return optax.MultiSteps(chain, 2).gradient_transformation()


AROUND = {
    "masked": lambda tx: optax.masked(injected(tx), {"w": True, "b": False}),
    "multi_steps": steps_of_clipped,
    "partition": lambda tx: optax.partition(
        {"x": tx, "y": optax.sgd(1e-2)}, {"w": "x", "b": "y"}
    ),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_goes_around_goes_inside_too(around):
    """Wrapping inside and outside quantizes the same averages, with equal results."""
    lion = optax.lion(1e-3)
    expected, _ = stepped(AROUND[around](lion), 2)
    inside = coat.with_quantized_state(AROUND[around](lion))
    outside = AROUND[around](coat.with_quantized_state(lion))
    for tx in (inside, outside):
        actual, state = stepped(tx, 2)
        assert [q.shape for q in quantized_leaves(state)] == [SHAPE]
        same = np.mean(np.asarray(actual["w"]) == np.asarray(expected["w"]))
        assert same > 0.97
        np.testing.assert_allclose(actual["b"], expected["b"], rtol=1e-6)


class OwnState(NamedTuple):
    count: jax.Array
    speed: dict
    anchor: dict


def own(start=0.0):
    """Returns a user's optimizer: a moving average, and a copy of the parameters."""

    def init(params):
        speed = jax.tree.map(lambda p: jnp.full_like(p, start), params)
        return OwnState(jnp.zeros([], jnp.int32), speed, params)

    def update(updates, state, params=None):
        del params
        speed = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g, state.speed, updates)
        return speed, OwnState(state.count + 1, speed, state.anchor)

    return optax.GradientTransformation(init, update)


def test_fields_of_other_transformations_are_named():
    saved = {"speed": coat.Moment(format=coat.E5M2, power=2.0), "anchor": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        updates, state = stepped(coat.with_quantized_state(own(), moments=saved), 3)
    (speed,) = quantized_leaves(state)
    assert (speed.format, speed.power) == (coat.E5M2, 2.0)
    assert state.speed["w"] is state.inner_state.speed["w"]
    expected, _ = stepped(own(), 3)
    a, b = np.asarray(updates["w"]).ravel(), np.asarray(expected["w"]).ravel()
    assert a @ b / (b @ b) == pytest.approx(1, abs=0.01)


def test_fields_that_nobody_knows_stay_as_they_are_with_a_warning():
    message = r"OwnState.anchor, OwnState.speed has the parameters' shapes"
    with pytest.warns(UserWarning, match=message):
        state = coat.with_quantized_state(own()).init(PARAMS)
    assert not quantized_leaves(state)


@pytest.mark.skipif(
    not hasattr(optax.contrib, "scale_by_galore"), reason="optax has no GaLore"
)
def test_averages_of_projected_gradients_stay_as_they_are_with_a_warning():
    def projected(of):
        return optax.contrib.scale_by_galore(rank=32, base_optimizer=of)

    adam = optax.scale_by_adam()
    with pytest.warns(UserWarning, match=r"shapes of .*\.mu, .*\.nu are not"):
        updates, state = stepped(coat.with_quantized_state(projected(adam)), 1)
    expected, _ = stepped(projected(adam), 1)
    np.testing.assert_array_equal(updates["w"], expected["w"])
    assert not quantized_leaves(state)
    inside = projected(coat.with_quantized_state(adam))
    assert len(quantized_leaves(inside.init({"w": jnp.ones((512, 512))}))) == 2


def test_averages_of_flattened_gradients_stay_as_they_are_with_a_warning():
    adam = optax.scale_by_adam()
    with pytest.warns(UserWarning, match=r"shapes of .*\.mu, .*\.nu are not"):
        updates, state = stepped(coat.with_quantized_state(optax.flatten(adam)), 1)
    expected, _ = stepped(adam, 1)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    assert not quantized_leaves(state)
    inside = optax.flatten(coat.with_quantized_state(adam))
    assert len(quantized_leaves(inside.init(PARAMS))) == 2


@pytest.mark.filterwarnings("ignore:shapes of")
def test_updates_of_another_structure_are_refused():
    tx = coat.with_quantized_state(optax.lookahead(optax.adam(1e-2), 2, 0.5))
    params = optax.LookaheadParams.init_synced(PARAMS)
    message = "got a LookaheadParams for a dict. Put .* around: optax.lookahead"
    with pytest.raises(ValueError, match=message):
        tx.update(gradients(0), tx.init(params), params)


def test_an_average_that_does_not_start_at_zero_is_refused():
    saved = {"speed": coat.Moment(), "anchor": None}
    with pytest.raises(ValueError, match=r"\.speed.*does not start at zero"):
        coat.with_quantized_state(own(start=1.0), moments=saved).init(PARAMS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.rmsprop(1e-3, initial_scale=1.0),
        slow(lambda: optax.rmsprop(1e-3, centered=True, initial_scale=1.0)),
        lambda: optax.yogi(1e-3),
    ],
    ids=["rmsprop", "centered", "yogi"],
)
@pytest.mark.parametrize("change", [slow(lambda fn: fn), jax.jit], ids=["eager", "jit"])
def test_known_averages_start_where_optax_starts_them(make, change):
    inner = make()
    tx, expected = coat.with_quantized_state(inner), inner.init(PARAMS)
    state = change(tx.init)(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(PARAMS))
    for x, y in zip(
        *map(jax.tree.leaves, (coat.to_optax_state(state), expected)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5)
    actual, _ = tx.update(gradients(0), state, PARAMS)
    wide, _ = inner.update(gradients(0), expected, PARAMS)
    np.testing.assert_allclose(actual["b"], wide["b"], rtol=1e-5)
    np.testing.assert_allclose(actual["w"], wide["w"], rtol=1e-4)


def test_sums_of_gradients_stay_next_to_the_averages():
    """`optax.MultiSteps` is no transformation, but has one."""
    steps = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)
    state = coat.with_quantized_state(steps).init(PARAMS)
    assert isinstance(state.inner_opt_state[0].mu["w"], QuantizedArray)
    assert state.acc_grads["w"].dtype == jnp.float32
    with pytest.raises(TypeError, match=r"inner must be an optax transformation, .* 3"):
        coat.with_quantized_state(3)


def test_a_variance_stays_in_float32():
    """Codes would make it negative, for a mean of 3 and a deviation of 1."""
    inner = optax.rmsprop(1e-2, centered=True)
    tx = coat.with_quantized_state(inner)
    states = tx.init(PARAMS), inner.init(PARAMS)
    assert not quantized_leaves(states[0])
    for seed in range(20):
        grads = jax.tree.map(lambda g: 3 + g, gradients(seed))
        pairs = [t.update(grads, s) for t, s in zip((tx, inner), states, strict=True)]
        states = [state for _, state in pairs]
    np.testing.assert_array_equal(pairs[0][0]["w"], pairs[1][0]["w"])


def test_rounding_to_nearest_needs_no_random_bits():
    tx = coat.with_quantized_state(optax.ema(0.999, debias=False), rounding="nearest")
    state = tx.init(PARAMS)
    gradients = {"w": jnp.full(SHAPE, 1.0), "b": jnp.ones(8)}
    _, state = tx.update(gradients, state)
    later = state._replace(rounding_step=jnp.int32(7))
    small = jax.tree.map(lambda x: 1.01 * x, gradients)
    for a, b in zip(
        *(jax.tree.leaves(tx.update(small, s)[1].ema) for s in (state, later)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("columns", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("inner", "fewest"),
    [
        (optax.scale_by_adam(), 2),
        (optax.scale_by_adam(mu_dtype=BF16), 3),
        (optax.scale_by_lion(), 2),
    ],
    ids=["adam", "adam, bfloat16", "lion"],
)
def test_no_state_takes_more_bytes_than_optaxs(inner, fewest, columns):
    """A row of one element has a scale for each code."""
    params = {"w": jnp.zeros((8192, columns)), "b": jnp.zeros((64, 128))}
    plain, light = inner.init(params), coat.with_quantized_state(inner).init(params)
    assert isinstance(light.mu["b"], QuantizedArray)

    def nbytes(state):
        moments = [state.mu["w"], state.nu["w"] if "nu" in plain._fields else None]
        return sum(x.nbytes for x in jax.tree.leaves(moments))

    if columns < fewest:
        assert not isinstance(light.mu["w"], QuantizedArray)
        assert nbytes(light) == nbytes(plain)
    else:
        assert nbytes(light) < nbytes(plain)
