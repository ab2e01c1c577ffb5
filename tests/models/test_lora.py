"""Tests adapters over frozen weights, and the FP8 matmul with a frozen weight."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import oracle
from helpers.marks import slow
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

import coat_jax as coat
from coat_jax.fp8.frozen import freeze, frozen_linear, thawed
from coat_jax.models import hf, llama, lora
from pallas_kernels import Codes
from pallas_kernels.dispatch import devices

_CONFIG = llama.LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    recipe="bf16",
    dtype=jnp.float32,
)


def _rounded(x: np.ndarray, format: oracle.Format, block) -> tuple:
    """Returns an array rounded to FP8, and its scales.

    There is a scale for each row, or a single scale if `block` is None.
    """
    rows = x.reshape(-1, x.shape[-1]) if block else x.reshape(1, -1)
    scales = np.array([oracle.scale_of(row, format, block) for row in rows], np.float64)
    values = format.round(np.float32(rows * (1 / scales[:, None])))
    numbers = values.astype(np.float64) * scales[:, None]
    return numbers.reshape(x.shape), scales


def _products(x, w, a, b, dy):
    """Returns the product, its gradients, and the values of the frozen weight."""
    frozen = freeze(w)

    def product(x, a, b):
        return lora.linear(x, lora.Adapted(frozen, a, b, 0.5))

    y, vjp = jax.vjp(product, x, a, b)
    return y, *vjp(dy), thawed(frozen)


@pytest.mark.parametrize("implementation", ["reference", slow("interpret")])
def test_frozen_matmul_is_that_of_rounded_numbers(implementation, monkeypatch, rng):
    """Kernels are tested with shapes that their tiles divide."""
    interpreted = implementation == "interpret"
    m, n, k, r = (256, 128, 128, 4) if interpreted else (24, 40, 32, 3)
    shapes = (m, k), (2, n, k), (r, k), (2, n, r), (m, 2, n)
    x, w, a, b, dy = (rng.standard_normal(shape, np.float32) for shape in shapes)
    w *= rng.uniform(0.01, 1, (2, n, 1)).astype(np.float32)
    run = contextlib.nullcontext()
    if interpreted:
        monkeypatch.setattr(devices, "has_hopper", lambda: True)
        run = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    with run:
        actual = jax.block_until_ready(jax.jit(_products)(x, w, a, b, dy))
    y, dx, da, db, numbers = (np.asarray(array, np.float64) for array in actual)
    rounded_w, _ = _rounded(w, oracle.E4M3, None)
    rounded_x, _ = _rounded(x, oracle.E4M3, (1, k))
    rounded_dy, _ = _rounded(dy, oracle.E5M2, None)
    np.testing.assert_array_equal(numbers, rounded_w)
    low, of_low = x @ np.float64(a).T, np.einsum("mab,abr->mr", np.float64(dy), b)
    expected = {
        "y": np.einsum("mk,abk->mab", rounded_x, rounded_w)
        + 0.5 * np.einsum("mr,abr->mab", low, b),
        "dx": np.einsum("mab,abk->mk", rounded_dy, rounded_w) + 0.5 * of_low @ a,
        "da": 0.5 * of_low.T @ x,
        "db": 0.5 * np.einsum("mab,mr->abr", np.float64(dy), low),
    }
    for array, name in zip((y, dx, da, db), expected, strict=True):
        close = {"rtol": 1e-4, "atol": 1e-4, "err_msg": name}
        np.testing.assert_allclose(array, expected[name], **close)


def test_frozen_weights_have_no_gradient_and_match_in_size(rng):
    x, w = (
        jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((6, 4), (2, 3, 4))
    )
    wrong = jnp.ones((4, 5))
    for weight in (wrong, freeze(wrong)):
        with pytest.raises(ValueError, match=r"x and w need \[..., k\]"):
            frozen_linear(jnp.ones((2, 3)), weight)
    y, vjp = jax.vjp(frozen_linear, x, w)
    np.testing.assert_allclose(y, np.einsum("mk,abk->mab", x, w), rtol=1e-5, atol=1e-6)
    dx, dw = vjp(jnp.ones_like(y))
    expected = np.broadcast_to(np.sum(w, axis=(0, 1)), x.shape)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-6)
    assert not dw.any()


@pytest.mark.parametrize("quantizes", [False, True])
def test_a_loop_over_layers_saves_no_frozen_weights(quantizes):
    """No array that a loop returns has the size of the stack of weights or codes."""
    stacked = jnp.ones((3, 2, 8, 4))
    stacked = jax.vmap(freeze)(stacked) if quantizes else stacked

    def loss(x, stacked):
        def layer(x, w):
            return frozen_linear(x, w).sum(axis=(1, 2))[:, None] * x, None

        return lax.scan(layer, x, stacked)[0].sum()

    program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((5, 4)), stacked)
    loops = [e for e in program.jaxpr.eqns if e.primitive is lax.scan_p]
    assert len(loops) == 2
    sizes = [x.aval.size for loop in loops for x in loop.outvars]
    assert sizes
    assert 3 * 2 * 8 * 4 not in sizes


def _adapted(recipe, dtype=jnp.float32, rank=3):
    config = dataclasses.replace(_CONFIG, param_dtype=dtype)

    @nnx.jit
    def adapted():
        model = llama.Llama(config, rngs=nnx.Rngs(0))
        lora.adapt(model, rank=rank, alpha=2.0, recipe=recipe, rngs=nnx.Rngs(1))
        return model

    graph, params, frozen = nnx.split(adapted(), nnx.Param, ...)
    # Only one of two adapters has gradients where they are zero.
    rng = np.random.default_rng(2)
    params = jax.tree.map(
        lambda x: jnp.asarray(x + 0.05 * rng.standard_normal(x.shape), jnp.float32),
        params,
    )
    return graph, params, frozen


def _loss(model, tokens):
    return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])


def test_gradients_of_adapters_follow_from_those_of_their_sum():
    tokens = jax.random.randint(jax.random.key(3), (2, 17), 0, 64)
    graph, params, frozen = _adapted("bf16")

    def of_adapters(params):
        return _loss(nnx.merge(graph, params, frozen), tokens)

    plain = nnx.jit(lora.merged, static_argnums=1)(
        nnx.merge(graph, params, frozen), jnp.float32
    )
    structure, weights = nnx.split(plain)

    def of_sums(weights):
        return _loss(nnx.merge(structure, weights), tokens)

    @jax.jit
    def both():
        return jax.value_and_grad(of_adapters)(params), jax.value_and_grad(of_sums)(
            weights
        )

    (loss, grads), (expected, sums) = both()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for name in ("qkv", "out", "gate_up", "down"):
        a, b = (params["layers"][name][part][...] for part in "ab")
        dw = np.asarray(sums["layers"][name][...], np.float64)
        rows = dw.reshape(2, -1, dw.shape[-1])
        da = 2 / 3 * np.einsum("lnr,lnk->lrk", b.reshape(2, -1, 3), rows)
        db = 2 / 3 * np.einsum("lrk,lnk->lnr", a, rows).reshape(b.shape)
        for part, expected in (("a", da), ("b", db)):
            actual = grads["layers"][name][part][...]
            np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=1e-7)


def test_frozen_weights_take_a_byte_and_their_gradients_nothing():
    tokens = jax.random.randint(jax.random.key(3), (2, 17), 0, 64)
    graph, params, frozen = _adapted("coat", jnp.bfloat16)
    layers = jax.tree.leaves(frozen["layers"])
    codes = [x for x in layers if x.dtype == jnp.float8_e4m3fn]
    matrices = 2 * ((64 + 2 * 32) * 64 + 64 * 64 + 3 * 128 * 64)
    assert sum(x.nbytes for x in codes) == matrices
    scales = 2 * 4  # One for each of four matrices.
    norms = 2 * 2 * 64
    assert sum(x.nbytes for x in layers) == matrices + 4 * scales + 2 * norms

    def loss(params, frozen):
        return _loss(nnx.merge(graph, params, frozen), tokens)

    @jax.jit
    def both(params, frozen):
        merged = lora.merged(nnx.merge(graph, params, frozen), jnp.float32)
        return loss(params, frozen), _loss(merged, tokens)

    actual, expected = map(float, both(params, frozen))
    assert actual == pytest.approx(expected, rel=0.01)
    grads = jax.eval_shape(jax.grad(loss), params, frozen)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("recipe", [slow("coat"), "coat_max"])
def test_gradients_in_fp8_are_close_to_those_of_the_same_weights(recipe):
    """The oracle is float32 autodiff of a model with the numbers of the codes."""
    # Arrays of fewer tokens are too small to be saved in FP8.
    tokens = jax.random.randint(jax.random.key(3), (2, 65), 0, 64)
    graph, params, frozen = _adapted(recipe)
    wide, _, numbers = _adapted("bf16")
    for name in ("qkv", "out", "gate_up", "down"):
        weight = frozen["layers"][name]
        codes = Codes(weight["codes"][...], None, weight["scale"][...])
        numbers["layers"][name]["codes"].set_value(thawed(codes))

    @jax.jit
    def gradients(params, frozen, numbers):
        return [
            jax.grad(lambda p, g=g, c=c: _loss(nnx.merge(g, p, c), tokens))(params)
            for g, c in ((graph, frozen), (wide, numbers))
        ]

    actual, expected = map(jax.tree.leaves, gradients(params, frozen, numbers))
    assert len(actual) == 8
    for a, b in zip(actual, expected, strict=True):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert 0 < error < 0.1


@pytest.mark.slow
def test_generation_is_that_of_the_sum():
    graph, params, frozen = _adapted("coat", jnp.bfloat16)
    adapted = nnx.merge(graph, params, frozen)
    merged = lora.merged(adapted, jnp.float32)
    tokens = [
        np.asarray(coat.generate(model, [[1, 2, 3], [4]], max_new_tokens=6).tokens)
        for model in (adapted, merged)
    ]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be a positive int, got 0"),
        ({"rank": 1.5}, "rank must be a positive int, got 1.5"),
        (
            {"rank": 2, "alpha": float("nan")},
            "alpha must be a positive number, got nan",
        ),
        (
            {"rank": 2, "recipe": "te"},
            "one of bf16, coat, coat_max, coat_bf16 for its layers, got",
        ),
    ],
)
def test_adapters_that_cannot_be_are_named(options, message):
    model = nnx.eval_shape(lambda: llama.Llama(_CONFIG, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        lora.adapt(model, rngs=nnx.Rngs(0), **options)


def test_models_that_have_adapters_or_experts_are_named(tmp_path):
    def adapted():
        model = llama.Llama(_CONFIG, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="the model has no adapters"):
            lora.merged(model, jnp.float32)
        lora.adapt(model, rank=2, rngs=nnx.Rngs(0))
        return model

    model = nnx.eval_shape(adapted)
    with pytest.raises(ValueError, match="the model has adapters already"):
        lora.adapt(model, rank=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"saved as the sum of lora\.merged"):
        hf.save(model, tmp_path / "model")
    experts = dataclasses.replace(
        _CONFIG, experts=llama.Experts(num_experts=2, top_k=1)
    )
    model = nnx.eval_shape(lambda: llama.Llama(experts, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="adapters need a model without experts"):
        lora.adapt(model, rank=2, rngs=nnx.Rngs(0))
