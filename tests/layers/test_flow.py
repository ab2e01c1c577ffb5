"""Tests segments of the FP8 layer against autodiff of fake-quantized plain segments.

A segment's backward pass is a chain of vector-Jacobian products of plain functions,
each taken at the dequantized arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import oracle, segments
from helpers.gradients import fake, saved, saved_bytes, value_and_vjp
from helpers.marks import slow
from helpers.models import normal

from coat_jax.layers import flow, parts, shards

TOKENS = (2, 24)
HIDDEN, INNER, HEAD_DIM = 64, 96, 16
BF16 = jnp.bfloat16


def float32(x):
    return jnp.asarray(x, jnp.float32)


def tensor(x, format: oracle.Format = oracle.E4M3):
    """Quantizes with one scale and dequantizes."""
    return jnp.asarray(fake(np.asarray(x, np.float32), None, format))


def groups(x, size=16):
    return jnp.asarray(fake(np.asarray(x, np.float32), size))


def rows(x):
    """Quantizes with one scale per token and dequantizes."""
    x = np.asarray(x, np.float32)
    scale = np.abs(x).max(axis=-1, keepdims=True) * np.float32(1 / 448)
    return jnp.asarray(oracle.E4M3.round(x / scale) * scale)


def weight_rows(w):
    """Quantizes with one bfloat16 scale per output feature and dequantizes."""
    return groups(w, w.shape[-1])


def norm(kind, weight, x):
    x = float32(x)
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return x if weight is None else x * float32(weight)


def matmul(x, w):
    return jnp.tensordot(x, w, axes=(-1, -1), precision="highest")


def product_grads(x, w, dy):
    """Returns the gradients of a matmul of arrays that are quantized per tensor."""
    _, vjp = jax.vjp(matmul, tensor(x), tensor(w))
    return vjp(tensor(dy, oracle.E5M2))


def assert_near(actual, expected, error: float):
    """Asserts that norm(a - b) <= error * norm(b) for each array."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for a, b in zip(actual, expected, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= error * np.linalg.norm(b)


def weights(*shapes, kind="rms", dtype=BF16):
    """Returns parameters by name, including the norm's weight."""
    params = {
        name: normal(i, *shape, dtype=dtype, scale=0.1)
        for i, (name, shape) in enumerate(shapes)
    }
    norm_weight = 1 + normal(9, HIDDEN, dtype=dtype, scale=0.2)
    return {"norm": norm_weight if kind == "rms" else None, **params}


# Where BF16 roundings differ, a few FP8 roundings go the other way.
NEAR = 0.01


@pytest.mark.parametrize(
    ("kind", "gate", "dtype"),
    [
        slow("rms", "silu", jnp.bfloat16),
        slow("rms", "silu", jnp.float32),
        ("layer", "gelu", jnp.bfloat16),
        slow("rms", "gelu_exact", jnp.float32),
    ],
)
def test_gated_mlp(kind, gate, dtype):
    shapes = ("gate_up", (2, INNER, HIDDEN)), ("down", (HIDDEN, INNER))
    params = weights(*shapes, kind=kind, dtype=dtype)
    x, dy = normal(7, *TOKENS, HIDDEN, dtype=dtype), normal(8, *TOKENS, HIDDEN)
    dy = (dy * 1e-3).astype(dtype)
    its_norm = parts.Norm(kind=kind, eps=1e-5)
    y, (dparams, dx) = value_and_vjp(
        lambda p, x: segments.gated_mlp(p, x, its_norm, gate), dy, params, x
    )

    plain = {name: None if p is None else float32(p) for name, p in params.items()}
    exact = functools.partial(jax.nn.gelu, approximate=False)
    activations = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "gelu_exact": exact}
    activation = activations[gate]

    def gated(gate_up):
        return activation(gate_up[..., 0, :]) * gate_up[..., 1, :]

    h = rows(norm(kind, plain["norm"], x))
    gate_up = matmul(h, weight_rows(plain["gate_up"])).astype(dtype)
    down = matmul(rows(gated(float32(gate_up))), weight_rows(plain["down"]))
    gate_up = groups(gate_up)
    assert_near(float32(y), float32(x) + down, NEAR)
    assert_near(float32(y) - float32(x), down, 3 * NEAR)

    h, norm_vjp = jax.vjp(functools.partial(norm, kind), plain["norm"], groups(x))
    a, gate_vjp = jax.vjp(gated, gate_up)
    da, ddown = product_grads(a, plain["down"], float32(dy))
    (dgate_up,) = gate_vjp(da.astype(dtype).astype(jnp.float32))
    flat = dgate_up.reshape(*TOKENS, -1)
    dh, dw = product_grads(h, plain["gate_up"].reshape(-1, HIDDEN), flat)
    dnorm, dx_inner = norm_vjp(dh)
    assert_near(float32(dx) - float32(dy), dx_inner, 3 * NEAR)
    expected = {"norm": dnorm, "gate_up": dw.reshape(2, INNER, HIDDEN), "down": ddown}
    assert dparams.keys() == params.keys()
    for name, gradient in dparams.items():
        assert_near(gradient, expected[name], NEAR)


