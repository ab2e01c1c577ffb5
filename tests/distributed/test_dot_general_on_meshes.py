"""Tests of `fp8_dot_general` on explicit meshes of eight virtual devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers.sharded import as_kernels
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
import pallas_kernels as kernels

pytestmark = pytest.mark.distributed
E4M3 = jnp.float8_e4m3fn
NUMBERS = (((1,), (0,)), ((), ()))
CASES = {
    "batch": (P("x", None), P(None, None), None),
    "batch on both axes": (P(("x", "y"), None), P(None, None), None),
    "outputs": (P(None, None), P(None, "x"), None),
    "batch and outputs": (P("x", None), P(None, "y"), None),
    "inputs": (P(None, "x"), P("x", None), P(None, None)),
    "inputs, scattered": (P(None, "x"), P("x", None), P("x", None)),
}


def _arrays(x_spec, w_spec):
    x = jax.random.normal(jax.random.key(0), (64, 32))
    w = jax.random.normal(jax.random.key(1), (32, 16))
    return jax.sharding.reshard(x, x_spec), jax.sharding.reshard(w, w_spec)


def _results(dot, out_sharding, x, w):
    def loss(x, w):
        y = dot(x, w, NUMBERS, out_sharding=out_sharding)
        return jnp.sum(jnp.sin(y)), y

    grads, y = jax.grad(loss, (0, 1), has_aux=True)(x, w)
    return y, *grads


@pytest.mark.internals
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("jit", [False, True])
def test_values_and_types_are_those_of_dot_general(case, jit):
    x_spec, w_spec, out = CASES[case]
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    alone = _results(
        coat.fp8_dot_general,
        None,
        *map(jnp.asarray, jax.device_get(_on(mesh, x_spec, w_spec))),
    )
    with jax.set_mesh(mesh):
        arrays = _arrays(x_spec, w_spec)
        wrap = jax.jit if jit else (lambda fn: fn)
        actual, expected = (
            wrap(lambda x, w, dot=dot: _results(dot, out, x, w))(*arrays)
            for dot in (coat.fp8_dot_general, jax.lax.dot_general)
        )
        for a, b, c in zip(actual, expected, alone, strict=True):
            assert jax.typeof(a) == jax.typeof(b)
            np.testing.assert_allclose(
                np.asarray(a), np.asarray(c), rtol=1e-5, atol=1e-5
            )


@pytest.mark.internals
def test_operations_under_vmap_of_vmap_run_on_parts(monkeypatch):
    x = jax.random.normal(jax.random.key(0), (2, 4, 64, 32))
    scale = jnp.abs(x).max(axis=(2, 3)) / 448

    def codes(x, scale):
        return kernels.quantize_tensor(x, scale, dtype=E4M3, copies="row").row

    mapped = jax.vmap(jax.vmap(codes))
    alone = jax.jit(mapped)(x, scale)
    as_kernels(monkeypatch)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P(None, None, "x")))
        actual = jax.jit(mapped)(
            placed, jax.device_put(scale, NamedSharding(mesh, P()))
        )
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(alone))


def _on(mesh, *specs):
    with jax.set_mesh(mesh):
        return _arrays(*specs)


def test_an_ambiguous_result_is_refused_as_by_dot_general():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    with jax.set_mesh(mesh):
        x, w = _arrays(P(None, "x"), P("x", None))
        with pytest.raises(Exception, match="out_sharding"):
            coat.fp8_dot_general(x, w, NUMBERS)


def test_sums_that_are_left_to_others_are_refused():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    with jax.set_mesh(mesh):
        x, w = _arrays(P(None, "x"), P("x", None))
        sums = P(None, None, unreduced={"x"})
        with pytest.raises(ValueError, match=r"unreduced=\{'x'\}"):
            coat.fp8_dot_general(x, w, NUMBERS, out_sharding=sums)


@pytest.mark.parametrize("flax", ["linen", "nnx"])
def test_data_parallel_training_with_flax(flax):
    mesh = jax.make_mesh((8,), ("data",))
    options = {"dot_general": coat.fp8_dot_general}
    with jax.set_mesh(mesh):
        x = jax.sharding.reshard(jnp.ones((128, 64)), P("data", None))
        if flax == "linen":
            layer = nn.Dense(32, **options)
            params = layer.init(jax.random.key(0), x)
            grads = jax.grad(lambda p: jnp.sum(layer.apply(p, x) ** 2))(params)
        else:
            layer = nnx.Linear(64, 32, rngs=nnx.Rngs(0), **options)
            grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(layer)
        for leaf in jax.tree.leaves(grads):
            assert np.isfinite(np.asarray(leaf)).all()
