"""Tests a gradient under fp8_remat against one that is written down by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.gradients import GROUP, assert_close, fake, value_and_vjp
from helpers.models import normal

from coat_jax.remat.api import fp8_remat


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
    """Norm, matmul, GELU, matmul: both matmuls' operands are recomputed from copies."""
    w1, w2 = normal(1, 64, 128, scale=0.1), normal(2, 128, 32, scale=0.1)
    x, dy = normal(3, 80, 64), normal(4, 80, 32)

    def fn(params, x):
        w1, w2 = params
        return gelu(norm(x) @ w1) @ w2

    _, ((dw1, dw2), dx) = value_and_vjp(fp8_remat(fn), dy, (w1, w2), x)

    h, (_, r) = _norm_forward(x)
    x8, a8 = fake(x, GROUP), fake(h @ w1, GROUP)
    h8, b8 = x8 * r, gelu(a8)
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