def rotated(x, theta):
    """Applies RoPE to pairs of halves, as complex numbers."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * theta ** (-np.arange(half) / half)
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * np.exp(1j * angle)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize(
    ("num_kv_heads", "kind", "dtype"),
    [
        (4, "rms", jnp.bfloat16),
        slow(2, "layer", jnp.float32),
        slow(4, "rms", jnp.float32),
        slow(2, "layer", jnp.bfloat16),
    ],
)
def test_attention_in(num_kv_heads, kind, dtype):
    num_heads = 4
    columns = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    params = weights(("qkv", (columns, HIDDEN)), kind=kind, dtype=dtype)
    heads = parts.Heads(num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, theta=100.0)
    x = normal(7, *TOKENS, HIDDEN, dtype=dtype)
    dheads = tuple(
        normal(10 + i, *TOKENS, n, HEAD_DIM, dtype=dtype)
        for i, n in enumerate((num_heads, num_kv_heads, num_kv_heads))
    )
    dx_around = normal(8, *TOKENS, HIDDEN, dtype=dtype)
    its_norm = parts.Norm(kind=kind, eps=1e-5)
    out, (dparams, dx) = value_and_vjp(
        lambda p, x: segments.attention_in(p, x, its_norm, heads),
        (*dheads, (), dx_around),
        params,
        x,
    )
    np.testing.assert_array_equal(out[-1], x)

    plain = {name: None if p is None else float32(p) for name, p in params.items()}

    def split(y):
        y = y.reshape(*TOKENS, num_kv_heads, -1, HEAD_DIM)
        q = y[..., :-2, :].reshape(*TOKENS, -1, HEAD_DIM)
        return rotated(q, 100.0), rotated(y[..., -2, :], 100.0), y[..., -1, :]

    y = matmul(rows(norm(kind, plain["norm"], x)), weight_rows(plain["qkv"]))
    expected, heads_vjp = jax.vjp(split, y.astype(dtype).astype(jnp.float32))
    assert_near(out[:-1], expected, NEAR)

    (dy,) = heads_vjp(jax.tree.map(float32, dheads))
    h, norm_vjp = jax.vjp(functools.partial(norm, kind), plain["norm"], groups(x))
    dh, dqkv = product_grads(h, plain["qkv"], dy)
    dnorm, dx_inner = norm_vjp(dh)
    assert_near(dx, dx_inner + float32(dx_around), NEAR)
    expected = {"norm": dnorm, "qkv": dqkv}
    assert dparams.keys() == params.keys()
    for name, gradient in dparams.items():
        assert_near(gradient, expected[name], NEAR)


def test_copies_of_heads_change_nothing():
    params = weights(("qkv", (128, HIDDEN)))
    heads = parts.Heads(num_kv_heads=2, head_dim=HEAD_DIM, theta=100.0)
    its_norm = parts.Norm(kind="rms", eps=1e-5)
    x = normal(7, *TOKENS, HIDDEN, dtype=BF16)
    dheads = [normal(n, *TOKENS, n, HEAD_DIM, dtype=BF16) for n in (4, 2, 2)]
    results = []
    for keep in (False, True):

        def call(params, x, keep=keep):
            return segments.attention_in(params, x, its_norm, heads, keep)

        dkept = tuple(jnp.full_like(d, jnp.nan) for d in dheads) if keep else ()
        out, grads = value_and_vjp(call, (*dheads, dkept, x), params, x)
        results.append((*out[:3], out[-1], grads))
        assert len(out[3]) == 3 * keep
        for copy, original in zip(out[3], out, strict=False):
            np.testing.assert_array_equal(copy, original)
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_attention_out():
    params = {"out": normal(1, HIDDEN, INNER, dtype=BF16, scale=0.1)}
    o, x, dy = (
        normal(3, *TOKENS, INNER // HEAD_DIM, HEAD_DIM, dtype=BF16),
        normal(4, *TOKENS, HIDDEN, dtype=BF16),
        normal(5, *TOKENS, HIDDEN, dtype=BF16),
    )
    y, (dparams, do, dx) = value_and_vjp(segments.attention_out, dy, params, o, x)
    flat = o.reshape(*TOKENS, -1)
    w = float32(params["out"])
    product = matmul(groups(flat, INNER), weight_rows(w))
    assert_near(y, float32(x) + product, NEAR)
    np.testing.assert_array_equal(dx, dy)
    expected_do, dout = product_grads(flat, w, float32(dy))
    expected_do = expected_do.reshape(o.shape)
    assert_near([do, dparams["out"]], [expected_do, dout], NEAR)


MLP_SHAPES = ("gate_up", (2, INNER, HIDDEN)), ("down", (HIDDEN, INNER))


@jax.jit
def mlp_passes(dy, x):
    """Returns a gated MLP's result and all gradients."""
    its_norm = parts.Norm(kind="rms", eps=1e-5)

    def run(params, x):
        return segments.gated_mlp(params, x, its_norm, "silu")

    y, vjp = jax.vjp(run, weights(*MLP_SHAPES), x)
    return y, vjp(dy)


