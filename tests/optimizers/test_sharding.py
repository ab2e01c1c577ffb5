"""Tests of the shardings of optimizer states, without meshes of several devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat

PARAMS = {"w": jnp.zeros((64, 128)), "b": jnp.zeros((8,))}
REPLICATED = NamedSharding(jax.make_mesh((1,), ("data",)), P())
ELSEWHERE = NamedSharding(jax.make_mesh((1,), ("model",)), P())


@pytest.mark.parametrize(
    ("shardings", "message"),
    [
        (P("data"), r"takes jax.NamedSharding\(mesh, spec\), got P"),
        ({"w": REPLICATED, "b": P()}, r"takes jax.NamedSharding\(mesh, spec\), got P"),
        ({"w": REPLICATED, "b": ELSEWHERE}, "must name one mesh, got 2"),
    ],
)
def test_what_is_no_sharding_is_refused(shardings, message):
    with pytest.raises(ValueError, match=message):
        coat.opt_state_sharding(coat.fp8_adamw(1e-3), PARAMS, shardings)


@pytest.mark.parametrize("shardings", [None, {"w": REPLICATED}, [REPLICATED]])
def test_shardings_of_another_tree_are_refused(shardings):
    with pytest.raises(ValueError, match="params_sharding has nothing for"):
        coat.opt_state_sharding(coat.fp8_adamw(1e-3), PARAMS, shardings)


def test_a_tree_without_parameters_has_no_mesh():
    with pytest.raises(ValueError, match="must name one mesh, got 0"):
        coat.opt_state_sharding(coat.fp8_adamw(1e-3), {}, REPLICATED)


def test_an_axis_of_one_device_cuts_nothing():
    tx, where = coat.fp8_adamw(1e-3), NamedSharding(REPLICATED.mesh, P(None, "data"))
    actual = coat.opt_state_sharding(tx, jnp.zeros((64, 200)), where)
    assert actual[0].mu.codes == actual[0].mu.scale == where


def test_parameters_may_be_numbers_of_python():
    params = {"w": PARAMS["w"], "scale": 1.0, "none": None}
    tx = coat.fp8_adamw(1e-3)
    actual = coat.opt_state_sharding(tx, params, REPLICATED)
    assert jax.tree.structure(actual) == jax.tree.structure(tx.init(params))
    assert actual[0].mu["scale"] == REPLICATED
