"""Tests that need a Hopper GPU; run there with `pytest -m gpu -n 0`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.sharded import LAYOUT, chained, check_steps, collectives, fused
from jax.sharding import AxisType

import coat_jax as coat
from coat_jax.layers.attention import causal_attention
from coat_jax.layers.decoder import DecoderLayer

pytestmark = pytest.mark.gpu

BATCH, LENGTH, HIDDEN = 2, 1024, 1024
UNIT = BATCH * LENGTH * HIDDEN * 2


def layer_and_input(recipe):
    layer = DecoderLayer(HIDDEN, 2688, 8, 8, 128, recipe=recipe, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, HIDDEN), jnp.bfloat16)
    return lambda p, x: nnx.merge(graph, p)(x), params, x


def gradient(recipe):
    layer, params, x = layer_and_input(recipe)
    weight = jax.random.normal(jax.random.key(2), x.shape)

    def loss(p, x):
        return jnp.sum(layer(p, x).astype(jnp.float32) * weight)

    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(params, x)
    # The autotuner would take Triton for some of these small matmuls.
    compiled = lowered.compile({"xla_gpu_enable_triton_gemm": False})
    leaves = jax.tree.leaves(compiled(params, x))
    flat = np.concatenate([np.asarray(g, np.float64).ravel() for g in leaves])
    return flat, compiled.as_text()


def test_backend_is_a_gpu():
    assert jax.default_backend() == "gpu"


@pytest.mark.parametrize("recipe", ["te", "coat", "coat_max"])
def test_recipe_gradients_and_fp8_products(recipe):
    exact, _ = gradient("bf16")
    actual, program = gradient(recipe)
    cosine = actual @ exact / np.linalg.norm(actual) / np.linalg.norm(exact)
    assert cosine > 0.99
    # Three matmuls are forward (the last one's result is not needed) and eight are
    # backward. Nothing of the forward pass runs twice.
    calls = [line for line in program.splitlines() if " custom-call(" in line]
    matmul = re.compile(r'__cublas\$lt\$matmul\$f8|op_name="[^"]*/matmul')
    assert sum(matmul.search(call) is not None for call in calls) == 11
    assert "__cudnn$fmha" in program


@pytest.mark.parametrize("rerun", [False, True])
def test_attention_in_backward_fits_its_statistics(rerun):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(BATCH, LENGTH, n, 64) for n in (8, 2, 2, 8)]
    q, k, v, do = (
        jax.random.normal(*of, jnp.bfloat16) for of in zip(keys, shapes, strict=True)
    )
    inputs = 3 * q, k, v
    light = coat.fp8_remat(causal_attention, params_argnums=(), rerun_attention=rerun)
    actual = jax.jit(lambda *args: jax.vjp(light, *args)[1](do))(*inputs)
    groups = coat.PerGroup(16)
    copies = [coat.quantize(x, granularity=groups).dequantize() for x in inputs]
    decoded = copies if rerun else inputs
    expected = jax.jit(lambda *args: jax.vjp(causal_attention, *args)[1](do))(*decoded)
    for a, b in zip(actual, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        # The kernel adds up in any order.
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-6 * np.abs(b).max())


@pytest.mark.parametrize(("recipe", "units"), [("coat", 8.3), ("coat_max", 6.0)])
def test_saved_activations_with_flash_attention(recipe, units):
    layer, params, x = layer_and_input(recipe)
    stacked = jax.tree.map(lambda p: jnp.stack([p, p]), params)

    def two(params, x):
        return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]

    report = coat.residual_report(two, stacked, x)
    assert 0 < report.nbytes / UNIT / 2 <= units, str(report)


@pytest.mark.parametrize("format", [coat.E4M3, coat.E5M2, coat.DE8], ids=repr)
@pytest.mark.parametrize(
    "granularity", [coat.PerTensor(), coat.PerGroup(16), coat.PerBlock(4, 4)], ids=repr
)
@pytest.mark.parametrize("expand", [False, True])
def test_quantize_agrees_with_the_cpu(format, granularity, expand):
    rng = np.random.default_rng()
    x = rng.normal(size=(64, 200)) * np.exp(rng.normal(size=(64, 200)) * 4)

    def on(platform):
        with jax.default_device(jax.devices(platform)[0]):
            q = jax.jit(
                lambda x: coat.quantize(
                    x, format=format, granularity=granularity, expand=expand
                )
            )(jnp.asarray(x, jnp.float32))
            return [np.asarray(a) for a in (q.codes, q.scale, q.exponent)]

    (codes, scale, exponent), (cpu_codes, cpu_scale, cpu_exponent) = (
        on("gpu"),
        on("cpu"),
    )
    np.testing.assert_array_equal(scale, cpu_scale)
    differing = codes.view(np.uint8) != cpu_codes.view(np.uint8)
    if expand:
        # Logarithms differ in their last bit. A value between two codes may then go
        # either way. If it decides the exponent, its whole group changes.
        assert np.abs(exponent.astype(int) - cpu_exponent.astype(int)).max() <= 1
        assert differing.mean() < 1e-2
    else:
        assert not differing.any()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@pytest.mark.parametrize("how", [fused, chained])
def test_sharded_steps_are_one_gpus_in_place_and_move_nothing(how, shape):
    tx = coat.fp8_adamw(1e-2, weight_decay=0.1, nesterov=True)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    program = check_steps(tx, how(tx), mesh, LAYOUT)
    assert not collectives(program)
    assert "mosaic_gpu" in program
