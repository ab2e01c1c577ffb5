"""Tests of `fp8_remat` on random programs, against the same programs without FP8.

The programs run in their own processes, because codes are float16 in these.
"""

import json
import os
import subprocess
import sys

import pytest
from helpers.marks import slow

from experiments.rewrites import workers
from experiments.rewrites.verdicts import Judged, Outcome

_FATAL = 5


def _run(path, *options):
    program = [sys.executable, "-m", "experiments.rewrites.rewrites"]
    command = [*program, "--out", path, *options]
    ended = subprocess.run(
        list(map(str, command)), check=False, capture_output=True, text=True
    )
    return ended, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("first", "programs", "processes"), [(0, 1, 1), slow(10_000, 1000, 2)]
)
def test_random_programs_agree_with_exact_ones(tmp_path, first, programs, processes):
    options = ["--first-seed", first, "--programs", programs, "--processes", processes]
    ended, results = _run(tmp_path / "rewrites.json", *options)
    assert results["rows"][0]["programs"] == programs
    assert not results["wrong"], ended.stderr
    assert ended.returncode == 0


def test_results_of_no_time_say_that_no_program_ran(tmp_path):
    ended, results = _run(tmp_path / "rewrites.json", "--seconds", 1e-6)
    assert results["seeds"]["programs"] == 1000
    assert results["seeds"]["programs that ran"] == 0
    assert ended.returncode == 1


def _judge_or_die(connection):
    while True:
        seed = connection.recv()
        if seed == _FATAL:
            os._exit(3)
        connection.send(Outcome(seed, ("jit",), Judged("within the bound")))


def test_a_process_that_dies_is_an_error_of_its_program(monkeypatch):
    monkeypatch.setattr(workers, "_judge", _judge_or_die)
    results = sorted(workers.outcomes(range(20), processes=2))
    assert [outcome.seed for outcome in results] == [*range(20)]
    wrong = [(seed, judged.said) for seed, _, judged in results if judged.is_wrong]
    assert wrong == [(_FATAL, "its process ended with exit code 3")]
