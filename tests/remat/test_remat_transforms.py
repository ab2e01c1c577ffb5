"""Tests fp8_remat within other transformations, and its arguments."""

import functools

import jax
import jax.numpy as jnp
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
    value_and_vjp,
)
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


LIGHT = fp8_remat(gated)


@functools.cache
def alone():
    return gradients(LIGHT)(*two_product_arguments())


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
def test_gradient_is_the_same_within_other_transformations(outer):
    params, x = two_product_arguments()
    assert_close(gradients(outer(LIGHT))(params, x), alone(), 1e-6)


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


def test_scan_over_stacked_layers_equals_a_loop():
    params, x = two_product_arguments()
    layers = [jax.tree.map(lambda a, s=s: a * s, params) for s in (1.0, 0.7)]

    def loop(layers, x):
        for layer in layers:
            x = x + LIGHT(layer, x)[:, :1]
        return x

    in_loop, dx = gradients(loop)(layers, x)
    actual = gradients(scanned(LIGHT))(stack(layers), x)
    assert_close(actual, (stack(in_loop), dx), 1e-5)


def test_casts_of_parameters_within_a_scan_are_recomputed():
    params, x = two_product_arguments(jnp.bfloat16)
    light = fp8_remat(scanned(two_products))
    predicted = fp8_bytes((96, 64), ROW)
    predicted += fp8_bytes((96, 128), GROUP) + fp8_bytes((96, 128), ROW)
    assert saved_bytes(saved(light, stack([params] * 3), x)) == 3 * predicted


def test_vmap_equals_a_loop():
    params, x = two_product_arguments()
    xs = jnp.stack([x, 2 * x])

    def gradient(params, x):
        return jax.grad(lambda p: jnp.sum(jnp.sin(LIGHT(p, x))))(params)

    batched = compiled(jax.vmap(gradient, in_axes=(None, 0)), params, xs)
    one_by_one = [jax.jit(gradient)(params, x) for x in xs]
    assert_close(batched, stack(one_by_one), 1e-6)


def test_checkpoint_inside_saves_only_activations():
    params, x = two_product_arguments()
    fn = jax.checkpoint(lambda p, x: two_products(p, checkpoint_name(x, "x")))
    light = fp8_remat(fn)
    assert saved_bytes(saved(light, params, x)) == fp8_bytes(x.shape, ROW)
    dy = normal(5, 96, 48)
    _, expected = value_and_vjp(fn, dy, params, jnp.asarray(fake(x, ROW)))
    assert_close(value_and_vjp(light, dy, params, x)[1], expected, 1e-6)


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
        jax.grad(penalty),
        lambda params: jax.jvp(jax.grad(loss), (params,), (params,)),
    ):
        with pytest.raises(NotImplementedError, match="can be differentiated once"):
            jax.eval_shape(second, params)


def test_loops_and_branches():
    params, x = two_product_arguments()
    params = {"a": params["a"], "b": normal(2, 64, 128, scale=0.2)}

    def looped(params, x):
        return jax.lax.fori_loop(0, 2, lambda _, x: two_products(params, x), x)

    def branching(params, x):
        return jax.lax.cond(x[0, 0] < 9, lambda: two_products(params, x), lambda: x)

    def both(params, x):
        return looped(params, x) + branching(params, x)

    light, plain = gradients(fp8_remat(both)), gradients(both)
    assert 0.999 < cosine(light(params, x), plain(params, x)) < 1 - 1e-6


def test_closed_over_values_are_differentiated():
    params, x = two_product_arguments()
    expected = gradients(fp8_remat(two_products))(params, x)
    assert_close(gradients(closing)(params, x), expected, 1e-6)
