"""Tests context parallelism on virtual devices: values, collectives, bytes, errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.gradients import distances
from helpers.marks import slow
from helpers.sharded import COLLECTIVES, as_kernels
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.layers.context import ContextParallel
from coat_jax.models import llama

pytestmark = pytest.mark.distributed
BATCH, LENGTH, HIDDEN = 4, 128, 128
MESHES = {
    "2": {"context": 2},
    "2 x 2": {"fsdp": 2, "context": 2},
    "4": {"context": 4},
    "2 x 2 x 2": {"fsdp": 2, "context": 2, "tensor": 2},
}
# Steps between matmul and attention, and layers with windows and RoPE of their own.
STEPS = {
    "qkv_bias": True,
    "qk_norm": "width",
    "window": 40,
    "local_layers": (True, False),
    "local_rope_theta": 1e3,
}


def config_of(recipe, context=None, **changes):
    sizes = {"vocab_size": 256, "hidden_size": HIDDEN, "intermediate_size": 256}
    sizes |= {"num_layers": 2, "num_heads": 8, "num_kv_heads": 4}
    return llama.LlamaConfig(**(sizes | changes), recipe=recipe, context=context)


def context_of(sizes, axis_type=AxisType.Auto):
    names = tuple(sizes)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    types = (axis_type,) * len(names)
    mesh = jax.make_mesh(
        tuple(sizes.values()), names, axis_types=types, devices=devices
    )
    return ContextParallel(
        mesh=mesh,
        batch_axes="fsdp" if "fsdp" in names else None,
        head_axes="tensor" if "tensor" in names else None,
    )


def batch(length=LENGTH):
    """Returns tokens, targets, segments and weights of packed sequences."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (BATCH, length + 1), np.int32)
    segments = np.sort(rng.integers(0, 4, (BATCH, length)), axis=1).astype(np.int32)
    # Parts of sequences have other numbers of tokens that count.
    weights = rng.random((BATCH, length)) < np.linspace(0.1, 0.9, length)
    return tokens[:, :-1], tokens[:, 1:], segments, weights.astype(np.float32)


def step_of(config):
    model = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    graph, _, _ = nnx.split(model, nnx.Param, ...)

    def loss(params, others, tokens, targets, segments, weights):
        model = nnx.merge(graph, params, others)
        options = {"segment_ids": segments, "weights": weights}
        return llama.training_loss(model, tokens, targets, **options)[0]

    return loss


@functools.cache
def alone(recipe, length=LENGTH, **changes):
    """Returns the variables of a model, and its loss and gradients on one device."""
    config = config_of(recipe, **changes)
    model = nnx.jit(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))()
    _, *variables = nnx.split(model, nnx.Param, ...)
    step = jax.jit(jax.value_and_grad(step_of(config)))
    return variables, jax.device_get(step(*variables, *batch(length)))


def on_mesh(context, variables, of_parts=True, length=LENGTH):
    """Returns a step's arguments on a mesh, and the shardings of its results.

    Parameters are sharded if `of_parts` is true, and replicated if it is false.
    """
    mesh = context.mesh
    names = tuple(n for n in ("fsdp", "context") if of_parts and n in mesh.axis_names)

    def sharding(param):
        spec = [None] * (param.ndim - 2) + [names] if param.ndim > 2 else []
        return NamedSharding(mesh, P(*spec))

    params, others = variables
    placements = jax.tree.map(sharding, params)
    whole = NamedSharding(mesh, P())
    explicit = context.axis if mesh.explicit_axes else None
    there = NamedSharding(mesh, P(context.batch_axes, explicit))
    args = (params, others, *batch(length))
    args = jax.device_put(args, (placements, whole, *[there] * 4))
    return args, (whole, placements)


