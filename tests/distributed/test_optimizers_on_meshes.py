"""Tests of sharded optimizers on eight virtual devices."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.optimizers import assert_same_bits, is_quantized
from helpers.sharded import (
    LAYOUT,
    as_kernels,
    chained,
    check_steps,
    collectives,
    fused,
    placed,
    random_tree,
    shardings,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from pallas_kernels.dispatch import devices

pytestmark = pytest.mark.distributed
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(rows: int, columns: int, axis_type=AUTO):
    return jax.make_mesh(
        (rows, columns), ("data", "model"), axis_types=(axis_type,) * 2
    )


@pytest.fixture
def as_kernel(monkeypatch):
    """Runs the reference in custom_partitioning, as the kernel runs on several GPUs."""
    monkeypatch.setattr(devices, "has_hopper", lambda: True)
    as_kernels(monkeypatch)


@pytest.fixture(params=["kernel", "jnp"])
def either(request):
    """Lets `as_kernel` or XLA partition the steps of quantized moments."""
    if request.param == "kernel":
        request.getfixturevalue("as_kernel")


def only(*names: str) -> dict:
    return {name: LAYOUT[name] for name in names}


MANY = only("last", "vector", "stacked", "tensor", "whole")
SOME = only("both", "short")


@pytest.mark.parametrize(
    ("either", "how", "axis_type", "layout"),
    [
        ("kernel", fused, AUTO, MANY),
        ("kernel", fused, EXPLICIT, SOME),
        ("kernel", chained, EXPLICIT, SOME),
        ("jnp", fused, EXPLICIT, SOME),
        ("jnp", chained, AUTO, SOME),
    ],
    indirect=["either"],
)
def test_sharded_steps_are_one_devices_in_place_and_move_nothing(
    either, how, axis_type, layout
):
    del either
    tx = coat.fp8_adamw(1e-2, weight_decay=0.1, nesterov=True)
    program = check_steps(tx, how(tx), mesh_of(4, 2, axis_type), layout)
    assert not collectives(program)


@pytest.mark.usefixtures("as_kernel")
@pytest.mark.parametrize("how", [fused, chained])
def test_moments_in_float32_beside_quantized_ones(how):
    """The bits agree if XLA's algebraic simplifier is off.

    The simplifier may replace x / c by x * (1 / c), which rounds differently. It does
    so in one of the two programs only.
    """
    tx, layout = coat.fp8_adamw(1e-2, weight_decay=0.1), only("small", "fsdp")
    options = {"xla_disable_hlo_passes": "algsimp"}
    program = check_steps(tx, how(tx), mesh_of(4, 2), layout, **options)
    assert not collectives(program)


@pytest.mark.parametrize(
    ("either", "axis_type", "shape", "spec", "scales"),
    [
        ("kernel", AUTO, (16, 512), P(None, ("data", "model")), P(None, "data")),
        ("jnp", EXPLICIT, (16, 512), P(None, ("data", "model")), P(None, "data")),
        ("kernel", EXPLICIT, (48, 200), P("data", "model"), P("data")),
        ("jnp", AUTO, (48, 200), P("data", "model"), P("data")),
    ],
    indirect=["either"],
)
def test_cut_groups_are_announced_and_cost_no_more_than_time(
    either, axis_type, shape, spec, scales
):
    del either
    layout, key = {"w": (shape, spec)}, jax.random.key(0)
    tx, mesh = coat.fp8_adamw(1e-2), mesh_of(4, 2, axis_type)
    with pytest.warns(UserWarning, match=r"cuts the last axis into \d parts that are"):
        arrays = placed(tx, mesh, layout)
    expected = NamedSharding(mesh, scales)
    for name in ("mu", "nu"):
        moment = getattr(arrays[1][0], name)["w"]
        assert moment.codes.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert moment.scale.sharding.is_equivalent_to(expected, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = jax.jit(fused(tx))(*arrays, key)
    alone = jax.jit(fused(tx))(*jax.device_get(arrays), key)
    assert_same_bits(jax.device_get(after), jax.device_get(alone))


@pytest.mark.filterwarnings("ignore:a parameter of shape")
def test_any_optimizer_steps_where_explicit_axes_cut_groups():
    layout = {"w": ((64, 512), P(None, ("data", "model")))}
    tx = coat.with_quantized_state(optax.lion(1e-2))
    grads, state, params = placed(tx, mesh_of(2, 4, EXPLICIT), layout)
    after = jax.jit(tx.update)(grads, state, params)
    alone = jax.jit(tx.update)(*jax.device_get((grads, state, params)))
    assert_same_bits(jax.device_get(after), jax.device_get(alone))


@pytest.mark.usefixtures("either")
def test_parameters_on_every_device_with_sharded_moments():
    """The step runs on the shards of the moments, as in ZeRO's first stage."""
    tx, mesh, key = coat.fp8_adamw(1e-2), mesh_of(4, 2), jax.random.key(0)
    layout = {"w": LAYOUT["both"]}
    grads, state, params = placed(tx, mesh, layout)
    grads, params = jax.device_put((grads, params), NamedSharding(mesh, P()))
    program = jax.jit(fused(tx)).lower(grads, state, params, key).compile()
    # At most the parameter after the step is gathered (on CPUs as float32), and no
    # codes or exponents.
    gathered = re.findall(r"(\w+)\[[\d,]*\]\S* all-gather\(", program.as_text())
    assert set(gathered) <= {"f32"}
    after = program(grads, state, params, key)
    assert after[1][0].mu["w"].codes.sharding.spec == P("data", "model")
    alone = jax.jit(fused(tx))(*jax.device_get((grads, state, params)), key)
    assert_same_bits(jax.device_get(after), jax.device_get(alone))


