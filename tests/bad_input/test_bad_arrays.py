"""Tests that `coat.quantize` and its formats refuse bad input with a clear error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bad_input import BadInput, assert_refused

import coat_jax as coat

X = jnp.ones((4, 256))
INTEGERS = jnp.ones((4, 256), jnp.int32)
KEY = jax.random.key(0)
TABLE = BadInput()
refused = TABLE.refused

refused(coat.quantize, [None, "x", 1.0, [1.0, 2.0], {"w": 1.0}], name="quantize")
refused(coat.quantize, [INTEGERS], name="quantize", contains="int32")
refused(coat.quantize, [X > 0, X * 1j], name="quantize", contains="floating array")
refused(coat.quantize, [coat.quantize(X)], name="quantize", contains="QuantizedArray")
refused(coat.dequantize, [None, 1.0, "x", {"w": 1}], name="dequantize")
refused(coat.dequantize, [X], name="dequantize", contains="QuantizedArray")
refused(np.asarray, [coat.quantize(X)], name="numpy", contains=".dequantize()")
refused(
    lambda v: coat.quantize(X, granularity=v),
    [128, None, "row", (1, 16), coat.PerTensor, coat.PerGroup],
    name="granularity",
)
refused(
    lambda v: coat.quantize(X, format=v),
    [None, "E4M3", 8, jnp.float8_e4m3fn],
    name="format",
)
refused(
    lambda v: coat.quantize(X, expand=v),
    [None, "yes", 0, 0.0, -1.0, np.inf, np.nan, [1.0], 1j],
    name="expand",
)
refused(
    lambda v: coat.quantize(X, noise=v),
    [jnp.ones((4, 256), dtype) for dtype in ("uint8", "int32", "float32")],
    name="noise",
    contains="noise must be",
)
refused(
    lambda v: coat.quantize(X, noise=v),
    [KEY, jnp.ones(3, jnp.uint32), jnp.ones((256, 4), jnp.uint32), [1]],
    name="noise",
    contains="noise must be",
)
refused(coat.PerGroup, [0, -1, 1.5, True, np.True_, None, "16", (16,)], name="PerGroup")
for position in (0, 1):
    refused(
        lambda v, at=position: coat.PerBlock(*((v, 8) if at == 0 else (8, v))),
        [0, -8, 2.0, False, None, "8"],
        name="PerBlock",
    )
refused(
    lambda v: coat.quantize(jnp.ones(v), granularity=coat.PerBlock(2, 8)),
    [(3,), ()],
    name="PerBlock of shape",
)


@TABLE.each
def test_arrays_and_formats_are_refused_by_name(call, contains):
    assert_refused(call, contains)


@pytest.mark.parametrize("expand", [True, np.True_])
@pytest.mark.parametrize("size", [16, np.int64(16)])
def test_numbers_of_numpy_are_numbers(size, expand):
    q = coat.quantize(X, granularity=coat.PerGroup(size), expand=expand)
    assert q.scale.shape == q.exponent.shape == (4, 16)
    assert type(q.granularity.size) is int


def test_quantize_has_no_gradient():
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(lambda x: coat.dequantize(coat.quantize(x)).sum())(X)
