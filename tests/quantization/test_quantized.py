"""Tests quantize and dequantize against the oracle, and promised properties."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import oracle
from helpers.kernels import OPTIMIZED
from helpers.marks import slow, slow_except
from helpers.quantization import (
    FLOATS,
    FORMATS,
    GRANULARITIES,
    PER_BLOCK,
    PER_GROUP,
    PER_TENSOR,
    a_few_pairs,
    assert_same,
    check_scales,
    code_values,
    dequantized,
    either,
    every_format,
    every_granularity,
    inputs,
    quantized,
    reference,
    spread,
)
from hypothesis import given
from hypothesis import strategies as st

import coat_jax as coat


def check_linear(x, format, granularity):
    """Checks every bit of the scales, the codes and the dequantized array."""
    library, block = granularity
    q = quantized(x, format=format, granularity=library)
    scales, values = oracle.quantize(x, reference(format), block)
    check_scales(q, x, block, scales)
    assert q.codes.shape == x.shape
    assert q.codes.dtype == format.dtype
    assert q.exponent is None
    assert_same(code_values(q), values)
    back = oracle.dequantize(values, scales, block, None, reference(format))
    assert dequantized(q).dtype == x.dtype
    back = oracle.flush(oracle.flush(back).astype(x.dtype))
    np.testing.assert_array_equal(oracle.flush(np.asarray(dequantized(q))), back)


@pytest.mark.parametrize(
    ("format", "granularity"),
    slow_except(
        [(f, PER_GROUP) for f in FORMATS] + [(coat.E4M3, g) for g in GRANULARITIES],
        itertools.product(FORMATS, GRANULARITIES),
    ),
)
@given(data=st.data())
def test_linear_codes_are_the_oracles(format, granularity, data):
    check_linear(data.draw(inputs(granularity)), format, granularity)


@pytest.mark.parametrize("format", FLOATS, ids=repr)
def test_casts_round_to_nearest_even_and_saturate(rng, format):
    bits = rng.integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([bits, spread(rng, 500_000, 18), np.float32([465, 1e6, np.inf])])
    with np.errstate(invalid="ignore"):
        expected = reference(format).round(x)
    for encode in (format.encode, jax.jit(format.encode)):
        assert_same(np.asarray(encode(x)).astype(np.float32), expected)


def test_de8_is_the_dynamic_map():
    assert_same(np.asarray(coat.DE8.decode(jnp.arange(256))), oracle.de8_table())
    assert coat.DE8.dynamic_range == pytest.approx(oracle.DE8.dynamic_range)


@pytest.mark.parametrize("format", FLOATS, ids=repr)
@given(x=inputs())
def test_quantizing_twice_gives_the_same_codes_for_any_values(format, x):
    first = quantized(x, format=format, granularity=coat.PerGroup(16))
    back = np.asarray(dequantized(first))
    again = quantized(back, format=format, granularity=coat.PerGroup(16))
    normal = np.abs(back.astype(np.float32)) >= oracle.TINY
    assert_same(code_values(again)[normal], code_values(first)[normal])
    assert_same(np.asarray(dequantized(again))[normal], back[normal])


def test_quantizing_de8_twice_gives_the_same_codes_per_tensor(rng):
    """A float32 scale of the tensor keeps the codes.

    DE8's two largest values differ by only 0.7%, so a group's bfloat16 scale, which is
    rounded, could turn one into the other.
    """
    x = spread(rng, (64, 200))
    first = quantized(x, format=coat.DE8, granularity=coat.PerTensor())
    again = quantized(dequantized(first), format=coat.DE8, granularity=coat.PerTensor())
    np.testing.assert_array_equal(again.codes, first.codes)


@either
@every_format
def test_constant_groups_and_single_values(format, expand):
    values = np.float32([1e-30, -1e-30, 1e38, 3e38, -3e38, 0.0, 1.0, -3e-5])
    single = np.zeros((8, 16), np.float32)
    single[:, 5] = values
    for x in (single, np.repeat(values[:, None], 16, axis=1)):
        q = quantized(x, format=format, granularity=PER_GROUP[0], expand=expand)
        capped = np.clip(x, -(2.0**125), 2.0**125) if format is coat.DE8 else x
        np.testing.assert_allclose(dequantized(q), capped, rtol=0.01)
        if expand and format is not coat.DE8:
            np.testing.assert_array_equal(q.exponent, 255)


@either
@a_few_pairs
def test_a_poisoned_group_is_nan_and_leaves_others_alone(
    rng, format, granularity, expand
):
    library, block = granularity
    clean = spread(rng, (4, 35))
    poisoned = clean.copy()
    poisoned[0, 20], poisoned[2, 3], poisoned[2, 34] = np.nan, np.inf, -np.inf

    def fake(x):
        q = quantized(x, format=format, granularity=library, expand=expand)
        return np.array(dequantized(q))

    expected = fake(clean)
    places = [where for _, where in oracle.groups(clean.shape, block)]
    bad = [where for where in places if not np.isfinite(poisoned[where]).all()]
    assert len(bad) == {None: 1, (16,): 3, (2, 8): 3}[block]
    for where in bad:
        expected[where] = np.nan
    np.testing.assert_array_equal(fake(poisoned), expected)


@either
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf])
def test_no_poisoned_group_is_overlooked_in_a_large_array(rng, poison, expand):
    """XLA's own maximum overlooks NaN in some reductions of this size on CPUs."""
    x, bad = spread(rng, (64, 256)), np.zeros((64, 2), bool)
    for row, column in enumerate(rng.integers(0, 256, 64)):
        x[row, column], bad[row, column // 128] = poison, True
    for quantize in (coat.quantize, jax.jit(coat.quantize, static_argnames="expand")):
        q = quantize(x, expand=expand)
        np.testing.assert_array_equal(np.isnan(q.scale), bad)
        np.testing.assert_array_equal(np.isnan(q.dequantize()), np.repeat(bad, 128, 1))


@either
@every_granularity
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_arrays(shape, granularity, expand):
    q = quantized(jnp.zeros(shape), granularity=granularity[0], expand=expand)
    assert q.codes.shape == q.dequantize().shape == shape


@pytest.mark.parametrize("expand", [slow(False), True], ids=["linear", "expanded"])
@pytest.mark.parametrize(
    ("format", "granularity"),
    slow_except(
        [(coat.E4M3, PER_GROUP)],
        [(f, PER_GROUP) for f in FORMATS]
        + [(coat.E4M3, PER_TENSOR), (coat.E4M3, PER_BLOCK)],
    ),
)
def test_jit_changes_no_bit_of_the_codes(rng, format, granularity, expand):
    x = spread(rng, (16, 70))

    def quantize(x):
        return coat.quantize(
            x, format=format, granularity=granularity[0], expand=expand
        )

    eager, compiled = quantize(x), jax.jit(quantize, compiler_options=OPTIMIZED)(x)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    # Within one program nothing may cancel the conversion to 8 bits and back.
    together = jax.jit(lambda x: quantize(x).dequantize(), compiler_options=OPTIMIZED)(
        x
    )
    np.testing.assert_allclose(together, eager.dequantize(), rtol=1e-5 * expand)


@either
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        slow(coat.PerTensor(), (3, 8)),
        slow(coat.PerGroup(16), ()),
        slow(coat.PerGroup(16), (35,)),
        (coat.PerBlock(2, 8), (3, 20)),
    ],
)
def test_stacks_made_by_vmap_dequantize_and_scan(rng, granularity, shape, expand):
    x = spread(rng, (3, *shape))

    def quantize(x):
        return coat.quantize(x, granularity=granularity, expand=expand)

    stacked = jax.jit(jax.vmap(quantize))(x)
    each = jax.jit(lambda rows: [quantize(row).dequantize() for row in rows])(list(x))
    _, scanned = jax.lax.scan(lambda c, q: (c, q.dequantize()), None, stacked)
    mapped = jax.jit(jax.vmap(coat.dequantize))(stacked)
    for back in (jax.jit(coat.dequantize)(stacked), scanned, mapped):
        np.testing.assert_allclose(back, np.stack(each), rtol=1e-5 * expand)


