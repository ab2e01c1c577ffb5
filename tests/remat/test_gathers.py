"""Tests that gradients of gathers by permutations are computed by gathers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.fusion.gathers import gathers

TOKENS, CHOICES, WIDTH = 6, 4, 16
SIZE = TOKENS * CHOICES
KEY = jax.random.key(0)


def _order(ids):
    return jnp.argsort(ids)


def _moved(x, ids):
    return x[_order(ids) // CHOICES]


def _there_and_back(x, ids):
    order = _order(ids)
    rows = jnp.square(x[order // CHOICES])
    return rows[jnp.argsort(order).reshape(TOKENS, CHOICES)]


def _digits(x, ids):
    """Gathers by an index of 40 steps, each of which reads the index several times."""
    order = _order(ids)
    for _ in range(40):
        order = (2 * order + 1) // 2
    return x[order // CHOICES]


def _steps(x, ids):
    index = _order(ids)
    for _ in range(1200):
        index = index + 1
    return x[(index - 1200) // CHOICES]


def _cases(order):
    return lax.select_n(order, *[order] * 70)


def _case(order):
    return lax.select_n(lax.rem(order, 5), *[order // CHOICES] * 3)


# Functions of x [TOKENS, WIDTH] and integers, and the number of their gathers with
# gradients by gathers.
HITS = {
    "tokens by order": (_moved, 1),
    "there and back": (_there_and_back, 2),
    "taken": (lambda x, ids: jnp.take(x, _order(ids) // CHOICES, axis=0), 1),
    "clipped": (lambda x, i: x.at[_order(i) // CHOICES].get(mode="clip"), 1),
    "descending": (lambda x, i: x[jnp.argsort(i, descending=True) // CHOICES], 1),
    "sorted with numbers": (
        lambda x, i: x[lax.sort_key_val(i, jnp.arange(SIZE))[1] // CHOICES],
        1,
    ),
    "repeated": (lambda x, i: x[jnp.arange(SIZE) // CHOICES], 1),
    "matrices": (lambda x, i: x.reshape(TOKENS, 4, -1)[_order(i) // CHOICES], 1),
    "from many cases": (lambda x, i: x[_cases(_order(i)) // CHOICES], 1),
    "scaled and shifted": (lambda x, i: x[(2 * _order(i) + 1) // (2 * CHOICES)], 1),
}
MISSES = {
    "the integers": lambda x, i: x[i],
    "the sorted integers": lambda x, i: x[jnp.sort(i)],
    "fewer rows": lambda x, i: x[_order(i) // (2 * CHOICES)],
    "rows in turns": lambda x, i: x[_order(i) % TOKENS],
    "beyond the end": lambda x, i: x[_order(i) // CHOICES + 1],
    "from the end": lambda x, i: x[-1 - _order(i) // CHOICES],
    "by another integer": lambda x, i: x[(_order(i) + i) // CHOICES],
    "two orders": lambda x, i: x[(_order(i) - _order(-i)) // CHOICES],
    "a part of the order": lambda x, i: x[_order(i)[: SIZE // 2] // CHOICES],
    "columns": lambda x, i: x.T[:, _order(i) // CHOICES],
    "parts of rows": lambda x, i: lax.gather(
        x,
        (_order(i) // CHOICES)[:, None],
        lax.GatherDimensionNumbers(
            offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
        ),
        slice_sizes=(1, WIDTH // 2),
    ),
    "divided by nothing": lambda x, i: x[lax.div(_order(i), 0)],
    "constant order": lambda x, i: x[jnp.asarray(np.arange(SIZE) // CHOICES)] + i[0],
    "numbers that repeat": lambda x, i: x[:1][lax.iota(jnp.uint8, 300) * 0],
    "more numbers than the type has": lambda x, i: x[:1][lax.iota(jnp.int8, 300) * 0],
    "a case that is missing": lambda x, i: x[_case(_order(i))],
    "equal keys": lambda x, i: x[i + jnp.where(jax.random.key(1) == KEY, 1, 0)],
}


def arguments(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, WIDTH), np.float32)
    return jnp.asarray(x), jnp.asarray(rng.integers(0, 5, SIZE))


def rewritten(fn):
    program = jax.make_jaxpr(fn)(*arguments()).jaxpr
    return program, gathers(program, (), ())


@pytest.mark.parametrize("name", HITS)
def test_gradients_are_gathers(name):
    fn, count = HITS[name]
    names = [eqn.primitive.name for eqn in rewritten(fn)[1].eqns]
    assert names.count("gather_rows") == count
    text = assert_same_gradients(name, coat.fp8_remat)
    assert f"f32[{TOKENS},{WIDTH}] = scatter-add" not in text


def assert_same_gradients(name, wrap):
    """Compares gradients with plain autodiff; returns the program of `wrap(fn)`."""
    fn, _ = HITS[name]
    x, ids = arguments(1)

    def loss(x, fn):
        return jnp.sum(jnp.sin(fn(x, ids)))

    ours, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, fn=f)))
        for f in (wrap(fn), fn)
    )
    for a, b in zip(ours(x), expected(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-1 if "back" in name else 1e-5)
    return str(jax.make_jaxpr(ours)(x))


@pytest.mark.parametrize("name", MISSES)
def test_other_gathers_stay(name):
    program, after = rewritten(MISSES[name])
    assert after is program
    assert "gather_rows" not in str(
        jax.make_jaxpr(of_device(MISSES[name]))(*arguments())
    )


def of_device(fn):
    """Returns `fp8_remat(fn)` in a `shard_map`, with both arrays sharded by rows."""
    return on_devices(coat.fp8_remat(fn), P("data"), P("data"))


def on_devices(fn, *specs):
    """Returns a `shard_map` of `fn`; its result is sharded like its first argument."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=specs[0])


