"""Tests that programs hand arrays to kernels without reshapes.

The tests lower programs for a GPU, but need none.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels import adam, adam_arrays
from jax import lax

import pallas_kernels as pk
from pallas_kernels.dispatch import custom_calls, lowering, views

pytestmark = pytest.mark.internals

E4M3 = jnp.float8_e4m3fn


def launch(x, shape, dtype):
    """Runs a stand-in for a kernel, which negates an array of one axis."""
    operand = custom_calls.viewed(x, jax.ShapeDtypeStruct((x.size,), x.dtype))
    out = lowering.once(lambda x: -x, "negated")(operand)
    return custom_calls.viewed(out, jax.ShapeDtypeStruct(shape, dtype))


def primitives(fn, *arrays):
    return [eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*arrays).eqns]


def read_twice(x):
    y = launch(x, (4, 6), jnp.float32)
    return y, y.reshape(2, 12) * 2, launch(y, (3, 8), jnp.float32)


def in_a_call(x):
    return jax.jit(lambda x: launch(x, x.shape, x.dtype))(x.reshape(3, 8)).T


def with_barriers(x):
    x, _ = lax.optimization_barrier((x.reshape(8, 3), x))
    y = lax.optimization_barrier(launch(x, (8, 3), jnp.float32))
    return y.reshape(24)


def as_bits(x):
    return launch(x, (6, 4), jnp.uint32) & 0xFFFF, 2.0 * custom_calls.viewed(
        launch(x, (2, 12), jnp.int32), x
    )


def untouched(x):
    return launch(x, (6, 4), jnp.float32), x.reshape(2, 12), jnp.transpose(x)


def of_constants(x):
    return launch(x + np.arange(6.0, dtype=np.float32), (1, 24), jnp.float32)


CASES = [read_twice, in_a_call, with_barriers, as_bits, untouched, of_constants]


@pytest.mark.parametrize("fn", CASES)
def test_results_are_the_same(fn):
    x = jax.random.normal(jax.random.key(0), (4, 6))
    expected, out = fn(x), views.without_reshapes(fn)(x)
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    for actual, requested in zip(*map(jax.tree.leaves, (out, expected)), strict=True):
        assert actual.dtype == requested.dtype
        np.testing.assert_array_equal(actual, requested)


def test_kernels_read_and_write_arrays_as_they_are():
    x = jnp.ones((4, 6))

    def chained(x):
        y = launch(x, (2, 12), jnp.float32)
        return launch(y, (8, 3), jnp.float32)

    assert primitives(views.without_reshapes(chained), x) == ["kernel"] * 2
    names = primitives(views.without_reshapes(with_barriers), x)
    assert [name for name in names if name != "optimization_barrier"] == ["kernel"]


def test_a_transpose_of_long_axes_is_no_reshape():
    x = jnp.ones((4, 1, 6))
    moved = views.without_reshapes(lambda x: launch(x.swapaxes(1, 2), (24,), x.dtype))
    assert primitives(moved, x) == ["kernel"]
    mixed = views.without_reshapes(lambda x: launch(x.swapaxes(0, 2), (24,), x.dtype))
    assert primitives(mixed, x) == ["transpose", "kernel"]


def lowered(fn, *arrays):
    fn = jax.jit(fn)
    return fn.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_custom_calls_have_the_types_of_the_program():
    x = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    quantize = functools.partial(
        pk.quantize_tensor, dtype=E4M3, copies="row", implementation="mosaic"
    )

    def codes(x, scale):
        return quantize(x, scale).row

    arrays = x, jax.ShapeDtypeStruct((), jnp.float32)
    assert "stablehlo.reshape" in lowered(codes, *arrays)
    text = lowered(views.without_reshapes(codes), *arrays)
    assert "stablehlo.reshape" not in text
    (types,) = re.findall(r"@mosaic_gpu_v2.* : (.*)\n", text)
    assert types == "(tensor<64x512xbf16>, tensor<f32>) -> tensor<64x512xf8E4M3FN>"


@pytest.mark.parametrize(("rows", "calls"), [(64, 1), (9, 2)])
def test_what_is_overwritten_has_the_type_of_the_result(rows, calls):
    text = lowered(views.without_reshapes(adam), *adam_arrays(rows, 1024))
    actual = re.findall(r"stablehlo.custom_call @mosaic_gpu_v2.*", text)
    assert len(actual) == calls
    aliases = r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)"
    for call in actual:
        takes, returns = re.search(r" : \((.*)\) -> \((.*)\)", call).groups()
        pairs = re.findall(aliases, call)
        assert pairs
        for result, operand in pairs:
            result = returns.split(", ")[int(result)]
            assert takes.split(", ")[int(operand)] == result
