"""Kernels that add two arrays and quantize the sum are adding, then quantizing."""

import functools

import jax
import jax.numpy as jnp
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

import pallas_kernels as pk

SCALE = 2.0**-3


def added(x, y) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.asarray(x).astype(np.float32) + np.asarray(y).astype(np.float32)
        return total.astype(x.dtype)


@every_implementation
@pytest.mark.parametrize(
    ("shape", "dtype", "codes", "group"),
    [
        ((24, 128), BF16, E4M3, 16),
        ((2, 9, 160), F32, E5M2, 32),
        ((17, 256), BF16, E4M3, 128),
    ],
)
def test_sums_are_quantized_in_groups(implementation, shape, dtype, codes, group):
    x, y = adversarial(shape, dtype), numbers(shape, dtype, seed=1)
    add = functools.partial(pk.add_quantize_groups, dtype=codes, group=group)
    out = run(implementation, add, x, y)
    total = added(x, y)
    assert_identical(out.total, total)
    assert_identical(out.groups, encoded_groups(total, codes, group))


@every_implementation
@pytest.mark.parametrize("copies", ["row", "transposed", "both"])
@pytest.mark.parametrize(
    ("shape", "dtype", "codes"),
    [
        ((128, 64), BF16, E5M2),
        ((144, 80), F32, E4M3),
        ((2, 80, 192), BF16, E5M2),
    ],
)
def test_sums_are_quantized_with_one_scale(implementation, shape, dtype, codes, copies):
    x, y = adversarial(shape, dtype), numbers(shape, dtype, seed=1)
    add = functools.partial(pk.add_quantize_tensor, dtype=codes, copies=copies)
    out = run(implementation, add, x, y, jnp.float32(SCALE))
    total = added(x, y)
    assert_identical(out.total, total)
    row = encoded(total, SCALE, codes)
    assert_identical(out.row, None if copies == "transposed" else row)
    transposed = row.reshape(-1, shape[-1]).T
    assert_identical(out.transposed, None if copies == "row" else transposed)
    assert np.isnan(np.max(out.largest))


@every_implementation
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_maxima_are_those_of_sums(implementation, dtype):
    x, y = finite(adversarial((33, 128), dtype)), numbers((33, 128), dtype, seed=1)
    out = run(implementation, pk.add_quantize_tensor, x, y, jnp.float32(SCALE))
    assert np.max(out.largest) == np.abs(added(x, y).astype(np.float32)).max()


@every_kernel
def test_vmap_is_a_loop(implementation):
    x, y = numbers((2, 128, 64)), numbers((2, 128, 64), seed=1)

    def add(x, y, implementation):
        both = functools.partial(
            pk.add_quantize_tensor, copies="both", implementation=implementation
        )
        return jax.vmap(both, in_axes=(0, 0, None))(x, y, jnp.float32(SCALE))

    out = run(implementation, add, x, y)._replace(largest=None)
    assert_identical(out, run("reference", add, x, y)._replace(largest=None))


def test_kernels_have_no_races():
    x, y = numbers((128, 64)), numbers((128, 64), seed=1)
    both = functools.partial(pk.add_quantize_tensor, copies="both")
    run("interpret", both, x, y, jnp.float32(SCALE), detect_races=True)
    run("interpret", pk.add_quantize_groups, x, y, detect_races=True)


def test_what_kernels_do_not_take_is_left_to_the_reference():
    for shape in [(0, 32), (2, 3, 21)]:
        x, y = numbers(shape), numbers(shape, seed=1)
        out = jax.jit(pk.add_quantize_groups)(x, y)
        assert_identical(out.groups, encoded_groups(added(x, y), E4M3, 16))


def test_arrays_that_are_not_alike_are_named():
    x = numbers((16, 128))
    with pytest.raises(ValueError, match=r"bfloat16\(16, 128\) and float32\(16, 128\)"):
        pk.add_quantize_groups(x, x.astype(F32))
    with pytest.raises(ValueError, match="multiple of 16, got 100"):
        run("mosaic", pk.add_quantize_groups, x[:, :100], x[:, :100])
