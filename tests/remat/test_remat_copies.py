"""Tests that fp8_remat's copies equal `coat.quantize`'s."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gradients import ROW, assert_close, fake, saved, value_and_vjp
from helpers.kernels import OPTIMIZED, adversarial, assert_identical, encoded_groups
from helpers.marks import slow, slow_except
from helpers.models import normal
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import coat_jax as coat
import pallas_kernels
from coat_jax.remat.api import fp8_remat
from coat_jax.remat.copies import fp8_copy, read_copy
from pallas_kernels.dispatch import devices
from pallas_kernels.versions import kernels_obstacle

SHAPES = [(24, 128), (2, 9, 160), (17, 256), (40, 8), (5, 200), (3, 2, 7, 48)]
DTYPES = [jnp.bfloat16, jnp.float32, jnp.float16]
# Every shape has both groups, with two of the three dtypes.
CASES = [
    (shape, group, DTYPES[(i + j) % 3])
    for i, shape in enumerate(SHAPES)
    for j, group in enumerate([16, 128])
]


@pytest.mark.parametrize(
    ("shape", "group", "dtype"), slow_except([CASES[0], CASES[-1]], CASES)
)
def test_copies_are_what_quantize_makes(shape, group, dtype):
    size = int(np.prod(shape))
    x = np.asarray(adversarial((size // 16 + 1, 16), jnp.float32, seed=size))
    with np.errstate(over="ignore"):
        x = jnp.asarray(np.resize(x, shape).astype(dtype))
    copy = jax.jit(
        functools.partial(
            fp8_copy, format=coat.E4M3, granularity=coat.PerGroup(group), noise=None
        ),
        compiler_options=OPTIMIZED,
    )(x)
    assert_identical(
        [copy.codes, copy.scale], encoded_groups(x, jnp.float8_e4m3fn, group)
    )
    quantize = functools.partial(coat.quantize, granularity=coat.PerGroup(group))
    library = jax.jit(quantize)(x)
    assert jax.tree.structure(copy) == jax.tree.structure(library)
    assert_identical(copy, library)
    assert_identical(jax.jit(read_copy)(copy), jax.jit(coat.dequantize)(library))


@pytest.mark.parametrize("format", [coat.E5M2, coat.DE8], ids=repr)
def test_copies_in_other_formats(format):
    x, how = normal(1, 9, 64), {"format": format, "granularity": coat.PerGroup(16)}
    copy, library = (
        jax.jit(functools.partial(fn, **how))(x) for fn in (fp8_copy, coat.quantize)
    )
    assert_identical(copy, library)
    assert_identical(jax.jit(read_copy)(copy), jax.jit(coat.dequantize)(library))


@pytest.fixture
def kernels(monkeypatch):
    """Runs interpreted kernels, chosen as on a Hopper GPU."""
    if why := kernels_obstacle():
        pytest.skip(why)
    monkeypatch.setattr(devices, "has_hopper", lambda: True)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield
    jax.clear_caches()


def two_layers(w, x):
    """Computes sin(x @ w) @ w.

    The backward pass reads cos(x @ w) in groups, and x and sin(x @ w) by rows.
    """
    return jnp.sin(x @ w) @ w


def over_one_device(fn):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows = P(None, "data")
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), rows), out_specs=rows)


@pytest.mark.parametrize(
    ("transform", "runs"),
    [
        slow(over_one_device, False),
        (jax.jit, False),
        (jax.vmap, False),
        slow(over_one_device, True),
    ],
    ids=["shard_map", "jit", "vmap", "shard_map runs"],
)
def test_kernels_compute_the_same_within_transformations(transform, runs, request):
    w, xs = normal(1, 64, 64, scale=0.2), normal(2, 3, 96, 64)
    light = fp8_remat(two_layers)
    mapped = {jax.vmap: jax.vmap(light, in_axes=(None, 0))}.get(transform)
    fn = mapped or transform(light)

    def gradient(w, xs):
        return jax.grad(lambda w: jnp.sum(jnp.sin(fn(w, xs))))(w)

    if runs:
        expected = jax.block_until_ready(jax.jit(gradient)(w, xs))
    jax.clear_caches()
    request.getfixturevalue("kernels")
    chosen = pallas_kernels.explain(gradient, w, xs).choices
    assert {(c.operation, c.implementation) for c in chosen} == {
        ("quantize_groups", "mosaic"),
        ("dequantize_groups", "mosaic"),
        ("dequantize_groups", "reference"),
    }
    # One call quantizes all entries of the mapped axis.
    arrays = {c.arrays for c in chosen if c.operation == "quantize_groups"}
    assert ("float32[3,96,64]",) in arrays
    if runs:
        actual = jax.block_until_ready(jax.jit(gradient)(w, xs))
        assert_close(actual, expected, 1e-6)


def assert_copies(fn, w, x, *, count):
    """Asserts that `count` copies are made and read, and that XLA decodes one.

    XLA fuses the decoding of this copy with the operation that reads it.
    """

    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum(fp8_remat(fn)(w, x)))(w)

    chosen = pallas_kernels.explain(gradient, w, x).choices
    assert [c.operation for c in chosen].count("quantize_groups") == count
    reads = [c.reason for c in chosen if c.operation == "dequantize_groups"]
    assert reads.count("the caller named it") == 1
    assert len(reads) == count


def test_only_what_products_read_is_widened_by_a_kernel():
    """XLA fuses the decoding of other copies with their readers."""
    w, x = normal(1, 64, 64), normal(2, 96, 64)
    # Matmuls read x and sin(x @ w); a multiplication reads cos(x @ w).
    assert_copies(two_layers, w, x, count=3)
    scales = [
        r.shape for r in saved(fp8_remat(two_layers), w, x) if r.dtype == "uint16"
    ]
    assert sorted(scales) == [(96, 1), (96, 1), (96, 4)]
    assert ROW >= 64


def test_xla_decodes_what_it_computes_with():
    """XLA decodes a copy that it computes with, even if a matmul reads the result.

    The result goes through memory, but the decoded copy does not.
    """
    w, x = normal(1, 64, 64), normal(2, 96, 64)

    def layer(w, x):
        return jax.nn.gelu(x @ w) @ w

    # A matmul reads x; all of gelu is computed from x @ w.
    assert_copies(layer, w, x, count=2)


def test_what_was_widened_is_read_narrow():
    """A copy is quantized from the bfloat16 array, not from its float32 cast.

    Norms cast to float32. The copy is the same, and quantizing reads less.
    """

    def fn(w, x):
        wide = jnp.transpose(x.astype(jnp.float32))
        return (wide * w).astype(x.dtype), jnp.sin(wide * w)

    w, x = normal(1, 128), normal(2, 128, 64, dtype=jnp.bfloat16)
    light = fp8_remat(fn)
    choices = pallas_kernels.explain(lambda w: jax.vjp(light, w, x), w).choices
    arrays = [c.arrays for c in choices if c.operation == "quantize_groups"]
    assert sorted(arrays) == [("bfloat16[64,128]",), ("float32[64,128]",)]
    _, (dw,) = value_and_vjp(lambda w: light(w, x)[1], jnp.ones((64, 128)), w)
    wide = x.T.astype(jnp.float32)
    slope, wide = (fake(a, 16).astype(np.float64) for a in (jnp.cos(wide * w), wide))
    assert_close(dw, (slope * wide).sum(axis=0), 1e-5)


@pytest.mark.parametrize(
    ("cut", "decoded_by"), [(True, "reference"), (False, "mosaic")]
)
def test_xla_decodes_where_it_cuts(cut, decoded_by, kernels):
    """A matmul's operand is decoded by a kernel, unless it is a slice.

    Slices go through memory anyway.
    """

    def scores(w, x):
        y = x @ w
        queries, keys = (y[:, :64], y[:, 64:]) if cut else (y, y)
        return queries @ keys.T

    policy = jax.checkpoint_policies.dots_saveable
    light = fp8_remat(scores, policy=policy)
    w, x = normal(1, 32, 128), normal(2, 96, 32)
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.sin(light(w, x))))
    chosen = pallas_kernels.explain(gradient, w, x).choices
    of_product = [c for c in chosen if "float8_e4m3fn[96,128]" in c.arrays]
    actual = {
        c.implementation for c in of_product if c.operation == "dequantize_groups"
    }
    assert actual == {decoded_by}


def copies(fn, w, x):
    """Returns the shapes of the saved FP8 copies except x's."""
    actual = saved(fp8_remat(fn), w, x)
    shapes = sorted(r.shape for r in actual if r.dtype == jnp.float8_e4m3fn)
    shapes.remove(x.shape)
    return shapes


