"""Tests that states of an earlier version are converted, or refused with a hint.

`state_0.gz` holds what the earlier version wrote for `coat.fp8_adamw(1e-2)` after three
steps on the parameters here: the pickle, and the bytes of `flax.serialization`.
"""

import gzip
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import serialization

import coat_jax as coat
from coat_jax.optimizers.checkpoint import version_0

PARAMS = {"w": jnp.zeros((64, 128)), "b": jnp.zeros(8)}
TX = coat.fp8_adamw(1e-2)


@pytest.fixture(scope="module")
def saved():
    with gzip.open(Path(__file__).with_name("state_0.gz")) as file:
        return pickle.load(file)


def from_pickle(saved):
    return pickle.loads(saved["pickle"])


def from_msgpack(saved):
    like = version_0(jax.eval_shape(TX.init, PARAMS))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return serialization.from_bytes(zeros, saved["msgpack"])


def moments(state) -> tuple[np.ndarray, np.ndarray]:
    """Reads the stored moments of w by the earlier version's formulas, in float64."""

    def read(q, power):
        codes = np.asarray(q.codes).astype(np.float64)
        scale = np.asarray(q.scale).astype(np.float64)
        return np.sign(codes) * scale * 448 * (np.abs(codes) / 448) ** (1 / power)

    nu = read(state.nu["w"], np.asarray(state.nu["w"].exponent) / 16)
    return read(state.mu["w"], 3.0) * np.sqrt(nu), nu


@pytest.mark.parametrize("restored", [from_pickle, from_msgpack])
def test_a_state_of_version_0_goes_on(saved, restored):
    old = restored(saved)
    mu, nu = moments(old[0])
    exact = coat.to_optax_state(old)[0]
    assert int(exact.count) == 3
    np.testing.assert_allclose(exact.mu["w"], mu, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(exact.nu["w"], nu, rtol=1e-5)
    new = coat.from_optax_state(coat.to_optax_state(old), TX.init(PARAMS))
    assert (int(new[0].version), int(new[0].count)) == (1, 3)
    # The new format of the second moment has a mantissa of four bits.
    found = coat.to_optax_state(new)[0]
    np.testing.assert_allclose(found.nu["w"], nu, rtol=0.1)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    updates, after = TX.update(grads, new, PARAMS)
    assert int(after[0].count) == 4
    assert np.isfinite(updates["w"]).all()


def test_the_form_of_version_0_is_what_it_saved(saved):
    old, form = from_pickle(saved), version_0(jax.eval_shape(TX.init, PARAMS))
    assert jax.tree.structure(old) == jax.tree.structure(form)
    for found, expected in zip(
        jax.tree.leaves(old), jax.tree.leaves(form), strict=True
    ):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert old[0].nu["w"].scale.dtype == ml_dtypes.bfloat16


def test_a_step_refuses_a_state_of_version_0(saved):
    old = from_pickle(saved)
    message = r"ScaleByFP8AdamState.*coat.from_optax_state\(coat.to_optax_state"
    with pytest.raises(ValueError, match=message):
        TX.update(jax.tree.map(jnp.ones_like, PARAMS), old, PARAMS)


def test_flax_refuses_bytes_of_version_0_for_a_state_of_today(saved):
    with pytest.raises(ValueError, match=r"field names .* do not match.*'scaling'"):
        serialization.from_bytes(TX.init(PARAMS), saved["msgpack"])
