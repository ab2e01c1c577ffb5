"""Tests that residuals are recomputed from FP8 copies unless rounding errors grow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import oracle
from helpers.gradients import (
    FP8,
    GROUP,
    ROW,
    assert_close,
    compiled,
    cosine,
    distances,
    fake,
    value_and_vjp,
)
from helpers.marks import slow_except
from helpers.models import normal
from helpers.recomputed import arguments, between, by_hand, copies, from_inputs
from jax.ad_checkpoint import checkpoint_name

import coat_jax as coat
from coat_jax.layers.functional import geglu, layer_norm, rms_norm, swiglu
from coat_jax.remat.api import fp8_remat

FORMATS = {coat.E4M3: oracle.E4M3, coat.E5M2: oracle.E5M2, coat.DE8: oracle.DE8}


def halves(gate):
    return lambda a: gate(*jnp.split(a, 2, axis=-1))


def masked(a):
    keep = jax.random.bernoulli(jax.random.key(5), 0.8, a.shape)
    return jnp.where(keep, jax.nn.silu(a) / 0.8, 0.0)


INPUTS = {
    "gelu": nn.gelu,
    "silu": nn.silu,
    "jitted": jax.jit(lambda a: jnp.square(jax.nn.silu(a))),
    "swiglu": halves(swiglu),
    "geglu": halves(geglu),
    "dropout": masked,
    "bias": lambda a: nn.gelu(a + jnp.linspace(-1, 1, 128)),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "squared relu": lambda a: jnp.square(nn.relu(a)),
    "mish": lambda a: a * jnp.tanh(jnp.tanh(a) + 1),
}


@pytest.mark.parametrize("name", slow_except(["gelu", "swiglu", "jitted"], INPUTS))
def test_one_copy_of_what_goes_in_is_kept(name):
    """The matmul's output has a single copy, even if it holds both gate and up."""
    pointwise = INPUTS[name]
    params, x, dy = arguments(pointwise)
    light = fp8_remat(between(pointwise))
    assert copies(light, params, x) == [(96, 64), (96, 128)]
    a = x @ params[0]
    # If the result and the derivative depend on the same part of the input, this part
    # is saved.
    shift = jnp.linspace(-1, 1, 128) if name == "bias" else 0.0
    saved = {"bias": a + shift, "squared relu": nn.relu(a)}.get(name, a)
    _, actual = value_and_vjp(light, dy, params, x)
    expected = from_inputs(pointwise, params, x, dy, fake(saved, GROUP) - shift)
    assert_close(actual, expected, 2e-5)


@pytest.mark.parametrize(
    ("name", "format", "group"),
    [("gelu", coat.E5M2, 32), ("swiglu", coat.DE8, 16), ("gelu", coat.E4M3, 32)],
)
def test_formats_and_groups_are_those_asked_for(name, format, group):
    pointwise = INPUTS[name]
    params, x, dy = arguments(pointwise)
    light = fp8_remat(between(pointwise), format=format, group=group)
    _, actual = value_and_vjp(light, dy, params, x)
    h, vjp = jax.vjp(
        pointwise, jnp.asarray(fake(x @ params[0], group, FORMATS[format]))
    )
    x8 = fake(x, ROW, FORMATS[format])
    assert_close(actual, by_hand(params, x8, dy, h, lambda dh: vjp(dh)[0]), 2e-5)


def test_relu_keeps_its_result_and_an_exact_mask():
    """The matmul reads the result, so its copy needs fewer scales than the input's."""
    params, x, dy = arguments(nn.relu)
    light = fp8_remat(between(nn.relu))
    assert copies(light, params, x) == [(96, 64), (96, 128)]
    a = x @ params[0]
    _, actual = value_and_vjp(light, dy, params, x)
    h = fake(nn.relu(a), ROW)
    expected = by_hand(params, fake(x, ROW), dy, h, lambda dh: jnp.where(a > 0, dh, 0))
    assert_close(actual, expected, 2e-5)


