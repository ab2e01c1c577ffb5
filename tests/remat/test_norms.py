"""Tests that `fp8_remat` runs norms before FP8 matmuls as kernels, and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import layers, oracle
from helpers.dots import (
    assert_follows_autodiff,
    assert_left_alone,
    assert_near,
    every_other_way,
    linear,
    ran,
    rows,
    tensor,
)
from helpers.gradients import (
    FP8,
    assert_close,
    fake,
    fp8_bytes,
    saved,
    saved_bytes,
    value_and_vjp,
)
from helpers.models import normal

import pallas_kernels as pk
from coat_jax import fp8_remat

# There are as many tokens as columns, so that shapes do not tell them apart.
TOKENS, K, N = 48, 48, 32
BF16, F32 = jnp.bfloat16, jnp.float32
EPS = 1e-3


def after(norm):
    """Returns a function of parameters and x with matmuls after `norm`."""

    def fn(params, x):
        weights, *columns = params
        h = norm(x, *columns)
        return sum(linear(h, w.astype(BF16)) for w in weights).astype(BF16)

    return fn


def given(tokens=(TOKENS,), columns=2, products=2):
    """Returns parameters, activations of several sizes, and a gradient."""
    weights = [normal(i, K, N, scale=0.2) for i in range(products)]
    params = weights, *(1 + normal(5 + i, K, scale=0.3) for i in range(columns))
    x = normal(9, *tokens, K, dtype=BF16).at[..., 3].mul(8)
    return params, x, normal(20, *tokens, N, dtype=BF16)


def norms(fn, *args) -> set[str]:
    """Returns the input types of norms that kernels compute in the forward pass."""
    inputs = {x for x, *_ in ran("norm", fn, *args)}
    return {x for x in inputs if x.startswith("bfloat16")}


def mean(x):
    return jnp.mean(x, axis=-1, keepdims=True)


def rms(x, scale, bias=None, eps=EPS):
    y = x.astype(F32)
    y = y * jax.lax.rsqrt(mean(jnp.square(y)) + eps) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


def layer(x, scale, bias):
    y = x.astype(F32)
    y = (y - mean(y)) / jnp.sqrt(jnp.var(y, axis=-1, keepdims=True) + EPS)
    return (y * scale + bias).astype(x.dtype)


@pytest.mark.parametrize(("kind", "norm"), [("rms", rms), ("layer", layer)])
def test_results_and_gradients_follow_their_formulas(kind, norm):
    """The backward pass reads the norm's input in groups of 16."""
    params, x, dy = given()
    fn = fp8_remat(after(norm))
    assert len(norms(fn, params, x)) == 1
    y, ((dws, dscale, dbias), dx) = value_and_vjp(fn, dy, params, x)
    weights, scale, bias = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    weights = [tensor(w.astype(BF16)) for w in weights]
    exact = functools.partial(layers.norm, kind=kind, eps=EPS)
    h = exact(np.asarray(x, np.float64), scale, bias)
    products = [np.asarray(jnp.asarray(rows(h) @ w, BF16), float) for w in weights]
    assert_near(y, sum(products))
    saved_x = fake(np.asarray(x, np.float32), 16).astype(np.float64)
    dyq = tensor(dy, oracle.E5M2)
    dh = sum(dyq @ w.T for w in weights)
    centered = saved_x - saved_x.mean(-1, keepdims=True) * (kind == "layer")
    rate = 1 / np.sqrt(np.mean(centered**2, -1, keepdims=True) + EPS)
    z, g = centered * rate, dh * scale
    expected = rate * (g - z * np.mean(g * z, -1, keepdims=True))
    if kind == "layer":
        expected -= rate * g.mean(-1, keepdims=True)
    assert_near(dx, expected)
    assert_near(dscale, np.sum(dh * z, axis=0))
    assert_near(dbias, np.sum(dh, axis=0))
    for dw in dws:
        assert_near(dw, tensor(exact(saved_x, scale, bias)).T @ dyq)