def run_on(context, recipe, of_parts=True, length=LENGTH, **changes):
    """Returns the loss and gradients of a step on a mesh, and the program's text."""
    variables, _ = alone(recipe, length, **changes)
    args, results = on_mesh(context, variables, of_parts, length)
    step = jax.value_and_grad(step_of(config_of(recipe, context, **changes)))
    compiled = jax.jit(step, out_shardings=results).lower(*args).compile()
    loss, grads = jax.device_get(compiled(*args))
    return loss, grads, compiled.as_text()


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Makes operations choose kernels, as on Hopper GPUs, with and without a mesh."""
    with pytest.MonkeyPatch.context() as patch:
        as_kernels(patch)
        yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def fp8_on_four(kernels):
    """Returns the result of `run_on` for the recipe `coat` on four devices."""
    return run_on(context_of(MESHES["2 x 2"]), "coat")


@pytest.mark.parametrize("sizes", [*map(slow, ("2", "4", "2 x 2 x 2")), "2 x 2"])
def test_float32_differs_by_the_order_of_sums(sizes):
    # Some layers have windows. Of four devices two have the same key head.
    changes = {"dtype": jnp.float32, "num_kv_heads": 2, **STEPS}
    _, expected = alone("bf16", **changes)
    loss, grads, _ = run_on(context_of(MESHES[sizes]), "bf16", **changes)
    assert loss == pytest.approx(float(expected[0]), rel=1e-6)
    assert max(distances(grads, expected[1])) < 2e-6


def test_fp8_has_the_codes_of_one_device(fp8_on_four):
    assert_same(fp8_on_four, alone("coat")[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "sizes", "changes"),
    [
        ("coat", "2", {}),
        ("coat", "4", {}),
        ("coat", "2 x 2", {"scaling": "delayed"}),
        ("coat", "2 x 2", STEPS),
        ("coat", "2 x 2", {"norm_placement": "both"}),
        ("coat", "2", {"experts": llama.Experts(num_experts=4, top_k=2)}),
        ("coat_max", "2 x 2", {}),
        ("te", "2 x 2", {}),
        # Blocks have 128 tokens, so that parts of sequences have as many.
        ("coat_block", "2", {"hidden_size": 256, "length": 256}),
    ],
)
def test_other_recipes_have_the_codes_of_one_device(recipe, sizes, changes):
    _, expected = alone(recipe, **changes)
    assert_same(run_on(context_of(MESHES[sizes]), recipe, **changes), expected)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, STEPS])
def test_copies_of_unquantized_results_differ_by_few_roundings(changes):
    """Sums in another order round a few elements of BF16 results the other way."""
    _, expected = alone("coat_bf16", **changes)
    actual = run_on(context_of(MESHES["2 x 2"]), "coat_bf16", **changes)
    assert actual[0] == pytest.approx(float(expected[0]), rel=1e-6)
    assert max(distances(actual[1], expected[1])) < 5e-3


def assert_same(actual, expected):
    """Checks that a loss and gradients differ only by the order of float32 sums.

    FP8 codes are the same: quantization groups are within tokens, and scales of
    gradients that devices choose for their shards are powers of two.
    """
    assert actual[0] == pytest.approx(float(expected[0]), rel=1e-6)
    assert max(distances(actual[1], expected[1])) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["coat", "bf16"])
def test_explicit_axes_compute_the_same(recipe):
    context = context_of(MESHES["2 x 2"], AxisType.Explicit)
    changes = {} if recipe == "coat" else {"dtype": jnp.float32}
    _, expected = alone(recipe, **changes)
    assert_same(run_on(context, recipe, **changes), expected)


def test_devices_exchange_heads_and_gather_no_activations(fp8_on_four):
    calls = re.findall(rf"= \(?\w+\[([\d,]*)\].*? ({COLLECTIVES})\(", fp8_on_four[2])
    sizes = {name: [] for name in COLLECTIVES.split("|")}
    for shape, name in calls:
        sizes[name].append(int(np.prod([int(n) for n in shape.split(",") if n])))
    # Each device has the queries of 2 sequences at 64 positions, and half as many keys.
    # Results are a tuple of two such parts.
    queries = BATCH // 2 * LENGTH // 2 * HIDDEN // 2
    # Forward exchanges queries, keys, values and the output; backward their gradients,
    # and the output again.
    expected = [queries // 2] * 4 + [queries] * 5
    assert sorted(sizes["all-to-all"]) == expected
    # A layer's gate and up are the largest arrays that are gathered, as codes.
    assert max(sizes["all-gather"]) <= 2 * 256 * HIDDEN
    assert not sizes["collective-permute"]


def test_saved_bytes_are_shards():
    """The shards of sequences together save as many bytes as the complete sequences."""
    variables, _ = alone("coat")
    context = context_of({"context": 2})
    args, _ = on_mesh(context, variables)
    whole = coat.residual_report(step_of(config_of("coat")), *variables, *batch())
    parts = coat.residual_report(step_of(config_of("coat", context)), *args)
    assert parts.nbytes == pytest.approx(whole.nbytes, rel=0.01)


def test_what_cannot_be_split_is_refused():
    context = context_of(MESHES["4"])
    with pytest.raises(ValueError, match=r"of 4, .* axes context, got 6; use"):
        config_of("coat", context, num_heads=6, num_kv_heads=2, hidden_size=96)
    with pytest.raises(ValueError, match="of 6 positions into 4: both must divide"):
        context.enter(jnp.zeros((2, 6, 8)))
    with pytest.raises(ValueError, match="must have the axis 'sequence', got"):
        ContextParallel(mesh=context.mesh, axis="sequence")
    with pytest.raises(ValueError, match="can split one thing only"):
        ContextParallel(mesh=context.mesh, batch_axes="context")
    with pytest.raises(ValueError, match="batch_axes must be None or those of the"):
        config_of("coat", context, batch_axes="context")
