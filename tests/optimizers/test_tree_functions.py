"""Compares tree functions of optax and JAX on our states and on optax.adamw's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from helpers.marks import slow_except
from helpers.optimizers import SHAPE, assert_same_bits, gradients, is_quantized

import coat_jax as coat
from coat_jax.optimizers.checkpoint import check_restored

PARAMS = {"w": jnp.ones(SHAPE), "b": jnp.ones(8)}
GRADS = {"w": jnp.asarray(gradients(0)), "b": jnp.asarray(gradients(1, (8,)))}
WRAPPERS = {
    "alone": lambda make: make(1e-3),
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(1.0), make(1e-3)),
    "masked": lambda make: optax.masked(make(1e-3), {"w": True, "b": True}),
    "multi steps": lambda make: optax.MultiSteps(make(1e-3), 2),
    "injected": lambda make: optax.inject_hyperparams(make)(learning_rate=1e-3),
}
every_wrapper = pytest.mark.parametrize(
    "wrapper", slow_except(["chain", "multi steps", "injected"], WRAPPERS)
)
WHOLE = jax.NamedSharding(jax.make_mesh((1,), ("d",)), jax.P())


@functools.cache
def _pair(wrapper):
    """Returns optax.adamw and fp8_adamw, each with its state after two steps."""
    actual = []
    for make in (optax.adamw, coat.fp8_adamw):
        tx = WRAPPERS[wrapper](make)
        state = tx.init(PARAMS)
        for _ in range(2):
            _, state = jax.jit(tx.update)(GRADS, state, PARAMS)
        actual.append((tx, state))
    return actual


def _places(actual):
    """Returns the names around a value, without the level that fp8_adamw adds."""
    return [
        [str(key) for key in path if getattr(key, "name", "") != "inner_state"]
        for path, _ in actual
    ]


@every_wrapper
def test_names_are_found_at_the_same_places(wrapper):
    (_, theirs), (_, ours) = _pair(wrapper)
    for name in ("mu", "nu", "count"):
        actual = [optax.tree.get_all_with_path(state, name) for state in (ours, theirs)]
        assert actual[0]
        assert _places(actual[0]) == _places(actual[1])
        if name == "count":
            values = [[int(value) for _, value in each] for each in actual]
            assert values[0] == values[1]
        else:
            [(_, moment)], [(_, exact)] = actual
            assert is_quantized(moment["w"])
            np.testing.assert_allclose(moment["b"], exact["b"], rtol=1e-6)


@every_wrapper
def test_map_params_takes_a_tree_beside(wrapper):
    """Without `is_leaf` JAX refuses, since a moment is a node of several arrays."""
    (plain, theirs), (tx, ours) = _pair(wrapper)
    reference = {"w": "W", "b": "B"}

    def names(moment, name):
        return jax.tree.map(lambda _: name, moment)

    expected = optax.tree.map_params(plain, names, theirs, reference)
    options = {"is_leaf": is_quantized, "transform_non_params": lambda _: "other"}
    actual = optax.tree.map_params(tx, names, ours, reference, **options)
    counts = optax.tree.get_all_with_path(actual, "count")
    assert {count for _, count in counts} == {"other"}
    for field in ("mu", "nu"):
        [(_, mine)] = optax.tree.get_all_with_path(actual, field)
        [(_, exact)] = optax.tree.get_all_with_path(expected, field)
        assert mine["b"] == exact["b"] == "B"
        assert mine["w"].codes == mine["w"].scale == exact["w"] == "W"
    with pytest.raises(ValueError, match="QuantizedArray"):
        optax.tree.map_params(tx, names, ours, reference)


@every_wrapper
def test_norms_are_those_of_the_converted_state(wrapper):
    (_, theirs), (_, ours) = _pair(wrapper)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        optax.tree.norm(ours)
    actual = optax.tree.norm(coat.to_optax_state(ours))
    np.testing.assert_allclose(actual, optax.tree.norm(theirs), rtol=1e-2)


@every_wrapper
def test_moments_and_counts_are_set_by_name(wrapper):
    (_, theirs), (tx, ours) = _pair(wrapper)
    zero = jax.tree.map(jnp.zeros_like, optax.tree.get(ours, "mu"))
    recorded = optax.tree.set(ours, mu=zero)
    assert jax.tree.structure(recorded) == jax.tree.structure(ours)
    assert_same_bits(optax.tree.get(recorded, "mu"), zero)
    assert_same_bits(optax.tree.get(recorded, "nu"), optax.tree.get(ours, "nu"))
    jax.eval_shape(tx.update, GRADS, recorded, PARAMS)

    def of_adam(path, _):
        return "ScaleByAdamState" in str(path)

    def counts(state):
        recorded = optax.tree.set(state, of_adam, count=jnp.int32(7))
        actual = optax.tree.get_all_with_path(recorded, "count")
        return [int(value) for path, value in actual if of_adam(path, value)]

    # optax.tree.set looks no deeper than a field of the name, excluded or not.
    assert counts(ours) == counts(theirs) == [2 if wrapper == "injected" else 7]


@every_wrapper
def test_a_moment_may_be_set_to_an_array(wrapper):
    """The moment stays float32, and the next step is optax's."""
    (plain, theirs), (tx, ours) = _pair(wrapper)
    moments = {name: optax.tree.get(theirs, name) for name in ("mu", "nu")}
    replaced = optax.tree.set(ours, **moments)
    for name in ("mu", "nu"):
        halved = optax.tree.set(ours, **{name: moments[name]})
        _, after = jax.eval_shape(tx.update, GRADS, halved, PARAMS)
        assert optax.tree.get(after, name)["w"].dtype == jnp.float32
    actual, _ = tx.update(GRADS, replaced, PARAMS)
    expected, _ = plain.update(GRADS, theirs, PARAMS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected
    )


