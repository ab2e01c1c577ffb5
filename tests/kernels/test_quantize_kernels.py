"""Tests the quantization kernels against their references and NumPy."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.kernels import (
    BF16,
    E4M3,
    E5M2,
    F32,
    adversarial,
    assert_identical,
    encoded,
    encoded_groups,
    every_implementation,
    every_kernel,
    finite,
    numbers,
    run,
)
from helpers.marks import slow

import coat_jax as coat
import pallas_kernels as pk

GROUP_CASES = [
    ((8, 128), BF16, E4M3, 16),
    ((2, 9, 160), F32, E5M2, 32),
    ((17, 256), BF16, E4M3, 128),
    ((9, 512), F32, E4M3, 256),
]
TILE_CASES = [
    ((128, 64), BF16, E4M3),
    ((144, 80), F32, E5M2),
    ((2, 80, 192), BF16, E4M3),
]
SCALE = 2.0**-3


@every_implementation
@pytest.mark.parametrize(("shape", "dtype", "codes", "group"), GROUP_CASES)
def test_groups_are_quantized_as_specified(implementation, shape, dtype, codes, group):
    x = adversarial(shape, dtype, seed=sum(shape), group=16)
    quantize = functools.partial(pk.quantize_groups, dtype=codes, group=group)
    actual = run(implementation, quantize, x)
    assert_identical(actual, encoded_groups(x, codes, group))
    format = {E4M3: coat.E4M3, E5M2: coat.E5M2}[codes]
    if implementation == "reference":
        how = {"format": format, "granularity": coat.PerGroup(group)}
        library = jax.jit(functools.partial(coat.quantize, **how))(x)
        assert_identical(actual, (library.codes, library.scale))


@every_implementation
@pytest.mark.parametrize(("shape", "dtype", "codes", "group"), GROUP_CASES[1:4])
def test_groups_are_decoded(implementation, shape, dtype, codes, group):
    stored = pk.Scaled(*encoded_groups(adversarial(shape, dtype), codes, group))
    decode = functools.partial(pk.dequantize_groups, dtype=dtype)
    actual = run(implementation, decode, pk.Scaled(*map(jnp.asarray, stored)))
    scale = np.repeat(stored.scale.astype(np.float32), group, axis=-1)
    with np.errstate(over="ignore"):
        expected = (stored.codes.astype(np.float32) * scale).astype(dtype)
    assert_identical(actual, expected)


@every_implementation
@pytest.mark.parametrize(
    ("shape", "dtype", "codes"),
    [slow((3, 7, 1152), F32, E5M2), ((17, 2048), BF16, E4M3)],
)
def test_rows_are_quantized_as_groups_are(implementation, shape, dtype, codes):
    # Each row has one odd group: zeros, outliers, infinities, NaNs or denormals.
    x = adversarial((math.prod(shape[:-1]), 128), dtype, seed=sum(shape), group=128)
    x = jnp.concatenate(
        [numbers(shape, dtype, octaves=0)[..., 128:], x.reshape(*shape[:-1], 128)],
        axis=-1,
    )
    quantize = functools.partial(pk.quantize_rows, dtype=codes)
    actual = run(implementation, quantize, x)
    expected, scale = encoded_groups(x, codes, shape[-1])
    assert_identical(actual, (expected, scale[..., 0].astype(F32)))


@every_implementation
@pytest.mark.parametrize(
    ("shape", "dtype", "codes"),
    [slow((1, 256, 80), F32, E5M2), ((3, 256, 144), BF16, E4M3)],
)
def test_columns_are_quantized_as_rows_of_the_transpose(
    implementation, shape, dtype, codes
):
    count, k, n = shape
    # Some columns are odd: zeros, outliers, infinities, NaNs or denormals.
    rows = adversarial((count, n, k), dtype, seed=sum(shape), group=k)
    quantize = functools.partial(pk.quantize_columns, dtype=codes)
    actual = run(implementation, quantize, rows.swapaxes(1, 2))
    expected, scale = encoded_groups(rows, codes, k)
    assert_identical(actual, (expected, scale[..., 0].astype(F32)))


@every_implementation
def test_columns_with_known_scales_saturate(implementation):
    x = numbers((2, 128, 64), F32)
    # Scales have 8 significant bits; with the first ones numbers exceed the codes.
    scale = np.float32(1.375) * np.exp2(np.arange(-64.0, 64.0)).astype(F32)
    scale = scale.reshape(2, 64)[:, ::-1].copy()
    actual = run(implementation, pk.quantize_columns, x, jnp.asarray(scale))
    exact = np.asarray(x) * (1 / scale)[:, None]
    assert (np.abs(exact) > 448).any()
    expected = np.clip(exact, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert_identical(actual, pk.Scaled(expected.swapaxes(1, 2), scale))


@every_implementation
@pytest.mark.parametrize("shape", [slow((2, 32, 256)), (64, 33 * 128)])
def test_rows_with_known_scales_saturate(implementation, shape):
    x = numbers(shape, F32)
    scale = np.float32(1.375) * np.exp2(np.arange(31.0, -33.0, -1)).astype(F32)
    scale = scale.reshape(shape[:-1])
    actual = run(implementation, pk.quantize_rows, x, jnp.asarray(scale))
    exact = np.asarray(x) * (1 / scale)[..., None]
    assert (np.abs(exact) > 448).any()
    expected = np.clip(exact, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert_identical(actual, pk.Scaled(expected, scale))


def test_scales_of_rows_are_checked():
    for scale in (jnp.ones((2, 64)), 2.0, [1.0, 2.0]):
        with pytest.raises(ValueError, match=r"scale must have the shape \(2, 128\)"):
            pk.quantize_rows(jnp.ones((2, 128, 64)), scale)


def test_scales_of_columns_are_checked():
    x = jnp.ones((2, 128, 64))
    for scale, message in (
        (jnp.ones((2, 128)), r"scale must have the shape \(2, 64\)"),
        (jnp.ones((2, 64), BF16), "bfloat16"),
        (2.0, r"scale must have the shape \(2, 64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            pk.quantize_columns(x, scale)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(8192, 4096), (4099, 8192), (999, 11008), (3, 768), (70, 24576)]
)
def test_long_rows_on_a_gpu(shape):
    x = numbers(shape, seed=shape[0])
    expected = run("reference", pk.quantize_rows, x)
    assert_identical(run("mosaic", pk.quantize_rows, x), expected)


@every_implementation
@pytest.mark.parametrize(("shape", "dtype"), [((33, 160), F32), ((7, 128, 144), BF16)])
def test_maxima_keep_nan(implementation, dtype, shape):
    x = adversarial(shape, dtype)
    magnitudes = np.abs(np.asarray(finite(x), np.float32))

    def each(*arrays, implementation):
        return [pk.maxima(x, implementation=implementation) for x in arrays]

    actual = run(implementation, each, x, finite(x), jnp.zeros((40, 64), dtype))
    assert [array.ndim for array in actual] == [1] * 3
    expected = np.float32([np.nan, magnitudes.max(), 0])
    np.testing.assert_array_equal(list(map(np.max, actual)), expected)


@every_implementation
def test_maxima_of_all_arrays_and_of_batches(implementation):
    """The largest number of each batch entry is in the first or the second array."""
    x, y = numbers((2, 3, 9, 2048)), numbers((3, 1040), seed=1)
    x, y = x.at[1, 0, 5, 77].set(-1e4), y.at[2, -1].set(-1e4)

    def batched(x, y, **how):
        maxima = jax.vmap(functools.partial(pk.maxima, **how))
        return jax.vmap(maxima, (0, None))(x, y)

    actual = jnp.max(run(implementation, batched, x, y), axis=-1)
    x, y = (np.abs(np.asarray(a, np.float32)) for a in (x, y))
    np.testing.assert_array_equal(actual, np.maximum(x.max((2, 3)), y.max(1)))


@every_implementation
@pytest.mark.parametrize(
    ("shape", "dtype", "codes", "copies"),
    [
        (*TILE_CASES[0], "both"),
        (*TILE_CASES[1], "both"),
        (*TILE_CASES[1], "row"),
        (*TILE_CASES[2], "transposed"),
    ],
)
def test_tensors_are_quantized_as_specified(
    implementation, shape, dtype, codes, copies
):
    x = adversarial(shape, dtype, seed=sum(shape))
    quantize = functools.partial(pk.quantize_tensor, dtype=codes, copies=copies)
    actual = run(implementation, quantize, x, jnp.float32(SCALE))
    row = encoded(x, SCALE, codes)
    transposed = row.reshape(-1, shape[-1]).T
    assert (actual.row is None, actual.transposed is None) == (
        copies == "transposed",
        copies == "row",
    )
    expected = {"row": [row], "transposed": [transposed], "both": [row, transposed]}
    assert_identical(actual, [*expected[copies], np.float32(SCALE)])


@every_implementation
@pytest.mark.parametrize(("copies", "last"), [("row", np.nan), ("both", -np.inf)])
def test_maxima_beside_codes(implementation, copies, last):
    x = numbers((256, 192), seed=3).at[-1, -1].set(last)
    quantize = functools.partial(pk.quantize_tensor, copies=copies, keep_maxima=True)
    actual = run(implementation, quantize, x, jnp.float32(SCALE))
    magnitudes = np.abs(np.asarray(x, np.float32))
    np.testing.assert_array_equal(np.max(actual.largest), magnitudes.max())
    assert_identical(actual.row, encoded(x, SCALE, E4M3))


@every_implementation
def test_odd_scales(implementation):
    x, scales = adversarial((16, 128), F32), [np.nan, 2.0**-120, 2.0**100]

    def each(x, *scales, implementation):
        named = {"implementation": implementation}
        return [pk.quantize_tensor(x, scale, **named) for scale in scales]

    results = run(implementation, each, x, *map(jnp.float32, scales))
    for actual, scale in zip(results, scales, strict=True):
        assert_identical(actual, [encoded(x, scale, E4M3), np.float32(scale)])


@every_implementation
@pytest.mark.parametrize(("shape", "codes"), [(s, c) for s, _, c in TILE_CASES[1:]])
def test_codes_are_transposed(implementation, shape, codes):
    bits = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    every_code = jnp.asarray(bits.view(codes))
    actual = run(implementation, pk.transpose, every_code)
    np.testing.assert_array_equal(
        np.asarray(actual).view(np.uint8), bits.reshape(-1, shape[-1]).T
    )


@every_kernel
def test_vmap_and_scan(implementation):
    x, scale = numbers((2, 128, 128)), jnp.float32(SCALE)

    def both(x, implementation):
        named = {"implementation": implementation}

        def mapped(x):
            tensor = pk.quantize_tensor(x, scale, copies="both", **named)
            return pk.quantize_groups(x, **named), tensor

        def scanned(x):
            return pk.quantize_rows(x, **named)

        return jax.vmap(mapped)(x), jax.lax.map(scanned, x)

    (groups, tensor), rows = run(implementation, both, x)
    codes = encoded(x, SCALE, E4M3)
    assert_identical(groups, encoded_groups(x, E4M3, 16))
    expected = [codes, codes.swapaxes(1, 2), np.full(2, SCALE, np.float32)]
    assert_identical(tensor, expected)
    codes, scales = encoded_groups(x, E4M3, 128)
    assert_identical(rows, [codes, scales[..., 0].astype(F32)])


@every_kernel
def test_tuning_changes_nothing(implementation):
    x, scale = adversarial((128, 144)), jnp.float32(SCALE)
    tuning = pk.ElementwiseTuning(elements=8)
    quantize = functools.partial(pk.quantize_groups, tuning=tuning)
    assert_identical(run(implementation, quantize, x), encoded_groups(x, E4M3, 16))
    tuning = pk.ElementwiseTuning(elements=32, columns=128)
    quantize = functools.partial(pk.quantize_tensor, tuning=tuning, copies="both")
    codes = encoded(x, SCALE, E4M3)
    actual = run(implementation, quantize, x, scale)
    assert_identical(actual, [codes, codes.T, scale])


def test_kernels_have_no_races():
    x, scale = numbers((128, 64)), jnp.float32(SCALE)
    both = functools.partial(pk.quantize_tensor, copies="both")
    for function, arguments in (
        (pk.quantize_groups, [x]),
        (pk.quantize_rows, [numbers((9, 1152))]),
        (both, [x, scale]),
    ):
        run("interpret", function, *arguments, detect_races=True)


def test_what_kernels_do_not_take_is_left_to_the_reference():
    scale = jnp.float32(SCALE)
    quantize = functools.partial(pk.quantize_tensor, copies="both")
    for shape in [(0, 32), (3, 0), (2, 3, 21)]:
        x = numbers(shape)
        groups = jax.jit(pk.quantize_groups)(x)
        assert_identical(groups, encoded_groups(x, E4M3, 16))
        codes, scales = jax.jit(pk.quantize_rows)(x)
        by_row, expected = encoded_groups(x, E4M3, max(shape[-1], 1))
        assert_identical(codes, by_row)
        assert scales.shape == shape[:-1]
        if x.size:
            assert_identical(scales, expected[..., 0].astype(F32))
        assert jax.jit(pk.dequantize_groups)(groups).shape == shape
        both = jax.jit(quantize)(x, scale)
        codes = encoded(x, SCALE, E4M3)
        transposed = codes.reshape(np.prod(shape[:-1], dtype=int), shape[-1]).T
        assert_identical(both, [codes, transposed, scale])
        assert_identical(jax.jit(pk.transpose)(both.row), transposed)
    assert pk.maxima(jnp.zeros((0, 4))).max() == 0


@every_implementation
def test_rows_may_share_the_scales_of_groups(implementation):
    groups = pk.quantize_groups(numbers((128, 64)))
    shared = groups._replace(scale=groups.scale[:1])
    actual = run(implementation, pk.dequantize_groups, shared)
    alike = groups._replace(scale=jnp.tile(groups.scale[:1], (128, 1)))
    assert_identical(actual, run("reference", pk.dequantize_groups, alike))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float64, BF16])
def test_scalars_may_have_any_dtype(dtype):
    x = numbers((16, 64))
    with jax.enable_x64(True):
        actual = pk.quantize_tensor(x, jnp.asarray(SCALE, dtype))
    assert_identical(actual.row, encoded(x, SCALE, E4M3))


def test_kernels_are_the_same_where_jax_counts_in_64_bits():
    x = numbers((128, 64))
    quantize = functools.partial(pk.quantize_tensor, copies="both")
    codes = encoded(x, SCALE, E4M3)
    expected = [codes, codes.T, np.float32(SCALE)]
    with jax.enable_x64(True):
        assert_identical(run("interpret", quantize, x, SCALE), expected)
        codes, scales = run("interpret", pk.quantize_rows, numbers((5, 128)))
        assert (codes.dtype, scales.dtype) == (E4M3, F32)


def test_what_cannot_run_is_named():
    x, scale = numbers((128, 100)), jnp.float32(SCALE)
    with pytest.raises(ValueError, match="multiple of 16, got 100"):
        run("mosaic", pk.quantize_groups, x)
    with pytest.raises(ValueError, match="1024 elements or more, got 96"):
        run("mosaic", pk.quantize_tensor, x[0, :96], scale)
    with pytest.raises(ValueError, match="128 rows of 64 elements or more, got 64"):
        run("mosaic", pk.transpose, x[:64, :80].astype(E4M3))
    with pytest.raises(ValueError, match="multiple of 16 rows, got 132"):
        run("mosaic", pk.transpose, jnp.zeros((132, 64), E4M3))
    with pytest.raises(ValueError, match="64, 128 or 256 elements, got 8"):
        run("mosaic", functools.partial(pk.quantize_groups, group=8), x[:, :64])
    with pytest.raises(ValueError, match="codes must be float8_e4m3fn or float8_e5m2"):
        pk.quantize_groups(x, dtype=jnp.int8)
    with pytest.raises(ValueError, match="got 'columns'"):
        pk.quantize_tensor(x, scale, copies="columns")


@pytest.mark.parametrize("n", [18, 24, 36])
def test_the_size_of_groups_tells_a_short_last_one(n):
    """24 numbers have as many groups of 16 as groups of 12."""
    x = np.random.default_rng(0).standard_normal((3, n)).astype(np.float32)
    x[:, 16:] *= 100
    groups = jax.jit(functools.partial(pk.quantize_groups, group=16))(x)
    scale = np.repeat(np.asarray(groups.scale, np.float32), 16, axis=1)[:, :n]
    expected = np.asarray(groups.codes, np.float32) * scale
    read = functools.partial(pk.dequantize_groups, dtype=jnp.float32, group=16)
    actual = jax.jit(read)(groups)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(actual, x, rtol=2**-4, atol=1e-2)
    with pytest.raises(ValueError, match=f"{n} elements in groups of 5 are not"):
        pk.dequantize_groups(groups, group=5)
