"""Tests the benchmark of processes that share a compilation cache."""

import pytest

from experiments.bench import starts
from experiments.common.results import read_results


@pytest.mark.slow  # It starts processes.
def test_a_second_start_compiles_less(tmp_path):
    out = tmp_path / "starts.json"
    starts.main(["--cases", "bf16", "--batch", "1", "--out", str(out)])
    first, second = read_results(out)["rows"]
    assert (first["start"], second["start"]) == ("first", "second")
    assert second["compile_s"] < first["compile_s"] / 2
