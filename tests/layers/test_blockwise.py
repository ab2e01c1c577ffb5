"""Tests the blockwise FP8 matmul against its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gradients import compiled, fake, saved, value_and_vjp
from helpers.models import normal

from coat_jax.layers.blockwise import linear


def groups(x):
    """Quantizes with a scale for every 1 x 128 elements and dequantizes, in float64."""
    return fake(np.asarray(x, np.float32), 128).astype(np.float64)


def blocks(x):
    """Quantizes with a scale for every 128 x 128 elements and dequantizes."""
    x = np.asarray(x, np.float32)
    out = np.empty(x.shape)
    for i in range(0, x.shape[0], 128):
        for j in range(0, x.shape[1], 128):
            block = x[i : i + 128, j : j + 128]
            row = fake(block.reshape(1, -1), block.size)
            out[i : i + 128, j : j + 128] = row.reshape(block.shape)
    return out


def check(actual, expected, dtype):
    """Asserts equality up to float32 accumulation and one rounding to the dtype."""
    assert actual.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(actual, np.float64),
        expected,
        rtol=1e-5 if dtype == jnp.float32 else 2**-8,
        atol=1e-5 * np.abs(expected).max(),
    )


@pytest.mark.parametrize(
    ("batch", "k", "n", "dtype", "w_dtype"),
    [
        ((3, 50), 200, (2, 72), jnp.float32, jnp.bfloat16),
        ((130,), 40, (300,), jnp.bfloat16, jnp.float32),
    ],
)
def test_product_and_both_gradients(batch, k, n, dtype, w_dtype):
    # The magnitudes of features and tokens differ by some powers of ten.
    spread = 10 ** normal(7, k)
    x = (normal(1, *batch, k) * spread).astype(dtype)
    w = (normal(2, *n, k) / spread).astype(w_dtype)
    dy = (normal(3, *batch, *n) * 1e-4).astype(dtype)
    y, (dx, dw) = value_and_vjp(linear, dy, x, w)
    rows, flat_w = np.asarray(x, np.float32).reshape(-1, k), np.asarray(w, np.float32)
    flat_w = flat_w.reshape(-1, k)
    flat_dy = np.asarray(dy, np.float32).reshape(len(rows), -1)
    check(y, (groups(rows) @ blocks(flat_w).T).reshape(y.shape), dtype)
    check(dx, (groups(flat_dy) @ blocks(flat_w)).reshape(x.shape), dtype)
    expected = groups(flat_dy.T) @ blocks(rows.T).T
    check(dw, expected.reshape(w.shape), w_dtype)


def test_an_outlier_spoils_its_block_only():
    x = np.array(normal(1, 256, 256))
    x[0, 0] = 1e6
    error = np.abs(compiled(linear, x, np.eye(256, dtype=np.float32)) - x)
    assert error[0, :128].max() > 0.5
    assert error[:, 128:].max() < 0.2
    assert error[1:].max() < 0.2


def test_saves_its_arguments_alone():
    x, w = normal(1, 64, 48, dtype=jnp.bfloat16), normal(2, 32, 48)
    assert {r.argument for r in saved(linear, x, w)} == {0, 1}


def test_empty_batch_and_other_dtypes():
    w = np.ones((8, 16), np.float32)
    assert compiled(linear, jnp.ones((0, 16)), w).shape == (0, 8)
    gradient = jax.grad(lambda x: jnp.sum(linear(x, w)))
    x = jax.ShapeDtypeStruct((4, 16), jnp.float16)
    assert jax.eval_shape(gradient, x).dtype == jnp.float16


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"got \(2, 3\), \(4, 5\)"):
        linear(jnp.ones((2, 3)), jnp.ones((4, 5)))
