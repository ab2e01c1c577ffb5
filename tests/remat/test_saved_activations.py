"""Tests which residuals layers of each recipe save, and their reports."""

import functools
import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import small_models
from helpers.gradients import saved
from helpers.versions import needs_kernels

import coat_jax as coat
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.models import llama
from pallas_kernels.dispatch import devices, stand_ins

RECIPES = ["bf16", "te", "coat_block", "coat_bf16", "coat", "coat_max"]
FP8_RECIPES = RECIPES[1:]
BATCH, LENGTH, HIDDEN = 4, 2048, 4096
U = BATCH * LENGTH * HIDDEN * 2  # Bytes of the layer's BF16 input.
BOUNDS = {"te": 14.5, "coat_max": 6.5}
BOUNDS |= dict.fromkeys(("coat_block", "coat_bf16", "coat"), 8.3)


def abstract_layer(*sizes, recipe):
    make = functools.partial(DecoderLayer, *sizes, recipe=recipe)
    return nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))


@functools.cache
def units(recipe: str, num_layers: int | None = None, light: bool = False) -> float:
    """Returns a layer's saved bytes without parameters, in units of the input.

    Layers are under scan if there are several. With `light` each is in `fp8_remat`.
    """
    graph, params = abstract_layer(HIDDEN, 11008, 32, 32, 128, recipe=recipe)

    def apply(params, x):
        return nnx.merge(graph, params)(x)

    def stacked(params, x):
        return jax.lax.scan(lambda x, p: (apply(p, x), None), x, params)[0]

    if light:
        apply = coat.fp8_remat(apply)
    fn = apply
    if num_layers is not None:
        fn = stacked
        params = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct((num_layers, *p.shape), p.dtype), params
        )
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, HIDDEN), jnp.bfloat16)
    count = len(jax.tree.leaves(params))
    residuals = saved(fn, params, x)
    # The input of the layer is an argument here, but in a model it is saved.
    selected = [r for r in residuals if r.argument is None or r.argument >= count]
    return sum(r.nbytes for r in selected) / U / (num_layers or 1)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_layer_saves_no_more_than_the_paper_allows(recipe):
    assert units(recipe) <= BOUNDS[recipe]


@needs_kernels
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_the_same_holds_with_flash_attention(recipe):
    with stand_ins.for_hopper():
        assert units.__wrapped__(recipe) <= BOUNDS[recipe]


@pytest.mark.parametrize("num_layers", [None, 2])
def test_fp8_remat_of_a_layer_saves_what_products_return(num_layers):
    """A layer saves its input, q, k, v, attention's output, the sum, gate and up."""
    expected = (1 + 3 + 1 + 1 + 2 * 11008 / 4096) / 2
    assert expected < units("bf16", num_layers, light=True) <= 1.125 * expected + 0.01
    assert units("bf16", num_layers, light=True) <= 7


def test_recipes_save_less_and_less():
    counts = [units(recipe) for recipe in RECIPES]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 22


@pytest.mark.parametrize("recipe", RECIPES)
def test_scan_saves_nothing_twice(recipe):
    """Layers share tables that do not depend on the layer, which only `bf16` saves.

    JAX 0.9 saves a row of frequencies, of 256 bytes, too.
    """
    tolerance = 0.05 if recipe == "bf16" else 256 / U
    assert 0 <= units(recipe) - units(recipe, num_layers=2) <= tolerance


@pytest.mark.parametrize("recipe", ["coat", "coat_max"])
def test_attention_saves_what_the_recipe_says(recipe):
    """Queries, keys, values and outputs are BF16, or FP8 with one group per head."""
    graph, params = abstract_layer(64, 96, 4, 4, 16, recipe=recipe)
    x = jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16)
    residuals = saved(lambda p, x: nnx.merge(graph, p)(x), params, x)
    heads = [r.dtype.name for r in residuals if r.shape == (2, 64, 4, 16)]
    expected = {"coat": ["bfloat16"] * 3, "coat_max": ["float8_e4m3fn"] * 3}[recipe]
    assert heads[:3] == expected
    scales = [r for r in residuals if r.shape == (2, 64, 4, 1)]
    assert len(scales) == (4 if recipe == "coat_max" else 0)


def test_report_agrees():
    shape = {"hidden_size": 64, "intermediate_size": 96, "tie_embeddings": False}
    config = small_models.config(recipe="coat", **shape)
    make = lambda: llama.Llama(config, rngs=nnx.Rngs(0))  # noqa: E731
    graph, params = nnx.split(nnx.eval_shape(make))
    tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, config.vocab_size)
    model = functools.partial(llama.cross_entropy, targets=tokens)

    def loss(params, tokens):
        return model(nnx.merge(graph, params), tokens)

    residuals = saved(loss, params, tokens)
    expected = sum(r.nbytes for r in residuals if r.argument is None)
    assert coat.residual_report(loss, params, tokens).nbytes == expected


