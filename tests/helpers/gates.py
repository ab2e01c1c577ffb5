"""Gates in float64, and their inputs."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels as pk
from helpers.kernels import BF16, E4M3, FORMATS, encoded_groups, numbers
from helpers.marks import slow, slow_except

# The relative error of float32 arithmetic with a GPU's exponentials and logarithms.
ERROR = 4e-5
_TINY = 2.0**-110  # Absolute error of a flushed denormal times its factor.
SCALE = 2.0**-3
_SHAPES = [(8, 2, 128), (3, 11, 2, 144), (17, 2, 160)]
_TILES = [(128, 2, 64), (2, 72, 2, 80), (144, 2, 96)]
_ROWS = [(5, 2, 2048), (2, 2, 2, 2064), (1, 2, 28_656)]
_ROWS += [(5, 2, 1408), (2, 3, 2, 1920), (17, 2, 128)]  # Short ones.
ACTIVATIONS = ["silu", "gelu", "gelu_exact"]
_CASE = "activation", "shape"
_CASES = list(zip(ACTIVATIONS, _SHAPES, strict=True))
every_activation = pytest.mark.parametrize(_CASE, _CASES)
one_activation = pytest.mark.parametrize(_CASE, slow_except([_CASES[1]], _CASES))
_IN_ROWS = list(zip(ACTIVATIONS * 2, _ROWS, strict=True))
every_activation_in_rows = pytest.mark.parametrize(
    _CASE, slow_except([_IN_ROWS[0], _IN_ROWS[-1]], _IN_ROWS)
)
one_activation_in_rows = pytest.mark.parametrize(
    _CASE, slow_except([_IN_ROWS[0]], _IN_ROWS)
)
# Copies are made alike for all activations, which other tests compare with formulas.
every_activation_in_tiles = pytest.mark.parametrize(
    _CASE, [slow("gelu", _TILES[0]), ("silu", _TILES[1]), slow("gelu_exact", _TILES[2])]
)


def inputs(shape, seed=0):
    """Returns gate and up in groups of 16, some of them zero, and a gradient.

    Gate and up are the two entries of the second last axis of one quantized array.
    """
    rng = np.random.default_rng(seed)
    gate_up = rng.standard_normal(shape) * np.exp2(rng.uniform(-3, 5, shape))
    gate_up[..., :16] = 0
    gate_up[..., 16:32] *= 1e-4
    gate_up[..., 0, 40] = -300.0
    groups = encoded_groups(gate_up, E4M3, 16)
    dy = numbers((*shape[:-2], shape[-1]), seed=seed + 1, octaves=2)
    return pk.Scaled(*map(jnp.asarray, groups)), dy


def decoded(groups) -> np.ndarray:
    scale = np.repeat(np.asarray(groups.scale, np.float64), 16, axis=-1)
    return np.asarray(groups.codes, np.float64) * scale


def _sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def exact(groups, activation, dy=None):
    """Returns the gated product, or its gradients for `dy`, and the numbers' sizes.

    All are float64. The error of a number is relative to its size.
    """
    both = decoded(groups)
    gate, up = both[..., 0, :], both[..., 1, :]
    x, slope = gate, np.ones_like(gate)
    if activation == "gelu":
        x = math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)
        slope = math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * gate**2)
    factor, density = _sigmoid(x), _sigmoid(x) * _sigmoid(-x) * slope
    if activation == "gelu_exact":
        x = gate**2 / 2
        factor = np.vectorize(math.erfc)(-gate / math.sqrt(2)) / 2
        density = np.exp(-x) / math.sqrt(2 * math.pi)
    # The relative error of exp(x) is the absolute error of x, so it grows with |x|.
    growth = np.maximum(np.abs(x) / 16, 1)
    if dy is None:
        y = gate * factor * up
        return y, np.abs(y) * growth
    dy = np.asarray(dy, np.float64)
    inner = gate * density
    grads = [dy * up * (factor + inner), dy * gate * factor]
    sizes = [np.abs(dy * up) * (factor + np.abs(inner)), np.abs(grads[1])]
    return np.stack(grads, axis=-2), np.stack([s * growth for s in sizes], axis=-2)


def assert_rounded(values, y, size, scale=None):
    """Asserts that values are rounded from numbers within `ERROR * size` of y."""
    error = ERROR * size + _TINY
    low, high = y - error, y + error
    if values.dtype == BF16:
        low, high = (x.astype(ml_dtypes.bfloat16) for x in (low, high))
    else:
        format = FORMATS[values.dtype.type]
        low, high = (format.round((x / scale).astype(np.float32)) for x in (low, high))
    actual = np.asarray(values, np.float32)
    assert np.all((low.astype(np.float32) <= actual) | np.isnan(low))
    assert np.all((actual <= high.astype(np.float32)) | np.isnan(high))
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(y))


def assert_transposed(out):
    values = np.asarray(out.values)
    n = math.prod(values.shape) // out.transposed.shape[1]
    np.testing.assert_array_equal(
        np.asarray(out.transposed).view(np.uint8),
        values.view(np.uint8).reshape(-1, n).T,
    )


def apart(gate_up):
    """Returns gate and up as two arrays."""
    gate = jax.tree.map(lambda x: x[..., 0, :], gate_up)
    return gate, jax.tree.map(lambda x: x[..., 1, :], gate_up)


def with_scale(function):
    """Returns a function that takes the scale as its last array."""

    def call(*arrays, implementation):
        *arrays, scale = arrays
        return function(*arrays, scale=scale, implementation=implementation)

    return call
