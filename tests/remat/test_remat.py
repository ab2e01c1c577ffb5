"""Tests fp8_remat's gradients, what it saves, and other transformations."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.gradients import (
    FP8,
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
from helpers.marks import slow_except
from helpers.models import (
    LinenNet,
    Mlp,
    Vit,
    closing,
    normal,
    parameters,
    scanned,
    two_product_arguments,
    two_products,
)
from jax.sharding import AxisType, PartitionSpec

import coat_jax as coat
from coat_jax import fp8_dot_general
from coat_jax.remat.api import fp8_remat

pytestmark = pytest.mark.internals


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of parameters and one activation, and its FP8 form."""

    plain: Callable
    light: Callable
    params: Any
    x: Any


def nnx_case(make, x) -> Case:
    def function(graph):
        return lambda params, x: nnx.merge(graph, params)(x)

    graph, params = parameters(make)
    light, _ = nnx.split(fp8_remat(nnx.merge(graph, params)))
    return Case(function(graph), function(light), params, x)


def mlp() -> Case:
    return nnx_case(lambda: Mlp(64, rngs=nnx.Rngs(0)), normal(1, 64, 64))


def vit() -> Case:
    return nnx_case(lambda: Vit(64, rngs=nnx.Rngs(0)), normal(1, 2, 32, 32, 3))


def linen() -> Case:
    net, x = LinenNet(64), normal(1, 128, 64)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = compiled(net.init, keys, x)

    def function(net):
        def apply(params, x):
            rngs = {"dropout": jax.random.key(2)}
            all_of_it = {**variables, "params": params}
            return net.apply(all_of_it, x, rngs=rngs, mutable=["batch_stats"])[0]

        return apply

    return Case(function(net), function(fp8_remat(net)), variables["params"], x)


def large(residual) -> bool:
    size = np.prod(residual.shape)
    return size >= 4096 and residual.shape[-1] * residual.dtype.itemsize >= 16


# Shapes and groups of the FP8 copies that each model saves. Arrays that only matmuls
# read have ROW groups. Other operands of matmuls are recomputed from GELUs' inputs and
# from norms' centered inputs. Norms save x as well, because the variance is mean(x**2)
# - mean(x)**2.
HEADS = (2, 64, 4, 16)
COPIES = {
    mlp: [((64, 64), ROW), *[((64, 128), GROUP)] * 2, ((64, 128), ROW)],
    vit: [
        ((2, 32, 96), ROW),  # The images, with columns and channels merged.
        *[((2, 64, 64), GROUP)] * 4,
        *[(HEADS, ROW)] * 3,
        ((2, 64, 4, 1, 16), ROW),
        ((1, 2, 4, 64, 64), GROUP),
        *[((2, 64, 128), GROUP)] * 2,
        ((2, 64, 128), ROW),
    ],
    linen: [*[((128, 64), GROUP)] * 2, *[((128, 128), GROUP)] * 2],
}


@pytest.mark.parametrize("make", slow_except([mlp, linen], COPIES))
def test_saved_bytes_are_those_of_the_formats(make):
    """`fp8_remat` saves only the fewest copies that give the other residuals."""
    case = make()
    assert "f8_e4m3fn" not in str(jax.make_jaxpr(case.light)(case.params, case.x))
    count = len(jax.tree.leaves(case.params))
    light = saved(case.light, case.params, case.x)
    plain = saved(case.plain, case.params, case.x, params=count)
    floating = [
        r
        for r in plain
        if jnp.issubdtype(r.dtype, jnp.floating)
        and large(r)
        and (r.argument >= count if r.argument is not None else r.from_activations)
    ]
    assert len(COPIES[make]) <= 0.6 * len(floating)
    codes = [i for i, r in enumerate(light) if r.dtype in FP8]
    assert sorted(light[i].shape for i in codes) == sorted(s for s, _ in COPIES[make])
    # Scales are bfloat16, saved as their bits.
    assert all(light[i + 1].dtype == jnp.uint16 for i in codes)
    predicted = sum(fp8_bytes(shape, group) for shape, group in COPIES[make])
    remaining = [r for r in plain if r not in floating and r.argument is None]
    exact = [r for r in remaining if r.from_activations or r.dtype == bool]
    assert saved_bytes(light) == predicted + saved_bytes(exact)


