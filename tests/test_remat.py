"""fp8_remat: gradients, what is saved and how, composition, Linen and NNX."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from gradients import (
    FP8,
    GROUP,
    assert_close,
    compiled,
    cosine,
    fake,
    flat,
    fp8_bytes,
    saved,
    saved_bytes,
)
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec
from models import LinenNet, Mlp, Stateful, Vit, normal, parameters

import coat_jax as coat
from coat_jax.models import llama
from coat_jax.remat import fp8_remat


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of parameters and one activation, and its FP8 form."""

    plain: Callable
    light: Callable
    params: Any
    x: Any

    def gradient(self, fn: Callable) -> Callable:
        return jax.grad(lambda p: jnp.mean(jnp.square(fn(p, self.x))))


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


@functools.cache
def small_llama():
    config = llama.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        dtype=jnp.float32,
        recipe="bf16",
    )
    model = nnx.merge(*parameters(lambda: llama.Llama(config, rngs=nnx.Rngs(0))))
    tokens = jax.random.randint(jax.random.key(1), (2, 65), 0, 256)

    def loss(model):
        graph, params = nnx.split(model)

        def function(params, tokens):
            model = nnx.merge(graph, params)
            return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])

        return function, params

    return model, loss, tokens


def llama_loss() -> Case:
    model, loss, tokens = small_llama()
    plain, params = loss(model)
    return Case(plain, fp8_remat(plain), params, tokens)


def llama_layers() -> Case:
    model, loss, tokens = small_llama()
    plain, params = loss(model)
    light = nnx.merge(*nnx.split(model))
    light.layers = fp8_remat(light.layers)
    return Case(plain, loss(light)[0], params, tokens)


CASES = [mlp, vit, linen, llama_loss, llama_layers]


@pytest.mark.parametrize("make", CASES)
def test_gradient_is_autodiffs_and_forward_is_unchanged(make):
    case = make()
    forward = [compiled(f, case.params, case.x) for f in (case.light, case.plain)]
    np.testing.assert_array_equal(*forward)
    assert "f8_e4m3fn" not in str(jax.make_jaxpr(case.light)(case.params, case.x))

    backward = jax.make_jaxpr(case.gradient(case.light))(case.params)
    assert "f8_e4m3fn" in str(backward)
    light, plain = (
        compiled(case.gradient(f), case.params) for f in (case.light, case.plain)
    )
    assert 0.999 < cosine(light, plain) < 1 - 1e-6


def large(residual) -> bool:
    size = np.prod(residual.shape)
    return size >= 4096 and residual.shape[-1] >= GROUP


@pytest.mark.parametrize("make", [mlp, vit, linen])
def test_saved_bytes_are_those_of_the_formats(make):
    """Large activations become codes and scales; else nothing new, nothing copied."""
    case = make()
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
    codes = [i for i, r in enumerate(light) if r.dtype in FP8]
    assert sorted(light[i].shape for i in codes) == sorted(r.shape for r in floating)
    # The scale of a tensor is float32, those of groups bfloat16; kept as their bits.
    group = {"uint32": None, "uint16": GROUP}
    groups = [group[light[i + 1].dtype.name] for i in codes]
    assert set(groups) == {None, GROUP}
    shapes = [light[i].shape for i in codes]
    predicted = sum(map(fp8_bytes, shapes, groups))
    rest = [r for r in plain if r not in floating and r.argument is None]
    exact = [r for r in rest if r.from_activations or r.dtype == bool]
    assert saved_bytes(light) == predicted + saved_bytes(exact)


def two_products(params, x):
    """Its parameters are cast, and one of them transposed."""
    h = x @ params["a"].astype(x.dtype)
    return jnp.sin(h) @ params["b"].T.astype(x.dtype)


def two_product_arguments(dtype=jnp.float32):
    params = {"a": normal(1, 64, 128, scale=0.2), "b": normal(2, 48, 128, scale=0.2)}
    return params, normal(3, 96, 64, dtype=dtype)


def references(vjp, params) -> int:
    leaves = jax.tree.leaves(vjp)
    return sum(any(leaf is p for leaf in leaves) for p in jax.tree.leaves(params))


def scanned(fn):
    def run(params, x):
        return jax.lax.scan(lambda x, p: (x + fn(p, x)[:, :1], None), x, params)[0]

    return run


