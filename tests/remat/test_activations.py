"""Tests that activations before FP8 matmuls run the gate's kernels in `fp8_remat`."""

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

from coat_jax import fp8_remat

TOKENS, K, F = 96, 48, 64
BF16, F32 = jnp.bfloat16, jnp.float32


def mlp(activation, dtype=BF16):
    """Returns a function of weights and x: an MLP with biases and no gate."""

    def fn(weights, x):
        up, bias, down = (w.astype(dtype) for w in weights)
        return linear(activation(linear(x, up) + bias), down)

    return fn


def scaled(activation):
    """Returns the MLP with scales in the place of biases, which stay with XLA."""

    def fn(weights, x):
        up, scale, down = (w.astype(BF16) for w in weights)
        return linear(activation(linear(x, up) * scale), down)

    return fn


def given(f=F, **options):
    return mlp_arguments((K, f), (f,), (f, 32), **options)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_results_and_gradients_follow_their_formulas(name):
    activation, exact = ACTIVATIONS[name]
    weights, x, dy = given()
    y, (dws, dx) = value_and_vjp(fp8_remat(mlp(activation)), dy, weights, x)
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
    for dw, right in zip(
        dws, [again.T @ dhq, dh.sum(0), tensor(exact(h)).T @ dyq], strict=True
    ):
        assert_near(dw, right, 2e-2)


FORMS = [
    (nn.gelu, BF16),
    (nn.gelu, F32),
    (nnx.silu, BF16),
    (jax.jit(nn.silu), BF16),
    (lambda x: nn.silu(x.astype(F32)).astype(BF16), BF16),
    (lambda x: x * jax.nn.sigmoid(x), F32),
    (lambda x: nn.silu(2 * x), BF16),
    (lambda x: 0.5 * x * jax.lax.erfc(-x * math.sqrt(0.5)), F32),
]


@pytest.mark.internals
@pytest.mark.parametrize(("activation", "dtype"), FORMS)
def test_activations_are_found_in_each_form(activation, dtype):
    weights, x, _ = given(dtype=dtype)
    fn = mlp(activation, dtype)
    assert gates(fp8_remat(fn), weights, x) == {f"{x.dtype}[96,1,64]"}
    assert not gates(fn, weights, x)


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "dtype"), FORMS)
def test_activations_of_each_form_compute_the_same(activation, dtype):
    weights, x, dy = given(dtype=dtype)
    assert_follows_autodiff(mlp(activation, dtype), dy, weights, x)


NEAR_MISSES = {
    "another activation": nn.relu,
    "a square": lambda x: jnp.square(nn.relu(x)),
    "a slope of its own": lambda x: x * nn.sigmoid(1.702 * x),
    "a factor": lambda x: nn.silu(x) * 2,
    "a bias behind it": lambda x: nn.silu(x) + 1,
    "a narrow cast": lambda x: nn.silu(x).astype(jnp.float8_e4m3fn).astype(x.dtype),
    "a shift": lambda x: jnp.roll(nn.silu(x), 1, axis=0),
}


@pytest.mark.internals
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_alone(name):
    weights, x, _ = given()
    assert_left_alone("gated", scaled(NEAR_MISSES[name]), weights, x)


def test_what_others_read_is_left_alone():
    def inner(weights, x):
        up, scale, _ = (w.astype(BF16) for w in weights)
        return linear(x, up) * scale

    def argument_returned(weights, x):
        h = inner(weights, x)
        return h, linear(nn.silu(h), weights[2].astype(BF16))

    def argument_read_twice(weights, x):
        h = inner(weights, x)
        return linear(nn.silu(h), weights[2].astype(BF16)) + h[..., :32]

    def result_read_twice(weights, x):
        a = nn.silu(inner(weights, x))
        return linear(a, weights[2].astype(BF16)) + a[..., :32]

    def two_matmuls(weights, x):
        a, down = nn.silu(inner(weights, x)), weights[2].astype(BF16)
        return linear(a, down), linear(a, down[:, :16])

    def wider_argument(weights, x):
        h = inner(weights, x)
        wide = h.astype(F32)
        y = linear(nn.silu(wide).astype(BF16), weights[2].astype(BF16))
        return y, h.sum()

    weights, x, _ = given()
    for fn in (
        argument_returned,
        argument_read_twice,
        result_read_twice,
        two_matmuls,
        wider_argument,
    ):
        assert_left_alone("gated", fn, weights, x)


@every_other_way
def test_options_of_what_is_saved_leave_the_kernel_on(options):
    assert_gate_with_options(mlp(nn.silu), options, *given())


@pytest.mark.parametrize(
    ("tokens", "f"), [((4, 1, 33), 144), ((2, 9), 40), ((17,), 16)]
)
def test_edge_shapes(tokens, f):
    weights, x, dy = given(f=f, tokens=tokens)
    assert_one_gate(mlp(nn.gelu), weights, x, dy if f == 40 else None)


def test_saved_is_the_activations_argument():
    weights, x, _ = given()
    actual = saved(fp8_remat(mlp(nn.gelu)), weights, x, params=3)
    scales = 2 * 4  # Each array of codes has a scale of the whole, too.
    copies = fp8_bytes((TOKENS, F)) + fp8_bytes((TOKENS, K))
    assert saved_bytes(actual) == copies + scales
