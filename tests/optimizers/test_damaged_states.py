"""Tests that states from hostile or damaged files are refused with a clear error."""

import copy
import dataclasses
import traceback
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from helpers.damages import altered, damaged, json_values
from helpers.marks import slow
from helpers.optimizers import SHAPE, assert_same_bits, gradients
from hypothesis import given
from hypothesis import strategies as st

import coat_jax as coat
from coat_jax.optimizers.checkpoint import check_restored

PARAMS = {"w": jnp.ones(SHAPE), "b": jnp.ones(8)}
TX = coat.fp8_adamw(1e-2)


@pytest.fixture(scope="module")
def state():
    grads = {"w": jnp.asarray(gradients(1)), "b": jnp.ones(8)}
    return jax.jit(TX.update)(grads, TX.init(PARAMS), PARAMS)[1]


@pytest.fixture(scope="module")
def like():
    return jax.eval_shape(TX.init, PARAMS)


def restored(like, record):
    """Restores a state from a state dictionary, and checks it with `check_restored`."""
    state = serialization.from_state_dict(like, record)
    check_restored(state, like)
    return state


def written(state):
    """Returns a state's dictionary, decoded from the state's bytes."""
    return serialization.msgpack_restore(serialization.to_bytes(state))


def _at(record, position):
    for key in position:
        record = record[key]
    return record


ADAM = ("0",)
MU = ("0", "inner_state", "mu", "w")
NU = ("0", "inner_state", "nu", "w")
GONE = object()


def _changed(record, position, value):
    """Returns a copy of a record with an entry replaced, added or deleted."""
    record = copy.deepcopy(record)
    parent = _at(record, position[:-1])
    if value is GONE:
        del parent[position[-1]]
    else:
        parent[position[-1]] = value(parent[position[-1]]) if callable(value) else value
    return record


def _with(value):
    """Returns a function that copies an array and sets its last column."""

    def change(array):
        array = array.copy()
        array[..., -1] = value
        return array

    return change


_OF_ARRAY = r"at \./0/inner_state/nu/w the target has "
TABLE = {
    # Entries that flax.serialization and the library's functions for it refuse.
    "codes of another shape": (
        (*MU, "codes"),
        lambda x: x[:1],
        r"at \./0/inner_state/mu/w the target has codes float8_e4m3fn\[64, 160\], "
        r"found float8_e4m3fn\[1, 160\]",
    ),
    "codes of another axis order": ((*NU, "codes"), lambda x: x.T, r"\[160, 64\]"),
    "codes as bytes": (
        (*NU, "codes"),
        lambda x: x.view(np.uint8).astype(np.int8),
        _OF_ARRAY + r"codes float8_e4m3fn\[64, 160\], found int8\[64, 160\]",
    ),
    "codes as text": ((*NU, "codes"), "float8_e4m3fn[64, 160]", "found str f"),
    "codes as a list": ((*NU, "codes"), [1, 2], r"found list \[1, 2\]"),
    "no codes": ((*NU, "codes"), None, r"float8_e4m3fn\[64, 160\], found None"),
    "codes missing": ((*NU, "codes"), GONE, _OF_ARRAY + r"\['codes', .*found \['exp"),
    "more than codes": ((*NU, "more"), lambda: 0, "found .*'more'"),
    "scales of another shape": (
        (*NU, "scale"),
        lambda x: x[..., :1],
        _OF_ARRAY + r"scale float32\[64, 2\], found float32\[64, 1\]",
    ),
    "scales of another dtype": (
        (*NU, "scale"),
        lambda x: x.astype(np.float16),
        _OF_ARRAY + r"scale float32\[64, 2\], found float16\[64, 2\]",
    ),
    "a scale for all": ((*NU, "scale"), 1.0, "found float 1.0"),
    "a negative scale": (
        (*NU, "scale"),
        _with(-0.5),
        r"at \./0/inner_state/nu/w scale must be positive and finite, or NaN, got -0.5",
    ),
    "a zero scale": ((*MU, "scale"), _with(0), "mu/w scale must be positive.*got 0.0"),
    "an infinite scale": ((*NU, "scale"), _with(np.inf), "must be positive.*got inf"),
    "exponents missing": (
        (*NU, "exponent"),
        None,
        _OF_ARRAY + r"exponent uint8\[64, 2\], found None",
    ),
    "exponents too many": (
        (*MU, "exponent"),
        np.ones((64, 2), np.uint8),
        r"mu/w the target has exponent None, found uint8\[64, 2\]",
    ),
    "a zero exponent": (
        (*NU, "exponent"),
        _with(0),
        "exponent must be at least 1, got",
    ),
    "another power": ((*MU, "power"), 2.0, r"mu/w the target has power 3.0, found 2.0"),
    "a power of text": ((*MU, "power"), "3.0", "target has power 3.0, found 3.0"),
    "a power that is NaN": ((*MU, "power"), np.nan, "target has power 3.0, found nan"),
    "a power that is a list": ((*MU, "power"), [3.0], r"power 3.0, found \[3.0\]"),
    "another format": ((*NU, "format"), "E5M2", _OF_ARRAY + "format UE4M4, found E5M2"),
    "an unknown format": ((*NU, "format"), "E9M9", "format UE4M4, found E9M9"),
    "a format of numbers": ((*NU, "format"), np.ones(2), "format UE4M4, found"),
    "an array for a moment": (MU, np.ones(SHAPE), r"mu/w .*found float64\[64, 160\]"),
    "nothing for a moment": (MU, None, "mu/w the target has .*found None"),
    "a moment missing": (MU, GONE, r"keys \{'w'\} .* at path \./0/inner_state/mu"),
    "another layout": (
        (*ADAM, "layout", "rounding"),
        "nearest",
        r"at \./0/layout the target has moments .*'stochastic'.*found .*'nearest'",
    ),
    "a layout of arrays": ((*ADAM, "layout", "rounding"), np.ones(2), "0/layout the"),
    "no layout": ((*ADAM, "layout"), None, "0/layout the target has moments"),
    "no version": ((*ADAM, "version"), GONE, r"field names .* at path \./0"),
    "a field too many": ((*ADAM, "extra"), lambda: 1, r"'extra'.* at path \./0"),
    # Entries that only `check_restored` refuses.
    "a later version": (
        (*ADAM, "version"),
        np.int32(2),
        r"state\[0\]\.version must be 1, got 2: .* another version of coat_jax",
    ),
    "version 0": ((*ADAM, "version"), np.int32(0), r"\.version must be 1, got 0"),
    "a version of text": ((*ADAM, "version"), "1", r"must be int32\[\], got str 1"),
    "a version of no type": ((*ADAM, "version"), 1, r"must be int32\[\], got int 1"),
    "a step below 0": (
        (*ADAM, "rounding_step"),
        np.int32(-1),
        r"state\[0\]\.rounding_step must not be negative, got -1",
    ),
    "a long step": ((*ADAM, "rounding_step"), np.int64(1), r"int32\[\], got int64\[\]"),
    "a count of another shape": (
        (*ADAM, "inner_state", "count"),
        np.zeros(3, np.int32),
        r"state\[0\]\.inner_state\.count must be int32\[\], got int32\[3\]",
    ),
    "a small moment of another shape": (
        (*ADAM, "inner_state", "mu", "b"),
        np.ones(9, np.float32),
        r"inner_state\.mu\['b'\] must be float32\[8\], got float32\[9\]",
    ),
    "a small moment of text": (
        (*ADAM, "inner_state", "mu", "b"),
        "float32[8]",
        r"inner_state\.mu\['b'\] must be float32\[8\], got str float32\[8\]",
    ),
    "a small moment that is none": (
        (*ADAM, "inner_state", "nu", "b"),
        None,
        r"inner_state has no \.nu\['b'\]",
    ),
    "a small moment that is a tree": (
        (*ADAM, "inner_state", "nu", "b"),
        {"c": np.ones(8, np.float32)},
        r"inner_state has no \.nu\['b'\]",
    ),
}


