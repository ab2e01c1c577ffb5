"""Tests fp8_remat within other transformations, and its arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gradients import (
    GROUP,
    ROW,
    assert_close,
    compiled,
    cosine,
    fake,
    fp8_bytes,
    saved,
    saved_bytes,
)
from helpers.marks import slow
from helpers.models import closing, normal, scanned, two_product_arguments, two_products
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

from coat_jax import fp8_dot_general
from coat_jax.remat.api import fp8_remat

pytestmark = pytest.mark.internals


def gradients(fn):
    def loss(params, x):
        return jnp.sum(jnp.sin(fn(params, x)))

    return functools.partial(compiled, jax.grad(loss, argnums=(0, 1)))


def over_one_device(fn):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")
    specs = {"in_specs": (PartitionSpec(), rows), "out_specs": rows}
    return jax.shard_map(fn, mesh=mesh, **specs)


def gated(params, x):
    """Computes a gated function, of which backward recomputes more than it saves."""
    gate = x / (1 + jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))) @ params["a"]
    return (jax.nn.silu(gate) * jnp.tanh(gate)) @ params["b"].T


@pytest.mark.parametrize(
    "outer",
    [
        jax.jit,
        jax.checkpoint,
        fp8_remat,
        lambda fn: fp8_remat(jax.jit(fn)),
        over_one_device,
        lambda fn: scanned_once(fn),
    ],
    ids=["jit", "checkpoint", "fp8_remat", "fp8_remat of jit", "shard_map", "scan"],
)
@pytest.mark.parametrize("plain", [slow(two_products), gated], ids=["sine", "gate"])
def test_gradient_is_the_same_within_other_transformations(outer, plain):
    params, x = two_product_arguments()
    light = fp8_remat(plain)
    assert_close(gradients(outer(light))(params, x), gradients(light)(params, x), 1e-6)


def scanned_once(fn):
    def run(params, x):
        _, ys = jax.lax.scan(lambda c, p: (c, fn(p, x)), 0.0, stack([params]))
        return ys[0]

    return run


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_scales_survive_an_outer_fp8_remat():
    """Scales of a large residual are large too, but are not quantized again."""
    w, x = normal(1, 256, 256, scale=0.1), normal(2, 256, 256)
    inner = fp8_remat(lambda w, x: jnp.sin(x @ w))
    assert_close(gradients(fp8_remat(inner))(w, x), gradients(inner)(w, x), 1e-6)


@pytest.mark.parametrize("plain", [two_products, gated], ids=["sine", "gate"])
def test_scan_over_stacked_layers_equals_a_loop(plain):
    params, x = two_product_arguments()
    layers = [jax.tree.map(lambda a, s=s: a * s, params) for s in (1.0, 0.7)]
    light = fp8_remat(plain)

    def loop(layers, x):
        for layer in layers:
            x = x + light(layer, x)[:, :1]
        return x

    in_loop, dx = gradients(loop)(layers, x)
    actual = gradients(scanned(light))(stack(layers), x)
    assert_close(actual, (stack(in_loop), dx), 1e-5)


def test_casts_of_parameters_within_a_scan_are_recomputed():
    params, x = two_product_arguments(jnp.bfloat16)
    light = fp8_remat(scanned(two_products))
    predicted = fp8_bytes((96, 64), ROW)
    predicted += fp8_bytes((96, 128), GROUP) + fp8_bytes((96, 128), ROW)
    assert saved_bytes(saved(light, stack([params] * 3), x)) == 3 * predicted


@pytest.mark.parametrize("plain", [two_products, gated], ids=["sine", "gate"])
def test_vmap_equals_a_loop(plain):
    params, x = two_product_arguments()
    xs = jnp.stack([x, 2 * x])
    light = fp8_remat(plain)

    def gradient(params, x):
        return jax.grad(lambda p: jnp.sum(jnp.sin(light(p, x))))(params)

    batched = compiled(jax.vmap(gradient, in_axes=(None, 0)), params, xs)
    one_by_one = [compiled(gradient, params, x) for x in xs]
    assert_close(batched, stack(one_by_one), 1e-6)


def test_checkpoint_inside_saves_only_activations():
    params, x = two_product_arguments()
    fn = jax.checkpoint(lambda p, x: two_products(p, checkpoint_name(x, "x")))
    light = fp8_remat(fn)
    assert saved_bytes(saved(light, params, x)) == fp8_bytes(x.shape, ROW)
    dy = normal(5, 96, 48)
    expected = jax.vjp(fn, params, jnp.asarray(fake(x, ROW)))[1](dy)
    assert_close(jax.vjp(light, params, x)[1](dy), expected, 1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        fp8_remat(two_products),
        jax.jit(fp8_remat(two_products)),
        lambda params, x: fp8_dot_general(x, params["a"], (((1,), (0,)), ((), ()))),
    ],
    ids=["fp8_remat", "jit", "fp8_dot_general"],
)
def test_a_second_derivative_is_refused(fn):
    params, x = two_product_arguments()

    def loss(params):
        return jnp.sum(jnp.sin(fn(params, x)))

    def penalty(params):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(params)))

    for second in (
        lambda: jax.grad(penalty)(params),
        lambda: jax.jvp(jax.grad(loss), (params,), (params,)),
    ):
        with pytest.raises(NotImplementedError, match="can be differentiated once"):
            second()


def test_loops_and_branches():
    params, x = two_product_arguments()
    params = {"a": params["a"], "b": normal(2, 64, 128, scale=0.2)}

    def looped(params, x):
        return jax.lax.fori_loop(0, 2, lambda _, x: two_products(params, x), x)

    def branching(params, x):
        return jax.lax.cond(x[0, 0] < 9, lambda: two_products(params, x), lambda: x)

    for fn in (looped, branching):
        light, plain = gradients(fp8_remat(fn)), gradients(fn)
        assert 0.999 < cosine(light(params, x), plain(params, x)) < 1 - 1e-6


def test_arguments_of_any_kind():
    """Keywords, flags, integers, PRNG keys, None and nested trees may go in and out."""

    def fn(params, batch, key, *, train, scale=None, activation="sin"):
        h = batch["x"] @ params["layer"][0]
        h = getattr(jnp, activation)(h)
        if train:
            h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, 0.0)
        h = h if scale is None else h * scale
        rows = h[batch["rows"]]
        return {"y": rows, "count": batch["rows"].sum(), "none": None, "key": key}

    params = {"layer": [normal(1, 64, 64)], "unused": None}
    rows = jax.random.randint(jax.random.key(0), (32,), 0, 64)
    batch = {"x": normal(2, 64, 64), "rows": rows, "nothing": None}
    key, light = jax.random.key(3), fp8_remat(fn)
    for options in ({"train": True}, {"train": False, "scale": jnp.float32(2)}):
        expected, actual = (f(params, batch, key, **options) for f in (fn, light))
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        np.testing.assert_array_equal(actual["y"], expected["y"])
        assert actual["count"] == expected["count"]

    def run(fn):
        _, vjp = jax.vjp(lambda p, b: fn(p, b, key, train=True)["y"], params, batch)
        dparams, dbatch = vjp(normal(4, 32, 64))
        assert dbatch.pop("rows").dtype == jax.dtypes.float0
        return dparams, dbatch

    assert 0.999 < cosine(run(light), run(fn)) < 1 - 1e-6


def test_closed_over_values_are_differentiated():
    params, x = two_product_arguments()
    expected = gradients(fp8_remat(two_products))(params, x)
    assert_close(gradients(closing)(params, x), expected, 1e-6)
