"""Tests the benchmark of grouped matmuls in its small form."""

import functools
import itertools
import json

import jax
import pytest
from helpers.marks import slow

import coat_jax as coat
from experiments.bench import moe, moe_layers
from experiments.common import profiling
from pallas_kernels.dispatch import devices, stand_ins

SHAPE = moe.Shape(256, 4, 256, 512)


@pytest.mark.parametrize("case", ["forward", slow("input_gradient"), "weight_gradient"])
def test_programs_compute_the_matmuls_of_a_shape(case):
    rows, experts, k, n = SHAPE
    size = {"forward": rows * n, "input_gradient": rows * k}.get(case, experts * n * k)
    programs = list(moe.CASES[case](SHAPE))
    with stand_ins.for_hopper():
        for program in programs:
            y = jax.eval_shape(program.function, *program.arguments)
            # A dense matmul has one matrix for all rows.
            is_dense = program.name == "dense_fp8" and case == "weight_gradient"
            assert y.size == (n * k if is_dense else size), program.name
    assert list(moe.KINDS) == [program.name for program in programs[:3]]


def test_sizes_are_of_all_rows_unless_some_have_no_group():
    for kind in (*moe.KINDS, "one"):
        assert int(moe.sizes_of(kind, 4096, 16).sum()) == 4096
    assert 0 < int(moe.sizes_of("odd", 4096, 16).sum()) < 4096
    with pytest.raises(ValueError, match="no kind of sizes: other"):
        moe.sizes_of("other", 8, 2)


@pytest.mark.slow
def test_rows_are_printed_and_written(tmp_path, monkeypatch, capsys):
    programs = moe.CASES["input_gradient"]
    first = lambda shape: itertools.islice(programs(shape), len(moe.KINDS))  # noqa: E731
    monkeypatch.setitem(moe.CASES, "input_gradient", first)
    out = tmp_path / "moe.json"
    moe.main(["--small", "--only", "input_gradient", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row == json.loads(capsys.readouterr().out)
    assert all(row[f"{kind}_tflop_per_s"] > 0 for kind in moe.KINDS)


def test_no_case_starts_after_the_time(tmp_path, capsys):
    out = tmp_path / "moe.json"
    moe.main(["--small", "--only", "forward", "--seconds", "1e-9", "--out", str(out)])
    assert json.loads(capsys.readouterr().out)["skipped"] == "time is up"


def test_kernels_of_layers_have_a_row_each(tmp_path, monkeypatch):
    runs = [
        profiling.KernelRun("loop_fusion", 0.0, 1.0),
        profiling.KernelRun("grouped_matmul_mosaic_gpu_kernel", 1.5, 4.5),
        profiling.KernelRun("loop_fusion", 4.5, 5.5),
    ]
    monkeypatch.setattr(
        profiling, "kernel_ms", lambda run, calls, named: profiling.by_name(runs)
    )
    monkeypatch.setattr(devices, "has_hopper", lambda: True)
    monkeypatch.setattr(moe_layers, "NAMES", {"small": moe_layers.SMALL})
    out = tmp_path / "moe.json"
    moe.main(["--only", "kernels", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    times = [3.0, 2.0, 0.5]
    kernels = ["grouped_matmul_mosaic_gpu_kernel", "loop_fusion", "gaps"]
    assert rows == [
        {"case": "kernels", "layer": layer, **moe_layers.SMALL._asdict()}
        | {"kernel": kernel, "ms": ms}
        for layer in moe_layers.PROFILED
        for kernel, ms in zip(kernels, times, strict=True)
    ]


def test_kernels_are_profiled_only_on_a_gpu(capsys):
    with pytest.raises(SystemExit):
        moe.main(["--small", "--only", "kernels"])
    assert "profiles a Hopper GPU" in capsys.readouterr().err


def test_experts_on_several_gpus_need_them(tmp_path, monkeypatch):
    out = tmp_path / "moe.json"
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    moe.main(["--small", "--only", "expert_parallel", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["skipped"].startswith("it needs 2 GPUs")


def test_the_layer_of_a_user_is_the_same_layer():
    shape = moe_layers.SMALL
    params, x, dy = moe_layers.arguments(shape)
    users = functools.partial(moe_layers.users_layer, shape.top_k)
    y, ours = (
        jax.jit(lambda *arrays, layer=layer: moe_layers.passes(layer, *arrays)[0])(
            own_params, x, dy
        )
        for layer, own_params in (
            (users, moe_layers.users_params(params)),
            (dict(moe_layers.layers(shape))["bf16"], params),
        )
    )
    error = jax.numpy.linalg.norm((y - ours).astype(jax.numpy.float32))
    assert error < 0.01 * jax.numpy.linalg.norm(y.astype(jax.numpy.float32))
    report = coat.fp8_report(coat.fp8(users), moe_layers.users_params(params), x)
    in_fp8 = {row.parameter for row in report.rows if not row.reason}
    assert in_fp8 == {"gate_up", "down"}


def test_bars_are_of_the_measured_shapes():
    shape, target = next(iter(moe.FORWARD.items()))
    row = {"case": "forward", **shape._asdict(), "random_tflop_per_s": target + 1.0}
    small = {"case": "forward", **SHAPE._asdict(), "random_tflop_per_s": 1.0}
    (bar,) = moe.bars([row, small, {"case": "check forward", "right": True}])
    assert bar.holds
    assert bar.name == "forward, random, 16384 x 8 x 4096 x 14336, TFLOP/s"


def test_failed_programs_are_rows():
    def broken(x):
        raise ValueError("no")

    x = jax.numpy.ones(3)
    programs = iter(
        [moe.Program("works", abs, (x,)), moe.Program("fails", broken, (x,))]
    )
    row = moe.rates(programs, SHAPE, {"calls": 1, "rounds": 1})
    assert row["fails_error"] == "no"
    assert row["works_tflop_per_s"] > 0
