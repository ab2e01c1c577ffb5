"""Tests of what `coat.fp8` says: its report, its errors and its warnings."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import coat_jax as coat

pytestmark = pytest.mark.internals

X = jax.random.normal(jax.random.key(0), (8, 128))


class Mlp(nnx.Module):
    def __init__(self, hidden, width=128, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Tower(nnx.Module):
    def __init__(self, *blocks):
        self.layers = nnx.List(blocks)

    def __call__(self, x, only=None):
        for i, block in enumerate(self.layers):
            x = block(x) if only in (None, i) else x
        return x


class LinenMlp(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(128)(nn.gelu(nn.Dense(self.hidden)(x)))


class LinenTower(nn.Module):
    hidden: tuple[int, ...]

    def setup(self):
        self.layers = [LinenMlp(n) for n in self.hidden]

    def __call__(self, x):
        for block in self.layers:
            x = block(x)
        return x

    def embed(self, x):
        return x + 1


def linen(*hidden, **rules):
    model = LinenTower(hidden)
    params = model.init(jax.random.key(0), X)
    return lambda x: coat.fp8(model, **rules).apply(params, x)


def of_nnx(*hidden, **rules):
    return coat.fp8(Tower(*map(Mlp, hidden)), **rules)


def function(*hidden, **rules):
    params = [(jnp.ones((128, n)), jnp.ones((n, 128))) for n in hidden]

    def layers(params, x):
        for up, down in params:
            x = x + jnp.tanh(x @ up) @ down
        return x

    return lambda x: coat.fp8(layers, **rules)(params, x)


KINDS = pytest.mark.parametrize("make", [linen, of_nnx, function])


@KINDS
@pytest.mark.parametrize(
    ("hidden", "reason"),
    [(500, "500 outputs are no multiple of 16"), (64, "64 outputs are fewer than 128")],
)
def test_a_model_without_an_fp8_matmul_is_refused(make, hidden, reason):
    for _ in range(2):  # The second time JAX has traced it.
        with pytest.raises(ValueError, match=f"blocks=None.*converts no.*{reason}"):
            make(hidden, hidden)(X)


@KINDS
def test_a_rule_that_chooses_no_matmul_is_refused(make):
    light = make(256, 256, matmuls=".*nothing")
    with pytest.raises(ValueError, match=r"matmuls='\.\*nothing' converts no matmul"):
        light(X)


@pytest.mark.parametrize("make", [linen, of_nnx])
def test_a_block_that_stays_whole_is_warned_of_once(make):
    for _ in range(2):  # Another model of the same kind warns again.
        light = make(256, 500, 500)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                light(X)
                jax.grad(lambda x, light=light: light(x).sum())(X)
            if make is linen:
                caught = caught[:1]  # Each call of `make` converts anew.
        (warning,) = caught
        assert "500 outputs are no multiple of 16" in str(warning.message)
        assert "layers_1" in str(warning.message).replace("/", "_")


@pytest.mark.parametrize("make", [linen, of_nnx, function])
def test_a_model_that_is_converted_says_nothing(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(256, 256)(X)


def test_the_last_of_several_blocks_without_an_fp8_matmul_is_refused():
    light = of_nnx(500, 250)
    with (
        pytest.warns(UserWarning, match="layers/0 becomes"),
        pytest.raises(ValueError, match=r"converts no matmul.*layers/1"),
    ):
        light(X)


def test_blocks_that_are_not_called_are_said():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("layers_0", lambda _: {"a": {"kernel": jnp.eye(128)}})
            return x @ kernel["a"]["kernel"]

    model = Model()
    params = model.init(jax.random.key(0), X)
    light = coat.fp8(model, blocks="layers_0")
    with pytest.raises(ValueError, match="__call__ calls no block, of layers_0"):
        light.apply(params, X)
    assert "it is not called" in str(coat.fp8_report(light, params, X))
    tower = LinenTower((256, 256))
    params = tower.init(jax.random.key(0), X)
    with pytest.warns(UserWarning, match="embed calls no block"):
        coat.fp8(tower).apply(params, X, method="embed")


def test_report_of_all_reasons():
    @jax.custom_vjp
    def straight(w, x):
        return x @ w

    straight.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[0], r[1]))

    def fn(params, x):
        y = x @ params["a"] + (x @ x.T) @ x + x @ (params["a"] @ params["c"])
        y = y + straight(params["b"], x) + jax.checkpoint(jnp.dot)(y, params["b"])
        y = jax.lax.scan(lambda y, w: (y @ w, None), y, params["stack"])[0]
        return y @ jnp.ones((128, 128)), y @ params["small"], y @ params["odd"]

    shapes = {"a": (128, 128), "b": (128, 128), "c": (128, 128), "small": (128, 8)}
    shapes |= {"odd": (128, 200), "stack": (2, 128, 128)}
    params = {n: jnp.ones(s) for n, s in shapes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = coat.fp8_report(coat.fp8(fn), params, X)
    actual = [(row.parameter, row.reason) for row in report.rows]
    assert actual == [
        ("a", ""),
        ("", "both operands are activations"),
        ("", "both operands are activations"),
        ("a, c", "both operands are parameters"),
        ("a, c", ""),
        ("b", "within custom_vjp_call"),
        ("b", "within remat2"),
        ("stack", "within scan"),
        ("", "no operand is a parameter"),
        ("small", "8 outputs are fewer than 128"),
        ("odd", "200 outputs are no multiple of 16"),
    ]
    assert "0 of 11 matmuls in FP8" in str(report)  # 8 rows are too few.
    assert report.rows[0].left == (8, 128)


def test_matmuls_that_are_in_fp8_already_count():
    def fn(w, x):
        return coat.fp8_dot_general(x, w, (((1,), (0,)), ((), ())))

    coat.fp8(fn)(jnp.eye(128), X)
    (row,) = coat.fp8_report(coat.fp8(fn), jnp.eye(128), X).rows
    assert row.reason == "in FP8 already"


def _attention(p, x):
    q, k, v = (x @ p[name] for name in "qkv")
    h = jax.nn.softmax(q @ k.T) @ v
    return x + jax.nn.silu(h @ p["gate"]) * (h @ p["up"])


def _in_fp8(p, x):
    def dot(x, w):
        return coat.fp8_dot_general(x, w, (((1,), (0,)), ((), ())))

    return dot(jax.nn.gelu(dot(x, p["q"]) + p["bias"]), p["k"])


@pytest.mark.parametrize(
    ("light", "parameters"),
    [
        (coat.fp8(_attention), ["k, q, v", "", "", "gate, up"]),
        (coat.fp8_remat(_in_fp8), ["bias, q", "k"]),
    ],
)
def test_fused_matmuls_are_in_fp8_already(light, parameters, recwarn):
    """A function that is converted twice is one example."""
    params = {name: jnp.eye(128) for name in ("q", "k", "v", "gate", "up")}
    params["bias"] = jnp.ones(128)
    x, twice = jnp.ones((16, 128)), coat.fp8(light)
    np.testing.assert_array_equal(twice(params, x), light(params, x))
    assert not recwarn.list
    rows = coat.fp8_report(twice, params, x).rows[: len(parameters)]
    assert [row.parameter for row in rows] == parameters
    assert all(row.reason == "in FP8 already" for row in rows if row.parameter)
    assert all(row.right == (128, 128) for row in rows if row.parameter)


def test_report_says_that_few_rows_stay_as_they_are():
    """The report counts the rows of this call; an outer `vmap` may add others."""

    def fn(params, x):
        return params["left"] @ x.T, x @ params["right"]

    params = {"left": jnp.ones((256, 128)), "right": jnp.ones((128, 256))}
    model = coat.fp8(fn)
    for rows, expected in ((15, "no: 15 rows here, yes from 16 on"), (16, "yes")):
        report = coat.fp8_report(model, params, jnp.ones((rows, 128)))
        lines = str(report).splitlines()
        assert [line.rpartition("  ")[2] for line in lines[1:3]] == [expected] * 2
        assert [row.rows for row in report.rows] == [rows] * 2


def test_report_names_each_block_and_those_that_are_not_called():
    model = of_nnx(256, 256, 256)
    assert type(model.layers[0]) is type(model.layers[2])
    report = coat.fp8_report(model, X)
    assert report.called == ("layers/0", "layers/1", "layers/2")
    assert [row.parameter for row in report.rows] == ["up/kernel", "down/kernel"] * 3
    report = coat.fp8_report(model, X, only=1)
    assert report.called == ("layers/1",)
    assert str(report).count("it is not called") == 2
    nothing = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert coat.fp8_report(lambda m, x: m(x), model, nothing).rows


def test_report_of_linen_takes_its_keywords():
    model = LinenTower((256, 200))
    params = model.init(jax.random.key(0), X)
    report = coat.fp8_report(coat.fp8(model), params, X, mutable=["batch_stats"])
    assert [row.converted for row in report.rows] == [True, True, False, False]
    assert report.blocks == ("layers_0", "layers_1")


@pytest.mark.parametrize("model", [lambda x: x, Tower(Mlp(256))])
def test_report_of_what_is_not_converted_is_refused(model):
    with pytest.raises(ValueError, match=r"takes a model that coat\.fp8 has converted"):
        coat.fp8_report(model, X)


def test_report_of_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="fp8_report takes a function, got 3"):
        coat.fp8_report(3, X)


def test_a_closed_over_weight_is_said():
    w = jnp.eye(128)
    with pytest.raises(ValueError, match="closed over; give it as an argument"):
        coat.fp8(lambda x: x @ w)(X)