def references(vjp, params) -> int:
    leaves = jax.tree.leaves(vjp)
    return sum(any(leaf is p for leaf in leaves) for p in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "wrapped",
    [
        fp8_remat(two_products),
        jax.jit(fp8_remat(two_products)),
        fp8_remat(jax.jit(two_products)),
        fp8_remat(fp8_remat(two_products)),
        closing,
        jax.jit(closing),
    ],
    ids=["eager", "jit", "around jit", "nested", "closure", "jit of closure"],
)
def test_parameters_stay_references_and_bytes_are_exact(wrapped):
    params, x = two_product_arguments(jnp.bfloat16)
    plain = sorted((r.shape, r.dtype.name) for r in saved(two_products, params, x))
    assert plain == [
        ((64, 128), "bfloat16"),
        ((96, 64), "bfloat16"),  # x, read by a matmul.
        ((96, 128), "bfloat16"),  # cos(h).
        ((96, 128), "bfloat16"),  # sin(h), read by a matmul.
        ((128, 48), "bfloat16"),
    ]
    predicted = (
        fp8_bytes((96, 64), ROW) + fp8_bytes((96, 128)) + fp8_bytes((96, 128), ROW)
    )
    residuals = saved(wrapped, params, x)
    assert {r.argument for r in residuals} == {None, 0, 1}
    assert saved_bytes(residuals) == predicted


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_parameters_stay_references_under_scan(outer):
    params, x = two_product_arguments()
    params = jax.tree.map(lambda a: jnp.stack([a, a, a]), params)
    _, vjp = jax.vjp(outer(scanned(fp8_remat(two_products))), params, x)
    assert references(vjp, params) == 2
    remaining = [r for r in jax.tree.leaves(vjp) if r.dtype == jnp.float32]
    assert all(r.size < 4096 or any(r is p for p in params.values()) for r in remaining)


def test_params_argnums():
    def turned(x, params):
        return two_products(params, x)

    params, x = two_product_arguments()
    for argnums in (1, -1, (1,)):
        _, vjp = jax.vjp(fp8_remat(turned, params_argnums=argnums), x, params)
        assert references(vjp, params) == 2
        assert references(vjp, x) == 0
    _, vjp = jax.vjp(fp8_remat(turned, params_argnums=(0, 1)), x, params)
    assert references(vjp, (x, params)) == 3


def test_parameters_that_are_passed_by_name_stay_references():
    def model(*, params, x):
        return light(params=params, x=x)

    light = fp8_remat(two_products)
    params, x = two_product_arguments()
    _, vjp = jax.vjp(lambda params, x: model(params=params, x=x), params, x)
    assert references(vjp, params) == 2
    _, vjp = jax.vjp(lambda params, x: light(params, x=x), params, x)
    assert references(vjp, params) == 2


def test_effects_happen_once_and_keep_nothing():
    calls = []

    def noisy(params, x):
        jax.debug.callback(calls.append, jnp.sum(x))
        return two_products(params, x)

    params, x = two_product_arguments()
    _, vjp = jax.vjp(fp8_remat(noisy), params, x)
    assert (references(vjp, params), references(vjp, x)) == (2, 0)
    vjp(jnp.ones((96, 48)))
    jax.effects_barrier()
    assert len(calls) == 1


def test_format_is_that_of_the_residuals():
    params, x = two_product_arguments()
    light = fp8_remat(two_products, format=coat.E5M2)
    dtypes = [r.dtype for r in saved(light, params, x)]
    assert dtypes.count(jnp.float8_e5m2) == 3
    assert jnp.float8_e4m3fn not in dtypes


@pytest.mark.parametrize("view", [lambda x: x, jax.jit(lambda x: x[None, ::-1])])
def test_one_copy_with_groups_serves_products_and_others(view):
    """A reader that is no matmul may also be within a function under jit."""

    def fn(w, x):
        return x @ w + jnp.sum(jnp.tanh(view(x)))

    w, x = normal(1, 64, 32), normal(2, 64, 64)
    light, plain = fp8_remat(jax.checkpoint(fn)), jax.checkpoint(fn)
    assert saved_bytes(saved(light, w, x)) == fp8_bytes((64, 64))
    dy = normal(3, 64, 32)
    _, expected = value_and_vjp(plain, dy, w, jnp.asarray(fake(x, GROUP)))
    assert_close(value_and_vjp(light, dy, w, x)[1], expected, 1e-6)