def closing(params, x):
    return fp8_remat(lambda x: two_products(params, x), params_argnums=())(x)


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
        ((96, 64), "bfloat16"),  # x: read by a product
        ((96, 128), "bfloat16"),  # cos(h)
        ((96, 128), "bfloat16"),  # sin(h): read by a product
        ((128, 48), "bfloat16"),
    ]
    predicted = (
        fp8_bytes((96, 64), None) + fp8_bytes((96, 128)) + fp8_bytes((96, 128), None)
    )
    _, vjp = jax.vjp(wrapped, params, x)
    assert references(vjp, params) == 2
    kept = [r for r in jax.tree.leaves(vjp) if r.shape not in ((64, 128), (48, 128))]
    assert sum(r.nbytes for r in kept) == predicted
    assert saved_bytes(saved(wrapped, params, x)) == predicted


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_parameters_stay_references_under_scan(outer):
    params, x = two_product_arguments()
    params = jax.tree.map(lambda a: jnp.stack([a, a, a]), params)
    _, vjp = jax.vjp(outer(scanned(fp8_remat(two_products))), params, x)
    assert references(vjp, params) == 2
    others = [r for r in jax.tree.leaves(vjp) if r.dtype == jnp.float32]
    assert all(r.size < 4096 or any(r is p for p in params.values()) for r in others)


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


def test_format_is_that_of_the_residuals():
    params, x = two_product_arguments()
    light = fp8_remat(two_products, format=coat.E5M2)
    dtypes = [r.dtype for r in saved(light, params, x)]
    assert dtypes.count(jnp.float8_e5m2) == 3
    assert jnp.float8_e4m3fn not in dtypes


# A function whose residuals are known because they are written down.


@jax.custom_vjp
def norm(x):
    return _norm_forward(x)[0]


def _norm_forward(x):
    r = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    return x * r, (x, r)


def _norm_backward(residuals, dy):
    x, r = residuals
    y = x * r
    return (r * (dy - y * jnp.mean(dy * y, axis=-1, keepdims=True)),)


norm.defvjp(_norm_forward, _norm_backward)


@jax.custom_vjp
def gelu(x):
    return x * jax.nn.sigmoid(1.702 * x)


def gelu_slope(x, exp):
    s = 1 / (1 + exp(-1.702 * x))
    return s + 1.702 * x * s * (1 - s)


gelu.defvjp(lambda x: (gelu(x), x), lambda x, dy: (dy * gelu_slope(x, jnp.exp),))


def test_gradient_by_hand():
    """Norm, product, GELU, product: groups where GELU and norm read, else a tensor."""
    w1, w2 = normal(1, 64, 128, scale=0.1), normal(2, 128, 32, scale=0.1)
    x, dy = normal(3, 80, 64), normal(4, 80, 32)

    def fn(params, x):
        w1, w2 = params
        return gelu(norm(x) @ w1) @ w2

    _, vjp = jax.vjp(fp8_remat(fn), (w1, w2), x)
    (dw1, dw2), dx = vjp(dy)

    h, (_, r) = _norm_forward(x)
    a = h @ w1
    b = gelu(a)
    x8, a8, h8, b8 = fake(x, GROUP), fake(a, GROUP), fake(h), fake(b)
    x8, a8, h8, b8, r, w1, w2, dy = (
        np.asarray(v).astype(np.float64) for v in (x8, a8, h8, b8, r, w1, w2, dy)
    )
    da = (dy @ w2.T) * gelu_slope(a8, np.exp)
    dh = da @ w1.T
    y = x8 * r
    expected = (
        h8.T @ da,
        b8.T @ dy,
        r * (dh - y * np.mean(dh * y, axis=-1, keepdims=True)),
    )
    assert_close((dw1, dw2, dx), expected, 1e-5)


@pytest.mark.parametrize("view", [lambda x: x, jax.jit(lambda x: x[None, ::-1])])
def test_one_copy_with_groups_serves_products_and_others(view):
    """Also where the reader that is no product is behind a function under jit."""

    def fn(w, x):
        return x @ w + jnp.sum(jnp.tanh(view(x)))

    w, x = normal(1, 64, 32), normal(2, 64, 64)
    light, plain = fp8_remat(jax.checkpoint(fn)), jax.checkpoint(fn)
    assert saved_bytes(saved(light, w, x)) == fp8_bytes((64, 64))
    dy = normal(3, 64, 32)
    expected = jax.vjp(plain, w, jnp.asarray(fake(x, GROUP)))[1](dy)
    assert_close(jax.vjp(light, w, x)[1](dy), expected, 1e-6)


