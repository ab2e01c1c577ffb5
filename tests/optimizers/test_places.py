"""Tests of finding a moment's parameter where containers have a state's names."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat


class Head(NamedTuple):
    w: jax.Array


class Encoder(NamedTuple):
    """The encoder of a variational autoencoder."""

    w: jax.Array
    mu: Head
    nu: Head


PARAMS = Encoder(jnp.ones((128, 128)), Head(jnp.ones((128, 128))), Head(jnp.ones(8)))
MESH = jax.make_mesh((1,), ("d",))
FIRST, SECOND, WHOLE = (NamedSharding(MESH, s) for s in (P("d"), P(None, "d"), P()))
OPTIMIZERS = {
    "fp8_adamw": coat.fp8_adamw(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), coat.fp8_adamw(1e-3)),
    "masked": optax.masked(coat.fp8_adamw(1e-3), Encoder(True, Head(True), Head(True))),
    "wrapped adamw": coat.with_quantized_state(optax.adamw(1e-3)),
    "multi steps": optax.MultiSteps(coat.fp8_adamw(1e-3), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shardings_are_those_of_the_own_parameter(name):
    shardings = Encoder(FIRST, Head(SECOND), Head(WHOLE))
    actual = coat.opt_state_sharding(OPTIMIZERS[name], PARAMS, shardings)
    for moments in _moments(actual):
        assert moments.w.codes == FIRST
        assert moments.mu.w.codes == SECOND
        assert moments.nu.w == WHOLE


def _moments(state):
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)  # noqa: E731
    (adam,) = filter(is_adam, jax.tree.leaves(state, is_leaf=is_adam))
    return adam.mu, adam.nu


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_optax(name):
    tx = OPTIMIZERS[name]
    state, grads = tx.init(PARAMS), jax.tree.map(lambda p: p * 0.1, PARAMS)
    for moments in _moments(state):
        assert moments.w.codes.dtype == moments.mu.w.codes.dtype == jnp.float8_e4m3fn
    plain = optax.adamw(1e-3)
    expected, _ = plain.update(grads, plain.init(PARAMS), PARAMS)
    update = jax.jit(tx.update)
    for _ in range(2 if name == "multi steps" else 1):
        updates, state = update(grads, state, PARAMS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), updates, expected
    )