@pytest.mark.usefixtures("as_kernel")
@pytest.mark.parametrize("manual", [{"data", "model"}, {"data"}])
def test_inside_of_shard_map(manual):
    tx, mesh = coat.fp8_adamw(1e-2), mesh_of(4, 2)
    spec = P(*(axis if axis in manual else None for axis in ("data", "model")))
    arrays = placed(tx, mesh, {"w": LAYOUT["both"]})
    specs = jax.tree.map(lambda x: spec if x.ndim else P(), arrays)
    step = functools.partial(coat.fused_update, tx)
    step_there = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=specs,
        out_specs=(specs[2], specs[1]),
        axis_names=manual,
        check_vma=False,
    )
    program = jax.jit(step_there).lower(*arrays).compile()
    assert not collectives(program.as_text())
    after = jax.device_get(program(*arrays))
    # Random bits depend on the place of an element in its shard. So every shard's step
    # is the step of one device on that shard.
    grads, state, params = jax.device_get(arrays)
    rows, columns = (n if a in manual else 1 for a, n in mesh.shape.items())

    def shard(x, i, j):
        if not x.ndim:
            return x
        m, n = x.shape[0] // rows, x.shape[1] // columns
        return x[i * m : (i + 1) * m, j * n : (j + 1) * n]

    for i in range(rows):
        for j in range(columns):
            cut = functools.partial(shard, i=i, j=j)
            of_shard = jax.jit(step)(*jax.tree.map(cut, (grads, state, params)))
            assert_same_bits(jax.tree.map(cut, after), jax.device_get(of_shard))


@pytest.mark.usefixtures("as_kernel")
def test_outside_of_jit():
    tx, mesh = coat.fp8_adamw(1e-2), mesh_of(4, 2)
    arrays = placed(tx, mesh, {"w": LAYOUT["both"]})
    params, state = coat.fused_update(tx, *arrays)
    assert params["w"].sharding == arrays[2]["w"].sharding
    jitted = jax.jit(functools.partial(coat.fused_update, tx))(*arrays)
    assert_same_bits(jax.device_get((params, state)), jax.device_get(jitted))


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_moments_made_outside_of_jit_lie_with_their_parameters(axis_type):
    tx, layout = coat.fp8_adamw(1e-3), only("both", "vector", "small")
    where = shardings(mesh_of(4, 2, axis_type), layout)
    params = jax.device_put(random_tree(0, layout), where)
    state, expected = tx.init(params), coat.opt_state_sharding(tx, params, where)
    for field in ("mu", "nu"):
        moments, expected_moments = (
            getattr(state[0], field),
            getattr(expected[0], field),
        )
        for x, s in zip(
            jax.tree.leaves(moments), jax.tree.leaves(expected_moments), strict=True
        ):
            assert x.sharding.is_equivalent_to(s, x.ndim)
    abstract = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params
    )
    assert tx.init(abstract)[0].nu["both"].scale.sharding.spec == P("data", "model")


@pytest.mark.parametrize("init", [jax.jit, lambda fn: lambda x: jax.eval_shape(fn, x)])
def test_types_with_explicit_axes_say_where_moments_lie(init):
    layout = only("both", "vector", "stacked", "small")
    tx, mesh = coat.fp8_adamw(1e-3), mesh_of(4, 2, EXPLICIT)
    params = jax.device_put(random_tree(0, layout), shardings(mesh, layout))
    with jax.set_mesh(mesh):
        state = init(tx.init)(params)
    for field in ("mu", "nu"):
        for name, (_, spec) in layout.items():
            for x in jax.tree.leaves(getattr(state[0], field)[name]):
                assert P(*spec, *[None] * (x.ndim - len(spec))) == x.sharding.spec


