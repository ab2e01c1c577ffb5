"""Tests the benchmark of processes that share a compilation cache."""

import pytest

from experiments.bench import starts
from experiments.common.results import read_results


@pytest.mark.slow  # It starts processes.
def test_a_second_start_compiles_less(tmp_path):
    out = tmp_path / "starts.json"
    sizes = ["--layers", "1", "--batch", "1"]
    starts.main(["--cases", "bf16", *sizes, "--out", str(out)])
    first, second = read_results(out)["rows"]
    assert (first["start"], second["start"]) == ("first", "second")
    assert second["compile_s"] < first["compile_s"] / 2
    assert first["model"] == "124m, 1 layers"
    assert first["step_s"] > 0
