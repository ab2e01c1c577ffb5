"""Tests that kernels add the residual stream where `fp8_remat` finds that it is added.

The stream is `x + branch(x)`. Its gradient is the sum of the result's gradient and of
the branch's. Other tests check the branch alone.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.dots import (
    assert_follows_autodiff,
    assert_near,
    every_other_way,
    linear,
    rms,
)
from helpers.gradients import saved, saved_bytes, value_and_vjp
from helpers.marks import slow
from helpers.models import normal

import pallas_kernels as pk
from coat_jax import fp8_remat

K, F, TOKENS = 48, 64, (4, 24)
BF16, F32 = jnp.bfloat16, jnp.float32


def attention(params, x):
    """Computes a norm, the product of two matmuls, and a last matmul."""
    h = rms(x, params["norm"])
    mixed = jnp.tanh(linear(h, params["a"])) * linear(h, params["b"])
    return linear(mixed, params["c"])


def gated(params, x):
    h = rms(x, params["norm"])
    return linear(nn.silu(linear(h, params["a"])) * linear(h, params["b"]), params["c"])


def activated(params, x):
    return linear(nn.gelu(linear(rms(x, params["norm"]), params["a"])), params["c"])


def one(params, x):
    return linear(rms(x, params["norm"]), params["a"] @ params["c"])


BRANCHES = [slow(attention), gated, activated, one]


def given(seed=0, dtype=BF16):
    shapes = {"a": (K, F), "b": (K, F), "c": (F, K)}
    params = {
        name: normal(seed + i, *shape, scale=0.2, dtype=dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }
    params["norm"] = 1 + normal(seed + 5, K, scale=0.3)
    x = normal(seed + 9, *TOKENS, K, dtype=dtype).at[..., 3].mul(8)
    return params, x, normal(seed + 20, *TOKENS, K, dtype=dtype)


def added(fn, *args) -> tuple[bool, bool]:
    """Returns whether forward matmuls and norms' gradients add arrays of BF16."""

    def run(*args):
        y, vjp = jax.vjp(fn, *args)
        return vjp(y)

    calls = {(c.operation, *c.arrays) for c in pk.explain(run, *args).choices}
    # The arrays before are codes with scales of tokens, and the scale of the norm.
    matmul = r"matmul float8_e4m3fn\S+ float8_e4m3fn\S+ float32\S+ bfloat16\S+"
    norm_grad = r"norm_grad (float8_e4m3fn\S+ )?bfloat16\S+ \S+ float32\S+ bfloat16\S+"
    matmuls, norms = (
        any(re.fullmatch(pattern, " ".join(call)) for call in calls)
        for pattern in (matmul, norm_grad)
    )
    return matmuls, norms


def stream(branch, params, x):
    return x + branch(params, x)


def assert_is_sum(results, alone, x, dy):
    """Asserts that results are a branch's results plus the stream.

    The branch's results are rounded to bfloat16 before the sum, and each sum once more.
    """
    (y, (dparams, dx)), (branch, (dbranch, dnorm)) = results, alone
    jax.tree.map(np.testing.assert_array_equal, dparams, dbranch)
    for actual, parts in ((y, (x, branch)), (dx, (dy, dnorm))):
        parts = [np.asarray(piece, np.float64) for piece in parts]
        bound = 2**-8 * (np.abs(parts[1]) + np.abs(sum(parts)))
        assert np.all(np.abs(np.asarray(actual, np.float64) - sum(parts)) <= bound)


@pytest.mark.internals
@pytest.mark.parametrize("branch", BRANCHES)
def test_the_stream_and_its_gradient_are_added_and_nothing_more_is_saved(branch):
    params, x, dy = given()
    fn = functools.partial(stream, branch)
    # The gradient of a norm cannot add one that its own matmul passes through.
    assert added(fp8_remat(fn), params, x) == (True, branch is not one)
    sizes = {
        saved_bytes(saved(fp8_remat(f), params, x, params=4)) for f in (fn, branch)
    }
    assert len(sizes) == 1
    if branch is gated:
        actual, alone = (
            value_and_vjp(fp8_remat(f), dy, params, x) for f in (fn, branch)
        )
        assert_is_sum(actual, alone, x, dy)


