"""Tests kernels of gates with one or two input arrays, and of plain activations."""

import functools

import jax
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
    one_activation,
    one_activation_in_rows,
    with_scale,
)
from helpers.kernels import (
    BF16,
    E4M3,
    E5M2,
    F32,
    assert_identical,
    encoded_groups,
    every_implementation,
    every_kernel,
    kernel_or_slowly_reference,
    run,
)
from helpers.marks import slow

import pallas_kernels as pk


@kernel_or_slowly_reference
@every_activation
def test_products(implementation, activation, shape):
    groups, _ = inputs(shape)
    y, size = exact(groups, activation)
    gated = functools.partial(pk.gated, activation=activation)
    out = run(implementation, gated, groups)
    assert out.values.dtype == BF16
    assert_rounded(out.values, y, size)
    largest = np.abs(np.asarray(out.values, np.float32)).max()
    assert np.max(out.largest) == largest
    out = run(implementation, with_scale(gated), groups, jnp.float32(SCALE))
    assert out.values.dtype == E4M3
    assert_rounded(out.values, y, size, SCALE)
    np.testing.assert_allclose(np.max(out.largest), np.abs(y).max(), rtol=ERROR)


@kernel_or_slowly_reference
@every_activation
def test_gradients(implementation, activation, shape):
    groups, dy = inputs(shape)
    grads, size = exact(groups, activation, dy)
    grad = functools.partial(pk.gated_grad, activation=activation)
    out = run(implementation, grad, groups, dy)
    assert out.values.dtype == BF16
    assert_rounded(out.values, grads, size)
    assert np.max(out.largest) == np.abs(np.asarray(out.values, np.float32)).max()
    dy = dy.astype(F32)
    out = run(implementation, with_scale(grad), groups, dy, jnp.float32(SCALE))
    assert out.values.dtype == E5M2
    assert_rounded(out.values, grads, size, SCALE)


@kernel_or_slowly_reference
@every_activation_in_tiles
def test_transposed_copies(implementation, activation, shape):
    groups, dy = inputs(shape)
    scale = jnp.float32(SCALE)
    for function, arrays in ((pk.gated, [groups]), (pk.gated_grad, [groups, dy])):
        how = {"activation": activation, "dtype": E4M3}
        both = functools.partial(function, copies="both", **how)
        out = run(implementation, with_scale(both), *arrays, scale)
        y, size = exact(groups, activation, *arrays[1:])
        assert_rounded(out.values, y, size, SCALE)
        assert_transposed(out)
        np.testing.assert_allclose(np.max(out.largest), np.abs(y).max(), rtol=1e-3)
        alone = functools.partial(function, copies="transposed", **how)
        alone = run(implementation, with_scale(alone), *arrays, scale)
        assert alone.values is None
        assert_transposed(out._replace(transposed=alone.transposed))


@kernel_or_slowly_reference
@every_activation_in_tiles
def test_gradients_with_the_product(implementation, activation, shape):
    groups, dy = inputs(shape)
    how = {"activation": activation, "product_scale": jnp.float32(0.25)}
    products = []
    for copies in ("row", "both"):
        grad = functools.partial(pk.gated_grad, copies=copies, **how)
        out = run(implementation, with_scale(grad), groups, dy, jnp.float32(SCALE))
        grads, size = exact(groups, activation, dy)
        assert_rounded(out.values, grads, size, SCALE)
        np.testing.assert_allclose(np.max(out.largest), np.abs(grads).max(), rtol=1e-3)
        products.append(out.product)
    assert_transposed(out)
    y, size = (x.reshape(-1, shape[-1]).T for x in exact(groups, activation))
    assert out.product.dtype == E4M3
    assert_rounded(out.product, y, size, 0.25)
    assert_identical(*products)


@kernel_or_slowly_reference
@every_activation_in_rows
def test_a_scale_for_each_row(implementation, activation, shape):
    groups, _ = inputs(shape)
    y, size = exact(groups, activation)
    gated = functools.partial(pk.gated, activation=activation, scale="row")
    out = run(implementation, gated, groups)
    assert out.scale.shape == shape[:-2]
    np.testing.assert_allclose(out.scale, np.abs(y).max(-1) / 448, rtol=ERROR)
    assert_rounded(out.values, y, size, np.asarray(out.scale)[..., None])


