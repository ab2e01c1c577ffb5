"""Tests of grouped matmuls on eight virtual devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sharded import as_kernels, collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
import pallas_kernels as pk

pytestmark = pytest.mark.distributed
ROWS, GROUPS, N, K = 64, 3, 32, 128
SIZES = np.array([20, 0, 37], np.int32)


@pytest.fixture(autouse=True)
def _kernels_run_on_parts(monkeypatch):
    as_kernels(monkeypatch)


def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)


def on(where, x, *spec):
    return jax.device_put(x, NamedSharding(where, P(*spec)))


def drawn(*shape, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x, jnp.float8_e4m3fn)


def compiled(fn, *arrays):
    """Returns the result of a function and the text of its compiled program."""
    program = jax.jit(fn).lower(*arrays).compile()
    return program(*arrays), program.as_text()


@pytest.mark.parametrize(
    ("of_a", "of_b", "moved"),
    [
        ((), (None, "tensor"), set()),
        ((None, "tensor"), (None, None, "tensor"), {"all-reduce"}),
        ((None, "data"), (None, "tensor", "data"), {"all-reduce"}),
    ],
    ids=["n", "k", "n and k"],
)
def test_features_are_split(of_a, of_b, moved):
    a, b = drawn(ROWS, K), drawn(GROUPS, N, K, seed=1)
    scales = jnp.linspace(1, 2, ROWS), jnp.linspace(1, 2, GROUPS * N).reshape(-1, N)
    sizes, where = jnp.asarray(SIZES), mesh()

    def multiply(a, b, sizes, *scales):
        tiles = pk.group_tiles(sizes, rows=len(a), height=8)
        options = {"tiles": tiles, "out_dtype": jnp.float32}
        return pk.grouped_matmul(a, b, sizes, *scales, **options)

    expected = multiply(a, b, sizes, *scales)
    arrays = on(where, a, *of_a), on(where, b, *of_b), on(where, sizes)
    columns = on(where, scales[1], None, of_b[1])
    y, program = compiled(multiply, *arrays, on(where, scales[0]), columns)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)
    assert collectives(program) == moved
    assert y.sharding.is_equivalent_to(NamedSharding(where, P(None, of_b[1])), 2)


@pytest.mark.parametrize("of_k", [None, "data"])
def test_amaxes_are_of_the_whole_result(of_k):
    """The amax of a result that is summed over devices is computed after the sum."""
    a, b = drawn(ROWS, K), drawn(GROUPS, N, K, seed=1)
    b = b.at[2, N - 1].set(8.0)  # The largest results are on the last device.
    sizes, where = jnp.asarray(SIZES), mesh()
    multiply = partial(pk.grouped_matmul, keep_maxima=True)
    expected = jnp.max(multiply(a, b, sizes)[1])
    arrays = on(where, a, None, of_k), on(where, b, None, "tensor", of_k)
    (_, maxima), _ = compiled(multiply, *arrays, on(where, sizes))
    np.testing.assert_allclose(jnp.max(maxima), expected, rtol=1e-5)


def test_rows_with_known_scales_are_split_along_all_axes():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((GROUPS, 8, N)))
    scale = jnp.linspace(0.01, 0.1, GROUPS * 8).reshape(GROUPS, 8)
    expected, where = pk.quantize_rows(x, scale), mesh()
    arrays = on(where, x, None, "data", "tensor"), on(where, scale, None, "data")
    (codes, _), program = compiled(pk.quantize_rows, *arrays)
    np.testing.assert_array_equal(codes, expected.codes)
    assert not collectives(program)
    assert codes.sharding.spec == P(None, "data", "tensor")


def test_weight_gradients_are_split_along_features():
    a, b = drawn(ROWS, N), drawn(ROWS, K, seed=1)
    sizes, where = jnp.asarray(SIZES), mesh()

    def multiply(a, b, sizes):
        a, b = (pk.grouped_transpose(x, sizes) for x in (a, b))
        return pk.grouped_weight_gradient(a, b, sizes, out_dtype=jnp.float32)

    expected = multiply(a, b, sizes)
    arrays = on(where, a, None, "data"), on(where, b, None, "tensor"), on(where, sizes)
    y, program = compiled(multiply, *arrays)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)
    assert not collectives(program)
    assert y.sharding.spec == P(None, "data", "tensor")


def passes(x, w, sizes, dy, **options):
    y, vjp = jax.vjp(lambda x, w: coat.fp8_ragged_dot(x, w, sizes, **options), x, w)
    return y, *vjp(dy)


def operands():
    """Returns tokens, weights, sizes and gradients of two shards of tokens."""
    rng = np.random.default_rng(2)
    shapes = (2, ROWS, K), (GROUPS, K, N), (2, ROWS, N)
    x, w, dy = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
    return x, w, jnp.stack([SIZES, SIZES[::-1]]), dy


def assert_near(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_ragged_dot_splits_features():
    x, w, sizes, dy = operands()
    arrays, where = (x[0], w, sizes[0], dy[0]), mesh()
    specs = (), (None, None, "tensor"), (), (None, "tensor")
    split = [on(where, v, *spec) for v, spec in zip(arrays, specs, strict=True)]
    found, _ = compiled(passes, *split)
    assert_near(found, passes(*arrays))


def test_shards_of_tokens_are_mapped():
    """Each device sorts its own tokens, and weights are replicated."""
    arrays = x, w, sizes, dy = operands()
    mapped = jax.vmap(passes, in_axes=(0, None, 0, 0))
    where = mesh()
    split = on(where, x, "data"), on(where, w), on(where, sizes, "data")
    found, program = compiled(mapped, *split, on(where, dy, "data"))
    assert_near(found, jax.jit(mapped)(*arrays))
    assert "all-gather" not in collectives(program)


def test_ragged_dot_of_devices_parts():
    x, w, sizes, dy = operands()
    specs = P("data"), P(), P("data"), P("data")

    def part(x, w, sizes, dy):
        y, dx, dw = passes(x[0], w, sizes[0], dy[0])
        return y[None], dx[None], dw[None]

    run = jax.shard_map(
        part, mesh=mesh(), in_specs=specs, out_specs=P("data"), check_vma=False
    )
    found = jax.jit(run)(x, w, sizes, dy)
    each = [passes(x[i], w, sizes[i], dy[i]) for i in range(2)]
    assert_near(found, jax.tree.map(lambda *v: jnp.stack(v), *each))


def test_ragged_dot_on_explicit_axes():
    x, w, sizes, dy = operands()
    arrays, where = (x[0], w, sizes[0], dy[0]), mesh(AxisType.Explicit)
    with jax.set_mesh(where):
        split = [on(where, v) for v in arrays]
        found = jax.jit(partial(passes, out_sharding=P()))(*split)
    assert_near(jax.device_get(found), passes(*arrays))
