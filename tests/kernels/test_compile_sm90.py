"""Tests programs compiled for an H200: no register spills, little memory in backward.

The tests need no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from coat_jax.layers import attention
from experiments.common import kernel_cases, layer_cases, sm90
from experiments.common.timing import OPTIONS
from experiments.kernels.resources import FAMILIES, RESULTS
from pallas_kernels import dispatch

_ROOT = Path(__file__).parents[2]
_RECORDED = json.loads(RESULTS.read_text())
# Other compilers assign registers differently, so they may spill this much.
_SPILL_BYTES = {"added, 128 x 192, together False, cluster m": 16}
_HOW = "python -m experiments.kernels.resources records what they take"


def compiled(family):
    """Returns the rows of a family, compiled by a process whose output is read."""
    command = [sys.executable, "-m", "experiments.kernels.resources", family]
    # The process must not look for a GPU.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def by_case(rows):
    return {(row["kernel"], row["shape"]): row for row in rows}


needs_compiler = pytest.mark.skipif(
    sm90.missing() is not None, reason=str(sm90.missing())
)


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_and_take_no_more_than_recorded(family):
    rows = compiled(family)
    assert rows
    recorded = by_case(r for r in _RECORDED["rows"] if r["family"] == family)
    assert by_case(rows).keys() == recorded.keys(), _HOW
    as_recorded = sm90.versions() == _RECORDED["compiled_by"]
    spills = {row["kernel"]: row["spill_bytes"] for row in rows if row["spill_bytes"]}
    assert spills.items() <= ({} if as_recorded else _SPILL_BYTES).items()
    if not as_recorded:
        return
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


@needs_compiler
def test_backward_takes_no_more_memory_than_bf16s(monkeypatch):
    monkeypatch.setattr(dispatch, "has_hopper", lambda: True)
    monkeypatch.setattr(attention, "_has_flash_attention", lambda q: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    sizes = {"hidden": 2048, "intermediate": 5504, "kv_heads": 16, "head_dim": 128}
    shape = layer_cases.Shape(seq=2048, batch=4, **sizes)
    x = shape.input()

    def temporaries(case):
        apply, state = layer_cases.layer(layer_cases.CASES[case], shape)
        vjp = jax.eval_shape(lambda state, x: jax.vjp(apply, state, x)[1], state, x)
        backward = sm90.compiled(lambda vjp, dy: vjp(dy), vjp, x, options=OPTIONS)
        return backward.memory_analysis().temp_size_in_bytes

    assert 0 < temporaries("coat") <= temporaries("bf16")
