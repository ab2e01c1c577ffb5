"""Tests that every implementation of matmuls agrees with float64."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import kernels, layers
from helpers.kernels import (
    BF16,
    E4M3,
    E5M2,
    F32,
    assert_identical,
    every_implementation,
)
from helpers.marks import slow, slow_except
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from experiments.common import kernel_cases
from pallas_kernels.ops.matmul import tuning
from pallas_kernels.ops.matmul.api import _Matmul
from pallas_kernels.ops.matmul.plan import Product, Tuning

SMALL = Tuning(stages=2)
NARROW = Tuning(tile_n=128, stages=4)
TRIPLE = Tuning(tile_m=192, tile_n=128, stages=2, warpgroups=3)
TURNS = Tuning(tile_n=128, stages=2, together=False)
# Output is stored in parts of swizzled rows.
ODD = Tuning(tile_n=160, stages=2, together=False)
LOW = Tuning(tile_m=64, stages=2, together=False, cluster="m")
WIDE = Tuning(tile_n=192, stages=2, together=False, cluster="m")
LARGE = Tuning(tile_m=256, tile_n=192, stages=2)
TURNED = Tuning(stages=2, transposed=True)


def run(fn, implementation, *args, **kwargs):
    """Calls `fn` with options, compiled; see `kernels.run`."""
    return kernels.run(implementation, functools.partial(fn, **kwargs), *args)


def operands(shape, dtype=E4M3, seed=0):
    """Returns codes a [m, k] and b [n, k], and their float64 values."""
    m, n, k = shape
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((m, k)).astype(dtype)
    b = rng.standard_normal((n, k)).astype(ml_dtypes.float8_e4m3fn)
    return jnp.asarray(a), jnp.asarray(b), a.astype(np.float64), b.astype(np.float64)


def scales(kind, shape, seed=1):
    """Returns scales of a kind, and their float64 values, expanded to the operands."""
    (m, n, k), rng = shape, np.random.default_rng(seed)
    if kind == "tensor":
        return np.float32(0.5), np.float32(2.0**-7), 0.5, 2.0**-7
    if kind == "rows":
        a, b = (rng.uniform(0.1, 1, i).astype(np.float32) for i in (m, n))
        return a, b, a[:, None].astype(np.float64), b[:, None].astype(np.float64)
    a = rng.uniform(0.1, 1, (m, k // 128)).astype(np.float32)
    b = rng.uniform(0.1, 1, (-(-n // 128), k // 128)).astype(np.float32)
    wide_a, wide_b = np.repeat(a, 128, 1), np.repeat(np.repeat(b, 128, 0), 128, 1)
    return a, b, wide_a.astype(np.float64), wide_b[:n].astype(np.float64)


def in_parts(b, parts, groups):
    """Returns b [n, k] as `_Matmul` takes it, and as a user writes it.

    The first is [parts, n, groups, c], and the second [n, groups, parts * c].
    """
    complete = b.reshape(len(b), groups, -1)
    pieces = jnp.split(complete, parts, axis=2)
    return jnp.stack(pieces), complete


def error(actual, expected):
    actual = np.asarray(actual).astype(np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


# Every tile and step costs the interpreter time, so there are few. There are still more
# steps than stages, and two tiles for each ping-pong warpgroup.
CASES = [
    slow((128, 512, 384), E4M3, "tensor", BF16, None, Tuning(stages=2)),
    slow((256, 128, 256), E5M2, "rows", F32, None, Tuning(tile_m=256, tile_n=128)),
    slow((128, 128, 640), E4M3, "tensor", BF16, 256, NARROW),
    ((128, 256, 256), E4M3, "rows", F32, 128, Tuning(parts=4, stages=2)),
    slow((128, 128, 768), E4M3, "blocks", BF16, None, Tuning(tile_n=128, chunks=4)),
    slow((128, 256, 384), E4M3, "blocks", F32, None, Tuning(tile_n=128, chunks=2)),
    slow((512, 128, 384), E4M3, "tensor", BF16, None, TURNS),
    slow((256, 352, 256), E4M3, "rows", BF16, None, ODD),
    slow((256, 256, 256), E5M2, "tensor", BF16, None, Tuning(stages=2, cluster="m")),
    slow((128, 512, 256), E4M3, "tensor", F32, None, Tuning(stages=2, cluster="n")),
    ((320, 128, 256), E4M3, "blocks", BF16, None, TRIPLE),
    slow((200, 320, 256), E4M3, "rows", BF16, None, SMALL),
    slow((192, 256, 384), E4M3, "rows", BF16, None, LOW),
    slow((256, 256, 384), E5M2, "tensor", F32, None, LARGE),
    slow((256, 384, 256), E5M2, "tensor", BF16, None, TURNED),
    slow((448, 512, 128), E5M2, "tensor", BF16, None, replace(LARGE, transposed=True)),
    slow((384, 320, 128), E5M2, "tensor", BF16, None, replace(WIDE, transposed=True)),
]


@every_implementation
@pytest.mark.parametrize(
    ("shape", "a_dtype", "kind", "dtype", "promote", "tuning"), CASES
)
def test_products_are_float64s_but_for_rounding(
    implementation, shape, a_dtype, kind, dtype, promote, tuning
):
    a, b, wide_a, wide_b = operands(shape, a_dtype, seed=sum(shape))
    a_scale, b_scale, by_a, by_b = scales(kind, shape)
    y = run(
        pallas_kernels.matmul, implementation, a, b, a_scale, b_scale,
        out_dtype=dtype, promote=promote, tuning=tuning,
    )  # fmt: skip
    assert (y.shape, y.dtype) == (shape[:2], dtype)
    # Unless promoted, the tensor cores keep 13 bits of the terms that they add.
    within = 2.0**-9 if dtype == BF16 else 2.0**-20
    if implementation == "mosaic" or jax.default_backend() == "gpu":
        within += 2e-3 if promote is None and kind != "blocks" else 5e-4
    assert error(y, (wide_a * by_a) @ (wide_b * by_b).T) < within


@pytest.mark.gpu
@pytest.mark.parametrize("kind", kernel_cases.PRODUCTS)
def test_all_tiles_that_are_tried_agree(kind):
    shape = m, n, _ = (1088, 1536, 640)
    product, draw = kernel_cases.PRODUCTS[kind], kernel_cases.operands(kind, shape)

    def values(**how):
        y = kernel_cases.run_product(kind, *draw, **how)
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(y)])

    expected = values(implementation="reference").astype(np.float64)
    for tiles in tuning.candidates(product):
        assert tuning.obstacle(product, tiles, m, n) is None
        y = values(implementation="mosaic", tuning=tiles)
        assert error(y, expected) < 5e-3, tiles


@every_implementation
@pytest.mark.parametrize(
    ("dtype", "tuning"), [slow(BF16, SMALL), slow(F32, SMALL), (BF16, ODD)]
)
def test_products_are_added_to_an_accumulator(implementation, dtype, tuning):
    # Tiles of 160 columns overlap, so some columns are computed twice.
    shape = (128, 256, 256)
    a, b, wide_a, wide_b = operands(shape)
    initial = np.random.default_rng(2).standard_normal(shape[:2]).astype(dtype) * 16
    y = run(
        pallas_kernels.matmul, implementation, a, b, 0.5, 1.0, jnp.asarray(initial),
        tuning=tuning,
    )  # fmt: skip
    assert y.dtype == dtype
    expected = 0.5 * wide_a @ wide_b.T + initial.astype(np.float64)
    assert error(y, expected) < (2.0**-9 if dtype == BF16 else 1e-3)


BIASED = [
    (kind, with_accumulator, dtype, tuning)
    for kind in ("tensor", "rows", "blocks")
    for with_accumulator in (False, True)
    for dtype, tuning in ((BF16, None), (F32, None), (BF16, ODD))
    if kind != "blocks" or tuning is not ODD  # Blocks have tiles of 128 columns.
]


@every_implementation
@pytest.mark.parametrize(
    ("kind", "with_accumulator", "dtype", "tuning"),
    slow_except([("rows", True, F32, None)], BIASED),
)
def test_a_bias_is_added_to_columns(
    implementation, kind, with_accumulator, dtype, tuning
):
    shape = m, n, _ = (256, 384, 256)
    a, b, wide_a, wide_b = operands(shape, seed=3)
    a_scale, b_scale, by_a, by_b = scales(kind, shape)
    rng = np.random.default_rng(4)
    bias = jnp.asarray(rng.standard_normal(n) * 16, jnp.bfloat16)
    addend = jnp.asarray(rng.standard_normal((m, n)) * 16, dtype)
    y = run(
        pallas_kernels.matmul, implementation, a, b, a_scale, b_scale,
        addend if with_accumulator else None, bias=bias, out_dtype=dtype, tuning=tuning,
    )  # fmt: skip
    assert y.dtype == dtype
    expected = (wide_a * by_a) @ (wide_b * by_b).T + np.asarray(bias, np.float64)
    if with_accumulator:
        expected += np.asarray(addend, np.float64)
    assert error(y, expected) < (2.0**-8 if dtype == BF16 else 2e-3)


@every_implementation
@pytest.mark.parametrize(
    ("dtype", "tuning"),
    [slow(BF16, SMALL), slow(F32, TURNS), slow(BF16, ODD), (BF16, TURNED)],
)
def test_maxima_are_those_of_the_product(implementation, dtype, tuning):
    a, b, *_ = operands((256, 384, 128), seed=5)
    options = {"out_dtype": dtype, "keep_maxima": True, "tuning": tuning}
    matmul = functools.partial(pallas_kernels.matmul, **options)
    calls = (a, b, 0.5, 1.0), (a.at[200, 7].set(jnp.nan), b, 0.5, 1.0)
    (y, largest), with_nan = kernels.run_each(implementation, matmul, *calls)
    assert (largest.ndim, largest.dtype) == (1, F32)
    assert float(largest.max()) == np.abs(np.asarray(y, np.float32)).max()
    y, largest = with_nan
    assert np.isnan(np.asarray(y, np.float32)).any(), y
    assert np.isnan(np.asarray(largest).max())


@every_implementation
@pytest.mark.parametrize(
    ("heads", "size", "kind", "dtype", "tuning"),
    [
        slow((1, 1), 128, "tensor", BF16, TURNS),
        slow((2, 1), 64, "rows", BF16, SMALL),
        ((2, 2), 32, "rows", F32, NARROW),
    ],
)
def test_products_are_turned_heads(implementation, heads, size, kind, dtype, tuning):
    n, m = heads
    shape = (256, (n + 2 * m) * size, 256)
    a, b, wide_a, wide_b = operands(shape, seed=size)
    a_scale, b_scale, by_a, by_b = scales(kind, shape)
    # Sequences have angles in common, or each has its own.
    positions = (64,) if kind == "tensor" else (4, 64)
    angles = np.random.default_rng(3).uniform(0, 6, (*positions, size // 2))
    if kind == "rows":
        a_scale = a_scale.reshape(4, 64)
    actual = run(
        pallas_kernels.matmul_heads, implementation, a.reshape(4, 64, 256), b,
        a_scale, b_scale, *(jnp.asarray(f(angles), F32) for f in (np.cos, np.sin)),
        num_kv_heads=m, out_dtype=dtype, copies=2, tuning=tuning,
    )  # fmt: skip
    assert_identical(actual[:3], actual[3:])
    y = ((wide_a * by_a) @ (wide_b * by_b).T).reshape(4, 64, -1)
    within = 2.0**-9 if dtype == BF16 else 2.0**-20
    if jax.default_backend() == "gpu":
        within += 2e-3
    for x, expected in zip(actual[:3], layers.split_heads(y, angles, m), strict=True):
        assert (x.shape, x.dtype) == (expected.shape, dtype)
        assert error(x, expected) < within


def test_heads_that_do_not_go_together_are_named():
    a, b = jnp.ones((8, 64, 128), E4M3), jnp.ones((384, 128), E4M3)
    angles = [jnp.ones((64, 64))] * 2
    call = functools.partial(pallas_kernels.matmul_heads, num_kv_heads=1)
    with pytest.raises(ValueError, match=r"a must be \[b, s, k\], got \(64, 128\)"):
        call(a[0], b, 1.0, 1.0, *angles)
    with pytest.raises(ValueError, match=r"angles must be \(64, 64\) or \(8, 64, 64"):
        call(a, b, 1.0, 1.0, angles[0][:3], angles[1])
    with pytest.raises(ValueError, match="copies must be a positive int, got 0"):
        call(a, b, 1.0, 1.0, *angles, copies=0)
    with pytest.raises(ValueError, match="got 384 with m = 2 and d = 128"):
        call(a, b, 1.0, 1.0, *angles, num_kv_heads=2)
    with pytest.raises(ValueError, match="got 320 with m = 1 and d = 128"):
        call(a, b[:320], 1.0, 1.0, *angles)
    named = functools.partial(call, implementation="mosaic")
    with pytest.raises(ValueError, match="a multiple of 64, got 32"):
        named(a[:, :32], b, 1.0, 1.0, *(x[:32] for x in angles))
    of_96 = [x[:, :48] for x in angles]
    with pytest.raises(ValueError, match="are no whole heads of 96"):
        named(a, b, 1.0, 1.0, *of_96, tuning=Tuning(tile_n=128))


@pytest.mark.parametrize("tuning", [slow(SMALL), TURNS, slow(LOW)])
def test_the_kernel_has_no_races(tuning):
    """The interpreter raises an error at the first race."""
    a, b, wide_a, wide_b = operands((256, 256, 256))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        y = pallas_kernels.matmul(a, b, implementation="mosaic", tuning=tuning)
    assert error(y, wide_a @ wide_b.T) < 2.0**-9


@every_implementation
@pytest.mark.parametrize(
    ("parts", "groups", "k", "tuning"),
    [
        slow(2, 1, 512, Tuning(stages=2)),
        slow(2, 2, 512, Tuning(stages=2, cluster="m")),
        (3, 2, 768, Tuning(stages=2, transposed=True)),
        slow(4, 1, 512, Tuning(tile_n=128, stages=2, together=False, cluster="n")),
        # Parts that are no whole steps are merged.
        slow(4, 1, 768, Tuning(stages=2)),
    ],
)
def test_the_right_operand_is_read_in_parts(implementation, parts, groups, k, tuning):
    m, n = 256, 512
    a, b, wide_a, wide_b = operands((m, n, k), E5M2, seed=parts)
    split, complete = in_parts(b, parts, groups)
    operation = _Matmul(product=Product(out_dtype=BF16), tuning=tuning)

    def multiply(a, split, complete, *, implementation):
        one, named = jnp.ones((), F32), implementation
        y, _ = operation(a, split, one, one, None, None, implementation=named)
        complete = pallas_kernels.matmul(
            a, complete, tuning=tuning, implementation=named
        )
        return y, complete

    for y in kernels.run(implementation, multiply, a, split, complete):
        assert error(y, wide_a @ wide_b.T) < 3e-3


@every_implementation
def test_leading_axes_and_vmap(implementation):
    a, b, wide_a, wide_b = operands((256, 512, 128))
    matmul = functools.partial(pallas_kernels.matmul, tuning=SMALL)
    expected = wide_a @ wide_b.T

    def several(a, b, implementation):
        call = functools.partial(matmul, implementation=implementation)
        return call(a, b), jax.vmap(call)(a, b.reshape(2, 256, 128))

    y, both = run(several, implementation, a.reshape(2, 128, 128), b)
    assert y.shape == (2, 128, 512)
    assert error(y.reshape(256, 512), expected) < 2.0**-8
    assert error(both[0], expected[:128, :256]) < 2.0**-8
    assert error(both[1], expected[128:, 256:]) < 2.0**-8


@pytest.mark.parametrize("shape", [(0, 16, 128), (3, 5, 16), (100, 48, 130)])
def test_what_tiles_do_not_divide_is_right(shape):
    a, b, wide_a, wide_b = operands(shape)
    y = jax.jit(pallas_kernels.matmul)(a, b)
    assert y.shape == shape[:2]
    np.testing.assert_allclose(
        np.asarray(y, np.float64), wide_a @ wide_b.T, rtol=2**-7, atol=1e-2
    )


def test_what_does_not_go_together_is_named():
    a, b, *_ = operands((4, 8, 256))
    matmul = pallas_kernels.matmul
    with pytest.raises(ValueError, match="e5m2, got bfloat16 and float8_e4m3fn"):
        matmul(a.astype(BF16), b)
    with pytest.raises(ValueError, match=r"got \(4, 256\) and \(8, 128\)"):
        matmul(a, b[:, :128])
    with pytest.raises(ValueError, match=r"got \(3,\) and \(\)"):
        matmul(a, b, jnp.ones(3))
    with pytest.raises(ValueError, match=r"bfloat16\[4, 8\], got bfloat16\[8, 4\]"):
        matmul(a, b, 1.0, 1.0, jnp.zeros((8, 4), BF16))
    with pytest.raises(ValueError, match="128, 256 or None, got 64"):
        matmul(a, b, promote=64)
    with pytest.raises(ValueError, match="bfloat16 or float32, got float16"):
        matmul(a, b, out_dtype=jnp.float16)
    with pytest.raises(ValueError, match="rows of a must be a multiple of 8, got 4"):
        matmul(a, b, implementation="mosaic")
    kernel = functools.partial(
        matmul, *(jnp.ones((n, 128), E4M3) for n in (128, 272)), implementation="mosaic"
    )
    needed = "fit 128 x 272: they need 128 x 128 or more, n a multiple of 32"
    with pytest.raises(ValueError, match=needed):
        kernel()
    with pytest.raises(ValueError, match="a multiple of 16 columns, got 136"):
        kernel(tuning=Tuning(tile_n=136))
    with pytest.raises(ValueError, match="n must be a multiple of 64, got 272"):
        kernel(tuning=Tuning(tile_n=128))
    with pytest.raises(ValueError, match="64 rows a warpgroup and equal parts"):
        kernel(tuning=Tuning(tile_n=16, warpgroups=3))
    a, *scales = jnp.ones((256, 128), E4M3), jnp.ones((256, 1)), jnp.ones((2, 1))
    with pytest.raises(ValueError, match="the 128 columns of a block, got 256"):
        matmul(a, a, *scales, implementation="mosaic", tuning=SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(8192, 4096, 4096), (4096, 5504, 2048), (1000, 4160, 640)]
)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_errors_are_at_most_twice_cublaslts(shape, dtype):
    a, b, wide_a, wide_b = operands(shape, dtype, seed=sum(shape))
    expected = wide_a[:256] @ wide_b.T
    ours, cublaslt = (
        run(pallas_kernels.matmul, named, a, b)[:256]
        for named in ("mosaic", "reference")
    )
    assert error(ours, expected) <= 2 * error(cublaslt, expected)
    promoted = run(pallas_kernels.matmul, "mosaic", a, b, promote=256)[:256]
    assert error(promoted, expected) < 2.0**-9


@pytest.mark.gpu
def test_runs_repeat_and_write_every_element():
    a, b, *_ = operands((2048, 4096, 1024))
    matmul = jax.jit(functools.partial(pallas_kernels.matmul, implementation="mosaic"))
    expected = np.asarray(matmul(a, b))
    for _ in range(5):
        poison = jax.block_until_ready(jnp.full(expected.shape, jnp.nan, BF16))
        del poison  # The next array likely reuses this memory.
        np.testing.assert_array_equal(np.asarray(matmul(a, b)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("check_vma", [True, False])
def test_products_of_shards_on_two_gpus(check_vma):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    a, b, wide_a, wide_b = operands((512, 1024, 512))
    mesh = jax.make_mesh((2,), ("data",))
    a = jax.device_put(a, NamedSharding(mesh, P("data")))
    b = jax.device_put(b, NamedSharding(mesh, P()))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"),
        check_vma=check_vma,
    )  # fmt: skip
    def matmul(a, b):
        return pallas_kernels.matmul(a, b, implementation="mosaic")

    assert error(matmul(a, b), wide_a @ wide_b.T) < 2.0**-8
