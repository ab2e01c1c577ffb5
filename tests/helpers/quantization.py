"""Arrays to quantize, and comparisons of codes with the oracle's."""

import itertools
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import coat_jax as coat
from helpers import oracle
from helpers.marks import slow_except

FORMATS = [coat.E4M3, coat.E5M2, coat.DE8]
FLOATS = [coat.E4M3, coat.E5M2]
# Each granularity is paired with the oracle's name for it.
PER_TENSOR = (coat.PerTensor(), None)
PER_GROUP = (coat.PerGroup(16), (16,))
PER_BLOCK = (coat.PerBlock(2, 8), (2, 8))
GRANULARITIES = [PER_TENSOR, PER_GROUP, PER_BLOCK]
# Few shapes, since each is compiled anew: all ranks, whole and short last groups.
SHAPES = {
    PER_TENSOR: [(), (2, 1, 3, 9)],
    PER_GROUP: [(), (21,), (2, 3, 16), (2, 1, 3, 9)],
    PER_BLOCK: [(3, 35), (2, 1, 3, 9)],
}
EXTREMES = [0.0, -0.0, 1e-45, 1e-39, 1.17549435e-38, 1e-38, -2e-38, 1.0, 1e38, 3.4e38]

every_format = pytest.mark.parametrize("format", FORMATS, ids=repr)
every_granularity = pytest.mark.parametrize(
    "granularity", GRANULARITIES, ids=lambda g: type(g[0]).__name__
)
# A format and a granularity, two pairs of them by default.
a_few_pairs = pytest.mark.parametrize(
    ("format", "granularity"),
    slow_except(
        [(coat.E4M3, PER_GROUP), (coat.DE8, PER_BLOCK)],
        itertools.product(FORMATS, GRANULARITIES),
    ),
)
either = pytest.mark.parametrize("expand", [False, True], ids=["linear", "expanded"])


def reference(format: coat.Format) -> oracle.Format:
    return {"E4M3": oracle.E4M3, "E5M2": oracle.E5M2, "DE8": oracle.DE8}[format.name]


def code_values(q: coat.QuantizedArray) -> np.ndarray:
    codes = np.asarray(q.codes)
    if q.format is coat.DE8:
        return oracle.de8_table()[codes]
    return codes.astype(np.float32)


@st.composite
def inputs(draw, granularity=PER_GROUP):
    """Draws arrays of any finite values, of extremes, or of values in [-4, 4]."""
    shape = draw(st.sampled_from(SHAPES[granularity]))
    dtype = draw(st.sampled_from([np.float32, ml_dtypes.bfloat16]))
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    elements = draw(
        st.sampled_from(
            [
                anything,
                st.sampled_from(EXTREMES).map(lambda x: float(np.float32(x))),
                st.floats(-4, 4, width=32),
            ]
        )
    )
    x = draw(npst.arrays(np.float32, shape, elements=elements))
    bound = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    return x if dtype == np.float32 else np.clip(x, -bound, bound).astype(dtype)


def spread(rng, shape, octaves: float = 6) -> np.ndarray:
    """Returns normal numbers times powers of two, distributed like gradients."""
    x = rng.standard_normal(shape) * np.exp2(rng.uniform(-octaves, octaves, shape))
    return x.astype(np.float32)


def assert_same(actual, expected):
    """Asserts equal values, signs of zeros included."""
    np.testing.assert_array_equal(actual, expected)
    some = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual)[some], np.signbit(expected)[some])


def check_scales(q, x, block, scales: dict):
    last = (block or x.shape)[-x.ndim :] if x.ndim else ()
    extent = (1,) * (x.ndim - len(last)) + tuple(last)
    assert q.scale.shape == tuple(
        math.ceil(n / max(b, 1)) for n, b in zip(x.shape, extent, strict=True)
    )
    assert q.scale.dtype == oracle.scale_dtype(block)
    stored = np.asarray(q.scale)
    for index, scale in scales.items():
        np.testing.assert_array_equal(stored[index], scale)


# Whole programs, which are compiled faster than their operations one by one.
quantized = jax.jit(coat.quantize, static_argnames=("format", "granularity", "expand"))
dequantized = jax.jit(coat.dequantize)