def module(make, **options):
    """Returns a norm of Flax as a function of x and the norm's parameters."""
    graph, state = nnx.split(make(K, dtype=BF16, rngs=nnx.Rngs(0), **options))
    leaves, tree = jax.tree.flatten(state)

    def norm(x, *columns):
        return nnx.merge(graph, tree.unflatten(columns[: len(leaves)]))(x)

    return norm


def gemma(x, scale, bias):
    y = x.astype(F32)
    y = y / jnp.sqrt(mean(y * y) + EPS)
    return (y * (1 + scale)).astype(x.dtype)


def rounded_before(x, scale, bias):
    y = x.astype(F32)
    y = (y * jax.lax.rsqrt(mean(y**2) + EPS)).astype(x.dtype)
    return y * scale.astype(x.dtype)


def by_sums(x, scale, bias):
    y = x.astype(F32)
    mu = jnp.sum(y, -1, keepdims=True) * (1 / K)
    variance = jnp.sum((y - mu) ** 2, -1, keepdims=True) * (1 / K)
    return (bias + (y - mu) * (scale * jax.lax.rsqrt(EPS + variance))).astype(x.dtype)


def without_parameters(x, scale, bias):
    return rms(x, 1.0)


FORMS = {
    "nnx RMSNorm": module(nnx.RMSNorm),
    "nnx RMSNorm, no scale": module(nnx.RMSNorm, use_scale=False),
    "nnx LayerNorm": module(nnx.LayerNorm),
    "nnx LayerNorm, no bias": module(nnx.LayerNorm, use_bias=False),
    "nnx LayerNorm, two passes": module(nnx.LayerNorm, use_fast_variance=False),
    "linen RMSNorm": lambda x, scale, bias: nn.RMSNorm(dtype=BF16).apply(
        {"params": {"scale": scale}}, x
    ),
    "linen LayerNorm": lambda x, scale, bias: nn.LayerNorm(dtype=BF16).apply(
        {"params": {"scale": scale, "bias": bias}}, x
    ),
    "by hand": lambda x, scale, bias: rms(x, scale),
    "with var": layer,
    "one more than the scale": gemma,
    "rounded before the scale": rounded_before,
    "by sums": by_sums,
    "without parameters": without_parameters,
    "jitted": jax.jit(layer),
}


@pytest.mark.internals
@pytest.mark.parametrize("name", FORMS)
def test_norms_are_found_in_each_form(name):
    params, x, _ = given(products=1)
    fn = after(FORMS[name])
    assert norms(fp8_remat(fn), params, x) == {f"bfloat16[{TOKENS},{K}]"}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [(TOKENS,), (2, 24)])
@pytest.mark.parametrize("name", FORMS)
def test_norms_of_each_form_compute_the_same(name, tokens):
    params, x, dy = given(tokens, products=1)
    assert_follows_autodiff(after(FORMS[name]), dy, params, x)


NEAR_MISSES = {
    "no eps": lambda x, s, b: x * jax.lax.rsqrt(mean(x * x)),
    "an eps that is computed": lambda x, s, b: rms(x, s, eps=jnp.exp(b[0])),
    "another axis": lambda x, s, b: rms(x.T, s).T,
    "a factor": lambda x, s, b: rms(x, s) * 2,
    "a sum": lambda x, s, b: rms(x, s) + x,
    "a sum of squares": lambda x, s, b: x * jax.lax.rsqrt(K * mean(x * x) + EPS) * s,
    "a mean of half": lambda x, s, b: x * jax.lax.rsqrt(mean(x * x) / 2 + EPS),
    "a scale of tokens": lambda x, s, b: rms(x, s.reshape(TOKENS, 1)),
    "a scale of tokens, broadcast": lambda x, s, b: rms(
        x, jax.lax.broadcast_in_dim(s, x.shape, (0,))
    ),
    "two scales": lambda x, s, b: rms(x, s) * b.astype(x.dtype),
    "two biases": lambda x, s, b: rms(x, s, b) + s.astype(x.dtype),
    "a bias before the scale": lambda x, s, b: (rms(x, 1.0) + b.astype(BF16)) * s,
    "a wide input": lambda x, s, b: rms(x.astype(F32) * 1.5, s).astype(BF16),
    "a wide result": lambda x, s, b: rms(x.astype(F32), s),
    "a narrow cast": lambda x, s, b: rms(x, s).astype(jnp.float8_e4m3fn).astype(BF16),
    "another function": lambda x, s, b: jnp.tanh(rms(x, s)),
}