@every_implementation
@pytest.mark.parametrize(("dtype", "n"), [(F32, 2304), slow(BF16, 1536)])
def test_wide_gates_are_kept_in_groups(implementation, dtype, n):
    groups, _ = inputs((3, 2, n))
    wide = jnp.asarray(decoded(groups), dtype)
    gated = functools.partial(pk.gated, scale="row", keep_groups=True)
    out = run(implementation, gated, wide)
    scales = np.ones((3, 2, n // 16))
    y, size = exact(pk.Scaled(np.asarray(wide, np.float64), scales), "silu")
    np.testing.assert_allclose(out.scale, np.abs(y).max(-1) / 448, rtol=ERROR)
    assert_rounded(out.values, y, size, np.asarray(out.scale)[..., None])
    codes, scale = encoded_groups(wide, E4M3, 16)
    assert_identical(out.groups, [codes, scale])
    assert_identical(out.largest_scale, scale.astype(F32).max(axis=(-1, -2)))


@every_implementation
@pytest.mark.parametrize("n", [slow(2048), 256])
def test_what_is_not_finite(implementation, n):
    groups, dy = inputs((16, 2, n))
    groups = groups._replace(scale=groups.scale.at[3, 0, 5].set(np.nan))
    y, _ = exact(groups, "silu")
    assert np.isnan(y).sum() == 16

    def each(groups, dy, scale, **how):
        scaled, by_row = (pk.gated(groups, scale=s, **how) for s in (scale, "row"))
        return pk.gated(groups, **how), scaled, by_row, pk.gated_grad(groups, dy, **how)

    results = run(implementation, each, groups, dy, jnp.float32(SCALE))
    *both, by_row, out = results
    for product in both:
        nan = np.isnan(np.asarray(product.values, F32))
        np.testing.assert_array_equal(nan, np.isnan(y))
        assert np.isnan(product.largest).any()
    rows = np.isnan(np.asarray(by_row.values, F32)).all(axis=-1)
    np.testing.assert_array_equal(rows, np.isnan(by_row.scale))
    np.testing.assert_array_equal(rows, np.arange(16) == 3)
    nan = np.isnan(np.asarray(out.values, F32))
    assert nan[3, :, 80:96].all()
    assert nan.sum() == 32


@every_kernel
def test_vmap_is_a_loop(implementation):
    groups, dy = inputs((2, 128, 2, 64))

    def grad(groups, dy, implementation):
        function = functools.partial(
            pk.gated_grad,
            scale=jnp.float32(SCALE),
            copies="both",
            implementation=implementation,
        )
        return jax.vmap(function)(groups, dy)

    out = run(implementation, grad, groups, dy)
    expected = run("reference", grad, groups, dy)
    assert out.transposed.shape == (2, 128, 128)
    for values in ("values", "transposed"):
        a, b = (np.asarray(getattr(o, values), F32) for o in (out, expected))
        assert np.mean(a != b) < 1e-3


def test_kernels_have_no_races():
    groups, dy = inputs((128, 2, 64))
    both = functools.partial(pk.gated_grad, scale=jnp.float32(SCALE), copies="both")
    run("interpret", both, groups, dy, detect_races=True)
    groups, dy = inputs((16, 2, 128))
    run("interpret", pk.gated_grad, groups, dy, detect_races=True)
    by_row = functools.partial(pk.gated, scale="row")
    for n in (2048, 128):
        groups, _ = inputs((2, 2, n))
        run("interpret", by_row, groups, detect_races=True)


def test_what_kernels_do_not_take_is_left_to_the_reference():
    for shape in [(0, 2, 128), (3, 2, 16)]:
        groups, dy = inputs((max(shape[0], 1), *shape[1:2], 128))
        groups = jax.tree.map(lambda x, m=shape[0]: x[:m], groups)
        out = jax.jit(pk.gated_grad)(groups, dy[: shape[0]])
        assert out.values.shape == (shape[0], 2, 128)
        by_row = jax.jit(functools.partial(pk.gated, scale="row"))
        assert by_row(groups).scale.shape == shape[:1]


def test_what_cannot_run_is_named():
    groups, dy = inputs((16, 2, 128))
    with pytest.raises(ValueError, match="8 rows of 128 elements or more, got 4"):
        run("mosaic", pk.gated, jax.tree.map(lambda x: x[:4], groups))
    for n in (144, 2032, 28_688):
        of_n, _ = inputs((1, 2, n))
        with pytest.raises(ValueError, match=f"of 16 to 28672, got {n}"):
            run("mosaic", functools.partial(pk.gated, scale="row"), of_n)
    with pytest.raises(ValueError, match="got 'relu'"):
        pk.gated(groups, activation="relu")
    with pytest.raises(ValueError, match="needs a scalar scale, got None"):
        pk.gated(groups, copies="both")
    with pytest.raises(ValueError, match="product_scale needs a scale, got None"):
        pk.gated_grad(groups, dy, product_scale=jnp.float32(1))
    with pytest.raises(ValueError, match="keep_product takes no scales"):
        pk.gated_grad(groups, dy, scale=jnp.float32(1), keep_product=True)
    with pytest.raises(ValueError, match="needs wide arrays and scale='row', got"):
        pk.gated(groups, scale="row", keep_groups=True)
    with pytest.raises(ValueError, match="a scalar or 'row', got 'column'"):
        pk.gated(groups, scale="column")
    with pytest.raises(ValueError, match=r"\[\.\.\., 2, f\], got \(16, 128\)"):
        pk.gated(jax.tree.map(lambda x: x[:, 0], groups))
    with pytest.raises(ValueError, match=r"shape \(16, 128\), got \(8, 128\)"):
        pk.gated_grad(groups, dy[:8])
    gate, up = apart(groups)
    with pytest.raises(ValueError, match="both be codes, or neither"):
        pk.gated((gate, dy))
    with pytest.raises(ValueError, match="a pair, or the gate alone, got 3 arrays"):
        pk.gated((gate, up, up))
    with pytest.raises(ValueError, match=r"must be \[..., f\], got \(\)"):
        pk.gated((jnp.float32(1),))
    with pytest.raises(ValueError, match=r"\[..., 2, f\], got \(16, 1, 128\)"):
        pk.gated(jax.tree.map(lambda x: x[:, :1], groups))
    with pytest.raises(ValueError, match=r"up must .* \(16, 128\), got \(8, 128\)"):
        pk.gated((gate, jax.tree.map(lambda x: x[:8], up)))


@kernel_or_slowly_reference
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


@every_implementation
@pytest.mark.parametrize("form", ["one array", "two arrays", "the gate alone"])
def test_wide_gradients_with_the_wide_product(implementation, form):
    activation, groups, dy = "gelu", *inputs((3, 11, 2, 144))
    operands, sources = groups, groups
    if form == "two arrays":
        operands = apart(groups)
    if form == "the gate alone":
        operands, sources = alone(groups)
    grad = functools.partial(pk.gated_grad, activation=activation, keep_product=True)
    out = run(implementation, grad, operands, dy)
    y, size = exact(sources, activation)
    assert out.product.dtype == BF16
    assert_rounded(out.product, y, size)
    grads, sizes = exact(sources, activation, dy)
    values = (
        out.values
        if isinstance(out.values, tuple)
        else jnp.unstack(out.values, axis=-2)
    )
    for j, gradient in enumerate(values):
        assert gradient.dtype == BF16
        assert_rounded(gradient, grads[..., j, :], sizes[..., j, :])


def alone(gate_up):
    """Returns a tuple of the gate alone, and the gate together with an up of ones."""
    codes, scale = map(np.array, gate_up)
    codes[..., 1, :] = scale[..., 1, :] = 1
    return apart(gate_up)[:1], pk.Scaled(codes, scale)


@kernel_or_slowly_reference
@one_activation
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


@kernel_or_slowly_reference
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


@kernel_or_slowly_reference
@one_activation_in_rows
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
