"""Tests of decoder layers on eight virtual devices: kernels, values and collectives."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.gradients import distances
from helpers.marks import slow
from helpers.models import normal
from helpers.sharded import COLLECTIVES, as_kernels
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.layers.decoder import DecoderLayer
from coat_jax.models import llama
from pallas_kernels import checks, explain
from pallas_kernels.dispatch import devices

pytestmark = pytest.mark.distributed
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
_NAMES = ["auto", "explicit"]
BOTH = pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=_NAMES)
auto_or_slowly_explicit = pytest.mark.parametrize(
    "axis_type", [AUTO, slow(EXPLICIT)], ids=_NAMES
)
HIDDEN, INNER = 256, 512
SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 128}
BATCH = P(("data", "fsdp"))
_OF_KERNELS = 2048  # The gate's kernel takes no shorter rows.


def mesh_of(axis_type):
    return jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(axis_type,) * 2)


@functools.cache
def layer(recipe: str, scaling="just_in_time", dtype=jnp.bfloat16, inner=INNER):
    return nnx.split(
        DecoderLayer(
            HIDDEN,
            inner,
            **SIZES,
            recipe=recipe,
            scaling=scaling,
            param_dtype=dtype,
            rngs=nnx.Rngs(0),
        )
    )


def gradients(graph):
    def run(params, x, dy):
        y, vjp = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), params, x)
        return y, *vjp(dy)

    return run


def rows(dtype=jnp.bfloat16):
    x, dy = (normal(seed, 8, 128, HIDDEN, dtype=dtype) for seed in (1, 2))
    return x, dy * dtype(0.01)


def fully_sharded(param) -> P:
    """Returns the PartitionSpec of a layer's parameter under FSDP."""
    if param.ndim < 2:
        return P()
    return P(None, "fsdp") if param.ndim == 3 else P("fsdp")


def on(mesh, params, x, dy, spec=lambda param: P()):
    """Places a layer's arguments on a mesh, with the batch sharded over all devices."""
    placements = jax.tree.map(lambda p: NamedSharding(mesh, spec(p)), params)
    batch = NamedSharding(mesh, BATCH)
    return jax.device_put((params, x, dy), (placements, batch, batch))


def ran(fn, *args) -> set[tuple[str, str]]:
    """Returns pairs of an operation and the implementation that runs it.

    Two operations are left out, because XLA computes them here: `tensor_scales` of
    sharded maxima on a mesh, and `attention` without a GPU.
    """
    actual = {(c.operation, c.implementation) for c in explain(fn, *args).choices}
    return {call for call in actual if call[0] not in ("tensor_scales", "attention")}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(devices, "has_hopper", lambda: True)


@pytest.mark.parametrize(("recipe", "error"), [("bf16", 1e-5), ("coat_bf16", 1e-2)])
def test_matmuls_in_bf16_take_sharded_weights_on_explicit_axes(recipe, error):
    """Copies in FP8 round a few elements the other way after sums in another order."""
    graph, params = layer(recipe, dtype=jnp.float32)
    run, args = jax.jit(gradients(graph)), (params, *rows(jnp.float32))
    sharded = on(mesh_of(EXPLICIT), *args, fully_sharded)
    actual, expected = run(*sharded), run(*args)
    assert max(distances(actual, expected)) < error
    for gradient, param in zip(
        *map(jax.tree.leaves, (actual[1], sharded[0])), strict=True
    ):
        assert gradient.sharding.is_equivalent_to(param.sharding, param.ndim)