def test_what_feeds_an_exponential_stays_float32():
    """The log-sum-exp stays float32, because an exponential reads it."""

    @jax.custom_vjp
    def attention(q, k):
        return forward(q, k)[0]

    def forward(q, k):
        scores = jnp.einsum("hsd,htd->hst", q, k)
        lse = jax.nn.logsumexp(scores, axis=-1)
        return lse, (q, k, lse)

    def backward(residuals, dlse):
        q, k, lse = residuals
        scores = jnp.einsum("hsd,htd->hst", q, k)
        p = jnp.exp(scores - lse[..., None]) * dlse[..., None]
        return jnp.einsum("hst,htd->hsd", p, k), jnp.einsum("hst,hsd->htd", p, q)

    attention.defvjp(forward, backward)
    q, k = normal(1, 64, 64, 16), normal(2, 64, 64, 16)
    light = fp8_remat(attention, params_argnums=())
    wide = [r for r in saved(light, q, k) if large(r) and r.dtype == jnp.float32]
    assert [r.shape for r in wide] == [(64, 64)]
    dy = normal(3, 64, 64)
    # The statistic is computed from the exact q and k, not from the FP8 ones.
    actual_lse, actual = value_and_vjp(light, dy, q, k)
    lse = compiled(attention, q, k)
    np.testing.assert_allclose(actual_lse, lse, rtol=1e-6)
    expected = compiled(backward, (fake(q, ROW), fake(k, ROW), lse), dy)
    assert_close(actual, expected, 1e-5)


def test_tables_and_masks_are_recomputed():
    def fn(w, x):
        rows, cols = jnp.arange(64.0)[:, None], jnp.arange(128.0)
        turned = x * jnp.cos(rows * cols / 7)
        return jnp.where(rows >= cols, turned, 0.0) @ w

    w, x = normal(1, 128, 16), normal(2, 64, 128)
    assert saved_bytes(saved(fn, w, x)) > x.nbytes + 64 * 128
    light = saved(fp8_remat(fn), w, x)
    assert saved_bytes(light) == fp8_bytes((64, 128), ROW)


def test_masks_integers_and_statistics_stay_exact():
    """No large floating-point array is saved, so the gradient equals autodiff's."""

    def fn(w, x, index):
        selected = jnp.where(x * w > 0, jnp.max(x, axis=-1, keepdims=True) * w, 0.0)
        return selected[index]

    w, x = normal(1, 128), normal(2, 64, 128)
    index = jax.random.randint(jax.random.key(0), (32,), 0, 64)

    def gradient(fn):
        return jax.jit(jax.grad(lambda w: jnp.sum(fn(w, x, index) ** 2)))(w)

    exact = fp8_remat(lambda w, x, index: fn(w, jax.lax.stop_gradient(x), index))
    selected = saved(lambda w: exact(w, x, index), w)
    assert {r.dtype.name for r in selected if r.argument is None} >= {"bool", "float32"}
    assert not any(r.dtype in FP8 for r in selected)
    # XLA may add in another order.
    np.testing.assert_allclose(gradient(exact), gradient(fn), rtol=1e-6)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_constants_are_neither_differentiated_nor_quantized(make):
    table, w = make(normal(1, 96, 64)), make(normal(2, 64, 128, scale=0.2))
    x = normal(3, 96, 64)
    light = fp8_remat(lambda x: (x * table) @ w)
    y, (dx,) = value_and_vjp(light, jnp.ones((96, 128)), x)
    # Backward reads only the constants, unquantized.
    selected = saved(light, x)
    assert not any(r.from_activations or r.dtype in FP8 for r in selected)
    np.testing.assert_allclose(y, (x * table) @ w, rtol=1e-4, atol=1e-4)
    expected = np.asarray(table) * np.asarray(w).sum(axis=1)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-4)


def test_constants_and_what_is_differentiated_are_told_apart():
    """The function may close over constants and parameters in any order."""
    scale, shift = np.asarray(normal(1, 96, 64)), np.asarray(normal(2, 96, 128))
    w, bias, x = normal(3, 64, 128, scale=0.2), normal(4, 128), normal(5, 96, 64)

    def plain(w, bias):
        return lambda x: (x * scale) @ w + bias * shift

    dy = normal(6, 96, 128)
    _, actual = value_and_vjp(lambda w, b: fp8_remat(plain(w, b))(x), dy, w, bias)
    _, expected = value_and_vjp(lambda w, b: plain(w, b)(x), dy, w, bias)
    # Only the gradient of w reads an activation, x * scale.
    assert_close(actual, expected, 0.02)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5)


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
    """Computes a gate; its backward pass recomputes more arrays than it saves."""
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
