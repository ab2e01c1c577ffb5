"""Tests that kernels refuse bad arrays and options with a clear error."""

import jax.numpy as jnp
from helpers.bad_input import BadInput, assert_refused

import pallas_kernels as pk

X = jnp.ones((4, 256))
INTEGERS = jnp.ones((4, 256), jnp.int32)
CODES = jnp.ones((16, 128), jnp.float8_e4m3fn)
ONE = jnp.float32(1)
TABLE = BadInput()
refused = TABLE.refused

for function in (pk.quantize_groups, pk.quantize_rows, pk.maxima):
    refused(function, [INTEGERS, X > 0], name=function.__name__, contains="must be")
refused(
    lambda v: pk.quantize_groups(X, group=v),
    [0, -1, 1.5, True, None],
    name="group of a kernel",
)
refused(
    lambda v: pk.quantize_groups(X, dtype=v),
    ["float32", "int8", "float8_e4m3b11fnuz"],
    name="dtype of a kernel",
    contains="codes must be",
)
refused(
    lambda v: pk.quantize_tensor(X, v),
    [None, "one", jnp.ones(3), [1.0, 2.0]],
    name="scale of a kernel",
    contains="scale must be a scalar",
)
refused(
    lambda v: pk.quantize_tensor(X, ONE, copies=v), ["none", None, 2], name="copies"
)
refused(
    lambda v: pk.quantize_groups(X, implementation=v),
    ["cuda", "Mosaic", 1, True],
    name="implementation",
)
refused(lambda v: pk.norm(X, kind=v), ["batch", None], name="kind of a norm")
refused(
    lambda v: pk.norm(X, scale=v), ["tensor", jnp.ones(2)], name="scale of a norm",
    contains="scale",
)  # fmt: skip
refused(
    lambda v: pk.norm(X, jnp.ones(v)), [3, (4, 256)], name="weight", contains="shape"
)
refused(
    lambda v: pk.gated(jnp.ones((4, 2, 16)), activation=v),
    ["relu", None],
    name="activation",
)
refused(lambda v: pk.gated(jnp.ones(v)), [(16,), (4, 3, 16)], name="gate and up")
refused(
    lambda v: pk.gated(jnp.ones((4, 2, 16)), scale=v),
    [jnp.ones(64), jnp.ones((1, 1))],
    name="scale of a gate",
    contains="scale must be a scalar",
)
refused(
    lambda v: pk.matmul(CODES, CODES.astype(v)), ["float32", "bfloat16", "int8"],
    name="operand",
)  # fmt: skip
refused(lambda v: pk.matmul(CODES, CODES, promote=v), [64, "yes"], name="promote")
refused(
    lambda v: pk.matmul(CODES, CODES, out_dtype=v), ["float16", "int32"],
    name="out_dtype",
)  # fmt: skip
refused(lambda v: pk.matmul(CODES, CODES, jnp.ones(v)), [(3,), (16, 2)], name="scales")


@TABLE.each
def test_arrays_and_options_are_refused_by_name(call, contains):
    assert_refused(call, contains)
