"""Tests of layers that call `shard_map` themselves, as layers of experts do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gradients import FP8, saved
from helpers.models import normal
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat

pytestmark = [pytest.mark.distributed, pytest.mark.internals]
DEVICES, ROWS, HIDDEN, INNER = 4, 32, 128, 1024
SPLIT = {"scale": P(), "up": P(None, "data"), "down": P("data")}
WHOLE = dict.fromkeys(SPLIT, P())


def arguments():
    params = {
        "scale": 1 + normal(1, HIDDEN, scale=0.1),
        "up": normal(2, HIDDEN, INNER, scale=0.1),
        "down": normal(3, INNER, HIDDEN, scale=0.1),
    }
    return params, normal(4, DEVICES * ROWS, HIDDEN)


def of_rows(params, x):
    """Computes a norm and an MLP for a device's rows, and adds them to `x`."""
    rate = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    h = jax.nn.gelu(x * rate * params["scale"] @ params["up"])
    return x + jax.jit(jnp.dot)(h, params["down"])


def of_columns(params, x):
    """Computes `of_rows` with a device's part of the MLP's hidden columns."""
    y = of_rows(params, x) - x
    return x + lax.psum(y, "data")


def mesh_of(axis_type, shape=(DEVICES,), names=("data",)):
    devices = jax.devices()[:DEVICES]
    kinds = (axis_type,) * len(names)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)


def layer(fn, params_spec, rows, mesh, params, x, **options):
    """Applies `fn` in a `shard_map`, between two operations on whole arrays."""
    specs = {"in_specs": (params_spec, rows), "out_specs": rows}
    return jnp.cos(jax.shard_map(fn, mesh=mesh, **specs, **options)(params, jnp.sin(x)))


CASES = {"rows": (of_rows, WHOLE, P("data")), "columns": (of_columns, SPLIT, P())}


def gradients(fn, mesh, params_spec, rows):
    params, x = arguments()
    params = {
        name: jax.device_put(w, NamedSharding(mesh, params_spec[name]))
        for name, w in params.items()
    }
    x = jax.device_put(x, NamedSharding(mesh, rows))

    def loss(params, x):
        return jnp.sum(jnp.square(fn(params, x)))

    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(params, x))


def assert_near(actual, expected, error):
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert np.linalg.norm(a - b) < error * np.linalg.norm(b)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_gradients_and_saved_bytes(case, axis_type):
    mesh, of_case = mesh_of(axis_type), CASES[case]
    _, *specs = of_case
    plain = partial(layer, *of_case, mesh)
    within = partial(layer, coat.fp8_remat(of_case[0]), *specs, mesh)
    expected = gradients(plain, mesh, *specs)
    assert_near(gradients(coat.fp8_remat(plain), mesh, *specs), expected, 0.06)

    if axis_type is AxisType.Explicit:
        return  # Arguments without a place on the mesh have other types there.

    def sizes(fn):
        return [r.nbytes for r in saved(fn, *arguments()) if r.dtype in FP8]

    # The layer itself saves a copy of its input and of what its cosine reads.
    extra = 2 * [DEVICES * ROWS * HIDDEN]
    assert sorted(sizes(coat.fp8_remat(plain))) == sorted(sizes(within) + extra)


@pytest.mark.parametrize("case", CASES)
def test_matmuls_on_devices_become_fp8(case):
    mesh, (fn, *specs) = mesh_of(AxisType.Auto), CASES[case]
    converted = coat.fp8(partial(layer, fn, *specs, mesh))
    report = coat.fp8_report(converted, *arguments())
    assert [(m.parameter, m.reason) for m in report.rows] == [
        ("up", ""), ("down", "")
    ]  # fmt: skip
    assert report.rows[0].right[0] == HIDDEN
    within = partial(layer, coat.fp8(fn), *specs, mesh)
    ours, theirs = (gradients(f, mesh, *specs) for f in (converted, within))
    assert_near(ours, theirs, 0.1)


def test_matmuls_stay_where_xla_has_other_axes():
    mesh = mesh_of(AxisType.Auto, (2, 2), ("data", "model"))
    options = {"axis_names": {"data"}}
    fn = partial(layer, of_rows, WHOLE, P("data"), mesh, **options)
    with pytest.raises(ValueError, match=r"up .*: within shard_map"):
        coat.fp8(fn)(*arguments())
    light = coat.fp8_remat(fn)
    expected = gradients(fn, mesh, WHOLE, P("data"))
    assert_near(gradients(light, mesh, WHOLE, P("data")), expected, 0.06)


def test_where_selects_whole_arrays():
    mesh, of_case = mesh_of(AxisType.Auto), CASES["rows"]
    plain = partial(layer, *of_case, mesh)

    def shapes(where):
        residuals = saved(coat.fp8_remat(plain, where=where), *arguments())
        return {r.shape for r in residuals if r.dtype in FP8}

    whole = DEVICES * ROWS, INNER
    assert whole in shapes(lambda r: r.shape[0] != ROWS)
    assert whole not in shapes(lambda r: r.shape != whole)


def test_loops_on_devices_are_warned_of():
    mesh = mesh_of(AxisType.Auto)

    def loop(params, x):
        def step(x, _):
            return jnp.tanh(x @ params["up"]) @ params["down"], None

        return lax.scan(step, x @ params["up"] @ params["down"], length=2)[0]

    converted = coat.fp8(partial(layer, loop, WHOLE, P("data"), mesh))
    with pytest.warns(match="matmuls within scan in the model do not become FP8"):
        jax.eval_shape(converted, *arguments())


def test_gradients_without_jit():
    mesh, of_case = mesh_of(AxisType.Auto), CASES["rows"]
    plain = partial(layer, *of_case, mesh)
    params, x = arguments()

    def grads(fn):
        return jax.device_get(jax.grad(lambda p: jnp.sum(fn(p, x)))(params))

    assert_near(grads(coat.fp8_remat(plain)), grads(plain), 0.06)