def test_two_products_of_a_gate_have_a_copy_each():
    def fn(params, x):
        return (jax.nn.silu(x @ params[0]) * (x @ params[1])) @ params[2]

    params = [normal(i, 64, 64, scale=0.2) for i in range(3)]
    x, dy = normal(3, 96, 64), normal(4, 96, 64)
    light = fp8_remat(fn)
    assert copies(light, params, x) == [(96, 64)] * 3
    _, (dparams, dx) = value_and_vjp(light, dy, params, x)
    gate, up = (jnp.asarray(fake(x @ w, GROUP)) for w in params[:2])
    h, vjp = jax.vjp(swiglu, gate, up)
    slopes = vjp(dy @ params[2].T)
    x8 = fake(x, ROW)
    expected = [*(x8.T @ d for d in slopes), h.T @ dy]
    assert_close(dparams, expected, 2e-5)
    assert_close(dx, slopes[0] @ params[0].T + slopes[1] @ params[1].T, 2e-5)


def linen_norm(norm):
    return lambda scale, x: norm.apply({"params": {"scale": scale}}, x)


NORMS = {
    "rms_norm": lambda scale, x: rms_norm(x, scale),
    "jitted": jax.jit(lambda scale, x: rms_norm(x, scale)),
    "nn.RMSNorm": linen_norm(nn.RMSNorm(epsilon=1e-5)),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_rms_norm_keeps_one_copy_and_an_exact_statistic(name, dtype):
    def fn(params, x):
        scale, w = params
        return NORMS[name](scale, x).astype(jnp.float32) @ w

    scale, w = 1 + normal(1, 64, scale=0.1), normal(2, 64, 32, scale=0.2)
    x, dy = normal(3, 96, 64, dtype=dtype), normal(4, 96, 32)
    light = fp8_remat(fn)
    rows = coat.residual_report(light, (scale, w), x).rows
    assert [r.shape for r in rows if r.dtype in FP8] == [(96, 64)]
    assert all(r.nbytes <= 96 * 64 for r in rows if not r.is_argument)

    _, ((dscale, dw), dx) = value_and_vjp(light, dy, (scale, w), x)
    wide = np.asarray(x).astype(np.float32)
    x8 = fake(wide, GROUP)
    r = 1 / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    h = (x8 * r * scale).astype(dtype if name != "nn.RMSNorm" else jnp.float32)
    dh = (dy @ w.T).astype(h.dtype).astype(jnp.float32)
    dn = dh * scale
    mean = np.mean(dn * x8, axis=-1, keepdims=True)
    tolerance = 2e-5 if dtype == jnp.float32 else 1e-2
    assert_close(dw, h.T.astype(jnp.float32) @ dy, tolerance)
    assert_close(dscale, (dh * x8 * r).sum(axis=0), tolerance)
    assert_close(dx, (r * (dn - x8 * r * r * mean)).astype(dtype), tolerance)


@pytest.mark.parametrize(
    ("norm", "count"),
    [
        (lambda scale, x: layer_norm(x, scale), 1),
        (linen_norm(nn.LayerNorm(use_bias=False)), 2),
    ],
    ids=["layer_norm", "nn.LayerNorm"],
)
def test_layer_norm_keeps_what_it_centered(norm, count):
    """Rows are far from zero, so x - mean(x) of a copy would be rounding errors."""

    def fn(params, x):
        return jnp.square(norm(params[0], x)) @ params[1]

    params = 1 + normal(1, 64, scale=0.1), normal(2, 64, 32, scale=0.2)
    x = normal(3, 96, 64) + 100
    light = fp8_remat(fn)
    assert copies(light, params, x) == [(96, 64)] * count

    def gradient(fn):
        return compiled(jax.grad(lambda p: jnp.sum(jnp.sin(fn(p, x)))), params)

    assert cosine(gradient(light), gradient(fn)) > 0.998


def test_what_where_leaves_wide_is_computed_from_exactly():
    def pointwise(a):
        return nn.gelu(checkpoint_name(a, "inside"))

    params, x, dy = arguments(pointwise)
    light = fp8_remat(between(pointwise), where=lambda r: r.name != "inside")
    assert copies(light, params, x) == [(96, 64)]
    _, actual = value_and_vjp(light, dy, params, x)
    expected = from_inputs(pointwise, params, x, dy, x @ params[0])
    assert_close(actual, expected, 2e-5)


def test_many_operations_are_not_repeated():
    def pointwise(a):
        for _ in range(40):
            a = a * jnp.tanh(a)
        return a

    params, x, _ = arguments(pointwise)
    actual = copies(fp8_remat(between(pointwise)), params, x)
    assert 5 <= len(actual) <= 12  # There are some 80 residuals.


def test_one_copy_serves_what_is_rounded_stochastically():
    params, x, dy = arguments(INPUTS["swiglu"])
    fn = between(INPUTS["swiglu"])

    def gradient(key):
        return value_and_vjp(fp8_remat(fn, key=key), dy, params, x)[1]

    first, again, other = (gradient(jax.random.key(k)) for k in (0, 0, 1))
    assert_close(first, again, 0)
    assert 0.99 < cosine(first, other) < 1 - 1e-6
    assert copies(fp8_remat(fn, key=jax.random.key(0)), params, x) == [
        (96, 64),
        (96, 128),
    ]


def exact_gelu(a):
    return nn.gelu(a, approximate=False)


def test_exact_gelu_keeps_its_input():
    """The exponential of the negative square is recomputed from the input's copy."""
    args = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arguments(exact_gelu))
    params, x, dy = args
    light = fp8_remat(between(exact_gelu))
    assert copies(light, params, x) == [(96, 64), (96, 128)]
    _, actual = value_and_vjp(light, dy, params, x)
    saved = fake(x @ params[0], GROUP).astype(jnp.bfloat16)
    expected = from_inputs(exact_gelu, params, x, dy, saved)
    assert cosine(actual, expected) > 0.999


