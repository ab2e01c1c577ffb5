"""Tests gradients of gates for rows that are sorted by expert and have weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gates import ACTIVATIONS, ERROR, assert_rounded, exact, inputs
from helpers.groups import padded
from helpers.kernels import F32, every_implementation, run
from helpers.marks import slow_except

import pallas_kernels as pk
from pallas_kernels import ElementwiseTuning

SCALE, PRODUCT = 2.0**2, 2.0**-2
CASES = [
    # Sizes of groups, columns and columns of a thread block.
    ("silu", [100, 0, 1, 155], 64, None),
    ("gelu", [0, 7, 128], 128, 32),
    ("gelu_exact", [129, 2], 192, 16),
]


def computed(implementation, arrays, sizes, activation, tuning=None):
    call = functools.partial(
        pk.weighted_gate_grad, activation=activation, tuning=tuning
    )

    def with_scales(*arrays, implementation):
        *arrays, scale, product = arrays
        scales = {"scale": scale, "product_scale": product}
        return call(*arrays, **scales, implementation=implementation)

    scales = np.float32(SCALE), np.float32(PRODUCT)
    return run(implementation, with_scales, *arrays, jnp.int32(sizes), *scales)


@every_implementation
@pytest.mark.parametrize(
    ("activation", "sizes", "f", "columns"), slow_except([CASES[0]], CASES)
)
def test_gradients_are_those_of_float64(implementation, activation, sizes, f, columns):
    count = sum(sizes)
    rows = count + 128
    groups, dy = inputs((rows, 2, f))
    weights = np.random.default_rng(2).random(rows).astype(np.float32)
    weights[:3] = 0, 1, 1e-6
    tuning = columns and ElementwiseTuning(columns=columns)
    out = computed(implementation, (groups, dy, weights), sizes, activation, tuning)
    y, size = exact(groups, activation)
    grads, sizes_of_grads = exact(groups, activation, dy)
    wide = weights.astype(np.float64)[:, None]
    values = np.asarray(out.values)
    assert_rounded(
        values[:count],
        (grads * wide[..., None])[:count],
        (sizes_of_grads * wide[..., None])[:count],
        SCALE,
    )
    of_groups = padded(np.ones((rows, 1)), sizes)[0] > 0
    transposed = np.asarray(out.transposed).view(np.uint8)
    expected = padded(values.view(np.uint8).reshape(rows, -1), sizes)
    np.testing.assert_array_equal(transposed[:, of_groups], expected[:, of_groups])
    product = np.asarray(out.product)
    y_of_groups, size_of_groups = (padded(x * wide, sizes) for x in (y, size))
    assert product.shape == y_of_groups.shape
    assert_rounded(
        product[:, of_groups],
        y_of_groups[:, of_groups],
        size_of_groups[:, of_groups],
        PRODUCT,
    )
    dweights = np.sum(np.asarray(dy, np.float64) * y, axis=1)
    bound = ERROR * np.sum(np.abs(np.asarray(dy, np.float64)) * size, axis=1)
    assert (np.abs(out.weights - dweights) <= bound)[:count].all()


@pytest.mark.parametrize("activation", slow_except(["gelu"], ACTIVATIONS))
def test_columns_between_groups_are_finite(activation):
    """They must be finite because weight gradients multiply them by zeros."""
    groups, dy = inputs((264, 2, 64))
    arrays = groups, dy, np.ones(264, np.float32)
    out = computed("reference", arrays, [1, 100], activation)
    assert np.isfinite(np.asarray(out.transposed, np.float32)).all()
    assert np.isfinite(np.asarray(out.product, np.float32)).all()


def test_rows_that_the_kernel_would_read_beyond_the_last_are_told():
    """The kernel reads 128 rows from the first row of each block on."""
    groups, dy = inputs((256, 2, 64))
    arrays = groups, dy, np.ones(256, np.float32)
    out = computed("interpret", arrays, [100, 29], "silu")
    assert np.isnan(np.asarray(out.values, np.float32)[:129]).all()
    out = computed("interpret", arrays, [100, 28], "silu")
    assert np.isfinite(np.asarray(out.values, np.float32)[:128]).all()


def test_wrong_arguments_are_named():
    groups, dy = inputs((128, 2, 64))
    sizes, weights = jnp.int32([5]), jnp.ones(128)
    one = {"scale": jnp.float32(1), "product_scale": jnp.float32(1)}
    with pytest.raises(ValueError, match=r"dy must have the shape \(128, 64\)"):
        pk.weighted_gate_grad(groups, dy[:5], weights, sizes, **one)
    with pytest.raises(ValueError, match=r"weights must have the shape \(128,\)"):
        pk.weighted_gate_grad(groups, dy, weights[:2], sizes, **one)
    with pytest.raises(ValueError, match="activation must be one of"):
        pk.weighted_gate_grad(groups, dy, weights, sizes, **one, activation="relu")
    flat = jax.tree.map(lambda x: x[:, :1], groups)
    with pytest.raises(ValueError, match=r"gate and up must be \[rows, 2, f\]"):
        pk.weighted_gate_grad(flat, dy, weights, sizes, **one)
    wide, named = dy.astype(F32), {**one, "implementation": "mosaic"}
    with pytest.raises(ValueError, match="dy must be bfloat16"):
        pk.weighted_gate_grad(groups, wide, weights, sizes, **named)
