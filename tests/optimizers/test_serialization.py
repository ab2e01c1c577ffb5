"""Tests FP8 states on disk: every bit comes back, and misfits are refused."""

import pickle

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import serialization
from flax.training.train_state import TrainState
from helpers.marks import slow
from helpers.optimizers import SHAPE, assert_same_bits, gradients, run, run_on
from jax.sharding import SingleDeviceSharding

import coat_jax as coat
from coat_jax.optimizers.checkpoint import check_restored

PARAMS = {"w": jnp.ones(SHAPE), "b": jnp.ones((8,)), "none": None}
GRADS = [
    {"w": jnp.asarray(gradients(i)), "b": jnp.full(8, 0.1 * i), "none": None}
    for i in range(1, 5)
]


def through_pickle(state, like):
    del like
    return pickle.loads(pickle.dumps(state))


def through_msgpack(state, like):
    return serialization.from_bytes(like, serialization.to_bytes(state))


def through_a_state_dict(state, like):
    return serialization.from_state_dict(like, serialization.to_state_dict(state))


def through_orbax(state, like, folder=None):
    here = SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), like
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", like)


WAYS = [through_pickle, through_msgpack, through_a_state_dict, through_orbax]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def wrapped(**options) -> optax.GradientTransformation:
    """Wraps FP8 Adam so that its state has a mask, a schedule and counters."""
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        coat.fp8_adamw(optax.constant_schedule(1e-2), **options),
    )
    return optax.apply_if_finite(optax.masked(tx, {"w": True, "b": True}), 3)


def with_formats() -> coat.QuantizedState:
    tx = coat.scale_by_fp8_adam(mu_format=coat.E5M2, nu_format=coat.DE8)
    return run(tx, PARAMS["w"], [g["w"] for g in GRADS], jit=True)[2]


@pytest.mark.parametrize(
    "normalize_mu", [True, slow(False)], ids=["normalized", "coat"]
)
@every_way
def test_every_bit_comes_back(way, normalize_mu, tmp_path):
    tx = wrapped(normalize_mu=normalize_mu)
    params = {name: PARAMS[name] for name in ("w", "b")}
    grads = [{name: g[name] for name in params} for g in GRADS]
    middle, _, state = run(tx, params, grads[:2], jit=True)
    options = {"folder": tmp_path} if way is through_orbax else {}
    like = jax.eval_shape(tx.init, params)
    restored = way(state, like, **options)
    assert_same_bits(restored, state)
    mu = restored.inner_state.inner_state[1][0].mu["w"]
    assert (mu.codes.dtype, mu.scale.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    expected = run_on(tx, middle, state, grads[2:], jit=True)
    assert_same_bits(run_on(tx, middle, restored, grads[2:], jit=True), expected)


@every_way
def test_other_formats_come_back(way, tmp_path):
    state = with_formats()
    options = {"folder": tmp_path} if way is through_orbax else {}
    like = jax.eval_shape(lambda: state)
    assert_same_bits(way(state, like, **options), state)


# Both have codes of the same size, so that orbax can cast one to the other.
@pytest.mark.parametrize(
    "other", [{"mu_format": coat.E5M2}, {"nu_format": coat.E4M3}], ids=["dtype", "sign"]
)
def test_a_state_that_orbax_cast_to_another_format_is_refused(other, tmp_path):
    params = {"w": PARAMS["w"]}
    state = coat.fp8_adamw(1e-2).init(params)
    like = jax.eval_shape(coat.fp8_adamw(1e-2, **other).init, params)
    cast = through_orbax(state, like, tmp_path)
    with pytest.raises(ValueError, match=r"state\[0\]\.version must be .* codes were"):
        check_restored(cast, like)
    check_restored(through_pickle(state, None), state)


def test_a_state_saved_without_a_checksum_of_its_formats_passes():
    state = with_formats()
    check_restored(state._replace(version=jnp.int32(1)), state)


def test_equal_powers_have_one_checksum():
    states = [
        coat.with_quantized_state(
            optax.adam(1e-3), moments={"nu": coat.Moment(power=power)}
        ).init(PARAMS)
        for power in (3, 3.0)
    ]
    for state in states:
        check_restored(state, states[0])


def test_checksums_of_formats_stay_what_they_are_in_files():
    states = coat.scale_by_fp8_adam().init(PARAMS["w"]), with_formats()
    assert [int(state.version) for state in states] == [1883766785, 916150017]


@pytest.mark.parametrize("expand", [slow(False), True, 2.5])
def test_quantized_arrays_by_themselves(rng, expand):
    x = jnp.asarray(rng.standard_normal((8, 200)), jnp.bfloat16)
    q = coat.quantize(x, expand=expand, granularity=coat.PerBlock(2, 64))
    for variant in (through_pickle, through_msgpack, through_a_state_dict):
        restored = variant({"x": [q]}, {"x": [q]})["x"][0]
        assert_same_bits(restored, q)
        assert_same_bits(restored.dequantize(), q.dequantize())


def test_a_flax_train_state_comes_back():
    def create():
        params = {name: PARAMS[name] for name in ("w", "b")}
        return TrainState.create(apply_fn=None, params=params, tx=coat.fp8_adamw(1e-2))

    state = create()
    grads = {name: GRADS[0][name] for name in state.params}
    state = state.apply_gradients(grads=grads)
    restored = serialization.from_bytes(create(), serialization.to_bytes(state))
    assert_same_bits(restored.opt_state, state.opt_state)
    assert_same_bits(
        restored.apply_gradients(grads=grads).params,
        state.apply_gradients(grads=grads).params,
    )


@pytest.mark.parametrize("way", [through_msgpack, through_a_state_dict, through_pickle])
def test_states_of_boxed_parameters_come_back(way):
    params = {"w": nn.Partitioned(PARAMS["w"], (None, "model")), "b": PARAMS["b"]}
    grads = [{"w": params["w"].replace_boxed(g["w"]), "b": g["b"]} for g in GRADS[:2]]
    tx = coat.fp8_adamw(1e-2)
    _, _, state = run(tx, params, grads, jit=True)
    assert isinstance(state[0].mu["w"].codes, nn.Partitioned)
    assert_same_bits(way(state, jax.eval_shape(tx.init, params)), state)


def saved(**options) -> coat.QuantizedState:
    return coat.scale_by_fp8_adam(**options).init({"w": PARAMS["w"]})


def test_orbax_refuses_another_structure(tmp_path):
    like = jax.eval_shape(lambda: saved(quantize_mask=False))
    with pytest.raises(ValueError, match=r"structures do not match:\ninner_state.mu.w"):
        through_orbax(saved(), like, tmp_path)


def test_exponents_that_orbax_does_not_miss_are_missed_by_the_first_step(tmp_path):
    """orbax restores None where the checkpoint has None, even if the target has not."""
    tx = coat.scale_by_fp8_adam(normalize_mu=False)
    like = jax.eval_shape(lambda: saved(normalize_mu=False))
    state = through_orbax(saved(), like, tmp_path)
    message = r"shape \(\d+, 160\) has no exponents: was .* with other options"
    with pytest.raises(ValueError, match=message):
        tx.update({"w": GRADS[0]["w"]}, state)
    with pytest.raises(ValueError, match=message):
        coat.to_optax_state(state)


def test_a_pickle_of_version_0_names_the_commit_that_reads_it():
    """The error of reading it has the commit, from the class that the pickle names."""
    with pytest.raises(ValueError, match=r"ScaleByFP8AdamState.*its commit 688c8db"):
        pickle.loads(b"ccoat_jax.state\nScaleByFP8AdamState\n.")
