"""Tests that `fp8_remat` runs gates and activations before FP8 matmuls as kernels.

An activation without a gate runs the gate's kernels, too. Near misses stay with XLA.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import oracle
from helpers.dots import (
    ACTIVATIONS,
    assert_follows_autodiff,
    assert_gate_with_options,
    assert_left_alone,
    assert_near,
    assert_one_gate,
    bfloat16,
    every_other_way,
    gates,
    linear,
    mlp_arguments,
    rows,
    tensor,
)
from helpers.gradients import fake, fp8_bytes, saved, saved_bytes, value_and_vjp
from helpers.marks import slow, slow_except
from helpers.models import normal

import coat_jax as coat
from coat_jax import fp8_dot_general, fp8_remat

TOKENS, K, F = 96, 48, 64
BF16, F32 = jnp.bfloat16, jnp.float32


def gated(product, dtype=BF16):
    """Returns a gated MLP of weights and x, which computes `product(gate, up)`."""

    def fn(weights, x):
        gate, up, down = (w.astype(dtype) for w in weights)
        return linear(product(linear(x, gate), linear(x, up)), down)

    return fn


def activated(activation, dtype=BF16):
    """Returns an MLP of weights and x, with a bias before `activation` and no gate."""

    def fn(weights, x):
        up, bias, down = (w.astype(dtype) for w in weights)
        return linear(activation(linear(x, up) + bias), down)

    return fn


def scaled(activation):
    """Returns an MLP with a scale before `activation`; XLA multiplies by it."""

    def fn(weights, x):
        up, scale, down = (w.astype(BF16) for w in weights)
        return linear(activation(linear(x, up) * scale), down)

    return fn


def silu(gate, up):
    return nn.silu(gate) * up


def of_gates(f=F, **options):
    """Returns the arguments of a gated MLP, and a gradient."""
    return mlp_arguments((K, f), (K, f), (f, 32), **options)


def of_activations(f=F, **options):
    """Returns the arguments of an MLP without a gate, and a gradient."""
    return mlp_arguments((K, f), (f,), (f, 32), **options)


EITHER = [(gated(silu), of_gates), (activated(nn.gelu), of_activations)]


def test_products_and_gradients_follow_their_formulas():
    """A gate is tested with one activation; the test below has all of them."""
    activation, exact = ACTIVATIONS["gelu_exact"]
    weights, x, dy = of_gates()
    fn = fp8_remat(gated(lambda gate, up: activation(gate) * up))
    y, (dws, dx) = value_and_vjp(fn, dy, weights, x)
    gate, up, down = (tensor(w.astype(BF16)) for w in weights)
    by_token = fake(np.asarray(x, np.float32), K).astype(np.float64)
    g, u = (bfloat16(by_token @ w) for w in (gate, up))
    assert_near(y, rows(exact(g) * u) @ down)
    # Backward reads the copies of gate and up, which are in groups of 16.
    g, u = (fake(v.astype(np.float32), 16).astype(np.float64) for v in (g, u))
    step = 1e-5
    slope = (exact(g + step) - exact(g - step)) / (2 * step)
    dyq = tensor(dy, oracle.E5M2)
    da = bfloat16(dyq @ down.T)
    dg, du = (tensor(v, oracle.E5M2) for v in (da * u * slope, da * exact(g)))
    again = tensor(fake(np.asarray(x, np.float32), 16))
    assert_near(dx, dg @ gate.T + du @ up.T)
    expected = [again.T @ dg, again.T @ du, tensor(exact(g) * u).T @ dyq]
    for dw, right in zip(dws, expected, strict=True):
        assert_near(dw, right)


@pytest.mark.parametrize("name", slow_except(["gelu", "gelu_exact"], ACTIVATIONS))
def test_activations_and_gradients_follow_their_formulas(name):
    activation, exact = ACTIVATIONS[name]
    weights, x, dy = of_activations()
    y, (dws, dx) = value_and_vjp(fp8_remat(activated(activation)), dy, weights, x)
    up, bias, down = (w.astype(BF16) for w in weights)
    up, down = tensor(up), tensor(down)
    by_token = fake(np.asarray(x, np.float32), K).astype(np.float64)
    h = bfloat16(by_token @ up + np.asarray(bias, float))
    assert_near(y, rows(exact(h)) @ down)
    # Backward reads the copy of h, which is in groups of 16.
    h = fake(h.astype(np.float32), 16).astype(np.float64)
    step = 1e-5
    slope = (exact(h + step) - exact(h - step)) / (2 * step)
    dyq = tensor(dy, oracle.E5M2)
    dh = bfloat16(bfloat16(dyq @ down.T) * slope)
    dhq = tensor(dh, oracle.E5M2)
    again = tensor(fake(np.asarray(x, np.float32), 16))
    assert_near(dx, dhq @ up.T)
    expected = [again.T @ dhq, dh.sum(0), tensor(exact(h)).T @ dyq]
    for dw, right in zip(dws, expected, strict=True):
        assert_near(dw, right, 2e-2)


PRODUCTS = [
    (silu, BF16),
    (silu, F32),
    (lambda gate, up: up * nn.silu(gate), BF16),
    (lambda gate, up: nn.silu(up) * gate, BF16),
    (lambda gate, up: gate * (jax.nn.sigmoid(gate) * up), BF16),
    (lambda gate, up: jax.jit(nn.silu)(gate) * up, BF16),
    (lambda gate, up: (nn.silu(gate.astype(F32)) * up).astype(BF16), BF16),
    (lambda gate, up: nn.gelu(gate.astype(F32)).astype(BF16) * up, BF16),
    (lambda gate, up: up * nn.gelu(gate, approximate=False), F32),
    (lambda gate, up: gate * 0.5 * up * jax.lax.erfc(-gate * math.sqrt(0.5)), F32),
]
UNGATED = [
    (nn.gelu, BF16),
    (nn.gelu, F32),
    (nnx.silu, BF16),
    (jax.jit(nn.silu), BF16),
    (lambda x: nn.silu(x.astype(F32)).astype(BF16), BF16),
    (lambda x: x * jax.nn.sigmoid(x), F32),
    (lambda x: nn.silu(2 * x), BF16),
    (lambda x: 0.5 * x * jax.lax.erfc(-x * math.sqrt(0.5)), F32),
]
FORMS = [(gated(form, dtype), of_gates, 2, dtype) for form, dtype in PRODUCTS]
FORMS += [(activated(form, dtype), of_activations, 1, dtype) for form, dtype in UNGATED]
FORM = "fn", "arguments", "arrays", "dtype"
FAST_FORMS = [FORMS[i] for i in (0, 2, 4, 7, 8, 10, 15, 17)]


@pytest.mark.internals
@pytest.mark.parametrize(FORM, slow_except(FAST_FORMS, FORMS))
def test_each_form_is_found(fn, arguments, arrays, dtype):
    weights, x, _ = arguments(dtype=dtype)
    expected = " ".join(arrays * [f"{x.dtype}[96,1,64]"])
    assert gates(fp8_remat(fn), weights, x) == {expected}


@pytest.mark.slow
@pytest.mark.parametrize(FORM, FORMS)
def test_each_form_computes_the_same(fn, arguments, arrays, dtype):
    del arrays
    weights, x, dy = arguments(dtype=dtype)
    assert_follows_autodiff(fn, dy, weights, x)


@pytest.mark.internals
def test_numbers_of_a_gate_may_be_read_elsewhere():
    def fn(weights, x, sizes):
        gate, up = (coat.fp8_ragged_dot(x, w, sizes) for w in weights[:2])
        ones = jnp.ones_like(gate)
        y = coat.fp8_ragged_dot(nn.silu(gate) * ones * up, weights[2], sizes)
        return y + ones

    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(2, 128, 128)), BF16) / 8 for _ in range(3)]
    x, sizes = jnp.asarray(rng.normal(size=(32, 128)), BF16), jnp.array([16, 16])
    actual, expected = (
        np.asarray(jax.jit(f)(weights, x, sizes), np.float32)
        for f in (fp8_remat(fn), fn)
    )
    assert np.linalg.norm(actual - expected) < 0.03 * np.linalg.norm(expected - 1)


NEAR_MISSES = {
    "another activation": lambda gate, up: nn.relu(gate) * up,
    "a slope of its own": lambda gate, up: gate * nn.sigmoid(1.702 * gate) * up,
    "another power": lambda gate, up: nn.silu(gate) * up * up,
    "a sum": lambda gate, up: nn.silu(gate) + up,
    "a bias": lambda gate, up: nn.silu(gate + 1) * up,
    "a factor": lambda gate, up: nn.silu(gate) * up * 2,
    "a limit": lambda gate, up: nn.silu(jnp.minimum(gate, 7)) * up,
    "one array": lambda gate, up: nn.silu(gate) * gate,
    "a narrow cast": lambda gate, up: (
        (nn.silu(gate).astype(jnp.float8_e4m3fn).astype(gate.dtype)) * up
    ),
    "a shift": lambda gate, up: nn.silu(gate) * jnp.roll(up, 1, axis=0),
    "a transpose": lambda gate, up: (nn.silu(gate).T * up.T).T,
    "a row": lambda gate, up: nn.silu(gate) * up[:1],
}
FAST_MISSES = [
    "another activation", "a sum", "a factor", "a limit", "a narrow cast", "a row",
]  # fmt: skip
UNGATED_MISSES = {
    "another activation": nn.relu,
    "a square": lambda x: jnp.square(nn.relu(x)),
    "a slope of its own": lambda x: x * nn.sigmoid(1.702 * x),
    "a factor": lambda x: nn.silu(x) * 2,
    "a bias after it": lambda x: nn.silu(x) + 1,
    "a narrow cast": lambda x: nn.silu(x).astype(jnp.float8_e4m3fn).astype(x.dtype),
    "a shift": lambda x: jnp.roll(nn.silu(x), 1, axis=0),
}


@pytest.mark.internals
@pytest.mark.parametrize("name", slow_except(FAST_MISSES, NEAR_MISSES))
def test_near_misses_of_gates_are_left_alone(name):
    weights, x, _ = of_gates()
    assert_left_alone("gated", gated(NEAR_MISSES[name]), weights, x)


@pytest.mark.internals
@pytest.mark.parametrize(
    "name", [slow(name) if name in NEAR_MISSES else name for name in UNGATED_MISSES]
)
def test_near_misses_of_activations_are_left_alone(name):
    weights, x, _ = of_activations()
    assert_left_alone("gated", scaled(UNGATED_MISSES[name]), weights, x)


def product_of(x, gate, up):
    return silu(linear(x, gate), linear(x, up))


# Functions of x, gate, up and down, with other readers or arguments of the gate.
READ_BY_OTHERS = {
    "returned": lambda x, g, u, d: (
        h := linear(x, g),
        linear(silu(h, linear(x, u)), d),
    ),
    "read twice": lambda x, g, u, d: linear(a := product_of(x, g, u), d) + a[..., :32],
    "two downs": lambda x, g, u, d: (
        linear(a := product_of(x, g, u), d),
        linear(a, d[:, :16]),
    ),
    "a third": lambda x, g, u, d: (linear(product_of(x, g, u), d), linear(x, g + u)),
    "other inputs": lambda x, g, u, d: linear(silu(linear(x, g), linear(2 * x, u)), d),
    "no matmul": lambda x, g, u, d: linear(silu(linear(x, g), x @ u), d),
}


@pytest.mark.parametrize(
    "name", slow_except(READ_BY_OTHERS.keys() - {"two downs"}, READ_BY_OTHERS)
)
def test_gates_that_others_read_are_left_alone(name):
    def fn(weights, x):
        return READ_BY_OTHERS[name](x, *(w.astype(BF16) for w in weights))

    weights, x, _ = of_gates()
    assert_left_alone("gated", fn, weights, x)


def test_activations_that_others_read_are_left_alone():
    def of_inner(results):
        """Returns a function of weights and x; `results` reads the scaled matmul."""

        def fn(weights, x):
            up, scale, down = (w.astype(BF16) for w in weights)
            return results(linear(x, up) * scale, down)

        return fn

    def wider_argument(h, down):
        y = linear(nn.silu(h.astype(F32)).astype(BF16), down)
        return y, h.sum()

    readers = [
        lambda h, down: (h, linear(nn.silu(h), down)),
        lambda h, down: linear(nn.silu(h), down) + h[..., :32],
        lambda h, down: linear(a := nn.silu(h), down) + a[..., :32],
        lambda h, down: (linear(a := nn.silu(h), down), linear(a, down[:, :16])),
        wider_argument,
    ]
    weights, x, _ = of_activations()
    for results in readers:
        assert_left_alone("gated", of_inner(results), weights, x)


@pytest.mark.parametrize(("fn", "arguments"), [EITHER[0], slow(*EITHER[1])])
@every_other_way
def test_options_of_what_is_saved_leave_the_kernel_on(fn, arguments, options):
    assert_gate_with_options(fn, options, *arguments())


def test_float16_is_left_alone():
    weights, x, _ = of_gates(dtype=jnp.float16)
    assert not gates(fp8_remat(gated(silu, jnp.float16)), weights, x)


@pytest.mark.parametrize(("fn", "arguments"), EITHER)
def test_gradients_under_strict_promotion(fn, arguments):
    weights, x, dy = arguments()

    def gradients(weights, x, dy):
        return jax.vjp(fp8_remat(fn), weights, x)[1](dy)

    with jax.numpy_dtype_promotion("strict"):
        types = jax.tree.leaves(jax.eval_shape(gradients, weights, x, dy))
    assert [t.dtype for t in types] == [a.dtype for a in (*weights, x)]


@pytest.mark.parametrize(("fn", "arguments"), EITHER)
@pytest.mark.parametrize(
    ("tokens", "f"), [slow((4, 1, 33), 144), ((2, 9), 40), slow((17,), 16)]
)
def test_edge_shapes(fn, arguments, tokens, f):
    weights, x, dy = arguments(f=f, tokens=tokens)
    runs = f == 40 and arguments is of_gates
    assert_one_gate(fn, weights, x, dy if runs else None)


def test_saved_are_codes_and_scales_of_gate_up_and_x():
    weights, x, _ = of_gates()
    light = fp8_remat(gated(silu))
    statistics = 4 * TOKENS + 2 * 4  # The largest scales of tokens; two scales.
    copies = 2 * fp8_bytes((TOKENS, F)) + fp8_bytes((TOKENS, K))
    assert saved_bytes(saved(light, weights, x, params=3)) == copies + statistics
    report = coat.residual_report(light, weights, x)
    selected = [row.kept for row in report.rows if row.shape == (TOKENS, F)]
    assert selected == 2 * ["E4M3, groups of 16"]


def test_saved_is_the_activations_argument():
    weights, x, _ = of_activations()
    actual = saved(fp8_remat(activated(nn.gelu)), weights, x, params=3)
    scales = 2 * 4  # Each array of codes has a scale of the whole, too.
    copies = fp8_bytes((TOKENS, F)) + fp8_bytes((TOKENS, K))
    assert saved_bytes(actual) == copies + scales


def test_flax_modules():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            def dense(n, name):
                options = {"use_bias": False, "dtype": BF16, "name": name}
                return nn.Dense(n, dot_general=fp8_dot_general, **options)

            h = nn.silu(dense(F, "gate")(x)) * dense(F, "up")(x)
            return dense(K, "down")(h)

    class Nnx(nnx.Module):
        def __init__(self):
            options = {"use_bias": False, "dot_general": fp8_dot_general}
            options |= {"dtype": BF16, "rngs": nnx.Rngs(0)}
            self.gate, self.up = (nnx.Linear(K, F, **options) for _ in range(2))
            self.down = nnx.Linear(F, K, **options)

        def __call__(self, x):
            return self.down(nnx.silu(self.gate(x)) * self.up(x))

    x = normal(1, 2, TOKENS, K, dtype=BF16)
    linen = Linen()
    params = linen.init(jax.random.key(0), x)
    assert len(gates(fp8_remat(linen).apply, params, x)) == 1
    graph, state = nnx.split(fp8_remat(Nnx()))
    assert len(gates(lambda s, x: nnx.merge(graph, s)(x), state, x)) == 1
