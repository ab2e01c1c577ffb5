"""Tests that users' layers are fused on explicit mesh axes as on automatic ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.optimizers import assert_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from experiments.bench import foreign
from experiments.common.layer_cases import Shape

pytestmark = [pytest.mark.distributed, pytest.mark.internals]
NUMBERS = (((1,), (0,)), ((), ()))
SHAPES = {"norm": (64,), "gate": (64, 96), "up": (64, 96), "down": (96, 64)}
SHAPES |= {"bias": (64,)}
COLUMNS = {"gate": P(None, "y"), "up": P(None, "y"), "down": P("y", None)}


def on(mesh, array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def mesh_of(kind, of_columns=None):
    kinds = kind, of_columns or kind
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)


def numbers(shapes):
    """Returns a random BF16 array of each shape, by name."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape, jnp.bfloat16) / 8
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def as_it_is(x, spec):
    del spec
    return x


def moved(x, spec):
    """Returns `x`, resharded to `spec` if a mesh is set."""
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    return jax.sharding.reshard(x, spec) if on_mesh else x


def mlp(params, x, mark=as_it_is):
    """Adds a gated MLP of the RMSNorm of `x`, with a bias, to `x`.

    `mark(array, spec)` may set the sharding of intermediate arrays.
    """
    explicit = jax.typeof(x).sharding.mesh.explicit_axes
    specs = {"out_sharding": jax.typeof(x).sharding} if explicit else {}
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    h = (wide * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype) * params["norm"]
    h = mark(h, P("x", None))
    gate, up = (coat.fp8_dot_general(h, params[k], NUMBERS) for k in ("gate", "up"))
    a = mark(nnx.silu(gate) * up, P("x", "y"))
    y = coat.fp8_dot_general(a, params["down"], NUMBERS, **specs)
    return x + (y + params["bias"])


def results(fn, params, x):
    y, pullback = jax.vjp(coat.fp8_remat(fn), params, x)
    return y, *pullback(jnp.cos(x).astype(y.dtype))


def saved(fn, params, *xs):
    """Returns the shape, dtype and kind of each residual of `fp8_remat(fn)`."""
    report = coat.residual_report(coat.fp8_remat(fn), params, *xs)
    return sorted((row.shape, str(row.dtype), row.kept) for row in report.rows)


def wide(tree):
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.device_get(tree))]


@pytest.mark.parametrize(
    ("columns", "specs", "mark"),
    [
        (AxisType.Explicit, {}, as_it_is),
        (AxisType.Explicit, COLUMNS, as_it_is),
        (AxisType.Explicit, COLUMNS, moved),
        (AxisType.Auto, COLUMNS, as_it_is),
    ],
    ids=["batch", "columns", "columns, marked", "automatic columns"],
)
@pytest.mark.parametrize("jit", [False, True])
def test_layers_compute_and_save_what_one_device_does(columns, specs, mark, jit):
    def fn(params, x):
        return mlp(params, x, mark)

    arrays = numbers(SHAPES | {"x": (128, 64)})
    x = arrays.pop("x")
    compiled = jax.jit(results, static_argnums=0)
    alone, of_one = compiled(fn, arrays, x), saved(fn, arrays, x)
    mesh = mesh_of(AxisType.Explicit, columns)
    with jax.set_mesh(mesh):
        params = {k: on(mesh, w, specs.get(k, P())) for k, w in arrays.items()}
        x = on(mesh, x, P("x", None))
        y, of_params, of_x = (compiled if jit else results)(fn, params, x)
        assert saved(fn, params, x) == of_one
    assert jax.typeof(y) == jax.typeof(of_x) == jax.typeof(x)
    assert jax.tree.map(jax.typeof, of_params) == jax.tree.map(jax.typeof, params)
    for a, b in zip(wide((y, of_params, of_x)), wide(alone), strict=True):
        # Devices add up in another order.
        np.testing.assert_allclose(a, b, rtol=0, atol=0.01 * np.abs(b).max())


