"""Tests of `fp8_remat` on random programs, against the same programs without FP8.

They run in a process of their own, because codes are float16 there.
"""

import json
import subprocess
import sys

import pytest
from helpers.marks import slow


@pytest.mark.parametrize(("first", "programs"), [(0, 12), slow(10_000, 1000)])
def test_random_programs_agree_with_exact_ones(tmp_path, first, programs):
    path = tmp_path / "rewrites.json"
    program = [sys.executable, "-m", "experiments.rewrites.rewrites"]
    options = ["--first-seed", first, "--programs", programs, "--out", path]
    command = [*program, *map(str, options)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    results = json.loads(path.read_text())
    assert results["rows"][0]["programs"] == programs
    assert not results["wrong"], ended.stderr
    assert ended.returncode == 0
