"""Tests that calls of wrapped modules change NNX objects and Linen variables."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers.gradients import assert_close

import coat_jax as coat

pytestmark = pytest.mark.internals

X = jax.random.normal(jax.random.key(0), (64, 64))


class Recorder(nnx.Module):
    """A module that changes everything in a call that a call can change."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.calls = 0
        self.total = nnx.BatchStat(jnp.zeros(()))
        self.cache = nnx.data(None)
        self.extra = nnx.data(None)
        self.scratch = nnx.data(nnx.Cache(jnp.zeros(3)))

    def __call__(self, x):
        y = nnx.gelu(self.linear(x))
        self.calls += 1
        self.total[...] += jnp.sum(y)
        self.cache = nnx.Cache(y[:2])
        self.extra = nnx.Param(jnp.ones(4))
        self.scratch = nnx.data(None)
        return y


def _changed(module):
    return {
        "calls": module.calls,
        "total": module.total[...],
        "cache": module.cache[...],
        "extra": module.extra[...],
        "scratch": module.scratch,
    }


def _eager(module, x):
    return module(x)


def _jitted(module, x):
    return nnx.jit(lambda module, x: module(x))(module, x)


def _in_gradient(module, x):
    nnx.grad(lambda module, x: jnp.sum(module(x) ** 2))(module, x)


def _nested(module, x):
    return coat.fp8_remat(lambda module, x: module(x))(module, x)


@pytest.mark.parametrize(
    ("call", "wrap_class"),
    [(_eager, True), (_jitted, False), (_in_gradient, False), (_nested, False)],
)
def test_what_a_call_changes_of_a_module_is_as_without(call, wrap_class):
    plain = Recorder(nnx.Rngs(0))
    light = Recorder(nnx.Rngs(0))
    light = (
        coat.fp8_remat(Recorder)(nnx.Rngs(0)) if wrap_class else coat.fp8_remat(light)
    )
    for _ in range(2):
        call(plain, X)
        call(light, X)
    expected, actual = _changed(plain), _changed(light)
    assert actual.pop("calls") == expected.pop("calls") == 2
    assert actual.pop("scratch") is expected.pop("scratch") is None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *(
        actual, expected))  # fmt: skip
    assert isinstance(light.extra, nnx.Param)


def test_parameters_stay_the_same_objects():
    light = coat.fp8_remat(Recorder(nnx.Rngs(0)))
    kernel, value = light.linear.kernel, light.linear.kernel[...]
    light(X)
    assert light.linear.kernel is kernel
    assert light.linear.kernel[...] is value


def test_variables_are_arguments():
    @coat.fp8_remat
    def layer(weight, count, x):
        count[...] += 1
        return x @ weight[...]

    @nnx.jit
    def gradient(weight, count, x):
        return nnx.grad(lambda *args: jnp.sum(layer(*args)))(weight, count, x)

    weight, count = nnx.Param(jnp.ones((64, 8))), nnx.BatchStat(jnp.array(0))
    y = layer(weight, count, X)
    np.testing.assert_allclose(y, X @ jnp.ones((64, 8)), rtol=1e-5)
    expected = jnp.sum(X, 0)[:, None].repeat(8, 1)
    assert_close(jax.tree.leaves(gradient(weight, count, X))[0], expected, 0.05)
    assert count[...] == 2


def test_a_shared_module_is_one_module():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(64, 64, rngs=rngs)
            self.second = self.first

        def __call__(self, x):
            return self.second(nnx.gelu(self.first(x)))

    plain, light = Twice(nnx.Rngs(0)), coat.fp8_remat(Twice(nnx.Rngs(0)))

    def gradient(module):
        grads = nnx.grad(lambda m: jnp.sum(m(X) ** 2))(module)
        return jax.tree.leaves(nnx.state(grads, nnx.Param))

    expected, actual = gradient(plain), gradient(light)
    assert len(actual) == len(expected) == 2
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, 0.05)
    assert light.first is light.second


def test_a_module_that_is_no_pytree_can_be_wrapped_as_a_class():
    class Stack(nnx.Module, pytree=False):
        def __init__(self, rngs):
            self.layers = [nnx.Linear(64, 64, rngs=rngs) for _ in range(2)]

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.gelu(layer(x))
            return x

    light = coat.fp8_remat(Stack)(nnx.Rngs(0))
    grads = nnx.grad(lambda m: jnp.sum(m(X) ** 2))(light)
    assert len(jax.tree.leaves(grads)) == 4


@pytest.mark.parametrize("duplicate", [
    lambda module: pickle.loads(pickle.dumps(module)), copy.copy, copy.deepcopy,
])  # fmt: skip
def test_wrapped_modules_can_be_copied(duplicate):
    light = coat.fp8_remat(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), group=32)
    assert type(light).__module__ == nnx.Linear.__module__
    twin = duplicate(light)
    np.testing.assert_array_equal(twin(X), light(X))
    assert isinstance(twin, nnx.Linear)
    saved = coat.residual_report(nnx.jit(lambda m, x: jnp.sin(m(x))), twin, X)
    assert any("E4M3" in row.kept for row in saved.rows)


