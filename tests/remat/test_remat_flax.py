"""Tests fp8_remat of Linen and NNX modules: classes, instances, state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers.gradients import assert_close, compiled, cosine, flat
from helpers.marks import slow
from helpers.models import LinenNet, Stateful, normal
from helpers.versions import ROUNDING

from coat_jax.remat.api import fp8_remat


def same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=ROUNDING, atol=ROUNDING)


# Linen.

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class InCompact(nn.Module):
    """A module that wraps an instance, a class, and a submodule of another module."""

    light: bool

    @nn.compact
    def __call__(self, x, train: bool = True):
        wrap = fp8_remat if self.light else lambda target: target
        x = x + wrap(LinenNet(64))(x, train=train)
        x = x + wrap(LinenNet)(64)(x, train=train)
        return x + LinenNet(64, wrap=wrap)(x, train)


class InSetup(nn.Module):
    light: bool

    def setup(self):
        wrap = fp8_remat if self.light else lambda target: target
        self.first = wrap(LinenNet(64))
        self.others = [wrap(nn.Sequential([nn.Dense(64), nn.relu])), nn.Dense(64)]
        self.net, self.dense = wrap(LinenNet)(64), nn.Dense(64)

    def __call__(self, x, train: bool = True):
        x = self.first(x, train=train)
        for piece in self.others:
            x = piece(x)
        dense = fp8_remat(self.dense) if self.light else self.dense
        return dense(self.net(x, train)) + self.dense(x)


class ScanBody(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return x + LinenNet(64)(x, train), None


class Scanned(nn.Module):
    light: bool

    @nn.compact
    def __call__(self, x, train: bool = True):
        stacked = nn.scan(
            fp8_remat(ScanBody) if self.light else ScanBody,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=2,
        )
        return stacked(name="layers")(x, train)[0]


@pytest.mark.internals
@pytest.mark.parametrize(
    ("light", "plain"),
    [
        slow(InSetup(True), InSetup(False)),
        (InCompact(True), InCompact(False)),
        slow(Scanned(True), Scanned(False)),
    ],
    ids=["setup", "compact", "scan"],
)
def test_linen(light, plain):
    """Parameters, outputs, statistics and dropout agree; the gradient nearly agrees."""
    actual, gradient = linen_behaviour(light)
    expected, plain_gradient = linen_behaviour(plain)
    assert_close(actual, expected, 1e-5)
    assert 0.999 < cosine(gradient, plain_gradient) < 1 - 1e-6


def test_linen_parameters_that_a_scan_shares():
    x = normal(0, 4, 10, 64)

    def run(net):
        variables = net.init(jax.random.key(0), x)
        return variables, jax.grad(lambda v: jnp.sum(net.apply(v, x) ** 2))(variables)

    cells = fp8_remat(nn.LSTMCell)(64), nn.LSTMCell(64)
    (variables, actual), (initial, expected) = (
        compiled(functools.partial(run, nn.RNN(cell))) for cell in cells
    )
    same(variables, initial)
    assert cosine(actual, expected) > 0.999


def linen_behaviour(net):
    """Returns variables, outputs and statistics of one step, and its gradient.

    The outputs are computed in evaluation mode and in training mode.
    """

    def run(x):
        variables = net.init(KEYS, x)

        def loss(params):
            out, state = net.apply(
                {**variables, "params": params},
                x,
                train=True,
                rngs={"dropout": jax.random.key(2)},
                mutable=["batch_stats"],
            )
            return jnp.mean(out**2), (out, state)

        gradient, trained = jax.grad(loss, has_aux=True)(variables["params"])
        return (variables, net.apply(variables, x, False), *trained), gradient

    return compiled(run, normal(1, 64, 64))


# NNX.


def state(module):
    """Returns all variables as a tree of plain arrays."""

    def plain(x):
        keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if keys else x

    return jax.tree.map(plain, nnx.to_pure_dict(nnx.state(module)))


@pytest.mark.internals
def test_nnx():
    """Parameters, outputs, statistics, streams agree; gradients nearly agree."""

    @nnx.jit
    def run(module, x):
        outputs = module(x), module(x, train=False)
        return outputs, nnx.grad(lambda m, x: jnp.mean(jnp.square(m(x))))(module, x)

    light = fp8_remat(Stateful(64, rngs=nnx.Rngs(0)))
    of_class, plain = (
        cls(64, rngs=nnx.Rngs(0)) for cls in (fp8_remat(Stateful), Stateful)
    )
    assert nnx.graphdef(light) == nnx.graphdef(of_class)
    assert isinstance(light, Stateful)
    assert type(light).__name__ == "Stateful"
    initial = state(plain)
    for module in (light, of_class):
        same(state(module), initial)
    x = normal(1, 64, 64)
    (outputs, actual), (expected_outputs, expected) = (
        run(m, x) for m in (light, plain)
    )
    same(outputs, expected_outputs)
    actual, expected = map(nnx.to_pure_dict, (actual, expected))
    assert 0.999 < cosine(actual, expected) < 1 - 1e-6
    same(state(light), state(plain))
    assert not np.array_equal(flat(state(plain)), flat(initial))


def test_nnx_layers_stacked_and_scanned():
    def run(cls, x):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def stacked(rngs):
            return cls(64, rngs=rngs)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return x + layer(x)

        layers = stacked(nnx.Rngs(0))
        gradient = nnx.grad(lambda layers: jnp.mean(forward(x, layers) ** 2))(layers)
        return nnx.to_pure_dict(gradient), state(layers)

    x = normal(1, 64, 64)
    (actual, after), (expected, expected_after) = (
        compiled(functools.partial(run, cls), x)
        for cls in (fp8_remat(Stateful), Stateful)
    )
    assert_close(after, expected_after, 1e-6)
    assert 0.999 < cosine(actual, expected) < 1 - 1e-6
