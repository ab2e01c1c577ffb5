"""Tests per-tensor scales from partial amax: reference, interpreted kernel, GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels import (
    E4M3,
    E5M2,
    assert_identical,
    every_implementation,
    every_kernel,
    run,
)
from helpers.marks import slow

import pallas_kernels as pk

# Half a step above the largest code. Anything up to it rounds to the largest code or
# saturates.
EDGES = {E4M3: 464.0, E5M2: 61440.0}


def expected(bound, dtype):
    """Returns the scale that the specification requires, by trying powers of two."""
    largest = np.prod([np.abs(np.float64(x)).max() for x in bound.maxima])
    largest = np.float64(np.float32(largest * bound.factor))
    if not np.isfinite(largest):
        return np.float32(np.nan)
    tried = (2.0**e for e in range(-126, 128))
    return np.float32(next(s for s in tried if largest <= EDGES[dtype] * s))


def maxima(size, seed=0):
    rng = np.random.default_rng(seed)
    x = np.abs(rng.standard_normal(size)) * 2.0 ** rng.integers(-20, 20)
    return jnp.asarray(x, jnp.float32)


def scales(*bounds, implementation="reference", dtype=E4M3):
    factors = [bound.factor for bound in bounds]

    def call(*arrays, implementation):
        with_factors = map(pk.Bound, arrays, factors)
        return pk.tensor_scales(
            *with_factors, dtype=dtype, implementation=implementation
        )

    return run(implementation, call, *(bound.maxima for bound in bounds))


def same(actual, bounds, dtype):
    assert_identical(actual, [expected(bound, dtype) for bound in bounds])


@every_implementation
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    "sizes", [slow((128,)), slow((8192, 11008)), slow((264, 516, 4098)), (132, 65536)]
)
def test_scales_are_as_specified(implementation, dtype, sizes):
    arrays = [maxima(size, seed) for seed, size in enumerate(sizes)]
    bounds = [pk.Bound((x,), 448.0) for x in arrays]
    bounds.append(pk.Bound((arrays[-1], arrays[0]), 1.1))
    same(scales(*bounds, implementation=implementation, dtype=dtype), bounds, dtype)


@every_implementation
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_edges(implementation, dtype):
    """The edges of rounding to the largest code, zeros, denormals, infinity and NaN."""
    edge, top = EDGES[dtype], float(jnp.finfo(dtype).max)
    above = float(np.nextafter(np.float32(edge), np.inf))
    odd = [top, edge, above, 1.0, 0.0, 1e-39, 1e-45, 3.3e38, np.inf, np.nan]
    at = np.random.default_rng(1).integers(0, 128, len(odd))
    arrays = [np.zeros(128, np.float32) for _ in odd]
    for x, i, value in zip(arrays, at, odd, strict=True):
        x[i] = value
    bounds = [pk.Bound((jnp.asarray(x),)) for x in arrays]
    # Numbers with a larger power-of-two scale would not fit bfloat16.
    largest = 2.0 ** np.floor(np.log2(float(jnp.finfo(jnp.bfloat16).max) / top))
    results = scales(*bounds, implementation=implementation, dtype=dtype)
    for actual, bound, value in zip(results, bounds, odd, strict=True):
        tiny = not value > 2.0**-126 * top  # Scales are normal numbers.
        limited = 2.0**-126 if tiny else min(expected(bound, dtype), largest)
        if np.isnan(expected(bound, dtype)):
            limited = np.nan
        assert_identical(actual, np.float32(limited))


@every_kernel
def test_vmap_and_scan(implementation):
    x = jnp.stack([maxima(256, seed) for seed in range(3)])

    def both(x, *, implementation):
        one = functools.partial(_one, implementation=implementation)
        return jax.vmap(one)(x), jax.lax.map(one, x)

    mapped, looped = run(implementation, both, x)
    rows = np.array([expected(pk.Bound((row,)), E4M3) for row in x])
    assert_identical((mapped, looped), (rows, rows))


def _one(x, implementation):
    return pk.tensor_scales(pk.Bound((x,)), implementation=implementation)[0]


def test_the_kernel_has_no_races():
    bounds = [pk.Bound((maxima(4098), maxima(512)))] * 2

    def call(*arrays, implementation):
        return pk.tensor_scales(*map(pk.Bound, arrays), implementation=implementation)

    arrays = [bound.maxima for bound in bounds]
    same(run("interpret", call, *arrays, detect_races=True), bounds, E4M3)


def test_what_is_small_or_wrong_is_named():
    assert pk.tensor_scales() == ()
    few = pk.Bound((jnp.ones(100),))
    assert pk.tensor_scales(few) == (2.0**-8,)
    with pytest.raises(ValueError, match="128 maxima or more, got 100"):
        pk.tensor_scales(few, implementation="mosaic")
    with pytest.raises(ValueError, match="maxima must be float32, got bfloat16"):
        pk.tensor_scales(pk.Bound((jnp.ones(256, jnp.bfloat16),)))
    with pytest.raises(ValueError, match="codes must be float8_e4m3fn or float8_e5m2"):
        pk.tensor_scales(few, dtype=jnp.int8)
