"""Tests that kernels add the biases that `fp8_remat` finds after FP8 matmuls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers.dots import assert_near, gates, linear
from helpers.gradients import assert_close, saved, saved_bytes, value_and_vjp
from helpers.models import normal

import pallas_kernels as pk
from coat_jax import fp8_dot_general, fp8_remat

K, F, TOKENS = 48, 64, (4, 24)
BF16, F32 = jnp.bfloat16, jnp.float32


def two(params, x):
    """Computes two matmuls of x with biases, and a matmul of their product."""
    first, second = (linear(x, params[k]) + params[f"{k} bias"] for k in "ab")
    return linear(jnp.tanh(first) * second, params["c"]) + params["c bias"]


def gated(params, x):
    hidden = nn.silu(linear(x, params["a"])) * linear(x, params["b"])
    return linear(hidden, params["c"]) + params["c bias"]


def activated(params, x):
    hidden = nn.gelu(linear(x, params["a"]) + params["a bias"])
    return linear(hidden, params["c"]) + params["c bias"]


def given(dtype=BF16):
    shapes = {"a": (K, F), "b": (K, F), "c": (F, K)}
    params = {k: normal(i, *s, scale=0.2) for i, (k, s) in enumerate(shapes.items())}
    params |= {
        f"{k} bias": normal(5 + i, n) for i, (k, (_, n)) in enumerate(shapes.items())
    }
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    return params, normal(9, *TOKENS, K, dtype=BF16), normal(20, *TOKENS, K, dtype=BF16)


def biases(fn, *args) -> set[int]:
    """Returns the widths of forward matmuls with biases that kernels add."""
    actual = set()
    for choice in pk.explain(lambda *args: jax.vjp(fn, *args)[0], *args).choices:
        if choice.operation == "matmul":
            call = " ".join(choice.arrays)
            pattern = r"\S+ \S+\[1,(\d+),\S+ float32\[96\] float32\[\1\].*"
            if match := re.fullmatch(pattern, call):
                actual.add(int(match[1]))
    return actual


@pytest.mark.parametrize(
    ("fn", "columns"), [(two, {F, K}), (gated, {K}), (activated, {F, K})]
)
def test_biases_and_their_gradients_are_those_that_are_written(fn, columns):
    params, x, dy = given()
    assert biases(fp8_remat(fn), params, x) == columns
    if fn is not activated:
        return
    unfused = fp8_remat(fn, where=lambda _: True)  # This asks for other copies.
    actual, expected = (
        value_and_vjp(f, dy, params, x) for f in (fp8_remat(fn), unfused)
    )
    assert_close(actual, expected, 0.1)
    _, (dparams, _) = actual
    exact = np.asarray(dy, np.float64).sum((0, 1))
    assert_near(dparams["c bias"], exact)


def test_a_bias_is_added_before_the_only_rounding():
    params, x, dy = given()

    def fn(params, x):
        return linear(x, params["a"] @ params["c"]) + params["c bias"]

    def wide(params, x):
        w = (params["a"] @ params["c"]).astype(BF16)
        return fp8_dot_general(
            x, w, (((2,), (0,)), ((), ())), preferred_element_type=F32
        )

    y, (dparams, dx) = value_and_vjp(fp8_remat(fn), dy, params, x)
    product, (dplain, dx_plain) = value_and_vjp(
        fp8_remat(wide), dy.astype(F32), params, x
    )
    exact = np.asarray(product, np.float64) + np.asarray(params["c bias"], np.float64)
    np.testing.assert_array_equal(y, jnp.asarray(exact, BF16))
    np.testing.assert_array_equal(dx, dx_plain)
    np.testing.assert_array_equal(dparams["a"], dplain["a"])


def test_nothing_is_saved_for_a_bias():
    params, x, _ = given()
    plain = {**params, **{k: 0 * v for k, v in params.items() if "bias" in k}}

    def without(params, x):
        return gated({**params, "c bias": jnp.zeros(K, BF16)}, x)

    sizes = [
        saved_bytes(saved(fp8_remat(f), plain, x, params=6)) for f in (gated, without)
    ]
    assert sizes[0] == sizes[1]


def per_token(params, x):
    """Adds a bias per row, with the shape of a bias per column if `y` is square."""
    y = linear(x[0], params["a"] @ params["c"])
    return y[:K] + params["c bias"][:, None]


def of_tokens(params, x):
    return linear(x, params["a"]) + x[0, 0, 0]


def read_twice(params, x):
    y = linear(x, params["a"])
    return (y + params["a bias"]) * jnp.tanh(y)


def of_gates(params, x):
    """Computes a gated MLP with biases of gate and up, which XLA adds."""
    hidden = nn.silu(linear(x, params["a"]) + params["a bias"])
    return linear(hidden * (linear(x, params["b"]) + params["b bias"]), params["c"])


@pytest.mark.parametrize(
    ("fn", "columns"),
    [(per_token, set()), (of_tokens, set()), (read_twice, set()), (of_gates, {F})],
)
def test_other_sums(fn, columns):
    params, x, _ = given()
    x = jnp.tile(x, (1, 2, 1)) if fn is per_token else x
    assert biases(fp8_remat(fn), params, x) == columns


def test_flax_layers():
    """Biases in float32 are cast, as Flax does."""

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"dot_general": fp8_dot_general, "dtype": BF16}
            x = nn.Dense(F, **options)(x)
            return nn.DenseGeneral((4, K // 4), **options)(nn.gelu(x))

    module, (_, x, _) = Mlp(), given()
    params = jax.eval_shape(module.init, jax.random.key(0), x)
    apply = fp8_remat(module).apply
    assert biases(apply, params, x) == {F}
    assert len(gates(apply, params, x)) == 1
    options = {"dtype": BF16, "dot_general": fp8_dot_general}
    linear = nnx.eval_shape(lambda: nnx.Linear(K, F, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(linear)
    assert biases(lambda p, x: fp8_remat(nnx.merge(graph, p))(x), state, x) == {F}
