"""Tests of experts sharded over a mesh axis: exchanged rows, layers and models.

Rows are compared with NumPy, and layers and models with one device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.marks import slow
from helpers.models import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.layers import recipes
from coat_jax.layers.experts.routing import Experts, Routing
from coat_jax.layers.experts.sent import Chunks, SentRows
from coat_jax.layers.parts import Norm
from coat_jax.memory.shards import default_shardings
from coat_jax.models import llama
from experiments.bench import moe_parallel

pytestmark = pytest.mark.distributed
HIDDEN, INNER, COUNT, LENGTH, PADDING = 32, 32, 8, 6, 24
NORM = Norm(kind="rms", eps=1e-5)
EXPERTS = Experts(num_experts=COUNT, top_k=2)
SHARED = dataclasses.replace(EXPERTS, num_shared=1)
TOKENS = np.random.default_rng(0).integers(0, 96, (4, 17))
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def mesh_of(kind: AxisType = AxisType.Auto, **sizes: int) -> jax.sharding.Mesh:
    count = int(np.prod(list(sizes.values())))
    shape, names = tuple(sizes.values()), tuple(sizes)
    types = (kind,) * len(names)
    return jax.make_mesh(shape, names, axis_types=types, devices=jax.devices()[:count])


def ids_of(load: str, count: int, experts: Experts) -> np.ndarray:
    """Returns random expert ids for each token, int [devices, tokens, choices].

    Args:
      load: "one device" or "empty experts" restrict the choice; other names do not.
      count: The number of devices.
      experts: The settings of the experts. Shared experts are the last choices.
    """
    rng, (first, second) = np.random.default_rng(3), (0, COUNT)
    if load == "one device":
        first, second = COUNT // 2, COUNT // 2 + experts.top_k
    if load == "empty experts":
        first = 3
    ids = np.stack(
        [
            rng.permutation(np.arange(first, second))[: experts.top_k]
            for _ in range(count * LENGTH)
        ]
    ).reshape(count, LENGTH, -1)
    shared = np.arange(COUNT, experts.num_groups)
    shared = np.broadcast_to(shared, (*ids.shape[:2], len(shared)))
    return np.concatenate([ids, shared], axis=-1)


def devices_of(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns the device of each chosen expert that is not shared, for each sender."""
    chosen = ids[ids < COUNT] // (COUNT // count)
    return chosen.reshape(len(ids), -1)


def expected_rows(ids: np.ndarray, device: int, experts: Experts) -> list:
    """Returns sender, token and choice of each row on a device, sorted by expert."""
    each = COUNT // len(ids)
    here = [*range(device * each, (device + 1) * each)]
    here += range(COUNT, experts.num_groups)
    rows = []
    for expert in here:
        senders = range(len(ids)) if expert < COUNT else [device]
        for sender in senders:
            places = np.argwhere(ids[sender] == expert)
            rows.append([(sender, *place) for place in places.tolist()])
    return [row for of_expert in rows for row in of_expert]