@pytest.mark.parametrize("name", ["llama", "vision transformer"])
def test_layers_of_flax_have_the_bits_of_automatic_axes(name):
    shape = Shape(
        hidden=128, seq=16, batch=4, intermediate=128, kv_heads=2, head_dim=32
    )

    def of_axes(kind):
        mesh = mesh_of(kind)
        with jax.set_mesh(mesh):
            fn, params = foreign.case_of(name, "both", shape)
            leaves, tree = jax.tree.flatten(params)
            arrays = numbers({str(i): leaf.shape for i, leaf in enumerate(leaves)})
            arrays = [
                on(mesh, a.astype(leaf.dtype), P())
                for a, leaf in zip(arrays.values(), leaves, strict=True)
            ]
            params = jax.tree.unflatten(tree, arrays)
            x = on(mesh, numbers({"x": (4, 16, 128)})["x"], P("x"))
            out = jax.jit(results, static_argnums=0)(fn, params, x)
            return saved(fn, params, x), wide(out)

    copies, automatic = of_axes(AxisType.Auto)
    assert any("groups of 16" in kept for *_, kept in copies)
    again, explicit = of_axes(AxisType.Explicit)
    assert copies == again
    for a, b in zip(explicit, automatic, strict=True):
        np.testing.assert_array_equal(a, b)


def test_only_gathered_weights_count_as_saved():
    mesh = mesh_of(AxisType.Explicit)
    arrays = numbers({"w": (64, 96), "x": (128, 64)})
    with jax.set_mesh(mesh):
        w, x = (on(mesh, array, P("x", None)) for array in arrays.values())
        for spec, moves in ((P("x", None), False), (P(None, None), True)):

            def fn(w, x, spec=spec):
                w = jax.sharding.reshard(w, spec)
                return coat.fp8_dot_general(x, w, NUMBERS, out_sharding=P("x", None))

            report = coat.residual_report(fn, w, x)
            (row,) = (row for row in report.rows if row.shape == w.shape)
            assert row.is_argument != moves


def test_a_weight_may_come_first():
    def fn(params, x):
        explicit = jax.sharding.get_abstract_mesh().explicit_axes
        where = {"out_sharding": P("y", "x")} if explicit else {}
        return jnp.einsum("of,bf->ob", params["w"], x, **where)

    arrays = numbers({"w": (256, 128), "x": (64, 128)})
    alone = coat.fp8(fn)({"w": arrays["w"]}, arrays["x"])
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        w, x = (on(mesh, array, P(None, "y")) for array in arrays.values())
        y = coat.fp8(fn)({"w": w}, x)
    assert jax.typeof(y).sharding.spec == P("y", "x")
    np.testing.assert_allclose(*wide((y, alone)), rtol=0, atol=0.02)


def test_matmuls_that_leave_sums_to_others_stay():
    def fn(params, x):
        sums = P(None, None, unreduced={"y"})
        y = jax.lax.dot_general(x, params["w"], NUMBERS, out_sharding=sums)
        return jax.sharding.reshard(y, P(None, None))

    arrays = numbers({"w": (128, 256), "x": (64, 128)})
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        w, x = on(mesh, arrays["w"], P("y", None)), on(mesh, arrays["x"], P(None, "y"))
        with pytest.raises(ValueError, match="devices' parts are added up later"):
            coat.fp8(fn)({"w": w}, x)


@pytest.mark.parametrize(
    "granularity",
    [coat.PerGroup(16), coat.PerGroup(128), coat.PerBlock(32, 32), coat.PerTensor()],
    ids=str,
)
@pytest.mark.parametrize("shape", [(64, 192), (64, 1024)])
def test_groups_that_a_mesh_cuts_are_quantized_as_on_one_device(granularity, shape):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.random.normal(jax.random.key(0), shape)

    @jax.jit
    def stored(x):
        q = coat.quantize(x, granularity=granularity, expand=True)
        return q, coat.dequantize(q)

    expected = stored(x)
    with jax.set_mesh(mesh):
        for spec in (P(None, ("b", "a")), P("a", "b"), P(("a", "b"), None)):
            q, values = stored(jax.device_put(x, spec))
            assert q.codes.sharding.spec == values.sharding.spec == spec
            assert_same_bits(jax.device_get((q, values)), jax.device_get(expected))
