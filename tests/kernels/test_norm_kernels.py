"""Tests the norms' kernels against NumPy in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import layers
from helpers.kernels import (
    BF16,
    E4M3,
    F32,
    adversarial,
    assert_identical,
    encoded_groups,
    every_implementation,
    every_kernel,
    kernel_or_slowly_reference,
    numbers,
    on_gpu,
    run,
    run_each,
)
from helpers.marks import slow

import pallas_kernels as pk

EPS = 1e-3
SCALE = 2.0**-3
HALF_STEP = {BF16: 2.0**-8, E4M3: 2.0**-4}  # Relative to the rounded number.
SMALLEST = {BF16: 2.0**-126, E4M3: 2.0**-6}  # The step is constant below.
# Few thread blocks, so that each takes several steps, and few values in registers.
FEW = pk.NormTuning(
    elements=512, stages=2, ctas=1, sms=2, params=512, held=512, sums=16
)
# Shape, kind, dtype of parameters, their leading axes, whether x is in groups, and the
# kernel's tuning.
CASES = [
    slow((2, 5, 128), "layer", F32, 0, False, FEW),
    slow((3, 6144), "layer", BF16, 0, True, None),
    ((12, 384), "rms", BF16, 0, True, FEW),
    slow((7, 2048), "rms", None, 0, False, FEW),
    # Two thread blocks for each of two sequences, and one for each of six.
    ((2, 9, 384), "layer", F32, 1, True, dataclasses.replace(FEW, sms=4)),
    slow((3, 2, 2, 1024), "rms", BF16, 2, False, FEW),
]
CASE = "shape", "kind", "dtype", "parts", "grouped", "tuning"
cases = pytest.mark.parametrize(CASE, CASES)
one_case = pytest.mark.parametrize(CASE, [slow(*CASES[2]), *CASES[:2], *CASES[3:]])


def inputs(shape, dtype=BF16, parts=0, grouped=False, seed=0):
    """Returns rows of several magnitudes, their float64 values, a weight and a bias.

    Weight and bias have the first `parts` axes of the rows, or are None if `dtype` is.
    With `grouped` the rows are quantized in groups of 16.
    """
    size = np.exp2(np.linspace(-4, 4, int(np.prod(shape[:-1])))).reshape(shape[:-1])
    x = numbers(shape, F32, seed, octaves=2) * size[..., None] + size[..., None]
    x = jnp.asarray(x, BF16)
    values = np.asarray(x, np.float64)
    if grouped:
        codes, scale = encoded_groups(x, E4M3, 16)
        values = codes.astype(np.float64)
        values = values * np.repeat(scale.astype(np.float64), 16, axis=-1)
        x = pk.Scaled(jnp.asarray(codes), jnp.asarray(scale))
    if dtype is None:
        return x, values, None, None
    columns = *shape[:parts], shape[-1]
    weight = numbers(columns, dtype, seed + 1, octaves=1)
    return x, values, weight, numbers(columns, dtype, seed + 2, octaves=1)


def wide(x):
    return np.asarray(x).astype(np.float64)


def spread(param, x):
    """Returns a parameter in float64 with axes that broadcast against `x`."""
    if param is None:
        return None
    axes = range(param.ndim - 1, x.ndim - 1)
    return np.expand_dims(wide(param), tuple(axes))


def expected_norm(x, weight, bias, kind):
    params = (spread(param, x) for param in (weight, bias))
    return layers.norm(x, *params, kind=kind, eps=EPS)


def expected_grad(x, dy, weight, kind, parts=0):
    """Returns the gradients of x, of the weight and of the bias.

    The gradients of weight and bias have the first `parts` axes of x.
    """
    centered = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + EPS)
    g = dy if weight is None else dy * spread(weight, x)
    slope = (g * centered).mean(-1, keepdims=True) / deviation**3
    dx = g / deviation - centered * slope
    dx = dx - dx.mean(-1, keepdims=True) if kind == "layer" else dx
    tokens = tuple(range(parts, x.ndim - 1))
    return dx, (dy * centered / deviation).sum(tokens), dy.sum(tokens)


def assert_rounded(actual, expected, dtype, scale=1.0, slack=1e-5):
    """Asserts that `actual` is `expected / scale`, rounded, up to float32's error."""
    assert actual.dtype == dtype
    expected = expected / np.asarray(scale, np.float64)
    if dtype == E4M3:
        expected = np.clip(expected, -448, 448)
    size = np.maximum(np.abs(expected), SMALLEST[dtype])
    allowed = size * (HALF_STEP[dtype] * (1 + 2**-6))
    allowed += slack * np.abs(expected).max(-1, keepdims=True, initial=0)
    error = np.abs(wide(actual) - expected)
    assert np.all(error <= allowed), (error / allowed).max()


