"""Tests the benchmark of compile times on tiny layers."""

import json

import pytest

from experiments.bench import compile as bench
from experiments.bench import compile_case
from experiments.common import sm90
from experiments.common.layer_cases import Shape

_SIZES = {
    "hidden": 256,
    "seq": 256,
    "batch": 2,
    "intermediate": 256,
    "kv_heads": 4,
    "head_dim": 64,
}
needs_compiler = pytest.mark.skipif(
    sm90.missing() is not None, reason=str(sm90.missing())
)


def row(case, cpu_s, gpus=1, layers=32):
    seconds = dict.fromkeys([f"{stage}_cpu_s" for stage in compile_case.STAGES], 1.0)
    counts = {"kernel_calls": 2, "kernels": 1}
    names = {"case": case, "gpus": gpus, "layers": layers, "cpu_s": cpu_s}
    return names | seconds | counts


@pytest.mark.slow  # Tests of remat say that they are traced once.
def test_further_layers_are_traced_in_less_time_than_the_first(monkeypatch):
    monkeypatch.setattr(compile_case, "_FURTHER", 2)
    actual = compile_case.traces(Shape(**_SIZES))
    assert actual["further_trace_s"] < actual["first_trace_s"]
    assert actual["functions"] > actual["files"] > 10


def test_bars_compare_with_a_remat_on_as_many_gpus():
    rows = [row("bf16, remat", 10.0), row("both", 20.0), row("both", 90.0, gpus=2)]
    traced = {"case": "trace", "first_trace_s": 0.1, "further_trace_s": 0.1}
    bars = bench.bars([*rows, traced])
    assert [(bar.measured, bar.holds) for bar in bars] == [
        (2.0, True),
        (0.1, True),
        (0.1, False),
    ]
    assert bench.table([*rows, traced]).row_count == 3


def test_kernels_are_counted_by_their_hashes():
    call = 'custom_call_target="mosaic_gpu_v2", {{kernel_hash = "{}", module = "M"}}\n'
    text = "".join(map(call.format, ["a", "b", "a"]))
    assert compile_case.kernels(text) == {"kernel_calls": 3, "kernels": 2}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_step_is_compiled_in_a_process_of_its_own(gpus):
    one, two = (
        bench.measured({"case": "both", "gpus": gpus, "layers": layers} | _SIZES)
        for layers in (1, 2)
    )
    assert two["kernel_calls"] > 1.5 * one["kernel_calls"]
    # The first layer has another place in the model.
    assert one["kernels"] <= two["kernels"] <= one["kernels"] + 4
    stages = sum(two[f"{stage}_cpu_s"] for stage in compile_case.STAGES)
    assert two["cpu_s"] == pytest.approx(stages)


@pytest.mark.slow
@needs_compiler
def test_a_command_line_writes_rows_and_bars(tmp_path):
    out = tmp_path / "results.json"
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in _SIZES.items()]
    options = ["--cases", "bf16", "--gpus", "1", "--layers", "1", "--out", str(out)]
    bench.main([*options, *sizes])
    written = json.loads(out.read_text())
    assert [row["case"] for row in written["rows"]] == ["bf16", "trace"]
    assert len(written["bars"]) == 2