@pytest.mark.internals
@pytest.mark.parametrize("name", HITS)
def test_devices_gather_their_own_rows(name):
    text = assert_same_gradients(name, of_device)
    assert not re.search(r"f32[^ ]* = scatter-add", text)


@pytest.mark.internals
def test_an_order_that_devices_have_in_common():
    """Each device has some columns of all rows."""
    x, ids = arguments(1)
    columns = P(None, "data")
    light = on_devices(coat.fp8_remat(_moved), columns, P())

    def grads(fn):
        return jax.grad(lambda x: jnp.sum(jnp.sin(fn(x, ids))))

    assert not re.search(
        r"f32[^ ]* = scatter-add", str(jax.make_jaxpr(grads(light))(x))
    )
    np.testing.assert_allclose(grads(light)(x), grads(_moved)(x), rtol=1e-5)


def test_a_transposing_reshape_is_no_order():
    def fn(x, ids):
        pairs = _order(ids).reshape(2, -1)
        return x[lax.reshape(pairs, (SIZE,), dimensions=(1, 0)) // CHOICES]

    program, after = rewritten(fn)
    assert after is program


@pytest.mark.parametrize("fn", [_digits, _steps])
def test_long_computations_of_an_index(fn):
    """The rewrite looks at each step of the index once, and at no step in another."""
    names = [eqn.primitive.name for eqn in rewritten(fn)[1].eqns]
    assert names.count("gather_rows") == 1


def test_numbers_of_few_bits():
    def fn(x, i):
        order = lax.sort_key_val(i, lax.iota(jnp.uint8, 256))[1]
        return x[order * 0]

    ours = jax.grad(lambda x, i: jnp.sum(coat.fp8_remat(fn)(x, i)))
    grads = ours(jnp.ones((1, 4)), jnp.arange(256) % 5)
    np.testing.assert_array_equal(grads, 256.0)


def test_float64_is_added_in_float64():
    with jax.enable_x64(True):
        x, ids = jnp.ones((1, 2)), jnp.arange(2)

        def fn(x, ids):
            rows = x[jnp.argsort(ids) // 2]
            return jnp.sum(rows * jnp.asarray([[1.0], [2.0**-40]]))

        grads = jax.grad(coat.fp8_remat(fn))(x, ids)
        np.testing.assert_array_equal(grads, 1 + 2.0**-40)


def test_sizes_that_an_export_leaves_open():
    def grads(x, ids):
        return jax.grad(lambda x: jnp.sum(coat.fp8_remat(_sorted)(x, ids)))(x)

    n, width = jax.export.symbolic_shape("n, 4")
    shapes = [((n, width), jnp.float32), ((n,), jnp.int32)]
    exported = jax.export.export(jax.jit(grads))(
        *(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    )
    # Rows 1, 2 and 0 in this order have the weights 2, 0 and 1.
    actual = exported.call(jnp.ones((3, 4)), jnp.asarray([2, 0, 1]))
    np.testing.assert_array_equal(actual, np.repeat([[1.0], [2], [0]], 4, axis=1))


def _sorted(x, ids):
    return x[jnp.argsort(ids)] * ids[:, None]


def test_policies_know_gathers():
    def fn(w, x, ids):
        return jnp.sum(jnp.sin(jnp.sin(x * w)[jnp.argsort(ids) // CHOICES]))

    def policy(primitive, *types, **params):
        return primitive is lax.gather_p

    x, ids = arguments()
    report = coat.residual_report(coat.fp8_remat(fn, policy=policy), x, x, ids)
    assert (SIZE, WIDTH) in [row.shape for row in report.rows]


def test_one_array_of_integers_is_saved():
    x, ids = arguments()
    light = coat.fp8_remat(lambda w, x, ids: x[_order(ids) // CHOICES] * w)
    rows = coat.residual_report(light, jnp.ones(WIDTH), x, ids).rows
    saved = [row for row in rows if row.dtype == jnp.int32 and not row.is_argument]
    assert [row.shape for row in saved] == [(SIZE,)]


def test_rows_are_added_in_float32():
    """A sum in BF16 would lose the three ones that are added to 256."""

    def fn(x, ids):
        scale = jnp.where(jnp.arange(SIZE) % CHOICES == 0, 256, 1)
        return jnp.sum((x[jnp.argsort(ids) // CHOICES].T * scale).astype(jnp.float32))

    x = jnp.ones((TOKENS, WIDTH), jnp.bfloat16)
    grads = jax.grad(coat.fp8_remat(fn))(x, jnp.arange(SIZE))
    # 259 is between two numbers of BF16, 258 and 260, and the even one is chosen.
    np.testing.assert_array_equal(grads.astype(np.float32), 260.0)


def test_mapped_and_in_loops():
    x, ids = arguments(2)
    many = jnp.stack([ids, ids[::-1]])

    def loss(x, wrap):
        moved = wrap(_moved)
        mapped = jax.vmap(moved, (None, 0))(x, many)
        looped, _ = lax.scan(lambda c, i: (c + jnp.sum(moved(c, i)), None), x, many)
        return jnp.sum(jnp.sin(mapped)) + jnp.sum(jnp.cos(looped))

    ours = jax.grad(loss)(x, coat.fp8_remat)
    np.testing.assert_allclose(ours, jax.grad(loss)(x, lambda fn: fn), rtol=1e-5)