def test_no_exponential_of_a_copy_is_taken():
    grow = lambda a: a * jnp.exp(a / 4)  # noqa: E731
    params, x, dy = arguments(grow)
    light = fp8_remat(between(grow))
    assert copies(light, params, x) == [(96, 64), (96, 128), (96, 128)]
    a = x @ params[0]
    _, actual = value_and_vjp(light, dy, params, x)
    a8, e8 = fake(a, GROUP), fake(jnp.exp(a / 4), GROUP)
    slope = e8 + a8 * e8 / 4
    expected = by_hand(params, fake(x, ROW), dy, a8 * e8, lambda dh: dh * slope)
    assert_close(actual, expected, 2e-5)


def test_sums_of_two_arrays_are_kept():
    """Sums are saved, because they may cancel if each term is rounded by itself."""

    def fn(params, x):
        a, b = x @ params[0], x @ params[1]
        return (a - b) @ params[2] + jnp.sum(jnp.square(a)) + jnp.sum(jnp.square(b))

    first = normal(1, 64, 64, scale=0.2)
    params = first, first + normal(2, 64, 64, scale=1e-3), normal(5, 64, 64)
    x, dy = normal(3, 96, 64), normal(4, 96, 64)
    light = fp8_remat(fn)
    assert copies(light, params, x) == [(96, 64)] * 4
    _, (dparams, _) = value_and_vjp(light, dy, params, x)
    difference = fake(x @ params[0] - x @ params[1], ROW)
    assert_close(dparams[2], difference.T @ dy, 2e-5)


def shifted(x, shift):
    return x + shift


def centered(x, shift):
    return x - (-shift)


def centered_by_a_number(x, shift):
    return x - 30.0


def squared(x, shift):
    return jnp.square(x) - 900.0


def factored(x, shift):
    return x * x - 30 * x


def scaled_before(x, shift):
    return 2.0 * x + 2 * shift


def moments(x):
    return x.mean(-1, keepdims=True), jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def scaled_by_a_mean(x, shift):
    return x * moments(x)[0] - 900.0


def scaled_by_roots_of_others(x, shift):
    return x * moments(x[:, ::-1] - 30)[1] + shift


def divided_by_roots_of_squares(x, shift):
    r = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True))
    return 30 * x * r + shift


def less_the_mean_of_others(x, shift):
    mean, r = moments(x - 30)
    return (x - mean) * r - 30.0


@pytest.mark.parametrize(
    "fn",
    [
        shifted,
        centered,
        centered_by_a_number,
        squared,
        factored,
        scaled_before,
        scaled_by_a_mean,
        scaled_by_roots_of_others,
        divided_by_roots_of_squares,
        less_the_mean_of_others,
    ],
)
def test_what_may_cancel_has_a_copy(fn):
    """A sum of a copy of x and a constant could consist of rounding errors alone.

    The numbers are all near 30, and each sum is near zero, so the sum has a copy, too.
    """

    def block(params, x):
        shift, w, out = params
        y = jnp.sin(fn(x, shift))  # Its gradient needs the cosine of the sum.
        return fn(x, shift) @ w + x @ out + y @ w

    params = jnp.full(64, -30.0), normal(1, 64, 64), normal(2, 64, 64)
    x, dy = 30 + normal(3, 96, 64), normal(4, 96, 64)
    # A multiple of x takes three: x, and the sine and the cosine of the multiple.
    assert len(copies(fp8_remat(block), params, x)) > 3
    if fn is not less_the_mean_of_others:
        return
    _, (plain, _) = value_and_vjp(block, dy, params, x)
    _, (light, _) = value_and_vjp(fp8_remat(block), dy, params, x)
    np.testing.assert_array_less(
        np.linalg.norm(light[1] - plain[1]), 0.1 * np.linalg.norm(plain[1])
    )


