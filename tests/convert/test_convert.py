"""Tests of `coat.fp8`, which converts models that others wrote."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers.gradients import assert_close, compiled, fake, flat, saved, saved_bytes
from helpers.marks import slow

import coat_jax as coat
from coat_jax.convert.rules import chosen_blocks, shapes_of
from pallas_kernels.versions import bodies_in_params

WIDTH = 128


class Block(nnx.Module):
    """A norm and an MLP, with einsums, plain products and a small router."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Einsum("btd,df->btf", (WIDTH, 256), rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal()
        self.down = nnx.Param(init(rngs.params(), (256, WIDTH)))
        self.router = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        weight = nnx.softmax(self.router(h)).max(-1, keepdims=True)
        return x + weight * ((nnx.silu(self.gate(h)) * self.up(h)) @ self.down[...])


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(40, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 40, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(h, h)
        h = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.5, deterministic=not train)(nn.Dense(WIDTH)(h))


class LinenModel(nn.Module):
    depth: int = 2

    def setup(self):
        self.embed = nn.Embed(40, WIDTH)
        self.encoderblock = [LinenBlock() for _ in range(self.depth)]
        self.head = nn.Dense(40)

    def encode(self, tokens, train: bool = False):
        x = self.embed(tokens)
        for block in self.encoderblock:
            x = block(x, train)
        return x

    def __call__(self, tokens, train: bool = False):
        return self.head(self.encode(tokens, train))


def tokens():
    return jax.random.randint(jax.random.key(0), (2, 48), 0, 40)


def fp8_parameters(fn, params) -> set[str]:
    """Returns the paths of the parameters that `fn(params)` casts to FP8."""
    leaves, tree = jax.tree.flatten(params)

    def forward(*leaves):
        return jax.vjp(lambda *x: fn(jax.tree.unflatten(tree, x)), *leaves)[0]

    jaxpr = jax.make_jaxpr(forward)(*leaves).jaxpr
    actual = set()
    _follow(jaxpr, dict(zip(jaxpr.invars, shapes_of(params), strict=True)), actual)
    return actual


def _follow(jaxpr, names, actual):
    """Adds to `actual` the names of the parameters that a jaxpr casts to FP8.

    Args:
      jaxpr: The jaxpr, which is searched with its inner jaxprs.
      names: The parameter that each variable is computed from, if it is known.
      actual: The set of names.
    """
    for eqn in jaxpr.eqns:
        arguments = {i: v for i, v in enumerate(eqn.invars) if not hasattr(v, "val")}
        arguments = {i: names[v] for i, v in arguments.items() if v in names}
        for body in bodies_in_params(eqn.params):
            inner = {body.invars[i]: name for i, name in arguments.items()}
            _follow(body, inner, actual)
            results = zip(eqn.outvars, body.outvars, strict=False)
            names |= {out: inner[v] for out, v in results if v in inner}
        if len({*arguments.values()}) != 1 or eqn.primitive.name == "dot_general":
            continue
        size = max(eqn.invars[i].aval.size for i in arguments)
        (name,) = {*arguments.values()}
        for out in eqn.outvars:
            if out.aval.size == size:
                names[out] = name
                if out.aval.dtype == jnp.float8_e4m3fn:
                    actual.add(name)


def loss(logits):
    return jnp.mean(jnp.square(logits.astype(jnp.float32)))


@pytest.mark.internals
def test_nnx_model_shares_variables_and_nearly_its_gradients():
    model = Model(nnx.Rngs(0))
    light = coat.fp8(model)
    assert type(light) is Model
    assert light.layers[1].gate.kernel is model.layers[1].gate.kernel
    assert light.embed is model.embed
    assert type(light.layers[0]) is type(light.layers[1])
    assert not isinstance(model.layers[0], type(light.layers[0]))
    gradient = nnx.jit(nnx.grad(lambda m: loss(m(tokens()))))
    grads = [gradient(m) for m in (model, light)]
    plain, fp8 = map(flat, grads)
    assert np.linalg.norm(plain - fp8) < 0.15 * np.linalg.norm(plain)
    assert jax.tree.structure(grads[0]) == jax.tree.structure(grads[1])


def test_matmuls_of_blocks_run_in_fp8_except_small_ones():
    model = coat.fp8(Model(nnx.Rngs(0)))
    graph, params = nnx.split(model)
    actual = fp8_parameters(lambda p: nnx.merge(graph, p)(tokens()), params)
    assert actual == {
        f"layers/{i}/{name}"
        for i in (0, 1)
        for name in ("up/kernel", "gate/kernel", "down")
    }


