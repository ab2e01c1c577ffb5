"""Tests kernels for rows copied from tokens: sums, copies and transposes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import kernels
from helpers.groups import padded
from helpers.kernels import BF16, E4M3, E5M2, F32, every_implementation

import pallas_kernels
from pallas_kernels.ops.grouped_matmul.transposed import _GroupedTranspose

CODES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


def summed(x, places, add):
    """Returns the float32 sum of each token's rows, plus `add` if it is given."""
    total = np.zeros((len(places), x.shape[1]), np.float32)
    for j in range(places.shape[1]):
        total += np.asarray(x, np.float32)[places[:, j]]
    return total if add is None else np.asarray(add, np.float32) + total


@every_implementation
@pytest.mark.parametrize(
    ("tokens", "k", "n", "dtype", "add", "out"),
    [
        (7, 8, 128, BF16, BF16, BF16),
        (3, 1, 1280, F32, F32, F32),
        (4, 16, 384, F32, None, BF16),
    ],
)
def test_sums_are_rounded_once(implementation, tokens, k, n, dtype, add, out):
    rng = np.random.default_rng(k)
    x = kernels.numbers((23, n), dtype)
    places = rng.integers(0, len(x), (tokens, k)).astype(np.int32)
    # The first and the last row, and one row twice.
    places[0, 0], places[-1, -1], places[1] = 0, len(x) - 1, places[1, 0]
    other = None if add is None else kernels.numbers((tokens, n), add, seed=1)
    call = functools.partial(pallas_kernels.sum_rows, out_dtype=out)
    arrays = x, places, *([] if other is None else [other])
    y = kernels.run(implementation, call, *arrays)
    expected = jnp.asarray(summed(x, places, other)).astype(out)
    np.testing.assert_array_equal(y, expected)


def test_numbers_that_are_not_finite_stay_in_their_tokens():
    x = np.ones((4, 128), np.float32)
    x[1, 5], x[2, 6] = np.nan, np.inf
    y = pallas_kernels.sum_rows(x, np.int32([[0, 3], [1, 0], [2, 2]]))
    assert np.isfinite(y[0]).all()
    assert np.argwhere(~np.isfinite(y)).tolist() == [[1, 5], [2, 6]]


def test_sums_over_a_mapped_axis():
    x = kernels.numbers((2, 6, 128))
    places = np.int32([[[0, 1], [5, 5]], [[2, 3], [0, 4]]])
    y = jax.vmap(pallas_kernels.sum_rows)(x, places)
    for one, of, expected in zip(x, places, y, strict=True):
        np.testing.assert_array_equal(summed(one, of, None), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.ones((4, 2, 8))}, "must be .rows, n. and .tokens, k."),
        ({"places": jnp.zeros((4, 0), jnp.int32)}, "k of 1 or more"),
        ({"places": jnp.zeros((4, 2))}, "places"),
        ({"x": jnp.ones((4, 8), jnp.float16)}, "float16"),
        ({"add": jnp.ones((3, 8))}, "add"),
        ({"out_dtype": jnp.float16}, "float16"),
        ({"implementation": "mosaic"}, "Hopper|GPU|rows must be"),
    ],
)
def test_wrong_sums_are_errors(changes, message):
    arguments = {"x": jnp.ones((4, 8)), "places": jnp.zeros((4, 2), jnp.int32)}
    with pytest.raises(ValueError, match=message):
        pallas_kernels.sum_rows(**arguments | changes)