@pytest.mark.internals
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_alone(name):
    params, x, _ = given()
    assert_left_alone("norm", after(NEAR_MISSES[name]), params, x)


@pytest.mark.parametrize("shape", [(4, 1), (1, 1)])
def test_rows_of_one_element_have_no_norm_that_is_known(shape):
    def fn(w, x):
        y = jnp.reshape(x, ()).reshape(shape) if shape == (1, 1) else x
        return linear(y * jax.lax.rsqrt(3 * y * y + EPS), w)

    w, x = normal(1, 1, N, dtype=BF16), normal(2, *shape, dtype=BF16)
    assert not norms(fp8_remat(fn), w, x)
    dy = normal(3, shape[0], N, dtype=BF16)
    merged, plain = (value_and_vjp(f, dy, w, x)[0] for f in (fp8_remat(fn), fn))
    assert_close(merged, plain, 0.1)


def read_by_another(params, x):
    h = rms(x, params[1])
    return linear(h, params[0][0].astype(BF16)) + h[..., :N]


def returned(params, x):
    h = rms(x, params[1])
    return linear(h, params[0][0].astype(BF16)), h


def of_parameters_only(params, x):
    return linear(x, linear(rms(params[0][0].T.astype(BF16), params[1]).T, jnp.eye(N)))


@pytest.mark.parametrize("fn", [read_by_another, returned, of_parameters_only])
def test_a_norm_that_others_read_is_left_alone(fn):
    params, x, _ = given()
    assert not norms(fp8_remat(fn), params, x)


@every_other_way
def test_options_of_what_is_saved_leave_the_kernel_on(options):
    params, x, dy = given()
    fn = after(rms)
    light = fp8_remat(fn, **options)
    assert norms(light, params, x)
    formats = {str(r.dtype) for r in saved(light, params, x) if r.dtype in FP8}
    # Small arrays are saved as they are, except by kernels.
    assert "format" not in options or formats <= {"float8_e5m2"}
    if "key" in options:  # One numeric case: the others change what is saved alone.
        assert_follows_autodiff(fn, dy, params, x, tolerance=0.2, **options)


def test_a_stream_in_float32_is_cast_before_the_norm():
    params, x, _ = given()

    def fn(params, x):
        return after(rms)(params, (x.astype(F32) * 1.1).astype(BF16))

    assert len(norms(fp8_remat(fn), params, x)) == 1


def test_one_copy_of_the_input_is_saved():
    params, x, _ = given()
    actual = saved(fp8_remat(after(rms)), params, x)
    one_scale = 4  # The norm's output has one in backward.
    assert saved_bytes(actual) == fp8_bytes((TOKENS, K), 16) + one_scale


def test_a_gated_mlp_reads_the_norm():
    def mlp(params, x):
        (gate, up), scale, down = params
        h = rms(x, scale)
        a = nn.silu(linear(h, gate.astype(BF16))) * linear(h, up.astype(BF16))
        return linear(a, down.astype(BF16))

    (weights, scale), x, _ = given(columns=1)
    params, fn = (weights, scale, normal(8, N, 16)), fp8_remat(mlp)
    choices = pk.explain(lambda *args: jax.vjp(fn, *args)[0], params, x).choices
    assert {"norm", "gated"} <= {c.operation for c in choices}
