"""Tests the recipe coat_bf16: unquantized matmuls, activations saved in FP8."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import small_models
from helpers.gradients import assert_close, compiled, cosine, fake, saved, saved_bytes
from helpers.marks import slow
from helpers.models import normal, parameters

from coat_jax.layers import recipes
from coat_jax.layers.experts.routing import Experts
from coat_jax.layers.parts import Norm
from coat_jax.models import llama, lora, vit
from coat_jax.optimizers.adam import fp8_adamw
from pallas_kernels.versions import bodies_in_params

RECIPE = recipes.RECIPES["coat_bf16"]
HIDDEN, INNER = 64, 96
MODELS = {
    "llama": {},
    "qwen3": {"qk_norm": "head", "head_dim": 16, "qkv_bias": True},
    "olmo2": {"norm_placement": "after", "qk_norm": "width"},
    "gemma2": {"norm_placement": "both", "norm_offset": 1.0, "gate": "gelu"},
    "experts": {"experts": Experts(num_experts=4, top_k=2), "intermediate_size": 32},
}
OF_ATTENTION = ("qwen3", "olmo2", "gemma2")


def model_of(name: str, recipe: str):
    """Returns a model's structure and its parameters, the same for all recipes."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER}
    config = small_models.config(recipe=recipe, **{**sizes, **MODELS[name]})
    return parameters(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))


def loss_of(graph):
    tokens = jax.random.randint(jax.random.key(1), (2, 65), 0, 128)

    def loss(params):
        model = nnx.merge(graph, params)
        return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])

    return loss


@functools.cache
def results(name: str, recipe: str):
    graph, params = model_of(name, recipe)
    return compiled(jax.value_and_grad(loss_of(graph)), params)


