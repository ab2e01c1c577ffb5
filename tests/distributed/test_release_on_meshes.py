"""Tests optimizer steps in the backward pass on eight virtual devices."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.marks import slow
from helpers.optimizers import assert_same_bits, is_quantized
from helpers.released import SGD, loss_of, ordinary, parameters, tokens
from helpers.sharded import as_kernels
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.models import llama
from pallas_kernels.dispatch import devices

pytestmark = pytest.mark.distributed
KEY = jax.random.key(7)


def llama_on(mesh):
    config = llama.LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=128,
        recipe="coat",
        param_dtype=jnp.bfloat16,
        batch_axes="fsdp",
    )
    graph, params, others = nnx.split(
        llama.Llama(config, rngs=nnx.Rngs(0)), nnx.Param, ...
    )

    def loss(params, tokens):
        model = nnx.merge(graph, params, others)
        return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])

    return loss, params, _fsdp(params, mesh)


def _fsdp(params, mesh):
    def of(p):
        spec = P(*[None] * (p.ndim - 2), "fsdp") if p.ndim > 2 else P()
        return NamedSharding(mesh, spec)

    return jax.tree.map(of, params)


@pytest.mark.parametrize("kernels", [slow(False), True], ids=["jnp", "kernels"])
def test_fsdp_has_the_bits_of_the_ordinary_step(monkeypatch, kernels):
    if kernels:  # Kernels read layers of stacks in place.
        monkeypatch.setattr(devices, "has_hopper", lambda: True)
        as_kernels(monkeypatch)
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    loss, params, where = llama_on(mesh)
    tx = coat.fp8_adamw(1e-3)
    states = coat.opt_state_sharding(tx, params, where)
    batch = jnp.tile(tokens(), (2, 1))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, where)
        batch = jax.device_put(batch, NamedSharding(mesh, P("fsdp")))
        state = jax.jit(tx.init, out_shardings=states)(params)
        results, memory = [], []
        for step in (ordinary(loss, tx), coat.value_and_update(loss, tx)):
            jitted = jax.jit(step, out_shardings=(None, where, states))
            results.append(jitted(params, state, batch, key=KEY))
            donated = jax.jit(
                step, donate_argnums=(0, 1), out_shardings=(None, where, states)
            )
            compiled = donated.lower(params, state, batch, key=KEY).compile()
            memory.append(compiled.memory_analysis())
    expected, actual = jax.device_get(results)
    assert_same_bits(actual, expected)
    in_place = [m.alias_size_in_bytes for m in memory]
    assert in_place[0] == in_place[1]


@pytest.mark.parametrize("make", [lambda: coat.fp8_adamw(1e-3), lambda: optax.sgd(0.1)])
def test_steps_within_shard_map(make):
    """Gradients of replicated parameters are summed over devices, layer by layer."""
    mesh, tx = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), make()
    mean = loss_of(coat.scan_layers)
    params, batch = parameters(stacked=True), jnp.tile(tokens(), (2, 1))

    def loss(params, tokens):
        return jax.lax.pmean(mean(params, tokens), "data")

    def sharded(step):
        specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
        return jax.jit(jax.shard_map(step, mesh=mesh, **specs))

    state = tx.init(params)
    steps = (ordinary(loss, tx), coat.value_and_update(loss, tx))
    expected, actual = (sharded(step)(params, state, batch) for step in steps)
    assert_same_bits(actual, expected)
    alone = jax.jit(coat.value_and_update(mean, tx))(params, state, batch)
    np.testing.assert_allclose(actual[0], alone[0], rtol=1e-3)


@pytest.mark.parametrize("skip", [False, slow(True)])
def test_norms_are_of_all_parts_of_a_parameter_within_shard_map(skip):
    """Devices hold parts of a stack and of a matrix, and gather them for matmuls."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "layers": {
            "w": jax.random.normal(keys[0], (3, 64, 128)) / 8,
            "norm": jnp.ones((3, 64)),
        },
        "head": jax.random.normal(keys[1], (64, 64)) / 8,
    }
    specs = {"layers": {"w": P(None, "data"), "norm": P()}, "head": P("data")}
    x = jax.random.normal(keys[2], (16, 64))

    def loss_with(whole, mean):
        def layer(p, x):
            w = whole(p["w"])
            return x + jnp.tanh(x * p["norm"] @ w) @ w.T

        def loss(params, x):
            y = coat.scan_layers(layer, x, params["layers"]) @ whole(params["head"])
            return mean(jnp.mean((y - 1) ** 2))

        return coat.value_and_update(
            loss, SGD, max_norm=0.1, return_norms=True, skip_not_finite=skip
        )

    step = loss_with(
        lambda w: jax.lax.all_gather(w, "data", tiled=True),
        lambda x: jax.lax.pmean(x, "data"),
    )
    across = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, P(), P("data")),
        out_specs=(P(), specs, P(), P()),
    )
    state = SGD.init(params)
    actual = jax.jit(across)(params, state, x)
    expected = jax.jit(loss_with(lambda w: w, lambda x: x))(params, state, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        actual,
        expected,
    )


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_loss_of_one_device_that_is_not_finite_skips_the_step_of_all(is_finite):
    """Devices that decide by themselves would wait for each other without end."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": jnp.ones((64, 64)) / 64}
    x = jnp.ones((8, 64)).at[3, 0].set(1.0 if is_finite else jnp.nan)

    def loss(params, x):
        return jnp.mean((x @ params["w"] - 2) ** 2)

    step = coat.value_and_update(loss, SGD, skip_not_finite=True)
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    across = jax.shard_map(lambda *args: step(*args)[1], mesh=mesh, **specs)
    after = jax.jit(across)(params, SGD.init(params), x)
    assert np.array_equal(after["w"], params["w"]) is not is_finite


def test_replicas_stay_equal_or_the_step_is_refused():
    mesh, tx = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), SGD
    params, batch = parameters(stacked=True), jnp.tile(tokens(), (2, 1))
    arguments = params, tx.init(params), batch

    def loss(params, tokens):
        return jax.lax.pmean(loss_of(coat.scan_layers)(params, tokens), "data")

    step = coat.value_and_update(loss, tx)
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}

    def sharded(**options):
        return jax.jit(jax.shard_map(step, mesh=mesh, **specs, **options))

    _, after, _ = sharded(check_vma=True)(*arguments)
    for p in jax.tree.leaves(after):
        replicas = [
            np.asarray(shard.data, np.float32) for shard in p.addressable_shards
        ]
        np.testing.assert_array_equal(replicas, replicas[:1] * 8)
    refused = pytest.raises(ValueError, match="the gradient of this device alone")
    with refused:
        sharded(check_vma=False)(*arguments)
    with refused:
        jax.pmap(step, "data", in_axes=(None, None, 0))(
            *arguments[:2], batch.reshape(8, 1, -1)
        )


@pytest.mark.parametrize("axis_name", [None, "examples"])
def test_each_example_of_a_vmap_steps_its_own_copy(axis_name):
    params, tx = parameters(stacked=True), SGD
    mean, batch = loss_of(coat.scan_layers), tokens()[:, None]

    def loss(params, tokens):
        value = mean(params, tokens)
        return value if axis_name is None else jax.lax.pmean(value, axis_name)

    def mapped(step):
        mapped = jax.vmap(step, (None, None, 0), axis_name=axis_name)
        return jax.jit(mapped)(params, tx.init(params), batch)

    expected, actual = map(
        mapped, (ordinary(loss, tx), coat.value_and_update(loss, tx))
    )
    assert_same_bits(actual, expected)


@pytest.mark.filterwarnings("ignore:a parameter of shape")
@pytest.mark.parametrize("init_knows_mesh", [True, False])
@pytest.mark.parametrize("make", [optax.adam, coat.fp8_adamw])
def test_layers_on_explicit_axes_keep_their_shardings(make, init_knows_mesh):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    params = parameters(stacked=True, dtype=jnp.float32)["layers"]
    specs = {
        "a": P(None, None, "model"),
        "b": P(None, "model", None),
        "norm": P(),
        "bias": P(None, "model"),
    }

    def loss_on(where):
        def explicit(p, x):
            a = jax.nn.silu(x * p["norm"] @ p["a"] + p["bias"])
            return x + jnp.dot(a, p["b"], out_sharding=where)

        return lambda params, x: jnp.mean(coat.scan_layers(explicit, x, params) ** 2)

    x = jnp.ones((8, 64)) / 8
    tx = make(1e-2)
    _, expected, _ = ordinary(loss_on(None), tx)(params, tx.init(params), x)
    loss = loss_on(P("data", None))
    where = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    placed = jax.device_put(params, where)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh) if init_knows_mesh else contextlib.nullcontext():
        state = jax.jit(tx.init)(placed)
    with jax.set_mesh(mesh):
        _, actual, state = jax.jit(coat.value_and_update(loss, tx))(placed, state, x)
    for name, p in actual.items():
        assert p.sharding.is_equivalent_to(where[name], p.ndim)
        mu = state[0].mu[name]
        mu = mu.codes if is_quantized(mu) else mu
        assert mu.sharding.is_equivalent_to(where[name], p.ndim)
        np.testing.assert_allclose(p, expected[name], atol=1e-4)