@pytest.mark.parametrize("label", TABLE)
def test_a_damaged_state_is_refused_by_name(label, state, like):
    position, value, message = TABLE[label]
    record = written(state)
    if position[-1] in ("more", "extra"):
        _at(record, position[:-1])[position[-1]] = 0
    else:
        record = _changed(record, position, value)
    with pytest.raises(ValueError, match=message):
        restored(like, record)


def test_the_state_itself_is_accepted(state, like):
    assert_same_bits(restored(like, written(state)), state)


def test_nan_that_gradients_have_left_comes_back(like):
    """A group of gradients that were not finite has the scale NaN."""
    grads = {"w": jnp.full(SHAPE, jnp.inf), "b": jnp.ones(8)}
    state = jax.jit(TX.update)(grads, TX.init(PARAMS), PARAMS)[1]
    assert np.isnan(state[0].mu["w"].scale).all()
    assert_same_bits(restored(like, written(state)), state)


@pytest.mark.parametrize(
    "tx",
    [
        slow(coat.fp8_adamw(1e-2, normalize_mu=False, nu_format=coat.E4M3)),
        slow(coat.scale_by_fp8_adam(mu_format=coat.E5M2, rounding="nearest")),
        coat.with_quantized_state(optax.lion(1e-3)),
        optax.chain(optax.clip(1.0), coat.with_quantized_state(optax.rmsprop(1e-3))),
        slow(optax.apply_if_finite(optax.masked(TX, {"w": True, "b": False}), 3)),
        slow(optax.MultiSteps(TX, 2)),
        optax.inject_hyperparams(coat.fp8_adamw)(learning_rate=1e-2),
        optax.adamw(1e-2),
    ],
)
def test_states_of_all_optimizers_pass(tx):
    grads = {"w": jnp.asarray(gradients(1)), "b": jnp.ones(8)}
    state = tx.init(PARAMS)
    check_restored(state, jax.eval_shape(tx.init, PARAMS))
    state = jax.jit(tx.update)(grads, state, PARAMS)[1]
    check_restored(state, tx.init(PARAMS))
    check_restored(jax.eval_shape(lambda: state), tx.init(PARAMS))
    jax.jit(lambda s: check_restored(s, state))(state)


