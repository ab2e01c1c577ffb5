"""FP8 matmuls as users write them, and their arithmetic in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import coat_jax as coat
import pallas_kernels as pk
from helpers import oracle
from helpers.gradients import FP8, assert_close, fake, saved, value_and_vjp
from helpers.marks import slow_except
from helpers.models import normal

# Options of `fp8_remat` that say what is saved, and how.
OTHER_WAYS = [
    {"format": coat.E5M2},
    {"group": 32},
    {"where": lambda _: True},
    {"policy": jax.checkpoint_policies.nothing_saveable},
    {"key": jax.random.key(0)},
]


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _phi(x):
    return np.vectorize(math.erf)(x / math.sqrt(2)) / 2 + 0.5


def _tanh_gelu(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# Activations that the gate's kernels know, with their formulas.
ACTIVATIONS = {
    "silu": (nn.silu, lambda x: x * _sigmoid(x)),
    "gelu": (nn.gelu, _tanh_gelu),
    "gelu_exact": (lambda x: nn.gelu(x, approximate=False), lambda x: x * _phi(x)),
}


def bfloat16(x):
    """Rounds to bfloat16 and returns float64."""
    return np.asarray(jnp.asarray(x, jnp.bfloat16), float)


def linear(x, w):
    return coat.fp8_dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def rms(x, scale=1.0):
    """Computes an RMSNorm in float32, as users write it."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)


def tensor(x, format=oracle.E4M3):
    """Quantizes per tensor and dequantizes, in float64."""
    return fake(np.asarray(x, np.float32), None, format).astype(np.float64)


def rows(x):
    """Quantizes with a float32 scale for each token and dequantizes, in float64."""
    x = np.asarray(x, np.float32)
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(448)
    return oracle.E4M3.round(x / scale).astype(np.float64) * scale


def assert_near(actual, expected, tolerance=1e-2):
    """Asserts that the error's norm is at most `tolerance` times the expected norm.

    Single results may differ more, where sums in another order round to another code.
    """
    error = np.linalg.norm(np.asarray(actual, float) - expected)
    assert error <= tolerance * np.linalg.norm(expected)


def ran(operation, fn, *args) -> set[tuple[str, ...]]:
    """Returns the types of the arrays of an operation's calls in the forward pass."""
    choices = pk.explain(lambda *args: jax.vjp(fn, *args)[0], *args).choices
    return {c.arrays for c in choices if c.operation == operation}


def assert_left_alone(operation, fn, *args):
    """Asserts that `fp8_remat` does not run an operation's kernel in a user's function.

    The program must also be the same with the option `where`, which selects all
    residuals.
    """
    assert not ran(operation, coat.fp8_remat(fn), *args)
    programs = [
        str(jax.make_jaxpr(coat.fp8_remat(fn, **options))(*args))
        for options in ({}, {"where": lambda _: True})
    ]
    assert programs[0] == programs[1]


def assert_follows_autodiff(fn, dy, *args, tolerance=0.15, **options):
    """Asserts that `fp8_remat` keeps results and gradients within `tolerance`."""
    light = coat.fp8_remat(fn, **options)
    assert_close(*(value_and_vjp(f, dy, *args) for f in (light, fn)), tolerance)


def mlp_arguments(*shapes, dtype=jnp.bfloat16, tokens=(96,)):
    """Returns weights of these shapes, activations with an outlier, and a gradient.

    The first and the last of the shapes are matrices.
    """
    weights = [normal(i, *shape, scale=0.2) for i, shape in enumerate(shapes)]
    x = normal(9, *tokens, shapes[0][0], dtype=dtype).at[..., 3].mul(8)
    return weights, x, normal(20, *tokens, shapes[-1][1], dtype=dtype)


def gates(fn, *args) -> set[str]:
    """Returns the types of arrays that the gate's kernel reads in the forward pass."""
    return {" ".join(arrays) for arrays in ran("gated", fn, *args)}


def assert_gate_with_options(fn, options, weights, x, dy):
    """Asserts that the gate's kernel runs, and that residuals have the set format."""
    light = coat.fp8_remat(fn, **options)
    assert gates(light, weights, x)
    formats = {str(r.dtype) for r in saved(light, weights, x) if r.dtype in FP8}
    assert formats == {"float8_e5m2" if "format" in options else "float8_e4m3fn"}
    if "format" in options:  # One numeric case: the others change what is saved alone.
        assert_follows_autodiff(fn, dy, weights, x, tolerance=0.2, **options)


def assert_one_gate(fn, weights, x, dy=None):
    """Asserts that one kernel computes the gate; with `dy`, also that it is right."""
    assert len(gates(coat.fp8_remat(fn), weights, x)) == 1
    if dy is not None:
        assert_follows_autodiff(fn, dy, weights, x, tolerance=0.2)


every_other_way = pytest.mark.parametrize(
    "options",
    slow_except(
        [way for way in OTHER_WAYS if way.keys() & {"format", "key"}], OTHER_WAYS
    ),
    ids="".join,
)
