"""Tests of the arguments that `fp8_remat` takes: pytrees, methods, bound arguments."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers.gradients import assert_close
from helpers.marks import slow

import coat_jax as coat

pytestmark = pytest.mark.internals

X = jax.random.normal(jax.random.key(0), (64, 128))
W = jax.random.normal(jax.random.key(1), (128, 128)) / 128**0.5


class Strict:
    """A pytree node for arrays alone, which `jax.jit` and `jax.checkpoint` pass it."""

    def __init__(self, array, extra=None):
        self.array, self.extra = jnp.asarray(array), extra


jax.tree_util.register_pytree_node(
    Strict, lambda n: ((n.array, n.extra), None), lambda _, c: Strict(*c)
)


@jax.tree_util.register_static
class Static(str):
    pass


def layer(node, x, *, scale=1.0):
    return jnp.tanh(x @ node.array) * scale


def grads(fn, *args, **kwargs):
    return jax.tree.leaves(jax.grad(lambda *a: fn(*a, **kwargs).sum())(*args))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_nodes_that_convert_their_leaves(transform):
    light = transform(coat.fp8_remat(layer))
    assert_close(grads(light, Strict(W), X), grads(layer, Strict(W), X), 0.05)
    # The node is a parameter: no copy of it is saved.
    report = coat.residual_report(light, Strict(W), X)
    assert [r for r in report.rows if r.shape == W.shape and not r.is_argument] == []
    last = coat.fp8_remat(lambda x, node: layer(node, x), params_argnums=-1)
    report = coat.residual_report(last, X, Strict(W))
    assert [r for r in report.rows if r.shape == W.shape and not r.is_argument] == []


@pytest.mark.parametrize(
    "call",
    [
        lambda fn: fn(x=X, node=Strict(W), mode=Static("tanh"), sizes=[("a", 1), None]),
        lambda fn: fn(Strict(W), X, Static("tanh"), (("a", 1), None)),
        lambda fn: fn(Strict(W), X, mode="tanh", sizes={"a": {"b": (True, 2.5)}}),
        lambda fn: fn(node=collections.OrderedDict(a=Strict(W)), x=X),
    ],
)
def test_static_arguments_of_any_container_and_keywords(call):
    def fn(node, x, mode="tanh", sizes=()):
        node = node["a"] if isinstance(node, dict) else node
        assert mode == "tanh"
        assert not any(isinstance(s, jax.Array) for s in jax.tree.leaves(sizes))
        return layer(node, x)

    np.testing.assert_allclose(call(coat.fp8_remat(fn)), call(fn), rtol=1e-5)


def test_equal_static_arguments_of_other_places_differ():
    def fn(w, x, first, second):
        return x @ w * (2.0 if first == "twice" else 1.0)

    light = coat.fp8_remat(fn)
    twice, single = light(W, X, "twice", "once"), light(W, X, "once", "twice")
    np.testing.assert_allclose(twice, 2 * single, rtol=1e-5)
    arguments = coat.fp8_remat(lambda w, x, y: x @ w if y is None else x @ w + y)
    assert arguments(W, X, None).shape == arguments(W, X, X).shape
    assert not np.array_equal(arguments(W, X, None), arguments(W, X, X))


class Counter(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(128, 128, rngs=nnx.Rngs(0))
        self.largest = nnx.BatchStat(jnp.array(0.0))

    def block(self, x, scale=1.0):
        self.largest[...] = jnp.maximum(self.largest[...], x.max())
        return jnp.tanh(self.linear(x)) * scale

    def __call__(self, wrap, x):
        return wrap(self)(x)


WAYS = {
    "plain": lambda m: m.block,
    "unbound": lambda m: functools.partial(coat.fp8_remat(Counter.block), m),
    "method": lambda m: coat.fp8_remat(m.block),
    "partial": lambda m: coat.fp8_remat(functools.partial(Counter.block, m)),
    "bound": lambda m: coat.fp8_remat(functools.partial(m.block, scale=1.0)),
    "nested": lambda m: coat.fp8_remat(coat.fp8_remat(m.block)),
    "keyword": lambda m: coat.fp8_remat(
        functools.partial(lambda x, node: node["m"].block(x), node={"m": m})
    ),
    "strict node": lambda m: functools.partial(
        coat.fp8_remat(lambda node, x: node.extra.block(x)), Strict(W, m)
    ),
    "fp8": lambda m: coat.fp8(m.block),
    "fp8 partial": lambda m: coat.fp8(functools.partial(Counter.block, m)),
}


@pytest.mark.parametrize(
    "ways",
    [
        ("unbound", "method", "partial"),
        slow(("bound", "keyword", "strict node")),
        ("nested",),
        ("fp8", "fp8 partial"),
    ],
)
def test_bound_methods_of_nnx_change_their_object(ways):
    @nnx.jit(static_argnums=2)
    def run(model, x, ways):
        def loss(model, x):
            for way in ways:
                x = model(WAYS[way], x)
            return jnp.mean(x**2)

        return nnx.grad(loss)(model, x)

    models = Counter(), Counter()
    plain = ("plain",) * len(ways)
    actual, expected = (
        jax.tree.leaves(run(m, X, w))
        for m, w in zip(models, (ways, plain), strict=True)
    )
    assert_close(actual, expected, 0.2 if "fp8" in ways else 0.1)
    assert models[0].largest[...] == models[1].largest[...] > 0


def test_a_bound_method_saves_what_the_unbound_one_does():
    def saved(variant):
        return coat.residual_report(lambda m, x: m(WAYS[variant], x), Counter(), X)

    assert "float8" in str(saved("method"))
    assert saved("method").nbytes == saved("unbound").nbytes


class Bound(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x):
        fn = functools.partial(self.block, nn.Dense(128), scale=0.5)
        return (coat.fp8_remat(fn) if self.how == "fp8_remat" else fn)(x)

    def block(self, dense, x, scale):
        return scale * jnp.tanh(dense(x))


def test_a_partial_of_a_linen_method():
    params = Bound("plain").init(jax.random.key(0), X)
    actual, expected = (
        grads(lambda p, how=how: Bound(how).apply(p, X), params)
        for how in ("fp8_remat", "plain")
    )
    assert_close(actual, expected, 0.05)


def test_a_module_that_is_not_called_is_refused():
    with pytest.raises(TypeError, match="List has no __call__"):
        coat.fp8_remat(nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0))]))


@pytest.mark.parametrize("report", [coat.residual_report, coat.memory_report])
def test_reports_pass_keywords_on(report):
    def fn(x, *, w=None, train, names=()):
        assert train is False
        assert names == ("a",)
        return jnp.sin(x) if w is None else jnp.tanh(x @ w)

    report(fn, X, train=False, names=("a",))
    options = {"train": False, "names": ("a",)}
    by_position = report(lambda x, w: fn(x, w=w, **options), X, W)
    assert (
        by_position == report(fn, X, w=W, **options) or report is coat.residual_report
    )
    only = report(fn, x=X, w=jax.ShapeDtypeStruct(W.shape, W.dtype), **options)
    size = "nbytes" if report is coat.residual_report else "residual_bytes"
    assert getattr(only, size) == getattr(by_position, size) > 0


def test_reports_of_linen_take_what_apply_takes():
    model = nn.Dropout(0.5)
    rngs = {"dropout": jax.random.key(0)}
    report = coat.residual_report(
        model.apply, {}, X, deterministic=False, rngs=rngs, mutable=["batch_stats"]
    )
    assert report.rows