def test_gradients_far_below_the_largest_survive():
    """Small gradients survive a scale that is computed from a bound.

    The scale of the gradients of gate and up maps a bound of their amax to E5M2's
    largest number, which is about 2**30 times the smallest normal one.
    """
    x = normal(7, *TOKENS, HIDDEN, dtype=BF16)
    dy = normal(8, *TOKENS, HIDDEN, dtype=BF16).at[0].multiply(2.0**-12)

    def dx(dy):
        _, (_, dx) = mlp_passes(dy, x)
        return float32(dx) - float32(dy)

    alone = dx(dy.at[1].set(0))[0]
    assert_near(dx(dy)[0], alone, 0.05)
    assert np.linalg.norm(alone) > 0


def test_what_is_saved():
    """The residuals are x, gate and up in groups, their scales, and weights.

    Other scales are the largest group scale of gate and up per token, in float32, and
    four per-tensor scales. Weights are references to the arguments.
    """
    params = weights(*MLP_SHAPES)
    x = normal(7, *TOKENS, HIDDEN, dtype=BF16)
    its_norm = parts.Norm(kind="rms", eps=1e-5)
    residuals = saved(
        lambda p, x: segments.gated_mlp(p, x, its_norm, "silu"), params, x
    )
    tokens = TOKENS[0] * TOKENS[1]
    in_groups = tokens * (HIDDEN + 2 * INNER) * (1 + 2 / 16)
    assert saved_bytes(residuals) == in_groups + 4 * tokens + 4 * 4
    assert sorted(r.argument for r in residuals if r.argument is not None) == [0, 1, 2]


def test_nan_is_not_hidden():
    x = normal(7, *TOKENS, HIDDEN, dtype=BF16)
    ones = jnp.ones_like(x)
    _, (dparams, _) = mlp_passes(ones.at[0, 3, 5].set(jnp.nan), x)
    assert all(np.isnan(g).any() for g in jax.tree.leaves(dparams))
    y, _ = mlp_passes(ones, x.at[1, 2, 3].set(jnp.nan))
    assert np.isnan(y[1, 2]).all()
    assert np.isfinite(y[0]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float32)])
def test_the_gradient_of_the_stream_has_its_scale(dtype):
    x, dy = (normal(i, *TOKENS, HIDDEN, dtype=dtype) for i in (7, 8))
    dheads = [normal(9, *TOKENS, n, HEAD_DIM, dtype=dtype) for n in (4, 2, 2)]
    heads = parts.Heads(num_kv_heads=2, head_dim=HEAD_DIM, theta=100.0)
    its_norm = parts.Norm(kind="rms", eps=1e-5)
    mlp = weights(*MLP_SHAPES)
    attention = weights(("qkv", (8 * HEAD_DIM, HIDDEN)))
    out = jax.vjp(shards.leave, parts.Stream.of(x))[1](dy)[0]
    streams = [out]
    for fn, params, cotangent in (
        (lambda p, s: flow.gated_mlp(p, s, its_norm, "silu"), mlp, out),
        (
            lambda p, s: flow.attention_in(p, s, its_norm, heads),
            attention,
            (*dheads, (), parts.Stream(dy, jnp.float32(0))),
        ),
    ):
        _, (_, stream) = value_and_vjp(fn, cotangent, params, parts.Stream.of(x))
        streams.append(stream)
    for stream in streams:
        largest = np.abs(np.asarray(stream.x, np.float64)).max()
        exponent = np.ceil(np.log2(largest / oracle.E5M2.edge))
        assert float(stream.scale) == 2.0**exponent