def test_what_feeds_an_exponential_stays_float32():
    """As in attention: probabilities are recomputed from scores and their statistic."""

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
    expected = jax.vjp(attention, fake(q), fake(k))
    # The statistic is that of the exact q and k, not of the FP8 ones.
    lse = attention(q, k)
    expected = backward((fake(q), fake(k), lse), dy)
    assert_close(jax.vjp(light, q, k)[1](dy), expected, 1e-5)


def test_tables_and_masks_are_recomputed():
    def fn(w, x):
        rows, cols = jnp.arange(64.0)[:, None], jnp.arange(128.0)
        turned = x * jnp.cos(rows * cols / 7)
        return jnp.where(rows >= cols, turned, 0.0) @ w

    w, x = normal(1, 128, 16), normal(2, 64, 128)
    assert saved_bytes(saved(fn, w, x)) > x.nbytes + 64 * 128
    light = saved(fp8_remat(fn), w, x)
    assert saved_bytes(light) == fp8_bytes((64, 128), None)


def test_masks_integers_and_statistics_stay_exact():
    """Nothing large and floating is saved: the gradient is autodiff's."""

    def fn(w, x, index):
        kept = jnp.where(x * w > 0, jnp.max(x, axis=-1, keepdims=True) * w, 0.0)
        return kept[index]

    w, x = normal(1, 128), normal(2, 64, 128)
    index = jax.random.randint(jax.random.key(0), (32,), 0, 64)

    def gradient(fn):
        return jax.jit(jax.grad(lambda w: jnp.sum(fn(w, x, index) ** 2)))(w)

    exact = fp8_remat(lambda w, x, index: fn(w, jax.lax.stop_gradient(x), index))
    kept = saved(lambda w: exact(w, x, index), w)
    assert {r.dtype.name for r in kept if r.argument is None} >= {"bool", "float32"}
    assert not any(r.dtype in FP8 for r in kept)
    # But for the order in which XLA adds up.
    np.testing.assert_allclose(gradient(exact), gradient(fn), rtol=1e-6)


def gradients(fn):
    def loss(params, x):
        return jnp.sum(jnp.sin(fn(params, x)))

    return functools.partial(compiled, jax.grad(loss, argnums=(0, 1)))


def same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def over_one_device(fn):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")
    specs = {"in_specs": (PartitionSpec(), rows), "out_specs": rows}
    return jax.shard_map(fn, mesh=mesh, **specs)


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
    light = fp8_remat(two_products)
    assert_close(gradients(outer(light))(params, x), gradients(light)(params, x), 1e-6)


def scanned_once(fn):
    def run(params, x):
        _, ys = jax.lax.scan(lambda c, p: (c, fn(p, x)), 0.0, stack([params]))
        return ys[0]

    return run


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_scales_survive_an_outer_fp8_remat():
    """Scales of a large residual are large too, and no activations."""
    w, x = normal(1, 256, 256, scale=0.1), normal(2, 256, 256)
    inner = fp8_remat(lambda w, x: jnp.sin(x @ w))
    assert_close(gradients(fp8_remat(inner))(w, x), gradients(inner)(w, x), 1e-6)


def test_scan_over_stacked_layers_equals_a_loop():
    params, x = two_product_arguments()
    layers = [jax.tree.map(lambda a, s=s: a * s, params) for s in (1.0, 0.7)]
    light = fp8_remat(two_products)

    def loop(layers, x):
        for layer in layers:
            x = x + light(layer, x)[:, :1]
        return x

    in_loop, dx = gradients(loop)(layers, x)
    actual = gradients(scanned(light))(stack(layers), x)
    assert_close(actual, (stack(in_loop), dx), 1e-5)


def test_vmap_equals_a_loop():
    params, x = two_product_arguments()
    xs = jnp.stack([x, 2 * x])
    light = fp8_remat(two_products)

    def gradient(params, x):
        return jax.grad(lambda p: jnp.sum(jnp.sin(light(p, x))))(params)

    batched = compiled(jax.vmap(gradient, in_axes=(None, 0)), params, xs)
    one_by_one = [compiled(gradient, params, x) for x in xs]
    assert_close(batched, stack(one_by_one), 1e-6)


