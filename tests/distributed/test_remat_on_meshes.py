"""Tests of fp8_remat on sharded arrays and eight virtual devices."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.gradients import FP8, assert_close, saved
from helpers.models import normal
from helpers.sharded import COLLECTIVES, as_kernels
from helpers.versions import needs_kernels
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
import pallas_kernels as pk
from coat_jax.remat.api import fp8_remat
from experiments.bench.compile_case import for_hopper

pytestmark = pytest.mark.distributed
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
BF16 = jnp.bfloat16
# An MLP with hidden columns sharded along "model", and rows along "data".
SPECS = {"up": P(None, "model"), "down": P("model", None), "x": P("data", None)}


@pytest.fixture(params=["kernel", "jnp"])
def either(request, monkeypatch):
    """Makes FP8 copies with jnp, within custom_partitioning (as kernels are) or not."""
    if request.param == "kernel":
        as_kernels(monkeypatch)
    yield request.param
    jax.clear_caches()


def mesh_of(axis_type):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def mlp(params, x):
    h = jnp.sin(nnx.gelu(x @ params["up"]))
    explicit = jax.typeof(h).sharding.mesh.explicit_axes
    return jnp.dot(h, params["down"], out_sharding=SPECS["x"] if explicit else None)


@functools.cache
def numbers(hidden: int):
    """Returns the MLP's parameters and its input as NumPy arrays."""
    shapes = {"up": (64, hidden), "down": (hidden, 64), "x": (256, 64)}
    values = {
        name: np.asarray(normal(seed, *shape))
        for seed, (name, shape) in enumerate(shapes.items(), 1)
    }
    x = values.pop("x")
    return jax.tree.map(lambda p: np.float32(0.1) * p, values), x


def arguments(mesh, hidden: int = 256):
    params, x = numbers(hidden)
    placements = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = {name: jax.device_put(p, placements[name]) for name, p in params.items()}
    return params, jax.device_put(x, placements["x"])