def by_index(y):
    halves = y.reshape(len(y), 2, -1)
    return halves[:, 0], halves[:, 1]


@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        (by_index, (128, 2, 64)),
        (lambda y: tuple(jnp.split(y, 2, axis=-1)), (128, 128)),
        (lambda y: (y[:, 64:], y[:, :64]), (128, 128)),
    ],
)
def test_parts_of_an_array_have_one_copy(cut, shape):
    w, x, dy = normal(1, 32, 128), normal(2, 128, 32), normal(3, 128, 64)

    def product(w, x):
        a, b = cut(x @ w)
        return a * b

    assert copies(product, w, x) == [shape]
    if shape == (128, 2, 64):
        return
    _, (_, dx) = value_and_vjp(fp8_remat(product), dy, w, x)
    y = jnp.asarray(fake(np.asarray(x @ w).reshape(shape), 16)).reshape(128, 128)
    (a, b), uncut = jax.vjp(cut, y)
    assert_close(dx, uncut((dy * b, dy * a))[0] @ w.T, 1e-5)


@pytest.mark.parametrize(
    ("columns", "width", "cut"),
    [
        (80, 40, lambda y: (y[:, :40], y[:, 40:])),  # The cut is within a group.
        (128, 64, lambda y: (y[:, ::2], y[:, 1::2])),
        (192, 64, lambda y: (y[:, :64], y[:, 64:128])),  # The rest is not saved.
    ],
)
def test_other_parts_have_copies_of_their_own(columns, width, cut):
    def product(w, x):
        a, b = cut(x @ w)
        return a * b

    w, x = normal(1, 32, columns), normal(2, 128, 32)
    assert copies(product, w, x) == [(128, width), (128, width)]