@BOTH
@pytest.mark.parametrize(
    "spec", [slow(lambda p: P()), fully_sharded], ids=["data", "fsdp"]
)
@pytest.mark.parametrize("recipe", [slow("coat"), "coat_max"])
@pytest.mark.usefixtures("hopper")
def test_all_kernels_of_one_device_run_on_a_mesh(recipe, spec, axis_type):
    graph, params = layer(recipe, inner=_OF_KERNELS)
    run = gradients(graph)
    alone = ran(run, params, *rows())
    assert {implementation for _, implementation in alone} == {"mosaic"}
    assert ran(run, *on(mesh_of(axis_type), params, *rows(), spec)) == alone
    # The process has eight devices, and these arrays are on one of them.
    last = jax.devices()[-1]
    assert ran(run, *jax.device_put((params, *rows()), last)) == alone


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.usefixtures("hopper")
def test_kernels_run_within_shard_map_over_all_axes_and_say_if_axes_are_left(check_vma):
    checks.warn_once.cache_clear()
    graph, params = layer("coat", inner=_OF_KERNELS)
    mesh, args = mesh_of(AUTO), (params, *rows())

    def mapped(axes):
        return jax.shard_map(
            gradients(graph),
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=(P("data"), P(), P("data")),
            axis_names=axes,
            check_vma=check_vma,
        )

    assert ran(mapped({"data", "fsdp"}), *args) == ran(gradients(graph), *args)
    with pytest.warns(UserWarning, match="shard_map leaves the axes fsdp of the mesh"):
        actual = explain(jax.jit(mapped({"data"})), *on(mesh, *args))
    assert {choice.implementation for choice in actual.choices} == {"reference"}
    assert "leaves the axes fsdp" in actual.choices[0].reason


@functools.cache
def on_one_device(recipe: str, scaling: str):
    graph, params = layer(recipe, scaling)
    return jax.device_get(jax.jit(gradients(graph))(params, *rows()))


@functools.cache
def in_float32():
    graph, params = layer("bf16", dtype=jnp.float32)
    return jax.device_get(jax.jit(gradients(graph))(params, *rows(jnp.float32)))


def without_histories(results):
    """Returns the results of `gradients` without amax histories, and the histories."""
    y, dparams, dx = results
    saved = nnx.State({name: x for name, x in dparams.items() if name != "amax"})
    return (y, saved, dx), jax.tree.leaves(dparams.get("amax", {}))


@BOTH
@pytest.mark.parametrize(
    ("recipe", "scaling"),
    [
        slow("coat", "just_in_time"),
        slow("coat_max", "just_in_time"),
        ("coat", "delayed"),
    ],
)
def test_a_mesh_computes_what_one_device_does(monkeypatch, recipe, scaling, axis_type):
    alone = on_one_device(recipe, scaling)
    as_kernels(monkeypatch)
    graph, params = layer(recipe, scaling)
    args = on(mesh_of(axis_type), params, *rows(), fully_sharded)
    actual = jax.device_get(jax.jit(gradients(graph))(*args))
    jax.clear_caches()
    actual, histories = without_histories(actual)
    alone, expected = without_histories(alone)
    # Histories hold the largest gradients of all devices.
    for history, same in zip(histories, expected, strict=True):
        np.testing.assert_allclose(history, same, rtol=0.02)
    assert distances(actual[0], alone[0])[0] < 1e-3
    exact = in_float32()
    # Sums are in another order, so gradients are rounded to other codes here and there.
    # They are as near to float32's as one device's.
    for mesh, one in zip(
        distances(actual, exact), distances(alone, exact), strict=True
    ):
        assert mesh < 1.05 * one + 1e-3


@auto_or_slowly_explicit
def test_fsdp_gathers_codes_and_scatters_gradients(monkeypatch, axis_type):
    as_kernels(monkeypatch)
    graph, params = layer("coat")
    args = on(mesh_of(axis_type), params, *rows(), fully_sharded)
    placements = jax.tree.map(lambda x: x.sharding, args)
    batch = placements[1]

    step = jax.jit(gradients(graph), out_shardings=(batch, placements[0], batch))
    program = step.lower(*args).compile().as_text()
    jax.clear_caches()
    actual = re.findall(rf"= \(?(\w+)\[([\d,]*)\].*? ({COLLECTIVES})\(", program)
    sizes = {"gathered": Counter(), "all-reduce": Counter(), "reduce-scatter": 0}
    for dtype, shape, name in actual:
        size = np.prod([int(n) for n in shape.split(",") if n], dtype=int)
        if name == "reduce-scatter":
            sizes[name] += 1
        elif name == "all-gather":
            # XLA's CPU compiler stores FP8 as float16, and BF16 as float32.
            sizes["gathered"][dtype] += int(size)
        else:
            sizes[name][dtype] += int(size)
    weights = sum(p.size for p in jax.tree.leaves(params) if p.ndim > 1)
    # Both passes gather the codes of all weights.
    assert sizes["gathered"]["f16"] == 2 * weights
    features = sum(p.size // p.shape[-1] for p in jax.tree.leaves(params) if p.ndim > 1)
    # Forward also gathers a scale for each output feature.
    assert sizes["gathered"].total() - 2 * weights == features
    # Gate and up are scattered each by itself.
    assert sizes["reduce-scatter"] == 5
    # Scalars, the gradients of norms, and what is left of gradients' sums over "data".
    assert sizes["all-reduce"].total() < weights / 2 + 4 * HIDDEN


@functools.cache
def model(batch_axes=None):
    config = llama.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        batch_axes=batch_axes,
    )
    return nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))