@pytest.mark.parametrize("count", [2, 4])
def test_rows_are_those_of_numpy(count):
    experts, tight = SHARED, dataclasses.replace(SHARED, buffer=1.0)
    mesh = mesh_of(expert=count)
    x = np.random.default_rng(1).standard_normal((count, LENGTH, 4), np.float32)
    weights = np.arange(count * LENGTH * experts.choices, dtype=np.float32) + 1
    weights = weights.reshape(count, LENGTH, -1)

    @functools.partial(jax.jit, compiler_options=QUICK)
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
    )
    def run(ids, x, weights):
        sort = functools.partial(SentRows.sorted_by_expert, ids[0])
        rows, narrow = (
            sort(each, "expert", padding=PADDING) for each in (experts, tight)
        )
        results = {
            "tight": narrow.sums(narrow.of_tokens(x[0])),
            "rows": rows.of_tokens(x[0]),
            "weights": rows.of_choices(weights[0]),
            "back": rows.to_choices(rows.of_choices(weights[0])),
            "sums": rows.sums(rows.of_tokens(x[0])),
            "sizes": rows.sizes,
        }
        return jax.tree.map(lambda v: v[None], results)

    chunk = Chunks.of(LENGTH, tight, count, "expert")
    longest = Chunks.of(LENGTH, experts, count, "expert")
    assert (chunk.rows, longest.part, longest.rows) == (8, 8, 16)
    place = -(-(16 * count + LENGTH) // 8) * 8
    for load in ("random", "one device", "empty experts"):
        ids = ids_of(load, count, experts)
        results = jax.tree.map(np.asarray, run(ids.astype(np.int32), x, weights))
        np.testing.assert_array_equal(results["back"], weights)
        sums = x * np.float32(experts.choices)
        np.testing.assert_allclose(results["sums"], sums, rtol=1e-6)
        # Without place for all rows no device has numbers.
        of_pairs = [np.bincount(c, minlength=count) for c in devices_of(ids, count)]
        fits = np.max(of_pairs) <= chunk.rows
        sums = sums if fits else np.full_like(sums, np.nan)
        np.testing.assert_allclose(results["tight"], sums, rtol=1e-6)
        assert not (fits and load == "one device")
        for device in range(count):
            expected = expected_rows(ids, device, experts)
            row = results["rows"][device]
            assert len(row) == place + PADDING
            assert results["sizes"][device].sum() == len(expected)
            senders, tokens, choices = np.array(expected).reshape(-1, 3).T
            np.testing.assert_array_equal(row[: len(expected)], x[senders, tokens])
            assert not row[len(expected) :].any()
            there = results["weights"][device][: len(expected)]
            np.testing.assert_array_equal(there, weights[senders, tokens, choices])


def parameters(experts: Experts, load: str) -> dict:
    router = normal(0, COUNT, HIDDEN, scale=0.2)
    if load == "one expert":  # The mean of tokens is far from zero.
        router = router.at[5].add(1.0)
    if load == "one device":
        router = router.at[:4].add(-1.0)
    groups = experts.num_groups
    return {
        "norm": 1 + normal(1, HIDDEN, scale=0.2),
        "router": router,
        "router_bias": None,
        "gate_up": normal(2, groups, 2, INNER, HIDDEN, scale=0.15),
        "down": normal(3, groups, HIDDEN, INNER, scale=0.15),
    }


def streams() -> tuple[jax.Array, jax.Array]:
    """Returns the residual stream and the gradient of the result."""
    return 1 + normal(5, 4, LENGTH, HIDDEN), normal(6, 4, LENGTH, HIDDEN)


def layer_of(name: str, experts: Experts, batch_axes=None):
    recipe = recipes.RECIPES[name]

    def layer(params, x):
        options = {"norm": NORM, "gate": "silu", "experts": experts}
        x = recipe.enter(x, batch_axes)
        y, shares = recipe.experts(params, x, **options, batch_axes=batch_axes)
        return recipe.leave(y), Routing.of(shares)

    return layer


def passes(name: str, experts: Experts, batch_axes=None):
    """Returns a jitted function that computes a layer's results and all gradients."""
    layer = layer_of(name, experts, batch_axes)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, x, dy):
        (y, routing), vjp = jax.vjp(layer, params, x)
        losses = Routing(jnp.zeros(COUNT), jnp.float32(0.3), jnp.float32(0.02))
        return y, routing, vjp((dy, losses))

    return run


def placed(mesh, params, *of_tokens, axes, weights=None):
    """Returns parameters and arrays of tokens on a mesh.

    Args:
      mesh: The mesh.
      params: The parameters by name; only the experts' weights are sharded.
      *of_tokens: Arrays with tokens along the first axis.
      axes: The mesh axes that shard the tokens.
      weights: The spec of the experts' weights; None shards them over "expert".
    """
    weights = P("expert") if weights is None else weights
    places = {
        name: NamedSharding(mesh, weights if name in ("gate_up", "down") else P())
        for name, param in params.items()
        if param is not None
    }
    params = {
        k: v if v is None else jax.device_put(v, places[k]) for k, v in params.items()
    }
    where = NamedSharding(mesh, P(axes))
    return params, *(jax.device_put(x, where) for x in of_tokens)


