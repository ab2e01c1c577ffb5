"""Tests that `fp8_remat` gives gated MLPs the kernels of gates, and nothing else."""

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
from helpers.gradients import (
    fake,
    fp8_bytes,
    saved,
    saved_bytes,
    value_and_vjp,
)
from helpers.models import normal

import coat_jax as coat
from coat_jax import fp8_dot_general, fp8_remat

TOKENS, K, F = 96, 48, 64
BF16, F32 = jnp.bfloat16, jnp.float32


def mlp(product, dtype=BF16):
    """Returns a function of weights and x with `product(gate, up)` before the last."""

    def fn(weights, x):
        gate, up, down = (w.astype(dtype) for w in weights)
        return linear(product(linear(x, gate), linear(x, up)), down)

    return fn


def silu(gate, up):
    return nn.silu(gate) * up


def given(f=F, **options):
    return mlp_arguments((K, f), (K, f), (f, 32), **options)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_products_and_gradients_follow_their_formulas(name):
    activation, exact = ACTIVATIONS[name]
    weights, x, dy = given()
    fn = fp8_remat(mlp(lambda gate, up: activation(gate) * up))
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


FORMS = [
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


@pytest.mark.internals
@pytest.mark.parametrize(("product", "dtype"), FORMS)
def test_gates_are_found_in_each_form(product, dtype):
    weights, x, _ = given(dtype=dtype)
    fn = mlp(product, dtype)
    assert gates(fp8_remat(fn), weights, x) == {" ".join(2 * [f"{x.dtype}[96,1,64]"])}
    assert not gates(fn, weights, x)


@pytest.mark.slow
@pytest.mark.parametrize(("product", "dtype"), FORMS)
def test_gates_of_each_form_compute_the_same(product, dtype):
    weights, x, dy = given(dtype=dtype)
    assert_follows_autodiff(mlp(product, dtype), dy, weights, x)


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


@pytest.mark.internals
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_alone(name):
    fn = mlp(NEAR_MISSES[name])
    weights, x, _ = given()
    assert_left_alone("gated", fn, weights, x)


def test_what_others_read_is_left_alone():
    def returned(weights, x):
        gate, up, down = (w.astype(BF16) for w in weights)
        gate = linear(x, gate)
        return gate, linear(nn.silu(gate) * linear(x, up), down)

    def read_twice(weights, x):
        gate, up, down = (w.astype(BF16) for w in weights)
        product = nn.silu(linear(x, gate)) * linear(x, up)
        return linear(product, down) + product[..., :32]

    def two_downs(weights, x):
        gate, up, down = (w.astype(BF16) for w in weights)
        product = nn.silu(linear(x, gate)) * linear(x, up)
        return linear(product, down), linear(product, down[:, :16])

    def a_third(weights, x):
        gate, up, down = (w.astype(BF16) for w in weights)
        product = nn.silu(linear(x, gate)) * linear(x, up)
        return linear(product, down), linear(x, gate + up)

    def other_inputs(weights, x):
        gate, up, down = (w.astype(BF16) for w in weights)
        return linear(nn.silu(linear(x, gate)) * linear(2 * x, up), down)

    def no_matmul(weights, x):
        gate, up, down = (w.astype(BF16) for w in weights)
        return linear(nn.silu(linear(x, gate)) * (x @ up), down)

    weights, x, _ = given()
    for fn in (returned, read_twice, two_downs, a_third, other_inputs, no_matmul):
        assert_left_alone("gated", fn, weights, x)


@every_other_way
def test_options_of_what_is_saved_leave_the_kernel_on(options):
    assert_gate_with_options(mlp(silu), options, *given())


def test_float16_is_left_alone():
    weights, x, _ = given(dtype=jnp.float16)
    assert not gates(fp8_remat(mlp(silu, jnp.float16)), weights, x)


@pytest.mark.parametrize(
    ("tokens", "f"), [((4, 1, 33), 144), ((2, 9), 40), ((17,), 16)]
)
def test_edge_shapes(tokens, f):
    weights, x, dy = given(f=f, tokens=tokens)
    assert_one_gate(mlp(silu), weights, x, dy if f == 40 else None)


def test_saved_are_codes_and_scales_of_gate_up_and_x():
    weights, x, _ = given()
    actual = saved(fp8_remat(mlp(silu)), weights, x, params=3)
    statistics = 4 * TOKENS + 2 * 4  # The largest scales of tokens; two scales.
    copies = 2 * fp8_bytes((TOKENS, F)) + fp8_bytes((TOKENS, K))
    assert saved_bytes(actual) == copies + statistics
    report = coat.residual_report(fp8_remat(mlp(silu)), weights, x)
    selected = [row.kept for row in report.rows if row.shape == (TOKENS, F)]
    assert selected == 2 * ["E4M3, groups of 16"]


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
