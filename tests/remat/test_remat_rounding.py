"""Tests stochastic rounding of the residuals that fp8_remat saves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers.gradients import assert_close, compiled, cosine, flat, value_and_vjp
from helpers.models import Mlp, normal, two_product_arguments, two_products

import coat_jax as coat
from coat_jax.remat.api import fp8_remat


def neighbours(y, format) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nearest magnitudes of a format: at or below y, and at or above it."""
    every = np.arange(256, dtype=np.uint8).view(format.dtype).astype(np.float64)
    values = np.unique(np.abs(every[np.isfinite(every)]))
    below = np.searchsorted(values, y, side="right") - 1
    return values[below], values[below + (values[below] < y)]


@pytest.mark.parametrize("format", [coat.E4M3, coat.E5M2], ids=repr)
def test_rounding_is_to_a_neighbour_and_unbiased(format):
    """The mean over 500 keys is the exact number, within 5.5 standard errors."""
    x = normal(2, 64, 64) * jnp.exp2(normal(3, 64, 64) * 3)
    keys = jax.random.split(jax.random.key(0), 500)

    def magnitudes(key):
        light = fp8_remat(lambda w, x: x @ w, key=key, format=format)
        leaves = jax.tree.leaves(jax.vjp(light, jnp.eye(64), x)[1])
        codes, scale = (
            next(leaf for leaf in leaves if leaf.dtype == dtype)
            for dtype in (format.dtype, jnp.uint16)
        )
        return jnp.abs(codes.astype(jnp.float32)), scale

    drawn, scale = jax.jit(lambda k: jax.lax.map(magnitudes, k, batch_size=50))(keys)
    assert np.unique(scale, axis=0).shape[0] == 1
    scale = np.asarray(scale[0]).view(jnp.bfloat16).astype(np.float64)
    y = np.abs(np.asarray(x, np.float64)) / scale
    assert y.max() <= format.max
    below, above = neighbours(y, format)
    drawn = np.asarray(drawn, np.float64)
    assert ((drawn == below) | (drawn == above)).all()
    step = np.where(above > below, above - below, 1)
    chance = (y - below) / step
    deviation = np.sqrt(chance * (1 - chance) / len(keys))
    error = (drawn.mean(axis=0) - y) / step
    assert (np.abs(error) <= 5.5 * deviation + 1e-3).all()
    # The mean over all elements does not drift either.
    assert np.abs(np.mean(error)) <= 5 * np.sqrt(np.mean(deviation**2) / error.size)


@jax.jit
def quantized(x, noise):
    return coat.quantize(x, granularity=coat.PerGroup(16), noise=noise)


def test_the_least_and_the_most_noise_take_the_codes_below_and_above():
    x = normal(2, 32, 64) * jnp.exp2(normal(3, 32, 64) * 3)
    none = jnp.zeros(x.shape, jnp.uint32)
    down, up = quantized(x, none), quantized(x, ~none)
    scale = np.repeat(np.asarray(down.scale, np.float64), 16, axis=-1)
    below, above = neighbours(np.abs(np.asarray(x, np.float64)) / scale, coat.E4M3)
    np.testing.assert_array_equal(np.abs(np.asarray(down.codes, np.float64)), below)
    actual = np.abs(np.asarray(up.codes, np.float64))
    assert (actual != above).mean() < 1e-3  # The most noise is not quite one.
    assert ((actual == above) | (actual == below)).all()
    np.testing.assert_array_equal(np.signbit(np.asarray(down.dequantize())), x < 0)


def test_what_is_not_finite_stays_so():
    x = np.ones((32, 64), np.float32)
    x[0, 3], x[1, 35] = np.inf, np.nan
    groups = np.isnan(quantized(x, np.zeros(x.shape, np.uint32)).dequantize())
    assert groups[0, :16].all()
    assert groups[1, 32:48].all()
    assert groups.sum() == 32


def test_rounding_follows_the_key():
    params, x = two_product_arguments()
    dy = normal(5, 96, 48)

    @jax.jit
    def keyed(key):
        return jax.vjp(fp8_remat(two_products, key=key), params, x)[1](dy)

    def gradient(key):
        return flat(keyed(key))

    keys = jax.random.split(jax.random.key(0))
    first, again, other = map(gradient, (keys[0], keys[0], keys[1]))
    np.testing.assert_array_equal(first, again)
    exact, default = (
        flat(value_and_vjp(fn, dy, params, x)[1])
        for fn in (two_products, fp8_remat(two_products))
    )
    assert not np.array_equal(first, default)
    assert 0.998 < cosine(first, exact) < cosine(default, exact)
    assert 0.997 < cosine(first, other) < 1 - 1e-6


def test_keys_may_be_traced_mapped_and_scanned():
    params, x = two_product_arguments()
    keys = jax.random.split(jax.random.key(0), 3)

    def gradient(key):
        light = fp8_remat(two_products, key=key)
        return jax.grad(lambda p: jnp.sum(jnp.sin(light(p, x))))(params)

    one_by_one = list(map(jax.jit(gradient), keys))
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)
    assert_close(compiled(jax.vmap(gradient), keys), expected, 1e-6)
    scanned = compiled(lambda keys: jax.lax.map(gradient, keys), keys)
    assert_close(scanned, expected, 1e-6)
    assert not np.array_equal(flat(one_by_one[0]), flat(one_by_one[1]))


class Rounded(nn.Module):
    """A module that takes the key for rounding from its own random streams."""

    @nn.compact
    def __call__(self, x):
        light = fp8_remat(nn.Dense, key=self.make_rng("rounding"))
        return light(64)(x)


def test_modules_are_rounded_in_a_training_step():
    x = normal(1, 64, 64)
    net = Rounded()
    variables = net.init(
        {"params": jax.random.key(0), "rounding": jax.random.key(1)}, x
    )

    @jax.jit
    def linen_step(key):
        def loss(variables):
            return jnp.mean(net.apply(variables, x, rngs={"rounding": key}) ** 2)

        return jax.grad(loss)(variables)

    model = Mlp(64, rngs=nnx.Rngs(0))

    @nnx.jit
    def nnx_step(model, key):
        def loss(model):
            return jnp.mean(fp8_remat(model, key=key)(x) ** 2)

        return nnx.to_pure_dict(nnx.grad(loss)(model))

    for step in (linen_step, lambda key: nnx_step(model, key)):
        first, again, other = (step(jax.random.key(k)) for k in (0, 0, 1))
        np.testing.assert_array_equal(flat(first), flat(again))
        assert 0.999 < cosine(first, other) < 1 - 1e-7


def test_every_copy_has_noise_of_its_own():
    """Copies differ in their noise even if only a function of both arrays is read."""

    def gate(params, x):
        return (jnp.tanh(x @ params[0]) * jnp.tanh(x @ params[1])) @ params[2]

    w = normal(1, 64, 128)
    light = fp8_remat(gate, key=jax.random.key(0))
    vjp = jax.jit(lambda *args: jax.vjp(light, *args)[1])(
        (w, w, normal(2, 128, 64)), normal(3, 96, 64)
    )
    codes = [
        np.asarray(leaf, np.float32)
        for leaf in jax.tree.leaves(vjp)
        if leaf.shape == (96, 128) and leaf.dtype == jnp.float8_e4m3fn
    ]
    assert len(codes) == 2
    assert 0.2 < np.mean(codes[0] != codes[1]) < 0.8
    assert np.corrcoef(*map(np.ravel, codes))[0, 1] > 0.99