@pytest.mark.parametrize(
    ("shape", "key"),
    [
        ((3, 5, 64, 4, 2), None),
        ((4, 64, 24, 2), jax.random.key(3)),
        ((2, 2100, 2), None),
    ],
)
def test_short_rows_are_merged_with_the_axes_before(shape, key):
    """Groups run over all axes but the first, as if these were one axis."""
    x, dy = normal(1, *shape), normal(2, *shape)
    light = fp8_remat(lambda p, x: p * jnp.square(x), key=key)
    (actual,) = (r for r in saved(light, 1.0, x) if r.dtype == jnp.float8_e4m3fn)
    assert actual.shape[-1] >= 16
    assert actual.shape[0] == shape[0]
    assert int(np.prod(actual.shape)) == x.size
    _, (_, dx) = value_and_vjp(light, dy, 1.0, x)
    if key is None:
        rows = np.asarray(x).reshape(actual.shape)
        assert_close(dx, 2 * fake(rows, 16).reshape(shape) * np.asarray(dy), 1e-6)
    else:
        assert_close(dx, 2 * x * dy, 2**-3)


def test_probabilities_take_the_same_bytes_in_any_order_of_axes():
    """Some models have scores [batch, queries, keys, key heads, group]."""

    def attention(spec, axis, p, q, k):
        scores = jnp.einsum(f"btkgh,bskh->{spec}", q * p, k)
        return jnp.einsum(f"{spec},bskh->btkgh", jax.nn.softmax(scores, axis), k)

    q, k = normal(1, 2, 64, 4, 2, 16), normal(2, 2, 64, 4, 16)
    sizes = [
        coat.residual_report(fp8_remat(functools.partial(attention, *a)), 1.0, q, k)
        for a in (("bkgts", -1), ("btskg", 2))
    ]
    assert sizes[0].nbytes == sizes[1].nbytes


def test_rows_are_not_merged_over_an_axis_that_types_split():
    mesh = jax.make_mesh((1,), ("a",), (AxisType.Explicit,))
    x = normal(1, 2, 4096, 2)
    for spec, wide in ((P(None, "a"), True), (P("a"), False)):
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
            actual = saved(fp8_remat(lambda p, x: p * jnp.square(x)), 1.0, placed)
        assert wide != any(r.dtype == jnp.float8_e4m3fn for r in actual)
