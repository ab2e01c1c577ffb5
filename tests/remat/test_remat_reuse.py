"""Tests that equal layers under fp8_remat are traced once, and that others are not."""

import dataclasses
import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import coat_jax as coat
from coat_jax.remat.fingerprint import fingerprint
from coat_jax.remat.outline import outlined
from pallas_kernels import explain

X = jax.random.normal(jax.random.key(0), (64, 64))
FACTOR = 2.0


class Traced:
    """Counts how often a function is traced, in an attribute of a class."""

    count = 0


class Layer(nnx.Module):
    """A matmul and a function, times a static number."""

    def __init__(self, seed, function=jnp.tanh, factor=1.0):
        self.w = nnx.Param(jax.random.normal(jax.random.key(seed), (64, 64)))
        self.function, self.factor = function, factor

    def __call__(self, x):
        Traced.count += 1
        return self.function(x @ self.w[...]) * self.factor


def function(w, x):
    Traced.count += 1
    return jnp.tanh(x @ w)


def times(n):
    return lambda x: x * n


def gradients(layers, x=X):
    """Returns gradients through `layers`, applied one after another, under jit."""
    graph, state = nnx.split(nnx.List(layers))

    @jax.jit
    @jax.grad
    def grad(state):
        y = x
        for layer in nnx.merge(graph, state):
            y = layer(y)
        return jnp.sum(y**2)

    return jax.tree.leaves(grad(state))


def assert_near(actual, expected):
    """Checks arrays up to the rounding of FP8 copies."""
    for a, b in zip(actual, expected, strict=True):
        assert jnp.linalg.norm(a - b) < 0.1 * jnp.linalg.norm(b)
        assert jnp.any(b != 0)


def test_equal_layers_are_traced_once():
    layers = [Layer(i) for i in range(4)]
    expected = gradients(layers)
    Traced.count = 0
    actual = gradients([coat.fp8_remat(layer) for layer in layers])
    assert Traced.count == 1
    assert_near(actual, expected)


def test_a_function_is_traced_once_for_equal_layers():
    weights = list(jax.random.normal(jax.random.key(1), (4, 64, 64)))

    def loss(light, weights):
        y = X
        for w in weights:
            y = light(w, y)
        return jnp.sum(y**2)

    expected = jax.grad(functools.partial(loss, function))(weights)
    Traced.count = 0
    light = coat.fp8_remat(function)
    actual = jax.jit(jax.grad(functools.partial(loss, light)))(weights)
    assert Traced.count == 1
    assert_near(actual, expected)


