"""Tests the FP8 matmul against the same formula in float64, and its residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import oracle
from helpers.gradients import (
    FP8,
    assert_close,
    compiled,
    cosine,
    fake,
    saved,
    saved_bytes,
    value_and_vjp,
)
from helpers.marks import slow
from helpers.models import normal

import coat_jax as coat
from coat_jax import fp8_dot_general
from coat_jax.fp8.matmul import linear

DTYPES = [jnp.float32, jnp.bfloat16]


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def q(x, format: oracle.Format = oracle.E4M3) -> np.ndarray:
    """Quantizes per tensor and dequantizes, in float64."""
    return wide(fake(np.asarray(x).astype(np.float32), None, format))


def check(actual, expected, dtype):
    """Asserts equality up to float32 accumulation and one rounding to the dtype."""
    assert actual.dtype == dtype
    np.testing.assert_allclose(
        wide(actual),
        expected,
        rtol=1e-5 if dtype == jnp.float32 else 2**-8,
        atol=1e-5 * np.abs(expected).max(),
    )


@pytest.mark.parametrize(("dtype", "w_dtype"), [DTYPES, slow(*DTYPES[::-1])])
def test_product_and_both_gradients(dtype, w_dtype):
    x = normal(1, 3, 40, 64, dtype=dtype, scale=30.0)
    w = normal(2, 48, 64, dtype=w_dtype, scale=0.02)
    dy = normal(3, 3, 40, 48, dtype=dtype, scale=1e-4)
    y, (dx, dw) = value_and_vjp(linear, dy, x, w)
    check(y, q(x) @ q(w).T, dtype)
    check(dx, q(dy, oracle.E5M2) @ q(w), dtype)
    flat_x, flat_dy = q(x).reshape(-1, 64), q(dy, oracle.E5M2).reshape(-1, 48)
    check(dw, flat_dy.T @ flat_x, w_dtype)


def test_weights_of_several_output_axes():
    x, w, dy = normal(1, 10, 32), normal(2, 2, 24, 32), normal(3, 10, 2, 24)
    y, (dx, dw) = value_and_vjp(linear, dy, x, w)
    check(y, np.einsum("bk,ijk->bij", q(x), q(w)), jnp.float32)
    check(dx, np.einsum("bij,ijk->bk", q(dy, oracle.E5M2), q(w)), jnp.float32)
    check(dw, np.einsum("bk,bij->ijk", q(x), q(dy, oracle.E5M2)), jnp.float32)
    assert jax.eval_shape(linear, x[0], w).shape == (2, 24)


@pytest.mark.parametrize("dtype", [slow(jnp.float32), jnp.bfloat16])
def test_saves_codes_of_x_and_w_by_reference(dtype):
    x, w = normal(1, 4, 16, 64, dtype=dtype), normal(2, 48, 64)
    for fn in (linear, jax.jit(linear)):
        _, vjp = jax.vjp(fn, x, w)
        leaves = jax.tree.leaves(vjp)
        assert any(leaf is w for leaf in leaves)
        remaining = [leaf for leaf in leaves if leaf is not w]
        assert sorted((leaf.size, leaf.dtype.itemsize) for leaf in remaining) == [
            (0, x.dtype.itemsize),
            (1, 4),
            (1, 4),
            (x.size, 1),
        ]
        assert any(leaf.dtype in FP8 for leaf in remaining)
    assert saved_bytes(saved(linear, x, w)) == x.size + 8


@jax.jit
def passes(dy, x, w):
    y, vjp = jax.vjp(linear, x, w)
    return y, vjp(dy)


def test_zeros():
    x, w, dy = jnp.zeros((8, 32)), normal(2, 16, 32), jnp.zeros((8, 16))
    y, (dx, dw) = passes(dy, x, w)
    for array in (y, dx, dw, passes(dy, x + 1, 0 * w)[0]):
        np.testing.assert_array_equal(array, jnp.zeros_like(array))


def test_nan_is_not_hidden():
    x, w, dy = normal(1, 8, 32), normal(2, 16, 32), jnp.full((8, 16), jnp.inf)
    y, _ = passes(dy, x.at[3, 5].set(jnp.nan), w)
    assert np.isnan(y).all()
    _, gradients = passes(dy, x, w)
    assert all(np.isnan(g).all() for g in gradients)


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e12])
def test_scales_follow_the_tensors(size):
    x, w, dy = normal(1, 8, 32), normal(2, 16, 32), normal(3, 8, 16)
    y, (dx, _) = passes(dy * size, x * size, w)
    check(y, q(x * size) @ q(w).T, jnp.float32)
    check(dx, q(dy * size, oracle.E5M2) @ q(w), jnp.float32)
    assert_close(y, size * wide(x) @ wide(w).T, 0.05)


DIMENSIONS = [
    ((4, 6, 32), (32, 5), (((2,), (0,)), ((), ()))),
    slow((20, 6, 8), (8, 6, 5), (((1, 2), (1, 0)), ((), ()))),
    slow((3, 16, 8), (3, 8, 5), (((2,), (1,)), ((0,), (0,)))),
    ((16, 2, 8, 3), (2, 5, 3, 8), (((2,), (3,)), ((3, 1), (2, 0)))),
]


@pytest.mark.parametrize(("a", "b", "dimensions"), DIMENSIONS)
def test_dot_general(a, b, dimensions):
    """Every entry of the batch axes has its own scales."""
    x, w = normal(1, *a), normal(2, *b)
    batch = dimensions[1]

    def fake_entries(array, axes, format=oracle.E4M3):
        front = np.moveaxis(wide(array), axes, range(len(axes)))
        entries = front.reshape(-1, *front.shape[len(axes) :])
        entries = np.stack([q(e, format) for e in entries]).reshape(front.shape)
        return jnp.asarray(np.moveaxis(entries, range(len(axes)), axes), jnp.float32)

    def dot(x, w):
        return jax.lax.dot_general(x, w, dimensions, precision="highest")

    dy = normal(3, *jax.eval_shape(dot, x, w).shape)
    actual = value_and_vjp(lambda *xw: fp8_dot_general(*xw, dimensions), dy, x, w)
    x8, w8 = fake_entries(x, batch[0]), fake_entries(w, batch[1])
    dy8 = fake_entries(dy, range(len(batch[0])), oracle.E5M2)
    assert_close(actual, value_and_vjp(dot, dy8, x8, w8), 1e-5)


def test_dot_general_dtypes():
    x, w = normal(1, 16, 8, dtype=jnp.bfloat16), normal(2, 8, 16)
    dimensions = (((1,), (0,)), ((), ()))
    assert fp8_dot_general(x, w, dimensions).dtype == jnp.float32
    both = fp8_dot_general(x, w.astype(jnp.bfloat16), dimensions)
    assert both.dtype == jnp.bfloat16
    named = fp8_dot_general(
        x, x.T, dimensions, precision="highest", preferred_element_type=jnp.float32
    )
    assert named.dtype == jnp.float32


@pytest.mark.parametrize(
    ("a", "b", "dimensions"),
    [
        # The products of the contracted sizes agree, but not the sizes.
        ((4, 2, 3), (3, 2, 5), (((1, 2), (0, 1)), ((), ()))),
        ((2, 3, 4, 8), (3, 2, 8, 5), (((3,), (2,)), ((0, 1), (0, 1)))),
        ((4, 3), (5, 2), (((1,), (0,)), ((), ()))),
    ],
)
def test_dot_general_names_dimensions_that_do_not_go_together(a, b, dimensions):
    with pytest.raises(TypeError, match="dot_general requires"):
        fp8_dot_general(jnp.ones(a), jnp.ones(b), dimensions)


@pytest.mark.parametrize(("m", "k", "n"), [(4, 0, 3), (4, 3, 0), (0, 4, 3)])
def test_dot_general_of_nothing(m, k, n):
    def product(x, w):
        return fp8_dot_general(x, w, (((1,), (0,)), ((), ())))

    y, pullback = jax.vjp(product, jnp.ones((m, k)), jnp.ones((k, n)))
    np.testing.assert_array_equal(y, np.zeros((m, n)))
    dx, dw = pullback(y)
    np.testing.assert_array_equal(dx, np.zeros((m, k)))
    np.testing.assert_array_equal(dw, np.zeros((k, n)))


def test_in_linen_layers():
    x = normal(1, 25, 4, 16)
    dense = nn.Dense(8, dot_general=coat.fp8_dot_general)
    variables = dense.init(jax.random.key(0), x)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    check(dense.apply(variables, x), q(x) @ q(kernel) + wide(bias), jnp.float32)

    general = nn.DenseGeneral((3, 7), axis=(1, 2), dot_general=coat.fp8_dot_general)
    variables = general.init(jax.random.key(0), x)
    kernel = variables["params"]["kernel"]
    expected = np.einsum("bij,ijkl->bkl", q(x), q(kernel))
    check(general.apply(variables, x), expected, jnp.float32)


def test_in_nnx_linear():
    x, dy = normal(1, 16, 16, dtype=jnp.bfloat16), normal(2, 16, 8, dtype=jnp.bfloat16)
    layer = nnx.Linear(
        16,
        8,
        use_bias=False,
        dtype=jnp.bfloat16,
        dot_general=coat.fp8_dot_general,
        rngs=nnx.Rngs(0),
    )
    kernel = layer.kernel[...].astype(jnp.bfloat16)
    check(layer(x), q(x) @ q(kernel), jnp.bfloat16)
    gradient = nnx.grad(lambda layer: jnp.sum((layer(x) * dy).astype(jnp.float32)))
    dw = gradient(layer)["kernel"][...]
    assert dw.dtype == jnp.float32
    expected = q(x).T @ q(dy, oracle.E5M2)
    np.testing.assert_allclose(dw, expected, rtol=2**-7, atol=1e-4)


def _rows_times(w):
    return lambda x: fp8_dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def test_few_rows_are_multiplied_by_jax():
    """A scale of weights would cost more than the matmul of few rows."""
    x, w = normal(1, 16, 32, dtype=jnp.bfloat16), normal(2, 32, 24, dtype=jnp.bfloat16)
    dy = normal(3, 16, 24, dtype=jnp.bfloat16)
    few, many = (
        value_and_vjp(lambda x, w: _rows_times(w)(x), dy[:n], x[:n], w)
        for n in (15, 16)
    )
    plain = value_and_vjp(jnp.matmul, dy[:15], x[:15], w)
    jax.tree.map(np.testing.assert_array_equal, few, plain)
    check(many[0], q(x) @ q(w), jnp.bfloat16)


def test_mapped_rows_are_those_of_one_matmul():
    x, w = normal(1, 2, 8, 32), normal(2, 32, 24)
    expected = _rows_times(w)(x)
    check(expected, q(x) @ q(w), jnp.float32)
    for fn in (jax.vmap(_rows_times(w)), jax.vmap(jax.vmap(_rows_times(w)))):
        np.testing.assert_array_equal(fn(x), expected)
    mapped = jax.vmap(_rows_times(w), in_axes=1, out_axes=1)(x)
    np.testing.assert_array_equal(mapped, expected)


def test_gradient_under_vmap_and_jit():
    xs, w = normal(1, 3, 8, 32), normal(2, 16, 32)

    def gradient(x):
        return jax.grad(lambda w: jnp.sum(jnp.sin(linear(x, w))))(w)

    batched = compiled(jax.vmap(gradient), xs)
    one = jax.jit(gradient)
    assert_close(batched, jnp.stack([one(x) for x in xs]), 1e-5)
    x, wide_w = wide(xs[0]), wide(w)
    plain = np.cos(x @ wide_w.T).T @ x
    assert cosine(batched[0], plain) > 0.95