@kernel_or_slowly_reference
@cases
def test_rows_are_normed(implementation, shape, kind, dtype, parts, grouped, tuning):
    x, values, weight, bias = inputs(shape, dtype, parts, grouped, seed=sum(shape))
    norm = functools.partial(pk.norm, kind=kind, eps=EPS, tuning=tuning)
    out = run(implementation, norm, x, weight, bias)
    assert_rounded(out.y, expected_norm(values, weight, bias, kind), BF16)
    np.testing.assert_array_equal(out.largest, np.abs(np.asarray(out.y)).max(-1))
    assert out.largest.dtype == F32
    assert (out.transposed, out.scale, out.groups) == (None,) * 3


@kernel_or_slowly_reference
@one_case
def test_rows_are_quantized_with_a_given_scale(
    implementation, shape, kind, dtype, parts, grouped, tuning
):
    x, values, weight, _ = inputs(shape, dtype, parts, grouped, seed=sum(shape) + 1)

    def norm(x, weight, scale, **how):
        return pk.norm(
            x, weight, kind=kind, eps=EPS, scale=scale, copies="both",
            tuning=tuning, **how,
        )  # fmt: skip

    calls = [(x, weight, jnp.float32(scale)) for scale in (SCALE, np.nan)]
    out, nothing = run_each(implementation, norm, *calls)
    expected = expected_norm(values, weight, None, kind)
    assert_rounded(out.y, expected, E4M3, SCALE)
    assert_identical(out.transposed, out.y.reshape(-1, shape[-1]).T)
    assert np.isnan(wide(nothing.y)).all()


# The interpreter's conversions do not saturate.
@pytest.mark.parametrize("implementation", ["reference", on_gpu])
def test_codes_saturate(implementation):
    x = jnp.asarray([[1.0, -1.0] * 64], BF16)

    def norm(x, scale, **how):
        return pk.norm(x, scale=scale, **how).y

    y = run(implementation, norm, x, jnp.float32(2.0**-20))
    np.testing.assert_array_equal(wide(y), wide(x) * 448)


@kernel_or_slowly_reference
@one_case
def test_rows_are_quantized_with_a_scale_each(
    implementation, shape, kind, dtype, parts, grouped, tuning
):
    x, values, weight, bias = inputs(shape, dtype, parts, grouped, seed=sum(shape) + 2)
    norm = functools.partial(pk.norm, kind=kind, eps=EPS, scale="row", tuning=tuning)
    out = run(implementation, norm, x, weight, bias)
    expected = expected_norm(values, weight, bias, kind)
    largest = np.abs(expected).max(-1)
    np.testing.assert_allclose(out.scale, largest / 448, rtol=1e-5)
    assert_rounded(out.y, expected, E4M3, wide(out.scale)[..., None])
    np.testing.assert_array_equal(np.abs(wide(out.y)).max(-1), 448)


@every_implementation
def test_the_input_is_quantized_in_groups(implementation):
    x = adversarial((3, 2048))
    out = run(implementation, functools.partial(pk.norm, keep_groups=True), x)
    assert_identical(out.groups, encoded_groups(x, E4M3, 16))