def assert_near(actual, expected, error: float):
    """Asserts that norm(a - b) <= error * norm(b) for all arrays."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= error * np.linalg.norm(b)


AXES = {
    "fsdp": ({"fsdp": 2, "expert": 2}, ("fsdp", "expert")),
    "alone": ({"expert": 4}, "expert"),
    # Tokens are whole along "expert" outside of the experts.
    "data": ({"data": 2, "expert": 2}, ("data",)),
}


@pytest.mark.parametrize(
    ("recipe", "axes", "experts"),
    [
        ("bf16", "fsdp", EXPERTS),
        ("coat", "fsdp", EXPERTS),
        slow("te", "fsdp", EXPERTS),
        slow("coat_max", "alone", SHARED),
        slow("bf16", "alone", SHARED),
        slow("te", "alone", SHARED),
        slow("coat", "data", EXPERTS),
        slow("bf16", "data", EXPERTS),
        slow("coat_bf16", "fsdp", EXPERTS),
        slow("coat_bf16", "alone", SHARED),
    ],
)
def test_layers_compute_what_one_device_does(recipe, axes, experts):
    sizes, names = AXES[axes]
    mesh, (x, dy) = mesh_of(**sizes), streams()
    weights = P() if experts.num_shared else P((*sizes,)[::-1])
    alone, there = passes(recipe, experts), passes(recipe, experts, names)
    for load in ("random", "one expert", "one device"):
        params = parameters(experts, load)
        expected = alone(params, x, dy)
        actual = there(*placed(mesh, params, x, dy, axes=names, weights=weights))
        # Rows have the same scales. Few roundings differ by the order of sums.
        assert_near(actual, expected, 1e-5 if recipe == "bf16" else 1e-3)


@pytest.mark.parametrize("recipe", ["bf16", "te", "coat", "coat_bf16"])
def test_weights_that_are_gathered_are_not_saved(recipe):
    sizes, names = AXES["fsdp"]
    mesh, (x, _) = mesh_of(**sizes), streams()
    params, x = placed(
        mesh, parameters(EXPERTS, "random"), x, axes=names, weights=P((*sizes,)[::-1])
    )
    report = coat.residual_report(layer_of(recipe, EXPERTS, names), params, x)
    weights = [params[name].shape[1:] for name in ("gate_up", "down")]
    saved = [row.shape[1:] for row in report.rows if not row.is_argument]
    assert not [shape for shape in saved if shape in weights]


@pytest.mark.slow
def test_weights_of_a_device_within_shard_map():
    mesh, (x, _) = mesh_of(expert=2), streams()
    params, layer = parameters(EXPERTS, "random"), layer_of("coat", EXPERTS)
    specs = {k: P("expert") if k in ("gate_up", "down") else P() for k in params}
    run = jax.shard_map(
        lambda params, x: layer(params, x)[0],
        mesh=mesh,
        in_specs=(specs, P("expert")),
        out_specs=P("expert"),
    )
    y, expected = (
        jax.jit(fn, compiler_options=QUICK)(params, x)
        for fn in (run, lambda params, x: layer(params, x)[0])
    )
    assert_near(y, expected, 1e-5)


def test_what_a_mesh_cannot_split_is_refused():
    params, (x, _) = parameters(EXPERTS, "random"), streams()
    cases = [
        (
            {"expert": 2},
            None,
            x,
            r"needs the batch_axes that split the batch, got None",
        ),
        ({"expert": 2}, "expert", x[:3], "the batch must be a multiple of 2"),
        ({"expert": 3}, "expert", x, '"expert" must divide num_experts 8, got 3'),
        ({"expert": 2, "tensor": 2}, "expert", x, "nothing but the batch"),
    ]
    for sizes, axes, stream, rule in cases:
        mesh = mesh_of(**sizes)
        arguments = placed(mesh, params, stream, axes=None, weights=P())
        with pytest.raises(ValueError, match=rule):
            jax.eval_shape(layer_of("coat", EXPERTS, axes), *arguments)
    mesh = mesh_of(AxisType.Explicit, expert=2)
    stream = jax.device_put(x, NamedSharding(mesh, P(None, "expert")))
    with pytest.raises(ValueError, match="sequences cannot be split"):
        jax.jit(layer_of("coat", EXPERTS)).trace(params, stream)
    wrong = {**params, "down": params["down"][:3], "gate_up": params["gate_up"][:3]}
    with pytest.raises(ValueError, match="must be of 8 experts, or of a device"):
        jax.eval_shape(layer_of("coat", EXPERTS), wrong, x)
    with pytest.raises(ValueError, match=r"buffer must be 1 or more, got 0\.5"):
        dataclasses.replace(EXPERTS, buffer=0.5)


def results(recipe, mesh=None, released=False):
    """Returns a model's loss, its routing, and its gradients.

    With `released` a step of `coat.value_and_update` is made, and its new parameters
    take the place of the gradients.
    """
    axes = None if mesh is None else mesh.axis_names
    config = llama.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        recipe=recipe,
        dtype=jnp.float32,
        batch_axes=axes,
        experts=dataclasses.replace(EXPERTS, balance_weight=0.5),
    )
    graph, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(TOKENS)
    if mesh is not None:
        places = default_shardings(params, mesh)
        weights = P(None, ("expert", "fsdp"), None, None, None)
        assert places["layers"]["gate_up"].spec == weights
        params = jax.tree.map(jax.device_put, params, places)
        tokens = jax.device_put(tokens, NamedSharding(mesh, P(axes)))

    def loss(params, tokens):
        model = nnx.merge(graph, params)
        return llama.training_loss(model, tokens[:, :-1], tokens[:, 1:])

    if released:
        tx = coat.fp8_adamw(1e-2)
        step = jax.jit(coat.value_and_update(loss, tx, has_aux=True))
        (value, losses), new, _ = step(params, jax.jit(tx.init)(params), tokens)
    else:
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, losses), new = step(params, tokens)
    return value, losses.routing, nnx.to_pure_dict(new)


@pytest.mark.parametrize(
    ("recipe", "kind", "released"),
    [
        slow("bf16", AxisType.Auto, False),
        slow("coat", AxisType.Auto, False),
        slow("coat", AxisType.Explicit, False),
        slow("te", AxisType.Explicit, False),
        slow("coat", AxisType.Auto, True),
    ],
)
def test_models_compute_what_one_device_does(recipe, kind, released):
    mesh = mesh_of(kind, fsdp=2, expert=2)
    value, routing, new = results(recipe, mesh, released)
    expected_value, expected_routing, expected = results(recipe, None, released)
    assert float(value) == pytest.approx(float(expected_value), rel=1e-4)
    assert_near(routing, expected_routing, 1e-3)
    # Devices quantize gradients of attention with scales of their own.
    assert_near(new, expected, 1e-4 if recipe == "bf16" else 0.1)


@pytest.mark.slow
def test_generation_gathers_experts():
    mesh, sizes = mesh_of(expert=2), {"vocab_size": 96, "hidden_size": 32}
    config = llama.LlamaConfig(
        **sizes,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        recipe="bf16",
        dtype=jnp.float32,
        experts=EXPERTS,
    )
    graph, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
    there = jax.tree.map(jax.device_put, params, default_shardings(params, mesh))
    # No size of a batch is a multiple of the axis, and no batch_axes are needed.
    answers = [
        coat.generate(nnx.merge(graph, p), TOKENS[:3, :5], max_new_tokens=3).tokens
        for p in (params, there)
    ]
    np.testing.assert_array_equal(*answers)


@pytest.mark.slow
def test_the_benchmark_compares_with_one_device(monkeypatch):
    monkeypatch.setattr(moe_parallel, "CASES", (("coat", 2.0),))
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    devices_of_mesh = jax.devices()[:2]
    make_mesh = functools.partial(jax.make_mesh, devices=devices_of_mesh)
    monkeypatch.setattr(jax, "make_mesh", make_mesh)
    options = {"calls": 1, "rounds": 1}
    (row,) = moe_parallel.rows(True, float("inf"), options)
    assert row["right"], row
    assert row["gpus"] == 2
    assert (row["recipe"], row["buffer"]) == ("coat", 2.0)
    assert row["spread_ms"] > 0
    assert row["one_gpu_ms"] > 0