@pytest.mark.slow
def test_blocks_follow_one_another():
    """The second block's stream is the sum that the first one's matmul computes."""
    (first, x, dy), (second, *_) = given(), given(40)
    params, of_block = [first, second], fp8_remat(functools.partial(stream, gated))

    def fn(params, x):
        return stream(gated, params[1], stream(gated, params[0], x))

    @jax.jit
    def passes(params, x, dy):
        y, vjp = jax.vjp(of_block, params, x)
        return y, vjp(dy)

    y, (dparams, dx) = value_and_vjp(fp8_remat(fn), dy, params, x)
    middle, _ = passes(first, x, dy)
    last, (dsecond, dmiddle) = passes(second, middle, dy)
    _, (dfirst, dinitial) = passes(first, x, dmiddle)
    jax.tree.map(np.testing.assert_array_equal, (y, dx), (last, dinitial))
    jax.tree.map(np.testing.assert_array_equal, dparams, [dfirst, dsecond])
    assert added(fp8_remat(fn), params, x) == (True, True)


def twice(params, x):
    """Adds the stream to a branch that another operation reads, too."""
    y = gated(params, x)
    return (x + y) * jnp.tanh(y)


def later(params, x):
    """Adds an array that is computed from the branch's result."""
    y = attention(params, x)
    return jnp.sin(y) + y.reshape(-1)[::-1].reshape(y.shape)


def others(params, x):
    """Adds the stream, and reads the norm's input once more."""
    return (x + attention(params, x)) * jnp.tanh(x)


def wide(params, x):
    """Adds a stream of another dtype."""
    return x.astype(F32) + gated(params, x)


def constant(params, x):
    return 1 + gated(params, x)


def column(params, x):
    return x[:, :1] + gated(params, x)


@pytest.mark.internals
@pytest.mark.parametrize("fn", [twice, later, wide, constant, column, others])
def test_other_sums_are_left_alone(fn):
    """The last matmul adds the stream only in `others`, and no norm's gradient does."""
    params, x, _ = given()
    assert added(fp8_remat(fn), params, x) == (fn is others, False)


def transposed(params, x):
    """Adds the branch's result in another order, given by `reshape(dimensions=)`."""
    y = linear(rms(x, params["norm"]), params["a"] @ params["c"])
    return x + jnp.ravel(y, order="F").reshape(x.shape)


def transposed_bias(params, x):
    y = linear(rms(x, params["norm"]), params["a"] @ params["c"])
    rows = jnp.broadcast_to(params["c"][0][:, None], (K, y.size // K))
    return y + jnp.ravel(rows, order="F").reshape(y.shape)


def on_heads(params, x):
    """Adds a residual stream with an axis of heads, as in `nn.DenseGeneral`."""
    y = linear(rms(x, params["norm"]), params["a"] @ params["c"])
    heads = (*x.shape[:-1], 4, K // 4)
    return (x.reshape(heads) + y.reshape(heads)).reshape(x.shape)


@pytest.mark.internals
@pytest.mark.parametrize("fn", [slow(transposed), transposed_bias, on_heads])
def test_other_orders_and_shapes(fn):
    params, x, dy = given()
    assert_follows_autodiff(fn, dy, params, x, tolerance=0.1)


@every_other_way
def test_options_of_what_is_saved_leave_the_sums_to_kernels(options):
    params, x, _ = given()
    fn = fp8_remat(functools.partial(stream, attention), **options)
    assert added(fn, params, x) == (True, True)


@pytest.mark.slow
def test_parallel_branches_add_one_after_the_other():
    params, x, dy = given()

    def branches(params, x):
        h = rms(x, params["norm"])
        mixed = jnp.tanh(linear(h, params["a"])) * linear(h, params["b"])
        return linear(mixed, params["c"]), linear(h, params["a"] @ params["c"])

    def fn(params, x):
        first, second = branches(params, x)
        return x + first + second

    def alone(params, x):
        return sum(y.astype(F32) for y in branches(params, x))

    y, (_, dx) = value_and_vjp(fp8_remat(fn), dy, params, x)
    branch, (_, dnorm) = value_and_vjp(fp8_remat(alone), dy.astype(F32), params, x)
    for actual, parts in ((y, (x, branch)), (dx, (dy, dnorm))):
        assert_near(actual, sum(np.asarray(piece, np.float64) for piece in parts))
    assert added(fp8_remat(fn), params, x) == (True, True)
