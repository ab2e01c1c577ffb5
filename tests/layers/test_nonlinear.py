"""Tests norms and gates against float64 NumPy, and their residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import layers
from helpers.gradients import (
    GROUP,
    assert_close,
    compiled,
    fake,
    fp8_bytes,
    saved,
    saved_bytes,
    value_and_vjp,
)
from helpers.models import normal

import coat_jax as coat
from coat_jax.layers import functional as nonlinear

EPS = 1e-5


def wide(*arrays):
    return [np.asarray(a).astype(np.float64) for a in arrays]


def rms_norm(x, weight):
    return layers.norm(x, weight, kind="rms", eps=EPS)


def layer_norm(x, weight, bias):
    return layers.norm(x, weight, bias, kind="layer", eps=EPS)


def swiglu(gate, up):
    return layers.silu(gate) * up


def geglu(gate, up):
    return layers.gelu(gate) * up


def inputs(dtype=jnp.float32):
    """Returns each function with its reference and its arguments, activations first."""
    x, up = normal(1, 5, 16, 64, dtype=dtype), normal(2, 5, 16, 64, dtype=dtype)
    weight, bias = 1 + normal(3, 64, scale=0.3), normal(4, 64)
    return {
        "rms_norm": (nonlinear.rms_norm, rms_norm, (x, weight)),
        "layer_norm": (nonlinear.layer_norm, layer_norm, (x, weight, bias)),
        "swiglu": (nonlinear.swiglu, swiglu, (x, up)),
        "geglu": (nonlinear.geglu, geglu, (x, up)),
    }


NAMES = list(inputs())


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name):
    """Norms round once, gates after every operation."""
    fn, reference, args = inputs(jnp.bfloat16)[name]
    y, expected = fn(*args), reference(*wide(*args))
    assert y.dtype == jnp.bfloat16
    error = np.abs(wide(y)[0] - expected)
    if name in ("swiglu", "geglu"):
        assert np.mean(error) < 2**-8 * np.mean(np.abs(expected))
    else:
        assert np.all(error <= 2**-8 * np.abs(expected) + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_slopes_of_the_reference(name):
    """Gradients equal central differences in float64 along random directions."""
    fn, reference, args = inputs()[name]
    dy = normal(7, *args[0].shape)
    y, gradients = value_and_vjp(fn, dy, *args)
    assert_close(y, reference(*wide(*args)), 1e-6)
    gradients, at, (weights,) = wide(*gradients), wide(*args), wide(dy)
    for i, gradient in enumerate(gradients):
        direction = np.random.default_rng(i).standard_normal(gradient.shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = [*at[:i], at[i] + step * direction, *at[i + 1 :]]
            ends.append(np.sum(reference(*moved) * weights))
        slope = (ends[0] - ends[1]) / 2e-5
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert abs(np.sum(gradient * direction) - slope) < 1e-5 * size


def test_optional_parameters_default_to_none():
    x = normal(1, 4, 64)
    weight, zeros = np.ones(64), np.zeros(64)
    assert_close(nonlinear.rms_norm(x), rms_norm(*wide(x), weight), 1e-6)
    assert_close(nonlinear.layer_norm(x), layer_norm(*wide(x), weight, zeros), 1e-6)


def test_weights_may_be_variables_of_nnx():
    x, weight = jnp.arange(8.0), jnp.linspace(0.5, 2, 8)
    for norm in (nonlinear.rms_norm, nonlinear.layer_norm):
        np.testing.assert_array_equal(norm(x, nnx.Param(weight)), norm(x, weight))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_inputs_alone_are_saved_in_fp8(name, dtype):
    """Values are unchanged; gradients are autodiff's at the fake-quantized inputs."""
    fn, _, args = inputs(dtype)[name]
    count = 1 if name.endswith("norm") else 2
    activations, parameters = args[:count], args[count:]
    light = coat.fp8_remat(
        fn,
        params_argnums=range(count, len(args)),
        policy=jax.checkpoint_policies.nothing_saveable,
    )
    dy = normal(7, *args[0].shape, dtype=dtype)
    y, gradients = value_and_vjp(light, dy, *args)
    np.testing.assert_array_equal(y, compiled(fn, *args))
    quantized = [jnp.asarray(fake(a, GROUP)) for a in activations]
    _, expected = value_and_vjp(fn, dy, *quantized, *parameters)
    assert_close(gradients, expected, 1e-5 if dtype == jnp.float32 else 2**-7)

    residuals = saved(light, *args)
    assert saved_bytes(residuals) == sum(fp8_bytes(a.shape) for a in activations)
    references = {r.argument for r in residuals if r.argument is not None}
    assert references <= set(range(count, len(args)))
