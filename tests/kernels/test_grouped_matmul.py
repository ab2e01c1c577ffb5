"""Tests grouped matmuls, weight gradients and transposes for all sizes of groups."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import kernels
from helpers.groups import padded, slices
from helpers.kernels import BF16, E4M3, E5M2, F32, every_implementation
from helpers.marks import slow, slow_except

import pallas_kernels
from pallas_kernels.dispatch import devices
from pallas_kernels.ops.grouped_matmul import tuning
from pallas_kernels.ops.matmul.plan import Tuning

TILE = Tuning(tile_n=128, stages=2)
TURNS = Tuning(tile_m=64, tile_n=128, stages=3, together=False)
PAIRS = Tuning(tile_n=128, stages=2, cluster="n", width=2)
NUMPY = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    BF16: ml_dtypes.bfloat16,
}


@pytest.fixture(autouse=True)
def _few_multiprocessors(monkeypatch):
    """Makes interpreted thread blocks compute several tiles each."""
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(devices, "multiprocessors", lambda: 2)


def drawn(rng, shape, dtype):
    """Returns normal numbers of a dtype, and their float64 values."""
    x = rng.standard_normal(shape).astype(NUMPY[dtype])
    return x, x.astype(np.float64)


def positive(rng, *shape):
    return np.exp2(rng.uniform(-3, 3, shape)).astype(np.float32)


def int32(sizes):
    return jnp.asarray(sizes, jnp.int32)


def grouped_in_float64(a, b, sizes, a_scale=1.0, b_scale=1.0):
    """Computes `grouped_matmul` group by group, in NumPy."""
    y = np.zeros((len(a), b.shape[1]))
    a = a * np.broadcast_to(np.asarray(a_scale, np.float64), len(a))[:, None]
    b_scale = np.asarray(b_scale, np.float64)
    b_scale = b_scale[:, None] if b_scale.ndim == 1 else b_scale
    b = b * np.broadcast_to(b_scale, b.shape[:2])[..., None]
    for rows, matrix in zip(slices(sizes), b, strict=True):
        y[rows] = a[rows] @ matrix.T
    return y


def assert_close(actual, expected, dtype, unit):
    """Asserts that a result has only the errors of its rounding and of its sums.

    `unit` is the standard deviation of the sums. Tensor cores cut each partial sum of
    FP8 products after about 14 bits.
    """
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    error = np.abs(np.asarray(actual).astype(np.float64) - expected)
    share = 2.0**-8 if dtype == BF16 else 2.0**-20
    of_sums = 3e-2 if jax.default_backend() == "gpu" else 1e-5
    assert (error <= share * np.abs(expected) + of_sums * unit).all()


def check_rows(
    implementation, sizes, shape, *, a_dtype=E4M3, b_dtype=E4M3, kinds=("rows", "all"),
    out_dtype=BF16, tuning=TILE, listed=False, seed=0, compute=None,
):  # fmt: skip
    """Compares `grouped_matmul` of random numbers with NumPy.

    `kinds` are the scales of both operands: "none", "one", "rows", "groups" or "all".
    `listed` passes the list of tiles as an option. `compute` replaces the kernel.
    """
    (rows, n, k), groups = shape, len(sizes)
    rng = np.random.default_rng(seed)
    (a, wide_a), (b, wide_b) = (
        drawn(rng, (rows, k), a_dtype),
        drawn(rng, (groups, n, k), b_dtype),
    )
    # Nothing after the last group is read, or else the result would be NaN.
    a[sum(sizes) :] = np.nan
    shapes = {"none": None, "one": (), "rows": (rows,), "groups": (groups,)}
    shapes["all"] = groups, n
    scales = [None if shapes[s] is None else positive(rng, *shapes[s]) for s in kinds]
    options = {"out_dtype": out_dtype, "tuning": tuning}
    if listed:
        height = tuning.tile_m
        options["tiles"] = pallas_kernels.group_tiles(
            int32(sizes), rows=rows, height=height
        )
    call = functools.partial(pallas_kernels.grouped_matmul, **options)
    compute = compute or functools.partial(kernels.run, implementation, call)
    y = compute(a, b, int32(sizes), *scales)
    scales = [1.0 if s is None else s for s in scales]
    wide_a[sum(sizes) :] = 0
    expected = grouped_in_float64(wide_a, wide_b, sizes, *scales)
    ones = np.ones((rows, 1)), np.ones((groups, n, 1))
    unit = math.sqrt(k) * grouped_in_float64(*ones, sizes, *scales)
    assert_close(y, expected, out_dtype, unit)
    assert not np.asarray(y[sum(sizes) :], np.float32).any()


WITHOUT_SCALES = {"a_dtype": BF16, "b_dtype": BF16, "kinds": ("none", "none")}
ROWS = [
    slow([100, 0, 1, 155], (256, 128, 128), {"kinds": ("one", "groups")}),
    ([3, 70, 0, 64, 5], (200, 256, 256), {"tuning": TURNS}),
    slow([0, 0, 256], (256, 256, 128), {"out_dtype": F32, "kinds": ("rows", "groups")}),
    slow([0, 0], (256, 128, 128), {}),
    slow([130, 3, 67], (256, 256, 256), {"tuning": PAIRS, "listed": True}),
    slow([64, 64], (128, 192, 128), {"a_dtype": E5M2, "kinds": ("one", "one")}),
    slow([1] * 8, (136, 128, 128), {"kinds": ("one", "all")}),
    ([77, 50], (128, 128, 128), WITHOUT_SCALES),
]


@every_implementation
@pytest.mark.parametrize(("sizes", "shape", "options"), ROWS)
def test_rows_of_groups_are_float64s_but_for_rounding(
    implementation, sizes, shape, options
):
    check_rows(implementation, sizes, shape, **options)


@every_implementation
@pytest.mark.parametrize("tuning", [slow(TILE), slow(TURNS), PAIRS])
def test_the_amax_is_of_rows_in_groups(implementation, tuning):
    """Tiles at borders read rows of the next group, which do not count."""
    sizes, rng = [100, 0, 1, 60], np.random.default_rng(0)
    (a, wide_a), (b, wide_b) = (
        drawn(rng, shape, E4M3) for shape in ((256, 128), (4, 320, 128))
    )
    a[sum(sizes) :] = np.nan
    wide_a[sum(sizes) :] = 0
    # The second row of group 2's tile would exceed all others by far.
    of_rows, of_groups = np.ones(256, np.float32), np.float32([1, 1, 1e3, 1])
    of_rows[100] = 1e-3
    options = {"tuning": tuning, "keep_maxima": True}
    call = functools.partial(pallas_kernels.grouped_matmul, **options)
    y, maxima = kernels.run(
        implementation, call, a, b, int32(sizes), of_rows, of_groups
    )
    expected = grouped_in_float64(wide_a, wide_b, sizes, of_rows, of_groups)
    unit = math.sqrt(128) * grouped_in_float64(
        np.ones((256, 1)), np.ones((4, 320, 1)), sizes, of_rows, of_groups
    )
    assert_close(y, expected, BF16, unit)
    # The amax is of the result, which is rounded to BF16.
    assert maxima.max() == np.abs(np.asarray(y, np.float32)).max()


@every_implementation
def test_a_result_that_overflows_has_an_infinite_amax(implementation):
    a, b = jnp.ones((128, 128), E4M3), jnp.ones((1, 320, 128), E4M3)
    call = functools.partial(pallas_kernels.grouped_matmul, keep_maxima=True)
    # BF16 ends below float32 does.
    scales = np.full(128, 3.4e38 / 128, np.float32), np.ones(1, np.float32)
    y, maxima = kernels.run(implementation, call, a, b, int32([128]), *scales)
    assert np.isinf(np.asarray(y, np.float32)).all()
    assert maxima.max() == np.inf


@pytest.mark.parametrize("rows", [3, 50])
def test_any_number_of_rows_is_right(rows):
    """XLA computes what no tile fits."""
    check_rows("reference", [1, 0, rows - 2], (rows, 5, 12), tuning=None)


def test_sizes_that_exceed_the_rows_are_cut():
    a, b = jnp.ones((16, 16), E4M3), jnp.ones((3, 2, 16), E4M3)
    scale = jnp.array([1.0, 2.0, 4.0])
    y = pallas_kernels.grouped_matmul(a, b, int32([10, 10, 5]), b_scale=scale)
    np.testing.assert_array_equal(y[:, 0], [16] * 10 + [32] * 6)


@pytest.mark.parametrize("sizes", [[200], [0, 128, 0, 5]])
def test_transposes_have_groups_at_multiples_of_128(sizes):
    rng = np.random.default_rng(0)
    x, _ = drawn(rng, (256, 24), BF16)
    x[sum(sizes) :] = np.nan
    transpose = jax.jit(pallas_kernels.grouped_transpose)
    y = transpose(x, int32(sizes))
    assert pallas_kernels.padded_rows(256, len(sizes)) == y.shape[1]
    np.testing.assert_array_equal(y, padded(x, sizes))
    codes = x.astype(NUMPY[E4M3])
    np.testing.assert_array_equal(transpose(codes, int32(sizes)), padded(codes, sizes))


@every_implementation
@pytest.mark.parametrize(
    ("sizes", "n", "dtype"), [([100, 0, 1, 155], 144, E5M2), ([130, 0, 7], 192, BF16)]
)
def test_transposes_are_identical(implementation, sizes, n, dtype):
    rng = np.random.default_rng(0)
    dtype = np.dtype(NUMPY[dtype])
    x = rng.integers(0, 256, (256, n * dtype.itemsize)).astype(np.uint8).view(dtype)
    assert np.isnan(x.astype(np.float32)).any()
    transpose = pallas_kernels.grouped_transpose
    y = kernels.run(implementation, transpose, x, int32(sizes))
    kernels.assert_identical(y, padded(x, sizes))


@every_implementation
@pytest.mark.parametrize(
    ("sizes", "rows", "dtype", "codes"),
    [([3, 128, 0, 130], 261, F32, E4M3), ([7, 1, 300], 333, BF16, E5M2)],
)
def test_transposes_are_quantized(implementation, sizes, rows, dtype, codes):
    x = np.array(kernels.numbers((rows, 128), dtype, octaves=9))
    x[sum(sizes) :] = np.nan
    transpose = functools.partial(pallas_kernels.grouped_transpose, dtype=codes)
    y = kernels.run(implementation, transpose, x, int32(sizes), np.float32(0.5))
    kernels.assert_identical(y, kernels.encoded(padded(x, sizes), 0.5, codes))


def check_gradient(
    implementation, sizes, shape, *, a_dtype=E5M2, b_dtype=E4M3,
    kinds=("one", "groups"), out_dtype=BF16, tuning=TILE, seed=0, compute=None,
):  # fmt: skip
    """Compares `grouped_weight_gradient` of random numbers with NumPy.

    `kinds` are the scales of both operands: "none", "one" or "groups". `compute`
    replaces the kernel.
    """
    (rows, n, k), groups = shape, len(sizes)
    rng = np.random.default_rng(seed)
    (a, wide_a), (b, wide_b) = (
        drawn(rng, (rows, n), a_dtype),
        drawn(rng, (rows, k), b_dtype),
    )
    shapes = {"none": None, "one": (), "groups": (groups,)}
    scales = [None if shapes[s] is None else positive(rng, *shapes[s]) for s in kinds]
    call = functools.partial(
        pallas_kernels.grouped_weight_gradient, out_dtype=out_dtype, tuning=tuning
    )
    compute = compute or functools.partial(kernels.run, implementation, call)
    y = compute(padded(a, sizes), padded(b, sizes), int32(sizes), *scales)
    by = functools.reduce(np.multiply, [1.0 if s is None else s for s in scales])
    by = np.broadcast_to(by, groups)
    expected = np.stack(
        [
            scale * wide_a[of].T @ wide_b[of]
            for of, scale in zip(slices(sizes), by, strict=True)
        ]
    )
    unit = by * np.sqrt(np.asarray(sizes))
    assert_close(y, expected, out_dtype, unit[:, None, None])


GRADIENTS = [
    slow([100, 0, 1, 155], (256, 128, 128), {}),
    ([3, 170, 0, 64, 5], (384, 256, 128), {"tuning": TURNS, "kinds": 2 * ("one",)}),
    slow([0, 0, 256], (256, 136, 192), {"out_dtype": F32, "kinds": 2 * ("groups",)}),
    slow([0, 0], (256, 128, 128), {"kinds": ("none", "none")}),
    slow([130, 0, 300], (512, 128, 256), {"a_dtype": BF16, "b_dtype": BF16}),
    slow([256, 0], (256, 128, 128), {"a_dtype": E4M3}),
]


@every_implementation
@pytest.mark.parametrize(("sizes", "shape", "options"), GRADIENTS)
def test_weight_gradients_are_float64s_but_for_rounding(
    implementation, sizes, shape, options
):
    check_gradient(implementation, sizes, shape, **options)


def routed(kind, rows, groups, rng):
    """Returns the sizes of `groups` groups with at most `rows` rows in all.

    `kind` is "equal", "random" or "zipf", as routers give them, or the rare "odd" or
    "one".
    """
    if kind == "equal":
        return [rows // groups] * groups
    if kind == "random":
        return rng.multinomial(rows, np.full(groups, 1 / groups)).tolist()
    if kind == "zipf":
        shares = rng.permutation(1 / np.arange(1, groups + 1))
        return rng.multinomial(rows, shares / shares.sum()).tolist()
    sizes = np.zeros(groups, int)
    if kind == "odd":  # Empty groups, single rows, and rows of no group.
        sizes[1::3] = 1
        sizes[::3] = rng.multinomial(
            rows * 5 // 6, np.full(len(sizes[::3]), 3 / groups)
        )
    if kind == "one":
        sizes[groups // 2] = rows
    return sizes.tolist()


KINDS = ["equal", "random", "zipf", "odd", "one", "none"]


def compiled(function, settings):
    """Returns a jitted kernel, which is compiled once for all sizes of groups."""
    named = functools.partial(function, tuning=settings, implementation="mosaic")
    return jax.jit(named, compiler_options=kernels.OPTIMIZED)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [None, *tuning.ALONG_M], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_rows_of_routed_groups_on_a_gpu(settings, dtype):
    rng = np.random.default_rng()
    compute = compiled(pallas_kernels.grouped_matmul, settings)
    options = {"a_dtype": dtype, "b_dtype": dtype, "seed": rng, "compute": compute}
    every = [("rows", "all"), ("rows", "groups"), ("one", "groups")]
    for scales in every if settings is None else every[:1]:
        for kind in KINDS:
            sizes = routed(kind, 4096, 16, rng)
            check_rows(None, sizes, (4096, 1536, 640), kinds=scales, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [None, *tuning.ALONG_K], ids=str)
@pytest.mark.parametrize("dtypes", [(E5M2, E4M3), (E4M3, E5M2), (BF16, BF16)])
def test_weight_gradients_of_routed_groups_on_a_gpu(settings, dtypes):
    rng = np.random.default_rng()
    compute = compiled(pallas_kernels.grouped_weight_gradient, settings)
    options = dict(zip(("a_dtype", "b_dtype"), dtypes, strict=True))
    for kind in KINDS:
        sizes = routed(kind, 4096, 16, rng)
        options |= {"seed": rng, "compute": compute}
        check_gradient(None, sizes, (4096, 1536, 640), **options)


@every_implementation
@pytest.mark.parametrize("kind", slow_except(["odd", "one", "none"], KINDS))
def test_each_row_is_written_by_one_tile_of_its_group(implementation, kind):
    rng, rows, height = np.random.default_rng(1), 1000, 64
    sizes = routed(kind, rows, 8, rng)
    options = {"rows": rows, "height": height}
    call = functools.partial(pallas_kernels.group_tiles, **options)
    tiles = kernels.run(implementation, call, int32(sizes))
    count, used = tiles.totals.tolist()
    assert count <= len(tiles.row)
    assert used == sum(sizes)
    writers = [[] for _ in range(rows)]
    lists = tiles.group, tiles.row, tiles.first, tiles.end
    for group, row, first, end in np.stack(lists, axis=1)[:count].tolist():
        assert row % 8 == 0
        assert 0 <= row <= first
        assert row + height <= rows
        for at in range(first, min(row + height, end)):
            writers[at].append(group)
    expected = np.repeat(np.arange(8), sizes)
    assert writers == [[group] for group in expected] + [[]] * (rows - used)
    np.testing.assert_array_equal(np.stack(lists)[:, count:], 0)


def test_kernels_have_no_races():
    """The interpreter raises an error at the first race.

    It waits for each part of a subtile as for a copy, so groups are whole tiles.
    """
    rng = np.random.default_rng(3)
    (a, wide_a), (b, wide_b) = (
        drawn(rng, (256, 256), E4M3),
        drawn(rng, (2, 256, 256), E4M3),
    )
    sizes = int32([128, 128])

    def both(a, b, sizes, *, implementation):
        named = {"implementation": implementation}
        y = pallas_kernels.grouped_matmul(a, b, sizes, tuning=TURNS, **named)
        wide = a.astype(BF16)
        codes = pallas_kernels.grouped_transpose(wide, sizes, np.float32(1), **named)
        options = named | {"tuning": TURNS}
        dw = pallas_kernels.grouped_weight_gradient(codes, codes, sizes, **options)
        return y, dw

    y, dw = kernels.run("interpret", both, a, b, sizes, detect_races=True)
    assert_close(y, grouped_in_float64(wide_a, wide_b, [128, 128]), BF16, 16.0)
    grams = np.stack([x.T @ x for x in np.split(wide_a, 2)])
    assert_close(dw, grams, BF16, 16.0)


def test_matmuls_under_vmap_and_scan():
    rng = np.random.default_rng(2)
    (a, wide_a), (b, wide_b) = (
        drawn(rng, (2, 32, 16), E4M3),
        drawn(rng, (2, 3, 8, 16), E4M3),
    )
    sizes = np.array([[1, 20, 11], [0, 30, 2]])
    expected = np.stack(list(map(grouped_in_float64, wide_a, wide_b, sizes)))

    def step(_, arrays):
        return None, pallas_kernels.grouped_matmul(*arrays)

    arrays = a, b, int32(sizes)
    mapped = jax.jit(jax.vmap(pallas_kernels.grouped_matmul))(*arrays)
    _, scanned = jax.jit(lambda x: jax.lax.scan(step, None, x))(arrays)
    for y in (mapped, scanned):
        assert_close(y, expected, BF16, 4.0)


def test_what_does_not_go_together_is_named():
    a, b, sizes = jnp.ones((16, 128), E4M3), jnp.ones((2, 64, 128), E4M3), int32([1, 2])
    matmul = pallas_kernels.grouped_matmul
    with pytest.raises(ValueError, match=r"got \(16, 128\) and \(64, 128\)"):
        matmul(a, b[0], sizes)
    with pytest.raises(ValueError, match=r"group_sizes must have the shape \(2,\)"):
        matmul(a, b, sizes[:1])
    with pytest.raises(ValueError, match="group_sizes must be int32, got float32"):
        matmul(a, b, jnp.ones(2))
    with pytest.raises(ValueError, match="both bfloat16, got bfloat16 and float8_e4m3"):
        matmul(a.astype(BF16), b, sizes)
    with pytest.raises(ValueError, match=r"have the shape \(\) or \(16,\)"):
        matmul(a, b, sizes, jnp.ones(3))
    with pytest.raises(ValueError, match="bfloat16 or float32, got float16"):
        matmul(a, b, sizes, out_dtype=jnp.float16)
    kernel = functools.partial(matmul, implementation="mosaic")
    with pytest.raises(ValueError, match="no tiles fit 64 columns"):
        kernel(a, b, sizes)
    wide = jnp.ones((2, 256, 128), E4M3)
    with pytest.raises(ValueError, match="a multiple of 8 and 128 or more, got 16"):
        kernel(a, wide, sizes)
    tiles = pallas_kernels.group_tiles(sizes, rows=128, height=64)
    rows = jnp.ones((128, 128), E4M3)
    with pytest.raises(ValueError, match="64 rows were listed, not of 128"):
        kernel(rows, wide, sizes, tiles=tiles, tuning=TILE)
    with pytest.raises(ValueError, match="different groups"):
        kernel(rows, wide, sizes, tuning=Tuning(cluster="m"))
    gradient = pallas_kernels.grouped_weight_gradient
    with pytest.raises(ValueError, match="a multiple of 128, got"):
        gradient(a.T, a.T, sizes)
    with pytest.raises(ValueError, match="no tiles fit 64 x 64"):
        gradient(b[0], b[1], sizes, implementation="mosaic")
