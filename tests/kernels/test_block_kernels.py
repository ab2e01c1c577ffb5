"""Tests quantization with scales of blocks against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import oracle
from helpers.kernels import (
    BF16,
    E4M3,
    E5M2,
    F32,
    FORMATS,
    assert_identical,
    every_implementation,
    numbers,
    run,
)
from helpers.marks import slow, slow_except

import pallas_kernels as pk

SIZES = {"1x128": (1, 128), "128x128": (128, 128)}
COPIES = [
    ("1x128", None),
    ("128x128", None),
    (None, "1x128"),
    (None, "128x128"),
    ("1x128", "1x128"),
    ("128x128", "128x128"),
    ("1x128", "128x128"),
]


def odd(shape, dtype, seed=0) -> jax.Array:
    """Returns random numbers with tiles, rows and columns that are hard to quantize.

    The array must have at least 2 x 3 tiles of 128 x 128 numbers.
    """
    x = np.array(numbers(shape, F32, seed))
    x[:128, 128:256] = 0
    x[:128, 256:384] *= np.float32(1e-37)
    x[128:256, :128] *= np.float32(1e30)
    x[130, 130], x[140, 150], x[200, 300] = np.nan, np.inf, -np.inf
    x[3], x[:, 5], x[7], x[:, 9] = 0, -0.0, 1e-41, 1e-39
    x[11, :128] = np.linspace(0, 448, 128)
    x[:128, 13] = np.linspace(0, 57344, 128)
    return jnp.asarray(x, dtype)


def expected(x, block, dtype):
    """Returns codes and scales by the specification, or None if `block` is None."""
    if block is None:
        return None
    x, size = np.asarray(x), SIZES[block]
    with np.errstate(invalid="ignore", over="ignore"):
        scales, values = oracle.quantize(x, FORMATS[dtype], size)
    scale = np.zeros([n // s for n, s in zip(x.shape, size, strict=True)], np.float32)
    for index, value in scales.items():
        scale[index] = value
    return values.astype(ml_dtypes.finfo(dtype).dtype), scale


@every_implementation
@pytest.mark.parametrize(
    ("shape", "dtype", "codes"), [((256, 384), BF16, E4M3), slow((256, 512), F32, E5M2)]
)
@pytest.mark.parametrize(
    ("row", "transposed"), slow_except([("1x128", "128x128")], COPIES)
)
def test_copies_are_quantized_as_specified(
    implementation, row, transposed, shape, dtype, codes
):
    x = odd(shape, dtype, seed=len(str(row)) + shape[1])
    quantize = functools.partial(
        pk.quantize_blocks, row=row, transposed=transposed, dtype=codes
    )
    actual = run(implementation, quantize, x)
    assert [copy is None for copy in actual] == [row is None, transposed is None]
    both = expected(x, row, codes), expected(x.T, transposed, codes)
    assert_identical(actual, both)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (28672, 4096), (128, 11008)])
@pytest.mark.parametrize(("row", "transposed"), COPIES)
def test_large_arrays_on_a_gpu(shape, row, transposed):
    x = numbers(shape, seed=shape[0])
    quantize = functools.partial(pk.quantize_blocks, row=row, transposed=transposed)
    assert_identical(run("mosaic", quantize, x), run("reference", quantize, x))


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_a_batch_is_quantized_array_by_array(implementation):
    x = numbers((2, 128, 256), seed=1)
    quantize = functools.partial(pk.quantize_blocks, row="1x128", transposed="128x128")

    def batched(x, implementation):
        return jax.vmap(functools.partial(quantize, implementation=implementation))(x)

    alone = [run("reference", quantize, each) for each in x]
    assert_identical(
        run(implementation, batched, x), jax.tree.map(lambda *a: jnp.stack(a), *alone)
    )


@pytest.mark.parametrize(
    ("options", "shape", "rule"),
    [
        ({}, (128, 128), "row, transposed or both must name blocks, got neither"),
        ({"row": "128"}, (128, 128), "row must be '1x128', '128x128' or None, got"),
        ({"transposed": 1}, (128, 128), "transposed must be '1x128', '128x128' or"),
        ({"row": "1x128"}, (128, 100), r"multiples of 128, got \(128, 100\)"),
        ({"row": "1x128"}, (2, 128, 128), r"two axes, .* got \(2, 128, 128\)"),
        ({"row": "1x128", "dtype": BF16}, (128, 128), "codes must be"),
    ],
)
def test_bad_input_is_refused(options, shape, rule):
    with pytest.raises(ValueError, match=rule):
        pk.quantize_blocks(jnp.zeros(shape, BF16), **options)
