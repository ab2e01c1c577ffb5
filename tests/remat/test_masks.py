"""Tests of masks that the backward pass makes again from integers and booleans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gradients import compiled

import coat_jax as coat
from coat_jax import fp8_remat


def test_masks_are_made_of_integers_again(rng):
    x = jnp.asarray(rng.normal(size=(2, 80, 80)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 3, (2, 80)))

    def masked(x, ids):
        same = ids[:, :, None] == ids[:, None, :]
        return jnp.sin(x) * jnp.where(same, 0.5, 0.1)

    light = fp8_remat(masked, params_argnums=())
    rows = coat.residual_report(light, x, ids).rows
    assert [row.shape for row in rows if row.is_argument] == [ids.shape]
    (codes,) = (row for row in rows if row.dtype == jnp.float8_e4m3fn)
    assert codes.shape == x.shape
    actual = compiled(jax.grad(lambda x: jnp.sum(light(x, ids))), x)
    same = np.asarray(ids)[:, :, None] == np.asarray(ids)[:, None, :]
    exact = np.cos(np.asarray(x)) * np.where(same, 0.5, 0.1)
    # The copy of cos(x) has errors, and the mask is exact.
    close = 2**-4 * np.where(same, 0.5, 0.1)
    assert np.all(np.abs(actual - exact) <= close)


def saved_integers(fn, *args):
    """Returns the dtypes of saved integers and booleans that are no arguments."""
    rows = coat.residual_report(fp8_remat(fn, params_argnums=()), *args).rows
    wide = [row.dtype for row in rows if not row.is_argument]
    return [d for d in wide if d in (jnp.bool_, jnp.int32, jnp.uint32)]


@pytest.mark.parametrize("dtype", [bool, jnp.int8])
def test_masks_of_arguments_are_not_saved(dtype, rng):
    x = jnp.asarray(rng.normal(size=(2, 80, 96)), jnp.float32)
    shown = jnp.asarray(rng.integers(0, 2, (2, 80, 80)), dtype).at[:, 3].set(dtype(0))

    def masked(x, shown):
        sees = (shown != 0).any(axis=-1, keepdims=True)
        return jnp.where(sees, 2 * x, -3 * x)

    assert saved_integers(masked, x, shown) == []
    light = fp8_remat(masked, params_argnums=())
    actual = compiled(jax.grad(lambda x: jnp.sum(light(x, shown))), x)
    sees = np.asarray(shown).any(axis=-1, keepdims=True)
    np.testing.assert_array_equal(actual, np.where(sees, 2, -3) * np.ones(x.shape))


def test_arguments_with_more_bytes_than_their_masks_are_not_kept(rng):
    x = jnp.asarray(rng.normal(size=(80, 96)), jnp.float32)
    bits = jnp.asarray(rng.integers(0, 9, (80, 96)), jnp.int32)
    masked = lambda x, bits: jnp.where(bits < 3, 2 * x, -3 * x)  # noqa: E731
    assert saved_integers(masked, x, bits) == [jnp.bool_]
    # Its bytes are kept once for both masks of an argument.
    twice = lambda x, bits: masked(x, bits) + masked(x[:, :1], bits[:, :1])  # noqa: E731
    assert saved_integers(twice, x, bits.astype(jnp.int8)) == []


def test_numpy_arguments_may_change_before_backward(rng):
    x = jnp.asarray(rng.normal(size=(80, 96)), jnp.float32)
    bits = rng.integers(0, 9, (80, 96)).astype(np.int8)
    expected = np.where(bits < 3, 2.0, -3.0)
    light = fp8_remat(lambda x, bits: jnp.where(bits < 3, 2 * x, -3 * x))
    y, vjp = jax.vjp(light, x, bits)
    bits[:] = 0
    np.testing.assert_array_equal(vjp(jnp.ones_like(y))[0], expected)


@pytest.mark.parametrize(
    "fn",
    [
        # A mask of activations follows from no integers.
        lambda x, ids: jnp.where(x > 0.5, 2 * x, -3 * x),
        # Another order is more work than a mask.
        lambda x, ids: jnp.sin(x)[jnp.argsort(ids[0])],
        lambda x, ids: jnp.where(
            jax.random.bernoulli(jax.random.wrap_key_data(ids[0, :2]), shape=x.shape),
            2 * x,
            -3 * x,
        ),
    ],
    ids=["activations", "order", "random"],
)
def test_other_integers_are_saved(fn, rng):
    x = jnp.asarray(rng.normal(size=(80, 96)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 9, (2, 80)), jnp.uint32)
    assert saved_integers(fn, x, ids)
