"""Runs kernels in several ways, on arrays that are hard to quantize."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as pk
from helpers import oracle
from helpers.marks import slow

BF16, F32 = jnp.bfloat16, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FORMATS = {E4M3: oracle.E4M3, E5M2: oracle.E5M2}
# Users compile at this level; `conftest` sets level 0 on CPUs.
OPTIMIZED = {"xla_backend_optimization_level": 3}

on_gpu = pytest.param("mosaic", marks=pytest.mark.gpu)
every_implementation = pytest.mark.parametrize(
    "implementation", ["reference", "interpret", on_gpu]
)
kernel_or_slowly_reference = pytest.mark.parametrize(
    "implementation", [slow("reference"), "interpret", on_gpu]
)
every_kernel = pytest.mark.parametrize("implementation", ["interpret", on_gpu])


def run(implementation, function, *arrays, detect_races=False):
    """Returns `function(*arrays, implementation=...)`, compiled."""
    (result,) = run_each(implementation, function, arrays, detect_races=detect_races)
    return result


def run_each(implementation, function, *calls, detect_races=False):
    """Returns the results of a function, compiled once, for several tuples of arrays.

    The implementation "interpret" runs the kernel without a GPU. Only this one is
    compiled without XLA's optimizations.
    """
    interpreted = implementation == "interpret"
    named = "mosaic" if interpreted else implementation
    call = jax.jit(
        lambda *arrays: function(*arrays, implementation=named),
        compiler_options=None if interpreted else OPTIMIZED,
    )
    if not interpreted:
        return [call(*arrays) for arrays in calls]
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    with plgpu.force_gpu_interpret_mode(params):
        return [jax.block_until_ready(call(*arrays)) for arrays in calls]


def numbers(shape, dtype=BF16, seed=0, octaves=6.0) -> jax.Array:
    """Returns normal numbers times powers of two."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.uniform(-octaves, octaves, shape))
    return jnp.asarray(x, dtype)


def adversarial(shape, dtype=BF16, seed=0, group=16) -> jax.Array:
    """Returns numbers; the first groups hold zeros, outliers, NaNs and denormals."""
    x = np.array(numbers(shape, F32, seed))
    groups = x.reshape(-1, group)
    groups[0] = 0
    groups[1] = -0.0
    groups[2, 1:] = 0
    groups[3, 5] = 1e30
    groups[4, 3] = np.inf
    groups[5, 7] = -np.inf
    groups[6, group - 1] = np.nan
    groups[7] *= np.float32(1e-41)  # Denormal.
    groups[8, 2:] = 1e-39
    groups[9] *= np.float32(1e-37)
    groups[10, 4] = 3.3e38
    groups[11] = np.linspace(0, 448, group)
    groups[12] = np.float32(17 / 16)  # Half way between two codes.
    groups[12, 0] = 1.75 * 256
    groups[13] = np.linspace(0, 57344, group)
    groups[14, 1::2] = -0.0
    return jnp.asarray(x, dtype)


def finite(x: jax.Array) -> jax.Array:
    """Replaces numbers that are not finite by zeros."""
    return jnp.where(jnp.isfinite(x), x, 0)


def encoded(x, scale, dtype) -> np.ndarray:
    """Returns the codes of x / scale that the specification requires."""
    with np.errstate(invalid="ignore", over="ignore"):
        x = oracle.flush(np.asarray(x)) * (np.float32(1) / np.float32(scale))
    return FORMATS[dtype].round(x).astype(ml_dtypes.finfo(dtype).dtype)


def encoded_groups(x, dtype, group) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes and the groups' scales that the specification requires."""
    x = np.asarray(x)
    with np.errstate(invalid="ignore", over="ignore"):
        scales, values = oracle.quantize(x, FORMATS[dtype], (group,))
    scale = np.zeros((*x.shape[:-1], -(-x.shape[-1] // group)), ml_dtypes.bfloat16)
    for index, value in scales.items():
        scale[index] = value
    return values.astype(ml_dtypes.finfo(dtype).dtype), scale


def assert_identical(actual, expected):
    """Asserts the same bits, except in NaNs."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        bits = f"u{a.dtype.itemsize}"
        nan = np.isnan(b.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(a.astype(np.float32)), nan)
        np.testing.assert_array_equal(a.view(bits)[~nan], b.view(bits)[~nan])


def adam(grads, params, codes, scale, exponent, seed):
    """Runs Adam's kernel on arrays of `adam_arrays`."""
    scalars = pk.AdamScalars(0.9, 0.95, 1e-8, 0.0, 1.5, 0.0, 1.1, 1e-4, 0.1)
    moments = pk.Moments(codes, scale, codes, scale, exponent)
    return pk.adam(scalars, grads, moments, seed, seed, params, implementation="mosaic")


def adam_arrays(rows=64, n=128):
    """Returns abstract arrays of a step of Adam, with groups of 128."""
    array = jax.ShapeDtypeStruct
    grads, groups = array((rows, n), BF16), (rows, n // 128)
    moments = array((rows, n), E4M3), array(groups, F32), array(groups, jnp.uint8)
    return grads, grads, *moments, array((), jnp.uint32)