@pytest.mark.parametrize("fn", [jax.nn.silu, jax.nn.gelu, jnp.tanh, nn.sigmoid])
def test_sums_that_cannot_cancel_are_computed_from_the_copy(fn):
    def block(w, x):
        h = x @ w[0]
        return fn(h) @ w[1] + jnp.square(h) @ w[1]

    w, x = [normal(1, 64, 128), normal(2, 128, 64)], normal(3, 96, 64)
    assert copies(fp8_remat(block), w, x) == [(96, 64), (96, 128)]


def test_a_norms_bias_is_added_to_the_copy_again():
    """The error is small compared with the unit variance of normalized numbers."""

    def fn(params, x):
        scale, bias, w = params
        centered = x - x.mean(-1, keepdims=True)
        y = centered * jax.lax.rsqrt(
            jnp.square(centered).mean(-1, keepdims=True) + 1e-6
        )
        return (y * scale + bias) @ w

    params = normal(1, 64), normal(2, 64), normal(3, 64, 64)
    assert copies(fp8_remat(fn), params, normal(4, 96, 64)) == [(96, 64)]


@pytest.mark.parametrize(("fn", "count"), [(jnp.exp, 2), (jnp.sin, 3)])
def test_what_makes_errors_grow_has_a_copy(fn, count):
    """The input has a copy, and so has the exponential, or the sine and the cosine."""

    def pointwise(a):
        return jnp.square(a) * fn(a)

    params, x, _ = arguments(pointwise)
    light = fp8_remat(between(pointwise))
    assert copies(light, params, x) == [(96, 64), *[(96, 128)] * count]


def products(a):
    for _ in range(6):
        a = a * a
    return a


def running_products(a):
    repeated = jnp.broadcast_to(a, (64, *a.shape))
    return jnp.sum(jnp.cumprod(repeated, axis=0), axis=0)


@pytest.mark.parametrize("power", [products, running_products])
def test_errors_of_many_factors_do_not_add_up(power):
    """A power of a copy would have 64 times its error: 0.99 would be 1."""

    def fn(w, x):
        return power(jax.nn.sigmoid(x @ w + 4))

    w, x, dy = normal(1, 64, 128, scale=0.1), normal(2, 96, 64), normal(3, 96, 128)
    actual, expected = (value_and_vjp(f, dy, w, x)[1] for f in (fp8_remat(fn), fn))
    assert max(distances(actual, expected)) < 0.1


def test_logarithms_of_what_is_kept_exactly_are_taken_again():
    """Logarithms are recomputed from their arguments, which are saved unquantized.

    The arguments are exact because the backward pass divides by them.
    """

    def pointwise(a):
        return jnp.square(a) * jnp.log(1 + jnp.square(a))

    params, x, dy = arguments(pointwise)
    light = fp8_remat(between(pointwise))
    assert copies(light, params, x) == [(96, 64), (96, 128)]
    a = x @ params[0]
    a8, denominator = fake(a, GROUP), 1 + a * a
    h = a8**2 * np.log(denominator)
    slope = 2 * a8 * np.log(denominator) + a8**2 * 2 * a8 / denominator
    _, actual = value_and_vjp(light, dy, params, x)
    expected = by_hand(params, fake(x, ROW), dy, h, lambda dh: dh * slope)
    assert_close(actual, expected, 2e-5)


def test_saturated_slopes_follow_from_what_goes_in():
    """Slopes are recomputed from the input.

    Slopes from the result, which is close to one, would be rounding errors alone.
    """
    params, x, dy = arguments(jnp.tanh, scale=0.6)
    light = fp8_remat(between(jnp.tanh))

    def gradient(fn):
        return value_and_vjp(fn, dy, params, x)[1][0][0]

    assert cosine(gradient(light), gradient(between(jnp.tanh))) > 0.998
