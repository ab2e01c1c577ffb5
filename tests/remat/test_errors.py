"""Tests that fp8_remat recomputes nothing that makes rounding errors grow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.gradients import (
    GROUP,
    ROW,
    assert_close,
    cosine,
    fake,
    value_and_vjp,
)
from helpers.models import normal
from helpers.recomputed import arguments, between, by_hand, copies, from_inputs

from coat_jax.remat.api import fp8_remat


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
    """The rounding errors of a copy of x could be all there is in sums with constants.

    The numbers are all near 30, and each sum is near zero, so the sum has a copy, too.
    """

    def block(params, x):
        shift, w, out = params
        y = jnp.sin(fn(x, shift))  # Its gradient needs the cosine of the sum.
        return fn(x, shift) @ w + x @ out + y @ w

    params = jnp.full(64, -30.0), normal(1, 64, 64), normal(2, 64, 64)
    x, dy = 30 + normal(3, 96, 64), normal(4, 96, 64)
    # For a multiple of x these are x, and the sine and the cosine of the multiple.
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


def test_logarithms_of_what_is_kept_exactly_are_taken_again():
    """Logarithms are recomputed, as backward divides by their exact arguments.

    Therefore the arguments are saved unquantized.
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

    From the result, which is close to one, they would be rounding alone.
    """
    params, x, dy = arguments(jnp.tanh, scale=0.6)
    light = fp8_remat(between(jnp.tanh))

    def gradient(fn):
        return value_and_vjp(fn, dy, params, x)[1][0][0]

    assert cosine(gradient(light), gradient(between(jnp.tanh))) > 0.998