@every_implementation
@pytest.mark.parametrize(
    ("tokens", "k", "n", "dtype"),
    [(3, 16, 1536, E5M2), (7, 1, 4608, E4M3), (4, 2, 80, E5M2)],
)
def test_tokens_are_copied_to_their_places(implementation, tokens, k, n, dtype):
    rng = np.random.default_rng(k)
    x = rng.integers(0, 256, (tokens, n)).astype(np.uint8).view(CODES[dtype])
    rows = tokens * k + 9
    # The first and the last row, and some rows of no token.
    places = rng.permutation(np.r_[0, rows - 1, 1 : rows - 1][: tokens * k])
    places = places.reshape(tokens, k).astype(np.int32)
    if implementation != "reference" and n % 512:
        pytest.skip("the kernel takes multiples of 512 bytes")
    call = functools.partial(pallas_kernels.copy_rows, rows=rows)
    y = kernels.run(implementation, call, x, places)
    assert y.shape == (rows, n)
    kernels.assert_identical(np.asarray(y)[places], np.repeat(x[:, None], k, axis=1))


def test_copies_over_a_mapped_axis():
    x = kernels.numbers((2, 3, 512)).astype(E4M3)
    places = np.int32([[[0, 5], [4, 1], [2, 3]], [[3, 1], [5, 0], [4, 2]]])
    copy = functools.partial(pallas_kernels.copy_rows, rows=6)
    for one, of, y in zip(x, places, jax.vmap(copy)(x, places), strict=True):
        kernels.assert_identical(y[of[:, 1]], one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.ones((4, 2, 8), E4M3)}, "must be .tokens, n. and .tokens, k."),
        ({"x": jnp.ones((3, 8), E4M3)}, "must be .tokens, n. and .tokens, k."),
        (
            {"x": jnp.ones((0, 8), E4M3), "places": jnp.zeros((0, 2), jnp.int32)},
            "tokens must be a positive int, got 0",
        ),
        ({"x": jnp.ones((4, 8), jnp.bfloat16)}, "bfloat16"),
        ({"places": jnp.zeros((4, 2))}, "places"),
        ({"rows": 7}, "rows must be 8 or more, got 7"),
        ({"implementation": "mosaic"}, "Hopper|GPU|rows must be"),
    ],
)
def test_wrong_copies_are_errors(changes, message):
    x, places = jnp.ones((4, 8), E4M3), jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match=message):
        pallas_kernels.copy_rows(**{"x": x, "places": places, "rows": 8} | changes)


@every_implementation
@pytest.mark.parametrize(
    ("sizes", "n", "dtype"), [([130, 0, 7], 256, E4M3), ([3, 126, 0], 48, E5M2)]
)
def test_transposes_of_copied_rows_are_identical(implementation, sizes, n, dtype):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, n)).astype(np.uint8).view(CODES[dtype])
    # Rows after the last group's are of no token.
    index = np.full(sum(sizes) + 139, len(x), np.int32)
    index[: sum(sizes)] = rng.integers(0, len(x), sum(sizes))
    index[0] = len(x) - 1
    rows = np.concatenate([x, np.zeros_like(x[:1])])[index]

    def call(x, sizes, index, implementation):
        options = {"index": index, "implementation": implementation}
        return pallas_kernels.grouped_transpose(x, sizes, **options)

    y = kernels.run(implementation, call, x, jnp.int32(sizes), index)
    kernels.assert_identical(y, padded(rows, sizes))


def test_a_devices_part_of_columns_may_be_narrow():
    # On a mesh the operation itself is called again, for the parts of columns.
    part = _GroupedTranspose(dtype=jnp.dtype(E4M3))
    x = jax.ShapeDtypeStruct((60, 64), E4M3)
    sizes, index = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (3, 400))
    call = jax.jit(functools.partial(part, implementation="mosaic"))
    call.trace(x, sizes, None, index).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("x", "index", "message"),
    [
        (jnp.ones((8, 128), jnp.bfloat16), jnp.arange(8), "rows with an index"),
        (jnp.ones((8, 128), E4M3), jnp.arange(8.0), "index"),
        (jnp.ones((8, 128), E4M3), jnp.zeros((8, 1), jnp.int32), "vector"),
    ],
)
def test_wrong_indices_are_errors(x, index, message):
    with pytest.raises(ValueError, match=message):
        pallas_kernels.grouped_transpose(x, jnp.int32([4]), index=index)