@kernel_or_slowly_reference
@cases
def test_gradients(implementation, shape, kind, dtype, parts, grouped, tuning):
    x, values, weight, bias = inputs(shape, dtype, parts, grouped, seed=sum(shape) + 3)
    bias = bias if kind == "layer" else None
    dy, add = numbers(shape, seed=5, octaves=2), numbers(shape, seed=6, octaves=2)
    options = {"kind": kind, "eps": EPS, "tuning": tuning}

    def grad(x, dy, weight, bias, add, **how):
        return pk.norm_grad(
            x, dy, weight, bias, add=add, keep_maxima=True, **options, **how
        )

    def grad_and_output(x, dy, weight, bias, scale, **how):
        return pk.norm_grad(x, dy, weight, bias, y_scale=scale, **options, **how)

    dx, dweight, dbias = expected_grad(values, wide(dy), weight, kind, parts)
    out = run(implementation, grad, x, dy, weight, bias, add)
    assert_rounded(out.dx, dx + wide(add), BF16)
    assert np.max(out.largest) == np.abs(wide(out.dx)).max()
    pairs = (weight, out.dweight, dweight), (bias, out.dbias, dbias)
    for param, actual, expected in pairs:
        assert (actual is None) == (param is None)
        if actual is not None:
            assert (actual.dtype, actual.shape) == (F32, param.shape)
            atol = 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)
    arguments = x, dy, weight, bias, jnp.float32(SCALE)
    out = run(implementation, grad_and_output, *arguments)
    assert_rounded(out.dx, dx, BF16)
    y = expected_norm(values, weight, bias, kind).reshape(-1, shape[-1])
    assert out.y.shape == y.shape[::-1]
    assert_rounded(out.y.T, y, E4M3, SCALE)


@kernel_or_slowly_reference
def test_what_is_not_finite_stays_in_its_row(implementation):
    x = numbers((4, 256))

    def each(x, bad, **how):
        quantized, normed = pk.norm(bad, scale="row", **how), pk.norm(bad, **how)
        return quantized, normed, pk.norm_grad(x, bad, keep_maxima=True, **how)

    calls = [(x, x.at[2, 77].set(bad)) for bad in (np.nan, np.inf)]
    for quantized, normed, grads in run_each(implementation, each, *calls):
        for array in (quantized.y, quantized.scale):
            nan = np.isnan(wide(array)).reshape(4, -1)
            assert nan[2].any()
            assert not nan[[0, 1, 3]].any()
        assert np.isnan(quantized.scale[2])
        np.testing.assert_array_equal(np.isnan(normed.largest), np.arange(4) == 2)
        assert not np.isfinite(np.max(grads.largest))
        assert np.isfinite(wide(grads.dx)).reshape(4, -1)[[0, 1, 3]].all()


@kernel_or_slowly_reference
def test_rows_of_zeros(implementation):
    zeros = jnp.zeros((2, 128), BF16)
    out = run(implementation, functools.partial(pk.norm, scale="row", eps=0.0), zeros)
    with np.errstate(invalid="ignore"):
        assert np.isnan(wide(out.y) * wide(out.scale)[:, None]).all()
    out = run(implementation, functools.partial(pk.norm, scale="row"), zeros)
    assert not wide(out.y).any()
    assert np.all(out.scale > 0)

    def smallest(weight, scale, **how):
        return pk.norm(jnp.ones((2, 128), BF16), weight, scale=scale, **how).y

    y = run(implementation, smallest, zeros[0], jnp.float32(2.0**-126))
    assert not wide(y).any()


@every_kernel
def test_no_thread_races_another(implementation):
    # Sums of 1,024 columns are in registers, of 512 not.
    x, _, weight, bias = inputs((7, 1536))
    norm = functools.partial(
        pk.norm, kind="layer", keep_groups=True, scale="row", tuning=FEW
    )
    grad = functools.partial(pk.norm_grad, keep_maxima=True, tuning=FEW)
    out = run(implementation, norm, x, weight, bias, detect_races=True)
    again = run(implementation, norm, x, weight, bias)
    assert_identical(out, again)
    arguments = out.groups, x, weight, bias
    out = run(implementation, grad, *arguments, detect_races=True)
    assert_identical(out, run(implementation, grad, *arguments))


