"""Tests gradients of layers that others wrote, as kernels compute them.

The errors of each gradient must be like the errors of the operations' definitions, in
size and in direction: a wrong kernel would have larger errors, or errors to one side.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.versions import needs_kernels
from jax.experimental.pallas import mosaic_gpu as plgpu

import coat_jax as coat
from experiments.common.foreign_layers import LAYERS, Modules
from experiments.common.layer_cases import Shape
from pallas_kernels.dispatch import devices, operations

pytestmark = needs_kernels

SMALL = Shape(hidden=256, seq=128, batch=1, intermediate=512, kv_heads=1, head_dim=128)
WIDE = Shape(
    hidden=4096, seq=512, batch=1, intermediate=11_008, kv_heads=8, head_dim=128
)


def gradients(name, shape, dot_general, wrap):
    """Returns the output and all gradients in float64, by their paths."""
    layer = LAYERS[name](shape, Modules(dot_general, nnx.Rngs(0)))
    graph, params = nnx.split(layer)
    size = shape.batch, shape.seq, shape.hidden
    keys = jax.random.split(jax.random.key(1), layer.inputs + 1)
    dy, *inputs = (jax.random.normal(key, size, jnp.bfloat16) for key in keys)

    def run(params, inputs, dy):
        fn = wrap(lambda params, *inputs: nnx.merge(graph, params)(*inputs))
        y, vjp = jax.vjp(fn, params, *inputs)
        return y, vjp(dy)

    with operations.traced_anew():
        results = jax.jit(run)(params, inputs, dy)
    return {
        jax.tree_util.keystr(path): np.asarray(x, np.float64).ravel()
        for path, x in jax.tree_util.tree_leaves_with_path(results)
    }


def assert_errors_of_definitions(name, shape, monkeypatch, kernels):
    exact = gradients(name, shape, None, lambda fn: fn)
    fp8 = name, shape, coat.fp8_dot_general, coat.fp8_remat
    with monkeypatch.context() as patch:
        patch.setattr(devices, "has_hopper", lambda: False)
        defined = gradients(*fp8)
    with kernels(), monkeypatch.context() as patch:
        patch.setattr(devices, "has_hopper", lambda: True)
        actual = gradients(*fp8)
    for path, y in exact.items():
        size = np.linalg.norm(y)
        errors = [np.linalg.norm(x[path] - y) / size for x in (actual, defined)]
        along = [x[path] @ y / size**2 for x in (actual, defined)]
        assert errors[0] < 1.1 * errors[1] + 0.01, (path, errors)
        assert abs(along[0] - along[1]) < 0.01, (path, along)


@pytest.mark.slow
def test_interpreted_kernels(monkeypatch):
    params = plgpu.InterpretGPUParams(detect_races=False)

    def interpreted():
        return plgpu.force_gpu_interpret_mode(params)

    assert_errors_of_definitions("qwen", SMALL, monkeypatch, interpreted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["qwen", "gemma 2", "encoder-decoder", "diffusion transformer"]
)
def test_kernels_on_a_gpu(name, monkeypatch):
    assert_errors_of_definitions(name, WIDE, monkeypatch, contextlib.nullcontext)