SAME = {
    "serialization": lambda s: serialization.from_bytes(s, serialization.to_bytes(s)),
    "device_put": lambda s: jax.device_put(s, WHOLE),
    "device_put to a tree": lambda s: jax.device_put(
        s, jax.tree.map(lambda _: WHOLE, s)
    ),
    "map": lambda s: jax.tree.map(lambda x: x, s),
    "cast_like": lambda s: optax.tree.cast_like(s, s),
}


@every_wrapper
@pytest.mark.parametrize("function", slow_except(["serialization", "map"], SAME))
def test_what_keeps_a_state_keeps_its_bits(wrapper, function):
    _, (tx, state) = _pair(wrapper)
    saved = SAME[function](state)
    assert_same_bits(saved, state)
    jax.eval_shape(tx.update, GRADS, saved, PARAMS)


@every_wrapper
def test_a_state_of_zeros_is_a_new_one(wrapper):
    """The scales are zero too, unlike the scales of `tx.init`."""
    (plain, theirs), (tx, ours) = _pair(wrapper)
    zeros = [jax.tree.map(jnp.zeros_like, state) for state in (theirs, ours)]
    expected, _ = plain.update(GRADS, zeros[0], PARAMS)
    actual, _ = tx.update(GRADS, zeros[1], PARAMS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), actual, expected
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_codes_that_were_cast_are_refused(dtype):
    _, (tx, state) = _pair("chain")
    with pytest.raises(ValueError, match=r"codes of mu\['w'\] must be float8_e4m3fn"):
        tx.update(GRADS, optax.tree.cast(state, dtype), PARAMS)


def test_codes_from_a_file_of_numpy_are_viewed_in_their_dtype(tmp_path):
    _, (tx, state) = _pair("chain")
    leaves, structure = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as file:
        restored = structure.unflatten(file.values())
    message = r"must be float8_e4m3fn.*view\(jnp\.float8_e4m3fn\)"
    with pytest.raises(ValueError, match=message):
        tx.update(GRADS, restored, PARAMS)
    with pytest.raises(ValueError, match=message):
        check_restored(restored, state)
    viewed = jax.tree.map(lambda x, like: x.view(like.dtype), restored, state)
    check_restored(viewed, state)
    assert_same_bits(tx.update(GRADS, viewed, PARAMS), tx.update(GRADS, state, PARAMS))