def test_layers_of_other_static_attributes_differ():
    kinds = [
        {},
        {"factor": 3.0},
        {"function": jnp.sin},
        {"function": lambda x: -x},
        {"function": functools.partial(jnp.clip, max=0.5)},
        {"function": functools.partial(jnp.clip, max=0.25)},
        *({"function": times(n)} for n in (2.0, 3.0)),
    ]

    def passes(wrap):
        layers = nnx.List([wrap(Layer(0, **kind)) for kind in kinds])
        graph, state = nnx.split(layers)

        @jax.jit
        def run(state):
            def loss(state):
                ys = [layer(X) for layer in nnx.merge(graph, state)]
                return sum(jnp.sum(y**2) for y in ys), ys

            return jax.grad(loss, has_aux=True)(state)

        return map(jax.tree.leaves, run(state))

    (grads, ys), (expected_grads, expected) = map(passes, (coat.fp8_remat, lambda x: x))
    for a, b in zip(ys, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_near(grads, expected_grads)


@pytest.mark.parametrize("factors", [(1, 1.0, True), (0.0, -0.0)])
def test_equal_numbers_of_another_type_or_sign_differ(factors):
    x = jnp.ones(4, jnp.int32)
    for factor in factors:
        light = coat.fp8_remat(lambda x, n=factor: x * n)
        actual, expected = jax.jit(light)(x), x * factor
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(jnp.signbit(actual), jnp.signbit(expected))


def test_an_attribute_that_changes_between_calls_is_read_again():
    light = coat.fp8_remat(Layer(0))
    first = gradients([light])
    light.factor = 3.0
    assert_near(gradients([light]), [9 * g for g in first])
    light.factor = 1.0
    np.testing.assert_array_equal(gradients([light])[0], first[0])


class Counting(Layer):
    """A layer that counts its calls, sums up its inputs, and makes a variable."""

    def __init__(self, seed):
        super().__init__(seed)
        self.calls, self.made = 0, nnx.data(None)
        self.total = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls += 1
        self.total[...] += jnp.sum(x)
        self.made = nnx.Cache(x[0] * self.calls)
        return super().__call__(x)


@pytest.mark.parametrize("jit", [nnx.jit, lambda fn: fn])
def test_changes_of_equal_layers_reach_each_of_them(jit):
    def changed(layers):
        @jit
        def run(layers, x):
            for layer in [*layers, *layers]:
                x = layer(x)
            return x

        return run(nnx.List(layers), X), *map(nnx.state, layers), layers[1].calls

    expected = changed([Counting(i) for i in range(3)])
    actual = changed([coat.fp8_remat(Counting(i)) for i in range(3)])
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert actual[-1] == 2


@dataclasses.dataclass
class Settings:
    """Settings that a test changes."""

    factor: float


class Opaque:
    """An object with attributes of which nothing is known."""

    factor = 1.0


def _by_nonlocal():
    factor = 1.0

    def change():
        nonlocal factor
        factor = 3.0

    return lambda x: x * factor, change


def _by_attribute(settings):
    def change():
        settings.factor = 3.0

    return lambda x: x * settings.factor, change


def _by_element(values):
    def change():
        values[0] = 3.0

    return lambda x: x * values[0], change


def _by_variable(value):
    variable = nnx.Param(value)

    def change():
        variable[...] = 3 * value

    return lambda x: x * variable[...], change


@pytest.mark.parametrize(
    ("fn", "change"),
    [
        _by_nonlocal(),
        _by_attribute(Settings(1.0)),
        _by_attribute(Opaque()),
        _by_element([1.0]),
        _by_element({0: 1.0}),
        _by_element(np.ones(1)),
        _by_variable(jnp.ones(())),
        _by_variable(jnp.ones(64)),
    ],
)
def test_a_closure_whose_value_changes_is_read_again(fn, change):
    light = coat.fp8_remat(fn)

    def grads():
        # A new function each time, of which jit has nothing.
        return jax.jit(jax.grad(lambda x: jnp.sum(light(x) ** 2)))(X)

    first = grads()
    change()
    np.testing.assert_allclose(grads(), 9 * first, rtol=1e-6)


def test_a_global_that_changes_is_read_again(monkeypatch):
    light = coat.fp8_remat(lambda x: x * FACTOR)
    np.testing.assert_array_equal(jax.jit(lambda x: light(x))(X), 2 * X)
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    np.testing.assert_array_equal(jax.jit(lambda x: light(x))(X), 4 * X)


def test_types_of_arrays_and_settings_of_jax_differ():
    light = coat.fp8_remat(function)

    def program(x):
        fn = jax.grad(lambda w, x: jnp.sum(light(w, x).astype(jnp.float32)))
        return str(jax.make_jaxpr(fn)(x, x))

    assert "bf16[64,64] = dot_general" not in program(X)
    assert "bf16[64,64] = dot_general" in program(X.astype(jnp.bfloat16))
    assert "bf16[64,64] = dot_general" not in program(X)
    assert "Precision.HIGHEST" not in program(X)
    with jax.default_matmul_precision("highest"):
        assert "Precision.HIGHEST" in program(X)
    assert "Precision.HIGHEST" not in program(X)


def test_options_differ():
    def kept(**options):
        light = coat.fp8_remat(function, **options)
        report = coat.residual_report(lambda w, x: light(w, light(w, x)), X, X)
        return sorted(row.kept for row in report.rows if not row.is_argument)

    default = kept()
    assert kept(format=coat.E5M2) != default
    assert kept(where=lambda residual: False) != default
    nothing = jax.checkpoint_policies.nothing_saveable
    assert kept(policy=nothing) != kept(policy=jax.checkpoint_policies.dots_saveable)
    assert kept() == default


def test_layers_with_effects_have_all_of_them():
    totals = []

    class Loud(Layer):
        def __call__(self, x):
            jax.debug.callback(lambda total: totals.append(float(total)), jnp.sum(x))
            return super().__call__(x)

    layers = [Loud(i, factor=0.5) for i in range(3)]
    gradients(layers)
    jax.effects_barrier()
    expected = sorted(totals)
    totals.clear()
    gradients([coat.fp8_remat(layer) for layer in layers])
    jax.effects_barrier()
    np.testing.assert_allclose(sorted(totals), expected, rtol=1e-6)
    assert len(expected) == 3


def test_arrays_are_not_kept():
    def refs():
        w, closed = jnp.ones((64, 64)), jnp.ones((64, 64)) * 2
        light = coat.fp8_remat(lambda w, x: jnp.tanh(x @ w) * closed)
        outer = coat.fp8_remat(function)
        jax.jit(jax.grad(lambda w: jnp.sum(outer(w, light(w, X)))))(w)
        jax.grad(lambda w: jnp.sum(outer(w, light(w, X))))(w)
        return weakref.ref(w), weakref.ref(closed)

    actual = refs()
    gc.collect()
    assert [ref() for ref in actual] == [None, None]


def test_no_tracer_leaks():
    light = coat.fp8_remat(function)

    @jax.jit
    @jax.grad
    def grad(w):
        scaled = coat.fp8_remat(lambda x: jnp.tanh(x * w[0]))
        return jnp.sum(light(w, scaled(light(w, X))))

    with jax.checking_leaks():
        first = grad(X)
    np.testing.assert_allclose(grad(X), first, rtol=1e-5, atol=1e-6)


def test_threads_trace_their_own_calls():
    actual = {}

    def run(n):
        light = coat.fp8_remat(Layer(0, factor=float(n)))
        actual[n] = gradients([light])[0]

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in (1, 2, 3):
        alone = gradients([coat.fp8_remat(Layer(0, factor=float(n)))])[0]
        np.testing.assert_array_equal(actual[n], alone)
        assert_near([actual[n]], gradients([Layer(0, factor=float(n))]))


def test_explain_counts_every_layer():
    layers = [coat.fp8_remat(Layer(i)) for i in range(3)]
    of_one_layer = explain(gradients, layers[:1]).choices
    assert len(of_one_layer) > 0
    assert len(explain(gradients, layers).choices) >= 3 * len(of_one_layer)


def test_an_outlined_function_returns_arguments_as_they_are():
    @outlined
    def fn(x, y):
        z = lax.sin(x)
        return {"x": x, "z": z, "again": z, "y": y, "one": 1.0}

    def run(x, y):
        out = fn(x, y)
        assert out["x"] is x
        assert out["y"] is y
        assert out["z"] is out["again"]
        return out

    program = jax.make_jaxpr(run)(X, X[0])
    (eqn,) = (e for e in program.eqns if e.primitive.name == "jit")
    assert [v.aval.shape for v in eqn.outvars] == [(64, 64), ()]
    out = jax.jit(run)(X, X[0])
    np.testing.assert_array_equal(out["again"], jax.jit(jnp.sin)(X))
    assert out["one"] == 1


def test_fingerprints():
    def of(n):
        return lambda x: x + n

    assert fingerprint(of(1)) == fingerprint(of(1))
    assert fingerprint(of(1)) != fingerprint(of(1.0))
    assert fingerprint(of((1, {"a": [2]}))) == fingerprint(of((1, {"a": [2]})))
    assert fingerprint(of((1, {"a": [2]}))) != fingerprint(of((1, {"a": [3]})))
    assert fingerprint(Settings(1.0)) != fingerprint(Settings(2.0))
    assert fingerprint(jnp.tanh) == fingerprint(jnp.tanh) != fingerprint(jnp.sin)
    cycle = []
    cycle.append(cycle)
    unknown = [X, np.ones(2), Opaque(), iter([1]), cycle, nnx.Rngs(0), object()]
    for value in unknown:
        assert fingerprint(of(value)) is None, value
