"""Tests the benchmark of attention's kernels."""

import numpy as np
import pytest
from helpers.attention import oracle

from experiments.bench import attention
from experiments.bench.attention import Case
from pallas_kernels.dispatch import operations


@pytest.mark.parametrize("window", [None, 5, 16, 40])
def test_operations_of_scores_that_count(window):
    case = Case(head_dim=128, seq=16, batch=3, window=window)
    distance = np.arange(16)[:, None] - np.arange(16)
    count = np.sum((distance >= 0) & (distance < (window or 16)))
    assert case.flops(2) == 2 * 2 * count * 128 * 3 * 32


def test_documents_of_packed_sequences():
    """Positions attend within their documents, which differ in length."""
    case = Case(head_dim=128, seq=16, batch=3, documents=4)
    ids = case.ids()
    assert all(sorted(set(sequence)) == [0, 1, 2, 3] for sequence in ids.tolist())
    lengths = [sequence.count(j) for sequence in ids.tolist() for j in range(4)]
    count = sum(length * (length + 1) // 2 for length in lengths)
    assert case.flops(2) == 2 * 2 * count * 128 * 32


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_documents_of_packed_sequences_in_jax(softcap):
    case = Case(head_dim=128, seq=16, batch=2, documents=3, softcap=softcap)
    q, k, v, do = case.arrays()
    actual = attention._of_jax(case, "xla", q, k, v)
    expected = next(attention._in_float64(case, q, k, v, do))
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, atol=0.03)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_all_tiles_fit_the_measured_sequences(head_dim):
    named = attention.tunings(head_dim)
    assert named.pop("default") == attention.Tuning.of(head_dim)
    assert named
    for tuning in named.values():
        assert tuning != attention.Tuning.of(head_dim)
        assert 2048 % tuning.step == 0


@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_check_in_float64_is_the_one_of_the_tests(head_dim):
    case = Case(head_dim=head_dim, seq=16, batch=1, softcap=1.5, window=5, documents=2)
    arrays = case.arrays()
    masks = {"window": 5, "ids": case.ids()}
    expected = oracle(*arrays, scale=head_dim**-0.5, softcap=1.5, **masks)
    actual = attention._in_float64(case, *arrays)
    for x, y in zip(actual, expected[:1] + expected[2:], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


@pytest.mark.slow
def test_a_case_is_measured_where_it_runs():
    """Kernels fail without a GPU, and their rows say so."""
    case = Case(head_dim=256, seq=128, batch=1, softcap=50.0)
    rows = attention.measured(case, True, {"calls": 1, "rounds": 1})
    assert {row["passes"] for row in rows} == {"forward", "forward and backward"}
    for row in rows:
        assert bool(row["error"]) == (row["of"] == "default")
        assert row["error"] or row["ms"] > 0
    assert attention.bars(rows) == []
    assert attention.table(rows).row_count == 4


def test_the_case_names_the_kernel_that_it_times():
    case = Case(head_dim=128, seq=128, batch=1)
    arrays = case.arrays()
    explained = operations.explain(
        lambda *arrays: attention._passes(case, "mosaic", None, *arrays), *arrays
    )
    names = [choice.operation for choice in explained.choices]
    assert names == ["attention", "attention_grad"]
    assert {choice.implementation for choice in explained.choices} == {"mosaic"}
