"""Tests of how the axes of operations are sharded over a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.dispatch import array_types, devices, operations, parts, placement
from pallas_kernels.dispatch.axes import Axes
from pallas_kernels.ops.matmul.api import _Matmul
from pallas_kernels.ops.matmul.plan import Product
from pallas_kernels.ops.quantize.groups import _QuantizeGroups
from pallas_kernels.ops.quantize.tensor import _QuantizeTensor

pytestmark = pytest.mark.internals

E4M3 = jnp.float8_e4m3fn
SIZES = {"data": 2, "fsdp": 4}


def call(operation, *arrays):
    actual, out = parts.Call.of(operation, arrays)
    shapes = [x.shape for x in jax.tree.leaves((arrays, out))]
    return actual, shapes


def product(a, b, *scales, accumulator=None, **options):
    options = {"scaling": "tensor", **options}
    product = Product(out_dtype=jnp.dtype(jnp.bfloat16), **options)
    operation = _Matmul(product=product, tuning=None)
    scales = scales or (jnp.ones(()), jnp.ones(()))
    return call(operation, a, b.reshape(1, len(b), 1, -1), *scales, None, accumulator)


def quantize_tensor(*, row, keep_maxima):
    return _QuantizeTensor(
        dtype=E4M3,
        row=row,
        transposed=True,
        merge=True,
        keep_maxima=keep_maxima,
        tuning=None,
    )


def test_merged_axes_have_several_names():
    axes = Axes("b _ (g e)", sizes=(("e", 16),))
    assert axes.merged == [["b"], ["_"], ["g", "e"]]
    assert Axes("").merged == []


@pytest.mark.parametrize(
    ("specs", "split", "result"),
    [
        # Rows are split: the weights are gathered.
        (
            [P(("data", "fsdp")), P(None, "fsdp")],
            {"t0": ("data", "fsdp"), "n": ()},
            P(("data", "fsdp"), None),
        ),
        # Both are split over axes of their own.
        (
            [P("data"), P(None, "fsdp")],
            {"t0": ("data",), "n": ("fsdp",)},
            P("data", "fsdp"),
        ),
        # The contracted axis is split: the result is a sum.
        (
            [P(None, "data"), P(None, None, None, "data")],
            {"k": ("data",)},
            P(None, None),
        ),
        # Mesh axes that do not divide are dropped, the last first.
        ([P(None), P(None, ("fsdp", "data"))], {"n": ("fsdp",)}, P(None, "fsdp")),
    ],
)
def test_operands_decide_how_a_matmul_is_split(specs, split, result):
    actual, shapes = product(jnp.ones((16, 8), E4M3), jnp.ones((12, 8), E4M3))
    assert actual.split(SIZES, shapes, [*specs, P(), P()]) == split
    assert actual.specs(actual.results, split) == [result]


@pytest.mark.parametrize(
    ("of_a", "of_b", "taken", "gathered"),
    [
        # Tokens are split over the axis that splits b along k: b is gathered in parts.
        (P("fsdp"), P(None, None, None, "fsdp"), "fsdp", ("fsdp",)),
        (
            P("fsdp", "data"),
            P(None, None, None, ("data", "fsdp")),
            ("data", "fsdp"),
            ("fsdp",),
        ),
        # The axes that split b along k begin with the axes of a's tokens: XLA gathers
        # b.
        (P("fsdp"), P(None, None, None, ("fsdp", "data")), ("data",), ()),
        # Only k is split.
        (P(), P(None, None, None, "data"), ("data",), ()),
    ],
)
def test_what_splits_k_further_is_gathered_in_parts(of_a, of_b, taken, gathered):
    actual, shapes = product(jnp.ones((16, 8), E4M3), jnp.ones((12, 8), E4M3))
    specs = [of_a, of_b, P(), P()]
    split = actual.split(SIZES, shapes, specs)
    (_, b, *_) = actual.specs(actual.operands, split, specs)
    assert b == P(None, split.get("n") or None, None, taken)
    assert parts._further(actual.operands[1], split, b) == gathered


def test_a_sum_is_sent_where_it_is_wanted():
    actual, _ = product(jnp.ones((16, 8), E4M3), jnp.ones((12, 8), E4M3))
    split = {"k": ("data", "fsdp")}
    assert actual.specs(actual.results, split, [P("fsdp")]) == [P(("fsdp",), None)]
    assert actual.specs(actual.results, split, [P("other")]) == [P(None, None)]


def test_an_accumulator_is_split_like_the_result():
    accumulator = jnp.ones((16, 12), jnp.bfloat16)
    actual, shapes = product(
        jnp.ones((16, 8), E4M3),
        jnp.ones((12, 8), E4M3),
        accumulator=accumulator,
        accumulate=True,
    )
    specs = [P("fsdp", "data"), P(None, None, None, "data"), P(), P(), P()]
    split = actual.split(SIZES, shapes, specs)
    assert split == {"t0": ("fsdp",), "k": ("data",)}
    *_, addend = actual.specs(actual.operands, split)
    assert addend == P(("fsdp",), None)


def test_sums_with_an_amax_are_not_split():
    a, b = jnp.ones((16, 8), E4M3), jnp.ones((12, 8), E4M3)
    actual, shapes = product(a, b, maxima=True)
    specs = [P(None, "data"), P(None, None, None, "data"), P(), P()]
    assert actual.split(SIZES, shapes, specs) == {}


def test_the_rule_names_axes_in_order_and_those_that_stay_whole():
    x = jnp.ones((4, 6, 32))
    actual, _ = call(_QuantizeGroups(dtype=E4M3, group=16, tuning=None), x)
    rule, options = actual.rule()
    assert rule == "t0 t1 (g e) -> t0 t1 (g e), t0 t1 g"
    assert options == {"need_replication_factors": ("e",), "e": 16}
    tensor = quantize_tensor(row=False, keep_maxima=True)
    after = jnp.ones((5, 3))
    actual, shapes = call(tensor, x, jnp.ones(()), after)
    rule, options = actual.rule()
    assert rule == "t0 t1 n, , own0 own1 -> n (t0 t1), , u5"
    assert options == {"need_replication_factors": ("t1", "u5")}
    # An array that is not read stays as it is.
    specs = [P("data"), P(), P(None, "fsdp")]
    split = actual.split(SIZES, shapes, specs)
    assert split == {"t0": ("data",)}
    assert actual.specs(actual.operands, split, specs)[2] == P(None, "fsdp")
    assert actual.specs(actual.results, split)[0] == P(None, ("data",))


def test_arrays_of_one_device_are_on_no_mesh():
    x = jnp.ones((8, 8))
    assert array_types.mesh_of((x, None, [x])) is None
    assert array_types.obstacle((x,)) is None
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    one = jax.NamedSharding(mesh, P("data"))
    assert array_types.mesh_of(jax.device_put(x, one)) is None


@dataclasses.dataclass(frozen=True)
class Told(operations.Operation):
    """An operation that returns ones by its kernel, and zeros by its reference."""

    name = "told"

    def reference(self, x):
        return jnp.zeros_like(x)

    def kernel(self, x):
        return jnp.ones_like(x)

    def obstacle(self, x):
        return None

    def axes(self, x):
        return (Axes("a b"),), Axes("a b")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_kernels_run_on_a_mesh_of_one_device(monkeypatch, kind):
    monkeypatch.setattr(devices, "has_hopper", lambda: True)
    types = (jax.sharding.AxisType[kind],)
    mesh = jax.make_mesh((1,), ("data",), axis_types=types)
    x = jax.device_put(jnp.zeros((4, 4)), jax.NamedSharding(mesh, P("data")))
    assert jax.jit(Told())(x).all()


def test_vmap_maps_over_an_axis_that_devices_may_split():
    tensor = quantize_tensor(row=True, keep_maxima=True)
    x, scale = jnp.ones((8, 4, 6, 32)), jnp.ones(())
    actual, shapes = call(placement._Mapped(tensor, (True, False)), x, scale, None)
    rule, options = actual.rule()
    assert rule == (
        "vmap1 t0 t1 n,  -> vmap1 t0 t1 n, vmap1 n (t0 t1), vmap1, vmap1 u4"
    )
    assert options == {"need_replication_factors": ("t1", "u4")}
    split = actual.split(SIZES, shapes, [P(("data", "fsdp")), P()])
    assert split == {"vmap1": ("data", "fsdp")}
    *_, largest = actual.specs(actual.results, split)
    # Each device keeps the amax of its own elements of the axis.
    assert largest == P(("data", "fsdp"), None)


def test_amaxes_are_those_of_each_named_element():
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    of_all = parts._amax(jnp.asarray(x), Axes("_ _", reduced="max"))
    of_rows = parts._amax(jnp.asarray(x), Axes("vmap1 _", reduced="max"))
    np.testing.assert_array_equal(of_all, np.abs(x).max().reshape(1, 1))
    np.testing.assert_array_equal(of_rows, np.abs(x).max(axis=1, keepdims=True))


def test_merged_axes_have_no_factors_of_length_one():
    tensor = quantize_tensor(row=False, keep_maxima=False)
    actual, _ = call(tensor, jnp.ones((1, 6, 32)), jnp.ones(()), None)
    assert actual.rule()[0] == "t0 t1 n,  -> n t1, "


def test_equal_operations_are_partitioned_by_one_function():
    mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, P(*spec))
        )

    def part(*spec):
        x, scale = array((64, 128), jnp.bfloat16, *spec), array((), jnp.float32)
        operation = quantize_tensor(row=True, keep_maxima=False)
        actual, out = parts.Call.of(operation, (x, scale, None))
        out = jax.tree.map(lambda x: array(x.shape, x.dtype), out)
        return placement._partition(actual, mesh, ((x, scale, None),), out)[1]

    assert part("fsdp") is part("fsdp")
    assert part("fsdp") is not part(None, "fsdp")