def _user_layer(x, w):
    return coat.fp8_dot_general(x, w, (((1,), (0,)), ((), ())))


@pytest.mark.parametrize("wrap", [lambda fn: fn, coat.fp8_remat])
def test_reports_name_the_line_of_the_user_who_multiplies(wrap):
    def fn(x, w):
        return _user_layer(jnp.tanh(x), w)

    x, w = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
    rows = coat.residual_report(wrap(fn), x, w).rows
    line = inspect.getsourcelines(_user_layer)[1] + 1
    position = f"in _user_layer ({os.path.basename(__file__)}:{line})"
    places = {row.asked_by for row in rows} - {"the output"}
    # The others are for `tanh`, on the line above.
    assert sum(position in asked_by for asked_by in places) >= 2, places
    assert all(os.path.basename(__file__) in asked_by for asked_by in places), places


def test_reports_name_the_line_of_the_user_who_calls_a_function_of_jax():
    def gated(x, w):
        return jax.nn.silu(jnp.sin(_user_layer(x, w)))

    x, w = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    rows = coat.residual_report(coat.fp8_remat(gated), x, w).rows
    position = f"({os.path.basename(__file__)}:{inspect.getsourcelines(gated)[1] + 1})"
    products = [row.asked_by for row in rows if row.asked_by.startswith("mul")]
    assert len(products) > 1
    assert all(place.endswith(position) for place in products), products


def test_arrays_that_the_backward_pass_does_not_read_are_not_saved():
    """The rule of softplus saves its result, and its gradient reads only a slope."""
    x = jax.random.normal(jax.random.key(0), (128, 64))
    light = coat.fp8_remat(lambda x: jax.nn.softplus(x) + 1, params_argnums=())
    assert [row.shape for row in coat.residual_report(jax.nn.softplus, x).rows] == [
        (128, 64),
        (128, 64),
    ]
    rows = coat.residual_report(light, x).rows
    assert [row.shape for row in rows] == [(128, 64), (128, 4)]
    dx = jax.grad(lambda x: light(x).sum())(x)
    np.testing.assert_allclose(dx, jax.nn.sigmoid(x), rtol=2**-4, atol=1e-3)


@needs_kernels
def test_report_says_which_kernel_reads_what_where(monkeypatch):
    """The report lists no operations inside kernels and no callers of other traces."""
    monkeypatch.setattr(devices, "has_hopper", lambda: True)

    def report(recipe):
        graph, params = abstract_layer(256, 2048, 2, 2, 128, recipe=recipe)
        x = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16)
        apply = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
        return coat.residual_report(apply, params, x)

    report("te")
    rows = report("coat").rows
    reader = "gated_grad in gated_mlp"
    gated = [row for row in rows if row.asked_by.startswith(reader)]
    assert [row.shape for row in gated] == [(2, 128, 2, 2048), (2, 128, 2, 128), ()]
    normed = [row for row in rows if row.asked_by.startswith("norm_grad in ")]
    places = [row.asked_by.split()[2] for row in normed if row.shape == (2, 128, 256)]
    assert sorted(places) == ["attention_in", "gated_mlp"]
    weights = {
        row.shape: row.asked_by.split(" (")[0]
        for row in rows
        if row.is_argument and len(row.shape) > 1
    }
    assert weights == {
        (768, 256): "quantize_tensor in attention_in",
        (256, 256): "quantize_tensor in attention_out",
        (2, 2048, 256): "quantize_tensor in gated_mlp",
        (256, 2048): "quantize_tensor in gated_mlp",
    }


@jax.custom_vjp
def _saving_its_result(x):
    return jnp.sin(x)


def _sin_fwd(x):
    y = jnp.sin(x)
    return y, y


_saving_its_result.defvjp(_sin_fwd, lambda y, dy: (dy * jnp.sqrt(1 - y * y),))


@jax.custom_vjp
def _saving_its_argument(x):
    return 2 * x


_saving_its_argument.defvjp(lambda x: (2 * x, x), lambda x, dy: (dy * x,))


def test_an_array_whose_sharding_is_constrained_is_listed_once():
    """The two functions save one array, in a stack, with a constraint between them."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.NamedSharding(mesh, jax.P("data"))

    def body(x, scale):
        y = jax.lax.with_sharding_constraint(_saving_its_result(x), where)
        return _saving_its_argument(y), None

    def run(x):
        return jax.lax.scan(body, x, jnp.ones(3))[0]

    report = coat.residual_report(run, jnp.ones(8))
    assert [row.shape for row in report.rows] == [(3, 8)]


def test_arrays_of_two_calls_of_a_function_are_two():
    @jax.jit
    def twice(x):
        return _saving_its_result(x)

    report = coat.residual_report(lambda x: twice(2 + twice(x)), jnp.ones(8))
    assert [row.shape for row in report.rows] == [(8,), (8,)]
