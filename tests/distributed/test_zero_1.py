"""Tests of optimizer states sharded over the data axis, where parameters are not.

MaxText does this in three steps, which these tests repeat. It adds the data axis to the
sharding of every array of the state. It looks the first moments up by name, and gives
their shardings to the parameters at the same paths. Then it jits the step.
"""

import jax
import numpy as np
import optax
import pytest
from helpers.optimizers import is_quantized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat

pytestmark = pytest.mark.distributed
SHAPES = {"w": (64, 1024), "deep": {"v": (512, 128)}, "b": (64,), "odd": (7,)}


def _random(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    return jax.tree.map(
        lambda shape: jax.random.normal(next(keys), shape),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _with_data(mesh, x):
    """Returns a sharding over "data" for the first axis of `x` that can be divided.

    The array is replicated if no axis can be divided.
    """
    size = mesh.shape["data"]
    complete = [None] * len(x.shape)
    for axis, length in enumerate(x.shape):
        if length and length % size == 0:
            return NamedSharding(mesh, P(*complete[:axis], "data"))
    return NamedSharding(mesh, P())


def _shardings(tx, params, mesh, variant):
    """Returns the state's shardings, and the first moments' shardings by path."""
    if variant == "from parameters":
        requested = jax.tree.map(lambda p: _with_data(mesh, p), params)
        state = coat.opt_state_sharding(tx, params, requested)
    else:
        abstract = jax.eval_shape(tx.init, params)
        state = jax.tree.map(lambda x: _with_data(mesh, x), abstract)
    moments = jax.tree_util.tree_leaves_with_path(optax.tree.get(state, "mu"))
    return state, dict(moments)


@pytest.mark.filterwarnings("ignore:a parameter of shape")
@pytest.mark.parametrize("way", ["each array", "from parameters"])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_those_of_one_device(way, fused):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = optax.chain(optax.clip_by_global_norm(1.0), coat.fp8_adamw(1e-2))
    params, grads = _random(0), _random(1)
    everywhere = NamedSharding(mesh, P())
    shardings, _ = _shardings(tx, params, mesh, way)

    def step(grads, state, params):
        if fused:
            return coat.fused_update(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    expected, state = params, tx.init(params)
    for _ in range(2):
        expected, state = jax.jit(step)(grads, state, expected)
    actual = jax.device_put(params, everywhere)
    state = jax.jit(tx.init, out_shardings=shardings)(actual)
    sharded = jax.jit(step, out_shardings=(everywhere, shardings))
    for _ in range(2):
        actual, state = sharded(grads, state, actual)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)
    moment = optax.tree.get(state, "mu")["w"]
    assert is_quantized(moment)
    for array in jax.tree.leaves(moment):
        assert array.sharding.spec == P("data")
        assert array.addressable_shards[0].data.nbytes * 8 == array.nbytes


def test_codes_are_one_key_behind_their_parameters_path():
    """A look-up by a parameter's path finds its moment only if it is not quantized."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx, params = coat.fp8_adamw(1e-2), _random(0)
    _, by_path = _shardings(tx, params, mesh, "each array")
    _, plain = _shardings(optax.adamw(1e-2), params, mesh, "each array")
    codes = jax.tree_util.GetAttrKey("codes")
    small = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)} & set(
        by_path
    )
    assert {jax.tree_util.keystr(path) for path in small} == {"['b']", "['odd']"}
    for path, sharding in plain.items():
        assert by_path[path if path in small else (*path, codes)] == sharding
