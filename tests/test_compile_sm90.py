"""Every kernel compiles for an H200, without spills, and takes no more than it did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import kernel_cases, sm90
from experiments.kernel_resources import FAMILIES, RESULTS

_ROOT = Path(__file__).parent.parent
_RECORDED = json.loads(RESULTS.read_text())
_HOW = "python -m experiments.kernel_resources records what they take"


def compiled(family):
    """The rows of a family, compiled by a process of its own: it reads its output."""
    command = [sys.executable, "-m", "experiments.kernel_resources", family]
    # A GPU that is there is not looked for.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def by_case(rows):
    return {(row["kernel"], row["shape"]): row for row in rows}


@pytest.mark.skipif(sm90.missing() is not None, reason=str(sm90.missing()))
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_and_take_no_more_than_recorded(family):
    rows = compiled(family)
    assert rows
    assert [row for row in rows if row["spill_bytes"]] == []
    recorded = by_case(r for r in _RECORDED["rows"] if r["family"] == family)
    assert by_case(rows).keys() == recorded.keys(), _HOW
    if sm90.versions() != _RECORDED["compiled_by"]:
        return  # Other compilers assign registers in other ways.
    grown = [
        (row, recorded[case])
        for case, row in by_case(rows).items()
        for resource in ("kernels", "registers", "shared_bytes")
        if row[resource] > recorded[case][resource]
    ]
    assert not grown, _HOW


def test_all_families_are_recorded_without_spills():
    assert {row["family"] for row in _RECORDED["rows"]} == set(FAMILIES)
    measured = {case.kernel for case in kernel_cases.elementwise((8192, 4096))}
    assert measured <= {row["kernel"] for row in _RECORDED["rows"]}
    assert all(row["spill_bytes"] == 0 for row in _RECORDED["rows"])
