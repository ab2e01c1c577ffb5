"""Tests the range expansion against the oracle, and its promised properties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import oracle
from helpers.marks import slow_except
from helpers.quantization import (
    FORMATS,
    GRANULARITIES,
    PER_GROUP,
    assert_same,
    check_scales,
    code_values,
    dequantized,
    every_format,
    inputs,
    quantized,
    reference,
    spread,
)
from hypothesis import given
from hypothesis import strategies as st

import coat_jax as coat


def check_expanded(x, format, granularity, expand=True) -> tuple[int, int]:
    """Checks all codes, and returns how many codes and powers are ambiguous.

    An ambiguous code or power is at a rounding boundary, where the oracle allows two.
    """
    library, block = granularity
    q = quantized(x, format=format, granularity=library, expand=expand)
    x, of = oracle.flush(x), reference(format)
    places = list(oracle.groups(x.shape, block))
    scales = {index: oracle.scale_of(x[at], of, block) for index, at in places}
    check_scales(q, x, block, scales)
    values = code_values(q)
    if expand is True:
        powers, loose_powers = check_powers(q, x, places, scales)
    else:
        assert (q.exponent, q.power) == (None, expand)
        powers, loose_powers = dict.fromkeys(scales, 16 * float(expand)), 0
    loose_codes = 0
    for index, where in places:
        low, high = oracle.expanded_bounds(x[where], scales[index], powers[index], of)
        same = np.abs(low) == np.abs(high)
        assert_same(values[where][same], low[same])
        size = np.abs(values[where])
        assert np.all((np.abs(low) <= size) & (size <= np.abs(high)))
        loose_codes += np.sum(~same)
    back = oracle.dequantize(values, scales, block, powers, of)
    rtol = 5e-5 if q.dtype == np.float32 else 2.0**-8
    np.testing.assert_allclose(oracle.flush(np.asarray(dequantized(q))), back, rtol)
    return loose_codes, loose_powers


def check_powers(q, x, places, scales) -> tuple[dict, int]:
    """Checks the power of each group, and returns all powers and a count.

    Returns:
      Each group's power k in sixteenths, by the group's index, and the number of groups
      for which the oracle allows two powers.
    """
    assert q.exponent.shape == q.scale.shape
    assert q.exponent.dtype == np.uint8
    actual, loose = {}, 0
    for index, where in places:
        least, most = oracle.power_bounds(x[where], scales[index], reference(q.format))
        actual[index] = int(np.asarray(q.exponent)[index])
        assert least <= actual[index] <= most
        loose += least != most
    return actual, loose


# Every pair of values of format, granularity and power occurs; power is per group or
# fixed.
PAIRS = [
    (format, granularity, [True, 3.0][(i + j) % 2])
    for i, format in enumerate(FORMATS)
    for j, granularity in enumerate(GRANULARITIES)
]
POWERED = "format", "granularity", "power"


@pytest.mark.parametrize(POWERED, slow_except([PAIRS[-1]], PAIRS))
@given(data=st.data())
def test_expanded_codes_are_the_oracles(format, granularity, power, data):
    check_expanded(data.draw(inputs(granularity)), format, granularity, power)


@pytest.mark.parametrize(POWERED, slow_except([PAIRS[i] for i in (0, 5, 7)], PAIRS))
def test_expansion_is_rarely_ambiguous(rng, format, granularity, power):
    """The oracle's tolerance covers a negligible part of the codes on ordinary data."""
    x = spread(rng, (8, 1000))
    loose_codes, loose_powers = check_expanded(x, format, granularity, power)
    groups = sum(1 for _ in oracle.groups(x.shape, granularity[1]))
    assert loose_codes <= 5e-4 * x.size
    assert loose_powers <= 5e-3 * groups


@pytest.mark.parametrize(
    ("format", "power"), [(coat.E4M3, 0.3), (coat.E5M2, 7.75), (coat.DE8, 2)]
)
def test_any_positive_number_is_the_power_of_all_groups(rng, format, power):
    check_expanded(spread(rng, (4, 300)), format, PER_GROUP, power)


@every_format
def test_power_one_is_no_expansion(format):
    def program(expand):
        quantize = functools.partial(coat.quantize, format=format, expand=expand)
        jaxpr, out = jax.make_jaxpr(quantize, return_shape=True)(jnp.ones((3, 200)))
        return str(jaxpr), jax.tree.structure(out)

    linear = program(False)
    assert all(program(one) == linear for one in (1, 1.0, np.float32(1)))
    assert program(2.0) != linear


@pytest.mark.parametrize("power", [0, 0.0, -1.5, float("inf"), float("nan")])
def test_other_powers_are_refused(power):
    with pytest.raises(ValueError, match=f"positive number, got {power}"):
        coat.quantize(jnp.ones(3), expand=power)


@pytest.mark.parametrize(("format", "power"), [(coat.E4M3, 3.0), (coat.E5M2, 5.5)])
def test_a_fixed_power_gives_the_same_codes_twice(rng, format, power):
    """A fixed power depends on no value of a group but its amax."""
    x = rng.standard_normal((64, 200)).astype(np.float32)
    first = quantized(x, format=format, expand=power)
    again = quantized(dequantized(first), format=format, expand=power)
    assert_same(code_values(again), code_values(first))
    np.testing.assert_array_equal(again.scale, first.scale)


@pytest.mark.parametrize("format", slow_except([coat.E4M3], FORMATS), ids=repr)
def test_the_formats_power_suits_normal_numbers(rng, format):
    """Half the power, twice the power and power 1 have larger errors."""
    x = rng.standard_normal((64, 256)).astype(np.float32)

    def error(power: float) -> float:
        back = dequantized(quantized(x, format=format, expand=power))
        return float(np.mean(np.square(back - x)))

    best = error(format.power)
    assert best < min(error(format.power / 2), error(format.power * 2))
    assert best < 0.75 * error(1)


@pytest.mark.parametrize("format", slow_except([coat.E4M3], FORMATS), ids=repr)
@given(x=inputs())
def test_expansion_loses_nothing_normal(format, x):
    q = quantized(x, format=format, granularity=coat.PerGroup(16), expand=True)
    normal = np.abs(x.astype(np.float32)) >= oracle.TINY
    assert np.all(code_values(q)[normal] != 0)
    assert np.all(np.asarray(dequantized(q))[normal] != 0)
    assert np.all(code_values(q)[~normal] == 0)


def test_expansion_reduces_the_error_of_wide_groups(rng):
    """The error is 10 times smaller on second-moment-like data (COAT, section 4.2)."""
    x = np.square(spread(rng, (64, 128), 6))

    def error(expand: bool) -> float:
        back = dequantized(quantized(x, expand=expand))
        return float(np.sqrt(np.mean(np.square(np.log((back + 1e-30) / x)))))

    assert error(True) < 0.1 * error(False)