def loss_and_gradients(graph):
    def loss(params, tokens):
        net = nnx.merge(graph, params)
        return llama.cross_entropy(net, tokens[:, :-1], tokens[:, 1:])

    return jax.value_and_grad(loss)


@auto_or_slowly_explicit
def test_models_train_fully_sharded(monkeypatch, axis_type):
    tokens = np.random.default_rng(0).integers(0, 256, (8, 65), np.int32)
    graph, params = model()
    alone = jax.device_get(jax.jit(loss_and_gradients(graph))(params, tokens))
    as_kernels(monkeypatch)
    mesh = mesh_of(axis_type)
    graph, _ = model(("data", "fsdp") if axis_type == AUTO else None)

    def spec(param):
        return P(*[None] * (param.ndim - 2), "fsdp") if param.ndim > 2 else P()

    placements = jax.tree.map(lambda p: NamedSharding(mesh, spec(p)), params)
    params = jax.device_put(params, placements)
    tokens = jax.device_put(tokens, NamedSharding(mesh, BATCH))
    complete = NamedSharding(mesh, P())
    step = jax.jit(loss_and_gradients(graph), out_shardings=(complete, placements))
    compiled = step.lower(params, tokens).compile()
    loss, grads = jax.device_get(compiled(params, tokens))
    jax.clear_caches()
    assert loss == pytest.approx(float(alone[0]), rel=1e-4)
    # Gradients are FP8 on both sides, and a few codes differ.
    assert max(distances(grads, alone[1])) < 0.06
    # The batch stays split: no device holds another's stream.
    assert "[8,64,128]" not in compiled.as_text()


@auto_or_slowly_explicit
def test_shards_of_the_batch_are_quantized_like_microbatches(monkeypatch, axis_type):
    # The first sequence has its own tokens, and gradients 2**30 times larger: with a
    # scale in common the others' codes would be zero.
    rng = np.random.default_rng(1)
    tokens = rng.integers(128, 256, (8, 65), np.int32)
    tokens[0] -= 128
    weights = np.full((8, 64), 2.0**-30, np.float32)
    weights[0] = 1
    graph, params = model()
    step = jax.jit(loss_and_gradients(graph))
    parts = [jax.device_get(step(params, piece)) for piece in np.split(tokens, 8)]
    each = zip(*(jax.tree.leaves(grads) for _, grads in parts), strict=True)
    shares = weights[:, 0].astype(np.float64) / weights[:, 0].sum()
    expected = [
        np.tensordot(shares, np.asarray(operands, np.float64), 1) for operands in each
    ]
    as_kernels(monkeypatch)
    mesh = mesh_of(axis_type)
    graph, _ = model(("data", "fsdp") if axis_type == AUTO else None)

    def loss(params, tokens, weights):
        net, operands = nnx.merge(graph, params), (tokens[:, :-1], tokens[:, 1:])
        return llama.cross_entropy(net, *operands, weights=weights)

    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put((tokens, weights), NamedSharding(mesh, BATCH))
    grads = jax.device_get(jax.jit(jax.grad(loss))(params, *batch))
    jax.clear_caches()
    assert max(distances(grads, expected)) < 2e-3
    # The embedding is the first parameter.
    rows = [jax.tree.leaves(tree)[0][128:] for tree in (grads, expected)]
    assert max(distances(*rows)) < 2e-3