@pytest.mark.parametrize("how", [fused, chained])
def test_moments_on_one_device_move_to_their_gradients_on_explicit_axes(how):
    """Without `jax.set_mesh` a jitted `init` makes moments on one device."""
    layout = only("both", "stacked", "short", "small")
    tx, mesh, key = coat.fp8_adamw(1e-2), mesh_of(4, 2, EXPLICIT), jax.random.key(0)
    grads, expected, params = placed(tx, mesh, layout)
    step, state = jax.jit(how(tx)), jax.jit(tx.init)(params)
    assert len(state[0].mu["both"].codes.devices()) == 1
    for _ in range(2):
        params_after, state = step(grads, state, params, key)
        expected_params, expected = step(grads, expected, params, key)
    pairs = (params_after, state), (expected_params, expected)
    assert_same_bits(*map(jax.device_get, pairs))
    for x, y in zip(*map(jax.tree.leaves, pairs), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, lambda tx: optax.MultiSteps(tx, 2)], ids=["plain", "multi"]
)
def test_a_loop_of_steps_within_shard_map_makes_its_state(wrap):
    """Moments that each device has made vary over devices, like its parameters."""
    tx, mesh, layout = wrap(coat.fp8_adamw(1e-2)), mesh_of(4, 2), only("both")
    grads, _, params = placed(coat.fp8_adamw(1e-2), mesh, layout)
    specs = {name: spec for name, (_, spec) in layout.items()}

    def trained(params, grads):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = params, tx.init(params)
        return jax.lax.scan(step, carry, length=4)[0][0]

    across = jax.shard_map(trained, mesh=mesh, in_specs=(specs, specs), out_specs=specs)
    actual = jax.jit(across)(params, grads)
    expected = jax.jit(trained)(*jax.device_get((params, grads)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=4e-3), actual, expected
    )


WRAPPED = {
    "fp8_adamw": lambda: coat.fp8_adamw(1e-3),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), coat.scale_by_fp8_adam(), optax.scale(-1e-3)
    ),
    "trace": lambda: optax.chain(coat.fp8_adamw(1e-3), optax.trace(0.9)),
    "masked": lambda: optax.masked(coat.fp8_adamw(1e-3), dict.fromkeys(LAYOUT, True)),
    "partition": lambda: optax.partition(
        {"a": coat.fp8_adamw(1e-3), "b": optax.adam(1e-3)},
        {name: "b" if name in ("fsdp", "small") else "a" for name in LAYOUT},
    ),
    "inject": lambda: optax.inject_hyperparams(coat.fp8_adamw)(1e-3),
    "multi_steps": lambda: optax.MultiSteps(coat.fp8_adamw(1e-3), 2),
    "no_exponents": lambda: coat.fp8_adamw(1e-3, normalize_mu=False),
}


@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED.keys())
def test_the_state_of_any_optimizer_has_shardings(make):
    tx, where = make(), shardings(mesh_of(4, 2))
    params = random_tree(0)
    abstract = jax.eval_shape(lambda: params)
    actual = coat.opt_state_sharding(tx, abstract, where)
    state = jax.eval_shape(tx.init, abstract)
    assert jax.tree.structure(actual) == jax.tree.structure(state)
    flat = zip(
        jax.tree_util.tree_leaves_with_path(state, is_leaf=is_quantized),
        jax.tree.leaves(actual, is_leaf=is_quantized),
        strict=True,
    )
    moments = 0
    for (path, _), sharding in flat:
        name = [p.key for p in path if getattr(p, "key", None) in LAYOUT]
        spec = LAYOUT[name[0]][1] if name else P()
        moments += bool(name)
        assert {s.spec for s in jax.tree.leaves(sharding)} == {spec}
    assert moments >= 2 * len(LAYOUT)
    jax.jit(tx.init, out_shardings=actual).lower(abstract)


def test_nnx_states_and_prefixes():
    mesh = mesh_of(4, 2)
    model = nnx.Linear(64, 256, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    where = NamedSharding(mesh, P())
    tree = jax.tree.map(lambda p: NamedSharding(mesh, P("data")), params)
    tx = coat.fp8_adamw(1e-3)
    assert coat.opt_state_sharding(tx, params, where)[0].count == where
    actual = coat.opt_state_sharding(tx, params, tree)
    state = jax.jit(tx.init, out_shardings=actual)(params)
    for leaf in jax.tree.leaves((state[0].mu, state[0].nu)):
        assert leaf.sharding.spec == P("data")


def test_an_array_by_itself():
    tx, where = coat.fp8_adamw(1e-3), NamedSharding(mesh_of(4, 2), P("data", "model"))
    actual = coat.opt_state_sharding(tx, jnp.zeros((16, 1024)), where)
    assert actual[0].mu.scale.spec == actual[0].nu.exponent.spec == P("data", "model")
    assert actual[0].count.spec == P()


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data", "model")])
def test_a_report_of_moments_is_one_devices(kind, spec):
    """Stacks are read layer by layer, even if devices have different layers."""
    tx, mesh = coat.fp8_adamw(1e-2), mesh_of(2, 2, kind)
    stack = jax.random.normal(jax.random.key(0), (4, 64, 256))
    _, state = tx.update(stack, tx.init(stack), stack)
    expected = coat.moment_report(state).rows()
    with jax.set_mesh(mesh):
        split = jax.device_put(stack, NamedSharding(mesh, spec))
        _, state = jax.jit(tx.update)(split, tx.init(split), split)
        reports = coat.moment_report(state), jax.jit(coat.moment_report)(state)
    for report in reports:
        for row, expected_row in zip(report.rows(), expected, strict=True):
            for name in ("error", "zero_share", "max_share"):
                assert row[name] == pytest.approx(expected_row[name], rel=1e-4)
