"""Tests gates of two arrays, and activations without a gate."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gates import (
    ERROR,
    SCALE,
    apart,
    assert_rounded,
    assert_transposed,
    decoded,
    every_activation,
    every_activation_in_rows,
    every_activation_in_tiles,
    exact,
    inputs,
    with_scale,
)
from helpers.kernels import (
    BF16,
    E4M3,
    F32,
    assert_identical,
    encoded_groups,
    every_implementation,
    run,
)
from helpers.marks import slow

import pallas_kernels as pk


@every_implementation
@every_activation_in_tiles
def test_gate_and_up_as_two_arrays(implementation, activation, shape):
    groups, dy = inputs(shape)
    y, size = exact(groups, activation)
    gated = functools.partial(pk.gated, activation=activation, copies="both")
    out = run(implementation, with_scale(gated), apart(groups), jnp.float32(SCALE))
    assert_rounded(out.values, y, size, SCALE)
    assert_transposed(out)
    row = functools.partial(
        pk.gated_grad, activation=activation, product_scale=jnp.float32(0.25)
    )
    grad = functools.partial(row, copies="both")
    out = run(implementation, with_scale(grad), apart(groups), dy, jnp.float32(SCALE))
    rows = run(implementation, with_scale(row), apart(groups), dy, jnp.float32(SCALE))
    assert out.largest is None
    assert rows.transposed is None
    assert_identical(rows.values, out.values)
    grads, sizes = exact(groups, activation, dy)
    for j in range(2):
        of_array = out._replace(values=out.values[j], transposed=out.transposed[j])
        assert of_array.values.shape == dy.shape
        assert_rounded(of_array.values, grads[..., j, :], sizes[..., j, :], SCALE)
        assert_transposed(of_array)
    y, size = (x.reshape(-1, shape[-1]).T for x in (y, size))
    assert_rounded(out.product, y, size, 0.25)
    assert_identical(rows.product, out.product)


@every_implementation
def test_wide_gradients_of_two_arrays(implementation):
    groups, dy = inputs((3, 11, 2, 144))
    out = run(implementation, pk.gated_grad, apart(groups), dy)
    grads, sizes = exact(groups, "silu", dy)
    for j, values in enumerate(out.values):
        assert values.dtype == BF16
        assert_rounded(values, grads[..., j, :], sizes[..., j, :])


def alone(gate_up):
    """Returns the gate, and gate and up with an up of ones."""
    codes, scale = map(np.array, gate_up)
    codes[..., 1, :] = scale[..., 1, :] = 1
    return apart(gate_up)[:1], pk.Scaled(codes, scale)


@every_implementation
@every_activation
def test_an_activation_without_up(implementation, activation, shape):
    groups, dy = inputs(shape)
    gate, with_ones = alone(groups)
    y, size = exact(with_ones, activation)
    out = run(implementation, functools.partial(pk.gated, activation=activation), gate)
    assert_rounded(out.values, y, size)
    assert np.max(out.largest) == np.abs(np.asarray(out.values, np.float32)).max()
    grads, sizes = (x[..., 0, :] for x in exact(with_ones, activation, dy))
    grad = functools.partial(pk.gated_grad, activation=activation)
    out = run(implementation, grad, gate, dy)
    (values,) = out.values
    assert_rounded(values, grads, sizes)
    assert np.max(out.largest) == np.abs(np.asarray(values, np.float32)).max()


@every_implementation
@every_activation_in_tiles
def test_gradients_of_an_activation_with_its_output(implementation, activation, shape):
    groups, dy = inputs(shape)
    gate, with_ones = alone(groups)
    grads, sizes = (x[..., 0, :] for x in exact(with_ones, activation, dy))
    y, size = (x.reshape(-1, shape[-1]).T for x in exact(with_ones, activation))
    options = {"activation": activation, "product_scale": jnp.float32(0.25)}
    wide = run(implementation, functools.partial(pk.gated_grad, **options), gate, dy)
    assert_rounded(wide.values[0], grads, sizes)
    assert_rounded(wide.product, y, size, 0.25)
    grad = functools.partial(pk.gated_grad, copies="both", **options)
    out = run(implementation, with_scale(grad), gate, dy, jnp.float32(SCALE))
    of_array = out._replace(values=out.values[0], transposed=out.transposed[0])
    assert_rounded(of_array.values, grads, sizes, SCALE)
    assert_transposed(of_array)
    assert_identical(out.product, wide.product)


@every_implementation
@every_activation_in_rows
def test_an_activation_with_a_scale_for_each_row(implementation, activation, shape):
    groups, _ = inputs(shape)
    wide = jnp.asarray(decoded(groups), BF16)[..., 0, :]
    gated = functools.partial(
        pk.gated, activation=activation, scale="row", keep_groups=True
    )
    out = run(implementation, gated, (wide,))
    both = np.stack([np.asarray(wide, np.float64), np.ones(wide.shape)], axis=-2)
    y, size = exact(
        pk.Scaled(both, np.ones((*both.shape[:-1], shape[-1] // 16))), activation
    )
    np.testing.assert_allclose(out.scale, np.abs(y).max(-1) / 448, rtol=ERROR)
    assert_rounded(out.values, y, size, np.asarray(out.scale)[..., None])
    codes, scale = encoded_groups(wide, E4M3, 16)
    assert_identical(out.groups[0], [codes, scale])
    assert_identical(out.largest_scale, scale.astype(F32).max(axis=-1))


@every_implementation
@pytest.mark.parametrize(
    "shape", [(3, 2, 2304), slow((2, 2, 2, 2064)), slow((8, 2, 768))]
)
def test_two_wide_arrays_are_kept_in_groups(implementation, shape):
    groups, _ = inputs(shape)
    wide = jnp.asarray(decoded(groups), BF16)
    gated = functools.partial(pk.gated, scale="row", keep_groups=True)
    # Gate and up may differ in their dtypes.
    pair = wide[..., 0, :], wide[..., 1, :].astype(F32)
    out = run(implementation, gated, pair)
    scales = np.ones((*shape[:-1], shape[-1] // 16))
    y, size = exact(pk.Scaled(np.asarray(wide, np.float64), scales), "silu")
    np.testing.assert_allclose(out.scale, np.abs(y).max(-1) / 448, rtol=ERROR)
    assert_rounded(out.values, y, size, np.asarray(out.scale)[..., None])
    codes, scale = encoded_groups(wide, E4M3, 16)
    assert_identical(out.groups, apart(pk.Scaled(codes, scale)))
    assert_identical(out.largest_scale, scale.astype(F32).max(axis=(-1, -2)))