class Block(nn.Module):
    """A Linen module with one method that is wrapped in the way `how`."""

    how: str

    def setup(self):
        self.up, self.down = nn.Dense(256), nn.Dense(64)

    def block(self, x, scale=1.0):
        h = nn.gelu(self.up(x))
        self.sow("intermediates", "h", h)
        return x + scale * self.down(h)

    def __call__(self, x):
        if self.how == "plain":
            return self.block(x, scale=0.5)
        if self.how == "remat":
            return nn.remat(Block.block)(self, x, 0.5)
        if self.how == "bound":
            return coat.fp8_remat(self.block)(x, scale=0.5)
        return coat.fp8_remat(lambda module, x: module.block(x, scale=0.5))(self, x)


class Decorated(nn.Module):
    @coat.fp8_remat
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(x)))


@pytest.mark.parametrize("how", ["bound", "function"])
def test_a_method_of_linen_is_wrapped(how):
    plain, light = Block("plain"), Block(how)
    variables, actual = (jax.jit(m.init)(jax.random.key(0), X) for m in (plain, light))
    jax.tree.map(np.testing.assert_array_equal, actual["params"], variables["params"])
    params = {"params": variables["params"]}

    @functools.partial(jax.jit, static_argnums=0)
    def run(module, params):
        def loss(params):
            y, sown = module.apply(params, X, mutable=["intermediates"])
            return jnp.sum(y**2), (y, sown)

        return jax.grad(loss, has_aux=True)(params)

    (grads, out), (expected_grads, expected) = (run(m, params) for m in (light, plain))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        out,
        expected,
    )
    assert_close(grads, expected_grads, 0.05)

    def saved(module):
        return coat.residual_report(lambda v: module.apply(v, X), params).nbytes

    assert saved(light) < saved(plain) / 2


def test_a_decorated_method_of_linen_is_wrapped():
    model = Decorated()
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert set(variables["params"]) == {"Dense_0", "Dense_1"}
    report = coat.residual_report(lambda v: model.apply(v, X), variables)
    assert any("E4M3" in row.kept for row in report.rows)


def test_a_function_that_closes_over_a_bound_module_is_refused():
    class Closure(nn.Module):
        @nn.compact
        def __call__(self, x):
            return coat.fp8_remat(lambda x: nn.Dense(8, parent=self)(x))(x)

    with pytest.raises(TypeError, match="closes over a bound Linen module"):
        Closure().init(jax.random.key(0), X)


@pytest.mark.parametrize("mutable", [True, ["params"], ["params", "batch_stats"]])
def test_mutable_parameters_in_training_keep_the_copies(mutable):
    inner = nn.Sequential([nn.Dense(256), nn.gelu, nn.Dense(64)])
    model = coat.fp8_remat(inner)
    variables = jax.jit(model.init)(jax.random.key(0), X)

    def loss(v, mutable):
        out = model.apply(v, X, mutable=mutable)
        return jnp.sum((out[0] if mutable else out) ** 2)

    plain = coat.residual_report(lambda v: loss(v, False), variables)
    actual = coat.residual_report(lambda v: loss(v, mutable), variables)
    assert actual.nbytes <= 1.1 * plain.nbytes
    _, after = jax.jit(model.apply, static_argnames="mutable")(
        variables, X, mutable=mutable if mutable is True else tuple(mutable)
    )
    assert set(after) <= {"params"}
    jax.tree.map(
        np.testing.assert_array_equal, after.get("params", variables["params"]),
        variables["params"],
    )  # fmt: skip


def test_cotangents_are_python_numbers():
    fn = coat.fp8_remat(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2))
    w = jnp.ones((64, 64)) / 64
    (actual, _), (expected, _) = (
        jax.vjp(fn, w, X)[1](one) for one in (1.0, jnp.ones(()))
    )
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)])
def test_keys_and_numbers_are_arguments_and_results(key):
    def fn(w, rows, key, rate):
        saved = jax.random.bernoulli(key, rate, X.shape)
        y = jnp.where(saved, jnp.tanh(X[rows] @ w), 0.0)
        return {"y": y, "key": key, "none": None, "rate": rate}

    w = jnp.ones((64, 64)) / 64

    @functools.partial(jax.jit, static_argnums=0)
    def run(fn, w, rows):
        def loss(w, rows):
            out = fn(w, rows, key, 0.5)
            return jnp.sum(out["y"] ** 2), out

        return jax.grad(loss, (0, 1), has_aux=True, allow_int=True)(w, rows)

    rows = jnp.arange(64)[::-1]
    (grads, out), (expected_grads, expected) = (
        run(f, w, rows) for f in (coat.fp8_remat(fn), fn)
    )
    np.testing.assert_allclose(out["y"], expected["y"], rtol=1e-6)
    assert out["key"].dtype == key.dtype
    assert (out["none"], out["rate"]) == (None, 0.5)
    assert_close(grads[0], expected_grads[0], 0.05)
    assert grads[1].dtype == jax.dtypes.float0


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint])
def test_a_module_that_changes_nothing_is_called_from_any_transformation(transform):
    """Flax refuses changes of objects that a transformation closes over."""

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(64, 64, rngs=rngs)
            self.norm = nnx.BatchNorm(64, use_running_average=True, rngs=rngs)

        def __call__(self, x):
            return nnx.gelu(self.norm(self.linear(x)))

    plain, light = Mlp(nnx.Rngs(0)), coat.fp8_remat(Mlp(nnx.Rngs(0)))
    actual = transform(lambda x: light(x[None])[0])(X)
    np.testing.assert_allclose(actual, plain(X[None])[0], rtol=1e-4, atol=1e-5)
    assert coat.residual_report(light, X).rows