def test_converted_blocks_save_less_than_either_line_alone():
    model = Model(nnx.Rngs(0))
    graph, params = nnx.split(model)
    sizes = {}
    for name, convert in {
        "plain": lambda m: m,
        "fp8_remat": lambda m: coat.fp8_remat(m),
        "fp8": lambda m: coat.fp8(m),
    }.items():

        def run(params, x, convert=convert):
            return convert(nnx.merge(graph, params).layers[0])(x)

        if name == "fp8":

            def run(params, x):
                return coat.fp8(nnx.merge(graph, params)).layers[0](x)

        actual = saved(run, params, jnp.ones((4, 64, WIDTH)), params=len(params))
        sizes[name] = saved_bytes(actual)
    assert sizes["fp8"] <= 1.02 * sizes["fp8_remat"]
    assert sizes["fp8"] < sizes["plain"] / 3.5


@pytest.mark.parametrize(
    "rule",
    [
        ".*/(gate|up)/kernel",
        [".*gate/kernel", ".*up/kernel"],
        (f".*{name}/kernel" for name in ("gate", "up")),
        lambda p: "kernel" in p,
    ],
)
def test_rules_choose_matmuls_by_path(rule):
    model = coat.fp8(Model(nnx.Rngs(0)), blocks="layers/1", matmuls=rule)
    graph, params = nnx.split(model)
    actual = fp8_parameters(lambda p: nnx.merge(graph, p)(tokens()), params)
    expected = {"layers/1/gate/kernel", "layers/1/up/kernel"}
    # A rule that is given decides for small matmuls, too.
    assert actual == expected | (
        {"layers/1/router/kernel"} if callable(rule) else set()
    )


def _of_nnx(convert):
    graph, params = nnx.split(convert(Model(nnx.Rngs(0))))
    return lambda params: nnx.merge(graph, params)(tokens()), params


def _of_linen(convert):
    params = LinenModel().init(jax.random.key(0), tokens())
    return lambda params: convert(LinenModel()).apply(params, tokens()), params


def _of_function(convert):
    x, up, down = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(64, 128), (128, 512), (512, 128)])
    )

    def mlp(params, x):
        return nn.gelu(x @ params["up"]) @ params["down"]

    return lambda params: convert(mlp)(params, x), {"up": up, "down": down}


@pytest.mark.internals
@pytest.mark.parametrize("make", [_of_nnx, _of_linen, _of_function])
def test_without_matmuls_blocks_keep_outputs_and_save_fp8(make):
    plain, params = make(lambda model: model)
    light, _ = make(functools.partial(coat.fp8, matmuls=()))
    np.testing.assert_array_equal(*(compiled(fn, params) for fn in (light, plain)))
    assert fp8_parameters(light, params) == set()
    sizes = [saved_bytes(saved(fn, params)) for fn in (light, plain)]
    assert sizes[0] < 0.55 * sizes[1]

    def gradient(fn):
        return flat(compiled(jax.grad(lambda params: loss(fn(params))), params))

    actual, expected = gradient(light), gradient(plain)
    difference = np.linalg.norm(actual - expected)
    assert 0 < difference < 0.05 * np.linalg.norm(expected)


def test_linen_model_keeps_paths_and_takes_methods():
    model = LinenModel()
    light = coat.fp8(model)
    assert isinstance(light, LinenModel)
    assert light.depth == 2
    params = jax.eval_shape(model.init, jax.random.key(0), tokens())
    assert jax.eval_shape(light.init, jax.random.key(0), tokens()) == params
    training = {"train": True, "rngs": {"dropout": jax.random.key(3)}}
    for options in ({}, {"method": "encode", **training}):
        run = functools.partial(light.apply, **options)
        actual = fp8_parameters(lambda p, run=run: run(p, tokens()), params)
        blocks = {path.split("/")[1] for path in actual}
        assert blocks == {"encoderblock_0", "encoderblock_1"}
        assert len(actual) == 12


@pytest.mark.internals
def test_functions_are_one_block():
    def mlp(params, x, scale=1.0):
        h = jnp.einsum("of,bf->bo", params["first"], x) * scale
        return params["list"][0] @ jnp.tanh(h).T

    keys = jax.random.split(jax.random.key(0), 3)
    first, second = (jax.random.normal(k, (WIDTH, WIDTH)) for k in keys[:2])
    params = {"first": first, "list": [second]}
    x = jax.random.normal(keys[2], (64, WIDTH))
    light = coat.fp8(mlp, matmuls="first")

    # Tokens and outputs have a scale each.
    h = fake(np.asarray(x), WIDTH) @ fake(np.asarray(first), WIDTH).T
    expected = np.asarray(second) @ np.tanh(h).T
    assert_close(compiled(light, params, x), expected, 1e-5)
    assert fp8_parameters(lambda p: light(p, x, scale=2.0), params) == {"first"}
    assert fp8_parameters(lambda p: coat.fp8(mlp)(p, x), params) == {"first", "list/0"}