def test_checkpoint_inside_saves_only_activations():
    params, x = two_product_arguments()
    fn = jax.checkpoint(lambda p, x: two_products(p, checkpoint_name(x, "x")))
    light = fp8_remat(fn)
    assert saved_bytes(saved(light, params, x)) == fp8_bytes(x.shape, None)
    dy = normal(5, 96, 48)
    expected = jax.vjp(fn, params, jnp.asarray(fake(x)))[1](dy)
    assert_close(jax.vjp(light, params, x)[1](dy), expected, 1e-6)


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
    """Keywords, flags, integers, PRNG keys, None and nested trees, in and out."""

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


@pytest.mark.parametrize("target", [3, int, None, "dense", [jnp.sin]])
def test_other_targets_are_refused(target):
    with pytest.raises(TypeError, match=r"fp8_remat takes .*, got") as error:
        fp8_remat(target)
    assert repr(target) in str(error.value)


# Linen.

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class InCompact(nn.Module):
    light: bool

    @nn.compact
    def __call__(self, x, train: bool = True):
        net = LinenNet(64)
        return x + (fp8_remat(net) if self.light else net)(x, train=train)


class ClassInCompact(nn.Module):
    light: bool

    @nn.compact
    def __call__(self, x, train: bool = True):
        cls = fp8_remat(LinenNet) if self.light else LinenNet
        return x + cls(64)(x, train=train)


class InSetup(nn.Module):
    light: bool

    def setup(self):
        self.net = (fp8_remat(LinenNet) if self.light else LinenNet)(64)
        self.dense = nn.Dense(64)

    def __call__(self, x, train: bool = True):
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


@pytest.mark.parametrize(
    ("light", "plain"),
    [
        (fp8_remat(LinenNet)(64), LinenNet(64)),
        (fp8_remat(LinenNet(64)), LinenNet(64)),
        (LinenNet(64, wrap=fp8_remat), LinenNet(64)),
        (InCompact(True), InCompact(False)),
        (ClassInCompact(True), ClassInCompact(False)),
        (InSetup(True), InSetup(False)),
        (Scanned(True), Scanned(False)),
    ],
    ids=["class", "instance", "submodule", "compact", "compact class", "setup", "scan"],
)
def test_linen(light, plain):
    """The same parameter tree, outputs, statistics and dropout; nearly its gradient."""
    actual, gradient = linen_behaviour(light)
    expected, plain_gradient = linen_behaviour(plain)
    assert_close(actual, expected, 1e-5)
    assert 0.999 < cosine(gradient, plain_gradient) < 1 - 1e-6


@functools.cache
def linen_behaviour(net):
    """Initial variables, outputs in evaluation and training, statistics; gradient."""

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
    """All variables as a tree of plain arrays."""

    def plain(x):
        keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if keys else x

    return jax.tree.map(plain, nnx.to_pure_dict(nnx.state(module)))


def squares(module, x):
    return jnp.mean(jnp.square(module(x)))


@pytest.mark.parametrize(
    ("make", "gradient"),
    [
        (lambda: fp8_remat(Stateful)(64, rngs=nnx.Rngs(0)), nnx.jit(nnx.grad(squares))),
        (lambda: fp8_remat(Stateful(64, rngs=nnx.Rngs(0))), nnx.grad(squares)),
    ],
    ids=["class under jit", "instance"],
)
def test_nnx(make, gradient):
    """Parameters, outputs, statistics and streams as without; nearly its gradient."""
    light, plain = make(), Stateful(64, rngs=nnx.Rngs(0))
    x = normal(1, 64, 64)
    assert isinstance(light, Stateful)
    assert type(light).__name__ == "Stateful"
    before = state(plain)
    same(state(light), before)
    same(light(x), plain(x))
    same(light(x, train=False), plain(x, train=False))
    actual, expected = (nnx.to_pure_dict(gradient(m, x)) for m in (light, plain))
    assert 0.999 < cosine(actual, expected) < 1 - 1e-6
    same(state(light), state(plain))
    assert not np.array_equal(flat(state(plain)), flat(before))


def test_nnx_instance_shares_variables():
    plain = Stateful(64, rngs=nnx.Rngs(0))
    light = fp8_remat(plain)
    x = normal(1, 64, 64)
    light(x)
    same(state(plain), state(light))
    plain.first.kernel[...] = jnp.zeros((64, 128))
    plain.first.bias[...] = jnp.zeros(128)
    same(light(x, train=False), light(2 * x, train=False))


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