@every_kernel
def test_vmap_and_scan_are_loops(implementation):
    x, _, weight, _ = inputs((2, 3, 256))

    def grads(x, weight, **how):
        out = pk.norm(x, weight, keep_groups=True, tuning=FEW, **how)
        return out.y, pk.norm_grad(out.groups, x, weight, tuning=FEW, **how)

    alone = run_each(implementation, grads, *((x, weight) for x in x))
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)

    def both(x, weight, **how):
        one = functools.partial(grads, weight=weight, **how)
        return jax.lax.map(one, x), jax.vmap(one)(x)

    assert_identical(run(implementation, both, x, weight), (expected, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (4099, 8192), (999, 11008)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_long_rows_on_a_gpu(shape, kind):
    x, _, weight, bias = inputs(shape, seed=shape[0])
    norm = functools.partial(pk.norm, kind=kind, keep_groups=True)
    out, expected = (run(i, norm, x, weight, bias) for i in ("mosaic", "reference"))
    assert_identical(out.groups, expected.groups)
    assert_rounded(out.y, wide(expected.y), BF16, slack=2**-8)
    grad = functools.partial(pk.norm_grad, kind=kind)
    arguments = out.groups, x, weight
    for more in ({}, {"bias": bias, "add": x}):
        both = [
            run(i, functools.partial(grad, **more), *arguments)
            for i in ("mosaic", "reference")
        ]
        assert_rounded(both[0].dx, wide(both[1].dx), BF16, slack=2**-8)
        for actual, sums in zip(*(out[1:3] for out in both), strict=True):
            if sums is not None:
                atol = 1e-4 * float(jnp.abs(sums).max())
                np.testing.assert_allclose(actual, sums, rtol=0, atol=atol)


@pytest.mark.parametrize("shape", [(2, 0, 128), (3, 100)])
def test_shapes_that_no_kernel_takes_have_the_references_result(shape):
    x, values, weight, _ = inputs(shape)
    norm = functools.partial(pk.norm, eps=EPS, keep_groups=True)
    out = jax.jit(norm)(x, weight)
    assert_rounded(out.y, expected_norm(values, weight, None, "rms"), BF16)
    assert out.largest.shape == shape[:-1]
    assert out.groups.scale.shape == (*shape[:-1], -(-shape[-1] // 16))
    grads = jax.jit(pk.norm_grad)(out.groups, x, weight)
    assert (grads.dx.shape, grads.dweight.shape) == (shape, shape[-1:])


def test_what_cannot_run_is_named():
    x = jnp.ones((4, 200), BF16)
    with pytest.raises(ValueError, match="multiples of 128 up to 12288 long, got 200"):
        pk.norm(x, implementation="mosaic")
    with pytest.raises(ValueError, match="rows must be bfloat16, got float32"):
        pk.norm_grad(x, x.astype(F32), implementation="mosaic")
    with pytest.raises(ValueError, match="one of rms, layer, got 'batch'"):
        pk.norm(x, kind="batch")
    with pytest.raises(ValueError, match="needs a scalar scale, got 'row'"):
        pk.norm(x, scale="row", copies="both")
    with pytest.raises(ValueError, match="needs a bfloat16 x, got groups"):
        pk.norm(pk.quantize_groups(x), keep_groups=True)


@pytest.mark.parametrize("implementation", ["reference", "mosaic"])
def test_what_does_not_go_together_is_named(implementation):
    x = jnp.ones((4, 256), BF16)
    norm = functools.partial(pk.norm, implementation=implementation)
    with pytest.raises(ValueError, match=r"weight must have the shape \(256,\), got"):
        norm(x, jnp.ones(512))
    with pytest.raises(ValueError, match=r"fewer axes than x of .*, got \(4, 256\)"):
        norm(x, jnp.ones((4, 256)))
    with pytest.raises(ValueError, match=r"bias must have the shape \(2, 256\), got"):
        norm(x.reshape(2, 2, 256), jnp.ones((2, 256)), jnp.ones(256))
    with pytest.raises(ValueError, match=r"add must have the shape \(4, 256\), got"):
        pk.norm_grad(x, x, add=x[:1], implementation=implementation)
    with pytest.raises(ValueError, match=r"scales must have the shape \(4, 16\), got"):
        norm(pk.quantize_groups(x, group=32))
    with pytest.raises(ValueError, match=r"dy must have the shape \(4, 256\), got"):
        pk.norm_grad(x, x[:1], implementation=implementation)
    with pytest.raises(ValueError, match=r"scale must be a scalar, got the shape"):
        norm(x, scale=jnp.ones(4))