@pytest.mark.parametrize(
    "order", [slow("bof,bif->bio"), slow("bfo,bif->boi"), "fbo,ibf->ibo"]
)
def test_batched_weights_in_any_order_of_axes(order):
    """The weights are the first operand, and the result has any order of axes."""

    def experts(w, x):
        return jnp.einsum(order, w, x)

    sizes = {"b": 3, "o": 128, "i": 48, "f": 256}
    first, second = order.split("->")[0].split(",")
    w, x = (
        jax.random.normal(jax.random.key(i), [sizes[c] for c in s])
        for i, s in enumerate((first, second))
    )
    light = coat.fp8(experts)

    def scalar(w, x):
        y = light(w, x)
        return jnp.sum(y**2), y

    dw, y = compiled(jax.grad(scalar, has_aux=True), w, x)
    expected = np.einsum(order, w, x)
    assert_close(y, expected, 0.05)
    gradient = f"{order.split('->')[1]},{second}->{first}"
    assert_close(dw, np.einsum(gradient, 2 * expected, x), 0.1)
    assert fp8_parameters(lambda w: light(w, x), w) == {""}


@pytest.mark.internals
def test_jitted_functions_are_converted_and_loops_are_warned_of():
    @jax.jit
    def inner(w, x):
        return x @ w

    def looped(params, x):
        x = inner(params["a"], x)
        return jax.lax.scan(lambda x, w: (inner(w, x), None), x, params["b"])[0]

    params = {"a": jnp.eye(WIDTH), "b": jnp.stack([jnp.eye(WIDTH)] * 2)}
    x = jnp.ones((16, WIDTH))
    with pytest.warns(UserWarning, match="within scan .* do not become FP8 matmuls: b"):
        actual = fp8_parameters(lambda p: coat.fp8(looped)(p, x), params)
    assert actual == {"a"}
    # Nothing is missing here.
    jax.eval_shape(coat.fp8(looped, matmuls="a"), params, x)


def test_attention_and_sums_of_parameters_are_left_alone():
    def fn(params, x):
        return (x @ x.T) @ x + params["a"] @ params["b"]

    params = {"a": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones((WIDTH, WIDTH))}
    x = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
    np.testing.assert_array_equal(coat.fp8(fn)(params, x), fn(params, x))


def test_products_with_a_number_are_left_alone():
    def fn(params, x):
        return jnp.einsum(",ij->ij", 0.5, x @ params)

    w, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((4, WIDTH))
    light = coat.fp8(fn)
    np.testing.assert_allclose(light(w, x), fn(w, x), rtol=1e-2)
    number, product = sorted(coat.fp8_report(light, w, x).rows, key=lambda r: r.left)
    assert number.reason == "no operand is a parameter"
    assert not product.reason


def test_numbered_siblings_are_blocks():
    deep = {"k": jnp.ones((2, 2)), "v": {"k": jnp.ones((2, 2))}}
    flat_dense = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones((2, 2))}
    tree = {
        "encoder": {"layer_0": deep, "layer_1": {**deep, "more": deep}, "norm": deep},
        "h": [deep, deep],
        "Dense_0": flat_dense,
        "Dense_1": flat_dense,
        "Block_0": deep,
    }
    actual = chosen_blocks(shapes_of(tree), [], None)
    assert sorted(actual) == ["encoder/layer_0", "encoder/layer_1", "h/0", "h/1"]
    modules = ["encoder", "encoder/layer_0", "h"]
    assert chosen_blocks(shapes_of(tree), modules, "encoder.*") == ["encoder"]


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"blocks": 3}, ValueError, "blocks must be regular expressions .* got 3"),
        ({"matmuls": "("}, ValueError, r"matmuls must be .* got '\('"),
        ({"blocks": "nothing"}, ValueError, "no block matches.*blocks='nothing'"),
        ({"blocks": "nothing"}, ValueError, "as one block with blocks='.*'"),
        ({"group": 0}, ValueError, "group"),
        ({"format": "e4m3"}, ValueError, "format must be"),
    ],
)
def test_bad_options(kwargs, error, match):
    with pytest.raises(error, match=match):
        coat.fp8(Model(nnx.Rngs(0)), **kwargs)


def test_parameters_of_a_function_may_be_passed_by_name():
    def product(params, x):
        return x @ params["w"]

    params, x = {"w": jnp.ones((128, 128))}, jnp.ones((16, 128))
    report = coat.fp8_report(coat.fp8(product), x=x, params=params)
    assert [(row.parameter, row.converted) for row in report.rows] == [("w", True)]


@pytest.mark.parametrize("model", [3, Model, "model"])
def test_bad_models(model):
    with pytest.raises(TypeError, match="fp8 takes a Flax module, a callable pytree"):
        coat.fp8(model)