@pytest.mark.parametrize(
    ("granularity", "part", "scales"),
    [
        (coat.PerGroup(16), lambda x: x[:, :16], r"\(32, 1\), got \(32, 2\)"),
        (coat.PerGroup(16), lambda x: x.T, r"\(32, 2\), got \(2, 32\)"),
        (coat.PerBlock(4, 8), lambda x: x[:2], r"\(1, 4\), got \(2, 4\)"),
        (coat.PerTensor(), lambda x: x[:, 4:8], r"\(1, 1\), got \(1, 0\)"),
    ],
)
def test_slices_that_cut_groups_are_refused(rng, granularity, part, scales):
    q = coat.quantize(spread(rng, (32, 32)), granularity=granularity)
    with pytest.raises(ValueError, match=f"needs scales {scales}: slice and transpose"):
        jax.tree.map(part, q).dequantize()


def test_rows_and_stacks_of_groups_dequantize(rng):
    q = coat.quantize(spread(rng, (32, 32)), granularity=coat.PerGroup(16))
    rows = jax.tree.map(lambda x: jnp.concatenate([x[2:4], x[:1]]), q)
    expected = np.asarray(q.dequantize())[[2, 3, 0]]
    np.testing.assert_array_equal(rows.dequantize(), expected)


def test_pytree_and_pickle_round_trips(rng):
    q = coat.quantize(spread(rng, (3, 35)), expand=True)
    leaves, structure = jax.tree.flatten(q)
    assert [leaf.shape for leaf in leaves] == [(3, 35), (3, 1), (3, 1)]
    for other in (structure.unflatten(leaves), pickle.loads(pickle.dumps(q))):
        assert jax.tree.structure(other) == structure
        np.testing.assert_array_equal(other.dequantize(), q.dequantize())
    assert q.nbytes == 3 * 35 + 3 * 2 + 3
    assert (q.shape, q.ndim, q.size) == ((3, 35), 2, 105)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: coat.quantize(jnp.arange(3)), "floating array, got dtype int32"),
        (lambda: coat.PerGroup(0), "PerGroup.size must be a positive int, got 0"),
        (lambda: coat.PerGroup(1.5), "PerGroup.size must be a positive int, got 1.5"),
        (lambda: coat.PerBlock(2, -8), "PerBlock.cols must be a positive int, got -8"),
        (
            lambda: coat.quantize(jnp.ones(3), granularity=coat.PerBlock(2, 8)),
            r"PerBlock\(rows=2, cols=8\) needs an array of two axes.*got \(3,\)",
        ),
    ],
)
def test_errors_name_the_value_and_the_rule(call, message):
    with pytest.raises(ValueError, match=message):
        call()
