"""Tests fp8_remat on modules for which it was not made.

Each module keeps its outputs, saves a fraction of the bytes, and has nearly autodiff's
gradient. Bounds are close to measured values.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers.gradients import compiled, cosine, flat, saved, saved_bytes
from helpers.marks import slow_except
from helpers.models import normal, parameters

from coat_jax.remat.api import fp8_remat


class EncoderBlock(nn.Module):
    """A pre-norm transformer encoder block with dropout and a padding mask."""

    heads: int = 4

    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(num_heads=self.heads)(h, h, mask=mask)
        x = x + nn.Dropout(0.1, deterministic=False)(h)
        h = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(h))


class ResNetBlock(nn.Module):
    """A bottleneck block with BatchNorm in training and a strided shortcut."""

    @nn.compact
    def __call__(self, x):
        def norm(x):
            return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)

        h = nn.relu(norm(nn.Conv(32, (1, 1), use_bias=False)(x)))
        h = nn.Conv(32, (3, 3), strides=2, use_bias=False)(h)
        h = norm(nn.Conv(64, (1, 1), use_bias=False)(nn.relu(norm(h))))
        shortcut = norm(nn.Conv(64, (1, 1), strides=2, use_bias=False)(x))
        return nn.relu(h + shortcut)


class Experts(nnx.Module):
    """Two experts of eight for each token, with a capacity, dispatched by einsum."""

    def __init__(self, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        self.router = nnx.Linear(32, 8, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (8, 32, 64)))
        self.down = nnx.Param(init(rngs.params(), (8, 64, 32)))

    def __call__(self, x):
        gates, chosen = jax.lax.top_k(nnx.softmax(self.router(x)), 2)
        gates = gates / gates.sum(axis=-1, keepdims=True)
        picked = jax.nn.one_hot(chosen, 8)  # Axes are tokens, choices, experts.
        rows = picked.reshape(-1, 8).astype(jnp.int32)
        position = ((jnp.cumsum(rows, axis=0) - 1) * rows).sum(axis=-1)
        position = jax.nn.one_hot(position.reshape(chosen.shape), 64)
        dispatch = jnp.einsum("tke,tkc->tec", picked, position)
        combine = jnp.einsum("tk,tke,tkc->tec", gates, picked, position)
        h = jnp.einsum("tec,td->ecd", dispatch, x)
        h = nnx.silu(jnp.einsum("ecd,edf->ecf", h, self.up[...]))
        return jnp.einsum(
            "tec,ecf,efd->td", combine, h, self.down[...], optimize="optimal"
        )


class UNetBlock(nnx.Module):
    """Residual blocks of a diffusion U-Net: down, up, and a skip over both."""

    def __init__(self, *, rngs: nnx.Rngs):
        def conv(inputs, outputs, **options):
            return nnx.Conv(inputs, outputs, (3, 3), rngs=rngs, **options)

        self.norms = nnx.List(
            nnx.GroupNorm(n, num_groups=8, rngs=rngs) for n in (32, 64, 96)
        )
        self.time = nnx.Linear(32, 64, rngs=rngs)
        self.down = conv(32, 64, strides=2)
        self.middle = conv(64, 64)
        self.up = conv(96, 32)

    def __call__(self, x, t):
        frequencies = jnp.exp(-jnp.arange(16) / 2)
        angle = t[:, None] * frequencies
        embedding = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        h = self.down(nnx.silu(self.norms[0](x)))
        h = h + self.time(nnx.silu(embedding))[:, None, None]
        h = h + self.middle(nnx.silu(self.norms[1](h)))
        h = jax.image.resize(h, (*x.shape[:3], 64), "nearest")
        h = self.norms[2](jnp.concatenate([h, x], axis=-1))
        return x + self.up(nnx.silu(h))


@dataclasses.dataclass(frozen=True)
class Case:
    """A module as a function of its parameters and its inputs, plain and wrapped."""

    plain: Callable
    light: Callable
    params: Any
    inputs: tuple


def linen_case(module: nn.Module, *inputs) -> Case:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = compiled(module.init, keys, *inputs)

    def function(module):
        def apply(params, *inputs):
            arguments = {**variables, "params": params}
            rngs = {"dropout": jax.random.key(2)}
            return module.apply(arguments, *inputs, rngs=rngs, mutable=["batch_stats"])

        return apply

    params = variables["params"]
    return Case(function(module), function(fp8_remat(module)), params, inputs)


def nnx_case(cls: type[nnx.Module], *inputs) -> Case:
    graph, params = parameters(lambda: cls(rngs=nnx.Rngs(0)))
    light, _ = nnx.split(fp8_remat(nnx.merge(graph, params)))

    def function(graph):
        return lambda params, *inputs: nnx.merge(graph, params)(*inputs)

    return Case(function(graph), function(light), params, inputs)


def encoder() -> Case:
    mask = jnp.arange(48) < jnp.array([48, 30])[:, None, None, None]
    return linen_case(EncoderBlock(), normal(1, 2, 48, 64), mask)


def resnet() -> Case:
    return linen_case(ResNetBlock(), normal(1, 4, 16, 16, 64))


def experts() -> Case:
    return nnx_case(Experts, normal(1, 128, 32))


def unet() -> Case:
    return nnx_case(UNetBlock, normal(1, 2, 16, 16, 32), jnp.array([3.0, 40.0]))


# Upper bounds of the share of saved bytes and of the gradient's error.
BOUNDS = {
    encoder: (0.13, 0.020),
    resnet: (0.29, 0.027),
    experts: (0.20, 0.026),
    unet: (0.11, 0.015),
}


def behaviour(make: Callable[[], Case]) -> list:
    """Returns outputs and gradients, for `plain` and for `light`.

    Gradients belong to parameters and floating-point inputs.
    """
    case = make()
    actual = []
    for fn in (case.plain, case.light):
        floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in case.inputs]
        which = tuple(i + 1 for i, f in enumerate(floating) if f)

        def loss(params, *inputs, fn=fn):
            out = fn(params, *inputs)
            y = jax.tree.leaves(out)[0] if isinstance(out, tuple) else out
            weight = normal(9, *y.shape)
            return jnp.sum(y * weight) + jnp.sum(y * y), out

        gradient = jax.grad(loss, argnums=(0, *which), has_aux=True)
        actual.append(compiled(gradient, case.params, *case.inputs))
    return actual


@pytest.mark.parametrize("make", slow_except([encoder], BOUNDS))
def test_outputs_are_the_same_and_gradients_are_close(make):
    """Statistics are outputs, too."""
    (expected, y), (actual, light_y) = behaviour(make)
    assert jax.tree.structure(light_y) == jax.tree.structure(y)
    scale = np.abs(flat(y)).max()
    np.testing.assert_allclose(flat(light_y), flat(y), rtol=0, atol=1e-6 * scale)
    assert cosine(actual, expected) > 0.9995
    size = np.linalg.norm(flat(expected))
    assert 1e-3 < np.linalg.norm(flat(actual) - flat(expected)) / size < BOUNDS[make][1]
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        error = np.linalg.norm(flat(a) - flat(b))
        # The bound holds for each array. Some arrays, such as the gradient of keys'
        # biases, are rounding only.
        assert error < 0.07 * np.linalg.norm(flat(b)) + 1e-3 * size


@pytest.mark.parametrize("make", slow_except([encoder, experts, unet], BOUNDS))
def test_fewer_bytes_are_saved(make):
    case = make()
    plain, light = (
        saved_bytes(saved(fn, case.params, *case.inputs))
        for fn in (case.plain, case.light)
    )
    assert light / plain < BOUNDS[make][0]
