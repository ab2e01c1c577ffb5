"""Tests that layers and matmuls run within `shard_map` with its default arguments.

By default, types say over which mesh axes an array's values vary, and gradients of
arrays with equal values on all devices are summed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.marks import slow
from helpers.models import normal
from jax import lax
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.layers.decoder import DecoderLayer
from coat_jax.models import llama
from coat_jax.quantization.delayed import spread

pytestmark = pytest.mark.distributed
DEVICES = 4
NUMBERS = (((2,), (0,)), ((), ()))


def shard_map(fn, in_specs, out_specs):
    mesh = jax.make_mesh((DEVICES,), ("data",), devices=jax.devices()[:DEVICES])
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def run(*args):
        places = jax.tree.map(
            lambda spec: jax.NamedSharding(mesh, spec),
            in_specs,
            is_leaf=lambda spec: isinstance(spec, P),
        )
        return jax.device_get(jax.jit(mapped)(*jax.device_put(args, places)))

    return run


def shards(x):
    return np.split(np.asarray(x), DEVICES)


def by_shards(fn, params, x, dy):
    """Applies `fn` to each shard and returns the outputs and gradients of all shards.

    Gradients of `params` are summed over shards; the other arrays are concatenated.
    """
    one = jax.jit(fn)
    actual = [one(params, *rows) for rows in zip(shards(x), shards(dy), strict=True)]
    ys, dparams, dxs = zip(*jax.device_get(actual), strict=True)
    total = jax.tree.map(lambda *g: sum(x.astype(np.float32) for x in g), *dparams)
    return np.concatenate(ys), total, np.concatenate(dxs)


def assert_near(actual, expected):
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        # Sums over devices have the dtype of the parameters, bfloat16.
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=2.0**-7 * np.max(np.abs(b)))


def assert_those_of_shards(apply, params, x, dy):
    """Checks outputs and gradients in `shard_map` against `by_shards` on one device."""

    def run(params, x, dy):
        y, vjp = jax.vjp(apply, params, x)
        return y, *vjp(dy)

    specs = P(), P("data"), P("data")
    actual = shard_map(run, specs, (P("data"), P(), P("data")))(params, x, dy)
    expected = by_shards(run, params, x, dy)
    assert_near(actual, expected)


@functools.cache
def layer(recipe):
    return nnx.split(
        DecoderLayer(
            256, 512, num_heads=2, num_kv_heads=1, head_dim=128,
            recipe=recipe, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0),
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "recipe",
    ["coat", *map(slow, ("bf16", "te", "coat_max", "coat_block", "coat_bf16"))],
)
def test_layers_run_on_each_devices_rows(recipe):
    graph, params = layer(recipe)
    x, dy = (normal(seed, 8, 128, 256, dtype=jnp.bfloat16) for seed in (1, 2))
    dy *= jnp.bfloat16(0.01)
    assert_those_of_shards(lambda p, x: nnx.merge(graph, p)(x), params, x, dy)


def test_next_histories_are_the_largest_of_all_devices():
    layer = DecoderLayer(
        256, 512, num_heads=2, num_kv_heads=1, head_dim=128, scaling="delayed",
        param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0),
    )  # fmt: skip
    graph, histories, params = nnx.split(layer, coat.OverwriteWithGradient, ...)
    x = normal(1, 8, 128, 256, dtype=jnp.bfloat16)
    dy = x * jnp.repeat(jnp.array([3, 1, 5, 2], x.dtype), 2)[:, None, None] / 64

    def run(histories, x, dy):
        def apply(histories):
            return nnx.merge(graph, histories, params)(x)

        return jax.vjp(apply, histories)[1](dy)[0]

    specs = P(), P("data"), P("data")
    actual = shard_map(run, specs, P())(histories, x, dy)
    rows = zip(shards(x), shards(dy), strict=True)
    each = [jax.device_get(jax.jit(run)(histories, *operands)) for operands in rows]
    for a, *b in zip(*map(jax.tree.leaves, (actual, *each)), strict=True):
        np.testing.assert_array_equal(a, np.max(b, axis=0))
        assert len({operands[0] for operands in b}) > 1


def test_histories_are_not_added_up_where_no_type_says_what_varies():
    history, x = jnp.arange(16.0), jnp.ones(DEVICES)
    mesh = jax.sharding.Mesh(jax.devices()[:DEVICES], ("data",))

    def total(history, x):
        return jax.lax.psum(jnp.sum(spread({"out": history}, x)["out"]), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    unchecked = jax.shard_map(total, mesh=mesh, **specs)
    assert jax.eval_shape(unchecked, history, x).shape == ()
    rule = "delayed scaling within shard_map needs check_vma=True, got False"
    with pytest.raises(ValueError, match=rule):
        jax.eval_shape(jax.grad(unchecked), history, x)


def dots(w, x):
    hidden = coat.fp8_dot_general(x, w["up"], NUMBERS)
    return coat.fp8_dot_general(jax.nn.silu(hidden), w["down"], NUMBERS)


def dense(w, x):
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    x = x * lax.rsqrt(mean + 1e-6) * w["scale"]
    return jax.nn.silu(x @ w["up"]) @ w["down"]


def arguments():
    """Returns the weights of `dots` and `dense`, their input and a gradient."""
    weights = {
        "up": normal(1, 256, 512, dtype=jnp.bfloat16) / 16,
        "down": normal(2, 512, 256, dtype=jnp.bfloat16) / 16,
        "scale": 1 + normal(3, 256, dtype=jnp.bfloat16) / 8,
    }
    x, dy = (normal(seed, 8, 128, 256, dtype=jnp.bfloat16) for seed in (4, 5))
    return weights, x, dy


@pytest.mark.internals
@pytest.mark.parametrize(
    "apply",
    [dots, coat.fp8_remat(dots), coat.fp8_remat(dense), coat.fp8(dense)],
    ids=["fp8_dot_general", "both", "fp8_remat", "fp8"],
)
def test_matmuls_of_other_layers_run_on_each_devices_rows(apply):
    assert_those_of_shards(apply, *arguments())


@pytest.mark.internals
@pytest.mark.parametrize("fn", [dots, dense], ids=["fp8", "bf16"])
def test_weights_that_a_layer_gathers(fn):
    """Devices have shards of weights, and gather them again in the backward pass."""
    weights, x, dy = arguments()

    def run(gathered, weights, x, dy):
        @coat.fp8_remat
        def layer(weights, x):
            return fn({name: gathered(w) for name, w in weights.items()}, x)

        y, vjp = jax.vjp(layer, weights, x)
        return y, *vjp(dy)

    split = functools.partial(
        run, lambda w: lax.all_gather(w.astype(jnp.bfloat16), "data", tiled=True)
    )
    # Gradients of parts are added up in the dtype of the parts.
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    rows = P("data")
    ours = shard_map(split, (rows, rows, rows), (rows, rows, rows))(wide, x, dy)
    expected = by_shards(functools.partial(run, lambda w: w), weights, x, dy)
    assert_near(ours, expected)


@pytest.mark.parametrize("recipe", [slow("bf16"), "coat"])
def test_a_models_loss_is_the_mean_over_devices(recipe):
    config = llama.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_layers=2,
        num_heads=2, num_kv_heads=1, recipe=recipe,
    )  # fmt: skip
    graph, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (8, 33), 0, 256)

    def loss(params, tokens):
        model = nnx.merge(graph, params)
        return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])

    def mean(params, tokens):
        return lax.pmean(loss(params, tokens), "data")

    run = shard_map(jax.value_and_grad(mean), (P(), P("data")), P())
    value, grads = run(params, tokens)
    actual = [jax.jit(jax.value_and_grad(loss))(params, t) for t in shards(tokens)]
    values, expected = zip(*jax.device_get(actual), strict=True)
    assert value == pytest.approx(np.mean(values), rel=1e-6)
    expected = jax.tree.map(lambda *g: sum(g) / DEVICES, *expected)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        # JAX adds up gradients in the dtype of the matmuls, bfloat16.
        np.testing.assert_allclose(a, b, atol=2.0**-7 * np.max(np.abs(b)))