def test_states_of_several_models_pass_if_each_is_right():
    models = jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
    state = jax.vmap(TX.init)(models)
    like = jax.eval_shape(jax.vmap(TX.init), models)
    check_restored(state, like)
    for field, value, message in (
        ("version", 7, "version must be 1, got 7"),
        ("rounding_step", -1, "rounding_step must not be negative, got -1"),
    ):
        numbers = getattr(state[0], field).at[1].set(value)
        damaged = (state[0]._replace(**{field: numbers}), *state[1:])
        with pytest.raises(ValueError, match=message):
            check_restored(damaged, like)


def test_states_of_nnx_pass():
    model = nnx.Linear(160, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    like = nnx.eval_shape(lambda: nnx.Optimizer(model, TX, wrt=nnx.Param))
    check_restored(optimizer.opt_state, like.opt_state)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (coat.fp8_adamw(1e-2, normalize_mu=False), r"state\[0\]\.layout must be .*mu"),
        (coat.fp8_adamw(1e-2, rounding="nearest"), r"layout must be .*'nearest'"),
        (coat.fp8_adamw(1e-2, mu_format=coat.E5M2), r"layout must be .*E5M2"),
        (coat.fp8_adamw(1e-2, granularity=coat.PerGroup(32)), "granularity must be"),
        (coat.fp8_adamw(1e-2, quantize_mask=False), r"mu\['w'\] must be float32\["),
        (optax.adamw(1e-2), r"state has no \[0\]\.count"),
        (
            optax.chain(TX, optax.clip(1.0)),
            "state must have the structure|state has no",
        ),
    ],
)
def test_a_state_of_another_optimizer_is_refused(other, message, state):
    """Pickle itself restores any state, without a check of the optimizer."""
    with pytest.raises(ValueError, match=message):
        check_restored(state, jax.eval_shape(other.init, PARAMS))


def test_a_state_of_other_parameters_is_refused(state):
    more = jax.eval_shape(TX.init, PARAMS | {"v": jnp.ones(8)})
    with pytest.raises(ValueError, match=r"inner_state has no \.mu\['v'\]"):
        check_restored(state, more)
    larger = jax.eval_shape(TX.init, PARAMS | {"w": jnp.ones((65, 160))})
    with pytest.raises(ValueError, match=r"mu\['w'\]\.codes must be float8_e4m3fn\[65"):
        check_restored(state, larger)
    swapped = state[0]._replace(inner_state=TX.init(PARAMS))
    with pytest.raises(ValueError, match=r"state\[0\]\.inner_state has"):
        check_restored((swapped, *state[1:]), TX.init(PARAMS))


def test_an_average_of_another_power_is_refused(state, like):
    inner = state[0].inner_state
    mu = inner.mu | {"w": dataclasses.replace(inner.mu["w"], power=2.0)}
    changed = state[0]._replace(inner_state=inner._replace(mu=mu))
    with pytest.raises(ValueError, match=r"mu\['w'\]\.power must be 3.0, got 2.0"):
        check_restored((changed, *state[1:]), like)


def in_flax(error) -> bool:
    """Returns whether the last frame of an error is flax's or msgpack's."""
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return last == Path(flax.serialization.__file__) or "msgpack" in last.parts


def go_on(like, record):
    """Restores a record; if it is accepted, checks that a step can follow."""
    try:
        state = restored(like, record)
    except ValueError:
        return
    except (AttributeError, KeyError, TypeError) as error:
        if not in_flax(error):  # Its own containers are not the library's matter.
            raise
        return
    expected = jax.tree.structure(like)
    assert jax.tree.structure(state) == expected
    after = jax.eval_shape(TX.update, PARAMS, state, PARAMS)[1]
    assert jax.tree.structure(after) == expected


arrays = st.builds(
    np.zeros,
    st.sampled_from([(), (8,), (64, 2), SHAPE]),
    st.sampled_from(["int32", "float32", "uint8", "float16", "bool"]),
)


@given(data=st.data())
def test_altered_records_are_refused_or_can_go_on(data, state, like):
    record = written(state)
    if data.draw(st.booleans()):
        record = data.draw(altered(record))
    paths = [
        (*ADAM, "version"),
        (*ADAM, "layout"),
        MU,
        NU,
        (*MU, "codes"),
        (*NU, "scale"),
    ]
    position = data.draw(st.sampled_from(paths))
    try:
        parent = _at(record, position[:-1])
        parent[position[-1]] = data.draw(json_values | arrays)
    except (KeyError, TypeError, IndexError):
        pass  # An earlier change has removed the place.
    go_on(like, record)


@given(data=st.data())
def test_damaged_bytes_are_refused_or_can_go_on(data, state, like):
    complete = serialization.to_bytes(state)
    try:
        record = serialization.msgpack_restore(data.draw(damaged(complete, 400)))
    except Exception:  # Reading msgpack is flax's matter.
        return
    go_on(like, record)