def gradients(fn):
    def loss(params, x):
        return jnp.sum(jnp.sin(fn(params, x)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


@functools.cache
def plain_program(axis_type):
    """Returns the gradient program of plain autodiff, compiled for a mesh."""
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        return gradients(mlp).lower(*arguments(mesh)).compile()


@functools.cache
def of_one_device(policy=None, hidden: int = 256):
    """Returns the gradients that one device computes, with FP8 copies made in jnp."""
    return jax.device_get(gradients(fp8_remat(mlp, policy=policy))(*numbers(hidden)))


def collectives(program: str) -> Counter:
    """Counts the arrays that go through each kind of collective."""
    actual = Counter()
    for arrays, name in re.findall(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", program):
        actual[name] += arrays.count("[")
    return actual


@pytest.mark.parametrize(
    ("axis_type", "policy"),
    [(AUTO, None), (AUTO, jax.checkpoint_policies.dots_saveable), (EXPLICIT, None)],
    ids=["auto", "auto, dots", "explicit"],
)
@pytest.mark.usefixtures("either")
def test_no_collective_is_added(axis_type, policy):
    mesh, plain = mesh_of(axis_type), plain_program(axis_type)
    with jax.set_mesh(mesh):
        params, x = arguments(mesh)
        light = gradients(fp8_remat(mlp, policy=policy)).lower(params, x).compile()
        assert "f8e4m3fn" in light.as_text()
        assert collectives(plain.as_text())
        assert collectives(light.as_text()) <= collectives(plain.as_text())
        actual = light(params, x)
    # Eight devices compute the same as one device.
    assert_close(jax.device_get(actual), of_one_device(policy), 1e-3)


@pytest.mark.internals
@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_residuals_lie_as_what_they_are_of(axis_type):
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        params, x = arguments(mesh)
        forward = jax.jit(lambda p, x: jax.vjp(fp8_remat(mlp), p, x)[1])
        program = forward.lower(params, x).compile()
        leaves = jax.tree.leaves(program(params, x))
    assert not collectives(program.as_text())
    hidden = NamedSharding(mesh, P("data", "model"))
    rows = NamedSharding(mesh, P("data", None))
    actual = Counter()
    for leaf in leaves:
        if leaf.dtype in FP8 or leaf.dtype == jnp.uint16:
            expected = rows if leaf.dtype in FP8 and leaf.shape[-1] == 64 else hidden
            if leaf.shape[-1] == 1:
                expected = rows
            assert leaf.sharding.is_equivalent_to(expected, leaf.ndim)
            actual[leaf.dtype.name] += 1
    assert actual["float8_e4m3fn"] == actual["uint16"] >= 4


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_groups_that_devices_cut_are_right_all_the_same(axis_type):
    """A device has 24 of 48 columns: one and a half groups."""
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        params, x = arguments(mesh, hidden=48)
        actual = gradients(fp8_remat(mlp))(params, x)
    assert_close(jax.device_get(actual), of_one_device(hidden=48), 1e-3)


@pytest.mark.internals
@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("manual", [{"data", "model"}, {"data"}], ids=["all", "data"])
def test_inside_of_shard_map(manual):
    mesh = mesh_of(AUTO)

    def everywhere(fn):
        return jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            axis_names=manual,
        )

    results = gradients(everywhere(fp8_remat(mlp)))(*numbers(256))
    assert_close(jax.device_get(results), of_one_device(), 1e-4)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_random_bits_are_made_where_they_are_needed(axis_type):
    mesh, key = mesh_of(axis_type), jax.random.key(0)
    plain = plain_program(axis_type)
    with jax.set_mesh(mesh):
        params, x = arguments(mesh)
        light = gradients(fp8_remat(mlp, key=key)).lower(params, x).compile()
        assert collectives(light.as_text()) <= collectives(plain.as_text())
        actual = light(params, x)
    alone = gradients(fp8_remat(mlp, key=key))(*jax.device_get((params, x)))
    assert_close(jax.device_get(actual), jax.device_get(alone), 1e-3)
    assert not np.array_equal(jax.device_get(actual)[1], plain(params, x)[1])


@pytest.mark.internals
@pytest.mark.parametrize("spec", [P(None, ("data", "model")), P("model", "data")])
def test_groups_that_a_mesh_cuts(spec):
    """Shards end within groups of 16, and copies are sharded like the array."""
    mesh = mesh_of(EXPLICIT)

    def fn(scale, x):
        return jnp.tanh(jnp.sin(x) * scale)

    with jax.set_mesh(mesh):
        scale, x = (jax.sharding.reshard(normal(i, 128, 64), spec) for i in range(2))

        @functools.partial(jax.jit, static_argnums=0)
        def gradient(fn, scale, x):
            return jax.grad(lambda scale: jnp.sum(fn(scale, x) ** 2))(scale)

        light, plain = gradient(fp8_remat(fn), scale, x), gradient(fn, scale, x)
        assert light.sharding == plain.sharding
        assert_close(light, plain, 0.1)


@needs_kernels
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_policies_know_matmuls_on_meshes(axis_type):
    """Each matmul is a kernel on GPUs, in an operation that is sharded over devices."""
    mesh, seen = mesh_of(axis_type), set()

    def policy(primitive, *types, **params):
        is_matmul = primitive is jax.lax.dot_general_p
        if is_matmul:
            seen.add(tuple(t.shape for t in types))
        return is_matmul

    def function(w, x):
        return jnp.sin(coat.fp8_dot_general(x, w, (((2,), (0,)), ((), ()))))

    w, x = (
        jax.ShapeDtypeStruct(shape, BF16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((1024, 2048), P()), ((8, 512, 1024), P("data")))
    )
    with jax.set_mesh(mesh), for_hopper():
        residuals = saved(fp8_remat(function, policy=policy), w, x)
    assert seen == {((8 * 512, 1024), (2048, 1024))}
    sizes = [r.nbytes for r in residuals if r.dtype in FP8]
    assert sorted(sizes) == [8 * 512 * 1024, 8 * 512 * 2048]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_gates_before_matmuls_in_bf16(axis_type):
    """XLA computes the gradients of gates on explicit axes, and a kernel elsewhere."""

    def gated(params, x):
        gate, up = jnp.split(x @ params["up"].astype(BF16), 2, axis=-1)
        a = nnx.silu(gate) * up
        return a @ params["down"].astype(BF16)[: a.shape[-1]]

    params, x = numbers(256)
    expected = gradients(gated)(params, jnp.asarray(x, BF16))
    mesh = mesh_of(axis_type)
    x = jax.device_put(jnp.asarray(x, BF16), NamedSharding(mesh, SPECS["x"]))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        run = gradients(fp8_remat(gated))
        operations = {choice.operation for choice in pk.explain(run, params, x).choices}
        assert ("gated_grad" in operations) == (axis_type is AUTO)
        assert_close(run(params, x), expected, 0.06)