@pytest.mark.parametrize("name", ["llama", *map(slow, ["experts", *OF_ATTENTION])])
def test_losses_are_those_of_bf16_and_gradients_near_them(name):
    (loss, gradient), (expected, wide) = (
        results(name, recipe) for recipe in ("coat_bf16", "bf16")
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert 1e-6 < 1 - cosine(gradient, wide) < 2e-3


@pytest.mark.parametrize("name", ["llama", "experts", *map(slow, OF_ATTENTION)])
def test_no_matmul_reads_fp8(name):
    """The products of "coat" do, so that the search finds them."""
    counts = {}
    for recipe in ("coat", "coat_bf16"):
        graph, params = model_of(name, recipe)
        program = jax.make_jaxpr(jax.grad(loss_of(graph)))(params)
        operands = list(_operands(program.jaxpr))
        assert operands
        counts[recipe] = sum("float8" in x.aval.dtype.name for x in operands)
    assert counts["coat_bf16"] == 0 < counts["coat"]


def _operands(jaxpr):
    """Yields the operands of all matmuls of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "ragged_dot", "ragged_dot_general"):
            yield from eqn.invars[:2]
        for body in bodies_in_params(eqn.params):
            yield from _operands(body)


@pytest.mark.parametrize("name", ["llama", "experts", *map(slow, OF_ATTENTION)])
def test_as_many_bytes_are_saved_as_with_coat(name):
    sizes = {}
    for recipe in ("coat", "coat_bf16"):
        graph, params = model_of(name, recipe)
        residuals = saved(loss_of(graph), params)
        sizes[recipe] = saved_bytes(residuals)
    assert sizes["coat_bf16"] <= 1.02 * sizes["coat"]


def test_gradients_of_the_gated_mlp_follow_from_its_copies():
    """Backward reads a copy of the input and copies of gate and up, groups of 16."""
    params = {
        "norm": 1 + normal(1, HIDDEN, scale=0.2),
        "gate_up": normal(2, 2, INNER, HIDDEN, scale=0.2),
        "down": normal(3, HIDDEN, INNER, scale=0.2),
    }
    x, dy = normal(4, 2, 64, HIDDEN), normal(5, 2, 64, HIDDEN)
    mlp = functools.partial(RECIPE.gated_mlp, norm=Norm(kind="rms", eps=1e-5))

    def run(params, x, dy):
        y, vjp = jax.vjp(mlp, params, x)
        return y, vjp(dy)

    y, (grads, dx) = compiled(run, params, x, dy)
    # In float64, with copies by the specification.
    weight, w, down = (np.float64(params[k]) for k in ("norm", "gate_up", "down"))
    normed, _ = _norm(np.float64(x), weight)
    gate, up = np.einsum("bsh,cfh->cbsf", normed, w)
    a = gate / (1 + np.exp(-gate)) * up
    assert_close(y, np.float64(x) + a @ down.T, 1e-5)
    gate, up = (np.float64(fake(np.float32(v), 16)) for v in (gate, up))
    share = 1 / (1 + np.exp(-gate))
    da = np.float64(dy) @ down
    dgate = da * up * share * (1 + gate * (1 - share))
    dgate_up = np.stack([dgate, da * gate * share])
    normed, scaled = _norm(np.float64(fake(np.float32(x), 16)), 1.0, np.float64(x))
    dnormed = np.einsum("cbsf,cfh->bsh", dgate_up, w)
    projected = dnormed * weight
    mean = np.mean(projected * normed, axis=-1, keepdims=True)
    expected = {
        "down": np.einsum("bsh,bsf->hf", dy, gate * share * up),
        "gate_up": np.einsum("cbsf,bsh->cfh", dgate_up, normed * weight),
        "norm": np.sum(dnormed * normed, axis=(0, 1)),
    }
    assert_close(grads, expected, 1e-4)
    assert_close(dx, np.float64(dy) + (projected - normed * mean) * scaled, 1e-4)


def _norm(x, weight, exact=None):
    """Returns the RMSNorm of x and 1 / rms, which is of `exact` if it is given."""
    exact = x if exact is None else exact
    rate = 1 / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-5)
    return x * rate * weight, rate


def test_moments_are_those_of_coat():
    assert RECIPE.optimizer is fp8_adamw


def test_adapters_leave_frozen_weights_as_they_are():
    config = small_models.config(recipe="bf16", hidden_size=64, intermediate_size=96)

    def adapted(recipe):
        model = llama.Llama(config, rngs=nnx.Rngs(0))
        lora.adapt(model, rank=2, recipe=recipe, rngs=nnx.Rngs(1))
        return model

    tokens = jnp.arange(128).reshape(2, 64) % 128
    logits, dtypes = {}, {}
    for recipe in ("bf16", "coat_bf16"):
        graph, variables = nnx.split(nnx.jit(adapted, static_argnums=0)(recipe))
        dtypes[recipe] = jax.tree.map(lambda v: v.dtype, variables)
        logits[recipe] = compiled(lambda v, g=graph: nnx.merge(g, v)(tokens), variables)
    assert dtypes["coat_bf16"] == dtypes["bf16"]
    np.testing.assert_array_equal(logits["coat_bf16"], logits["bf16"])


def test_encoders_of_images_take_it():
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER}
    config = vit.VitConfig(
        image_size=32, patch_size=4, num_layers=2, num_heads=4, **sizes
    )
    images = normal(2, 2, 32, 32, 3)
    values, sizes = {}, {}
    for recipe in ("bf16", "coat", "coat_bf16"):
        of_recipe = dataclasses.replace(config, recipe=recipe)
        graph, params = parameters(lambda c=of_recipe: vit.Vit(c, rngs=nnx.Rngs(0)))

        def run(params, graph=graph):
            return nnx.merge(graph, params)(images)

        values[recipe] = compiled(run, params)
        sizes[recipe] = saved_bytes(saved(run, params))
    np.testing.assert_array_equal(values["coat_bf16"], values["bf16"])
    # The projection reads attention's output, where "coat" saves codes of it, too.
    assert sizes["coat_bf16"] <= 1.1 * sizes["coat"] < sizes["bf16"] / 2
