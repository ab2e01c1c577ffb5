"""Tests the benchmark of a layer at a tiny size, and its targets."""

import collections
import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from helpers.tables import text_of

from experiments.bench import e2e as bench_e2e
from experiments.bench import kernels as bench_kernels
from experiments.bench import layer as bench_layer
from experiments.bench import layer_report
from experiments.common import profiling, timing
from experiments.common.layer_cases import Shape, llama_intermediate

_TINY = "--hidden 128 --seq 32 --batch 2 --head-dim 64 --calls 1 --rounds 1 --round-s 0"


def test_llamas_have_this_inside():
    sizes = {4096: 11_008, 2048: 5504, 5120: 13_696, 128: 384}
    assert {hidden: llama_intermediate(hidden) for hidden in sizes} == sizes


def test_shapes_are_the_papers():
    args = bench_layer.parser().parse_args([])
    (shape, *remaining) = bench_layer.shapes(args)
    assert (shape.hidden, shape.seq, shape.kv_heads) == (4096, 2048, 32)
    assert [(s.hidden, s.seq) for s in remaining] == [
        (4096, 4096),
        (2048, 2048),
        (2048, 4096),
    ]
    assert shape.unit == 64 * 2**20
    args = bench_layer.parser().parse_args(["--hidden", "1024", "--kv-heads", "2"])
    assert bench_layer.shapes(args)[0] == Shape(
        hidden=1024, seq=2048, batch=4, intermediate=2816, kv_heads=2, head_dim=128
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the results of a tiny layer in three cases, and their folder."""
    folder = tmp_path_factory.mktemp("layer")
    argv = [*_TINY.split(), "--out", str(folder / "layer.json")]
    cases = ["bf16, nothing saved", "coat", "coat, delayed scaling"]
    bench_layer.main([*argv, "--cases", *cases])
    return json.loads((folder / "layer.json").read_text()), folder


def test_rows_of_other_shapes_are_kept():
    def rows(hidden, seq, *cases):
        sizes = {"batch": 4, "intermediate": 8, "kv_heads": 1, "head_dim": 8}
        new_rows = {"hidden": hidden, "seq": seq} | sizes
        return [new_rows | {"case": case} for case in cases]

    before = rows(4096, 2048, "bf16", "te") + rows(2048, 2048, "bf16")
    new_rows = rows(4096, 2048, "coat")
    assert bench_layer.replaced(before, new_rows) == new_rows + before[2:]
    other = rows(4096, 4096, "bf16", "coat")
    after = bench_layer.replaced(before, other)
    assert after == [*before[:2], *other, *before[2:]]


def test_turns_are_as_long_as_asked(monkeypatch):
    """Only calls move the test's clock, since a busy machine sleeps for longer."""
    clock, calls = [0.0], collections.Counter()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def lasting(seconds):
        clock[0] += seconds
        calls[seconds] += 1

    both = [partial(lasting, 0.002), partial(lasting, 0.02)]
    actual = timing.in_turns(both, calls=2, rounds=3, round_s=0.02)
    assert actual == pytest.approx([0.002, 0.02])
    # Calls: one to begin with, two to measure the time of a call, and three rounds.
    assert calls == {0.002: 3 + 3 * 10, 0.02: 3 + 3 * 2}


@pytest.mark.slow
def test_a_layer_is_timed_and_measured(run):
    results, folder = run
    rows = {row["case"]: row for row in results["rows"]}
    assert list(rows) == ["bf16, nothing saved", "coat", "coat, delayed scaling"]
    fastest = rows["bf16, nothing saved"]["forward_backward_ms"]
    for row in rows.values():
        assert (row["hidden"], row["seq"], row["kv_heads"]) == (128, 32, 2)
        both = row["forward_ms"] + row["backward_ms"]
        assert both == pytest.approx(row["forward_backward_ms"])
        assert row["ratio_to_fastest_bf16"] == pytest.approx(fastest / both)
        assert row["saved_mib"] * 2**20 == pytest.approx(
            row["saved_units"] * 2 * 32 * 128 * 2
        )
        assert row["backward_temporaries_mib"] > 0
        assert row["paper_forward_ms"] is None
    # Only the input is saved.
    assert rows["bf16, nothing saved"]["saved_units"] == 1
    # Two inputs, gate and up are in FP8 groups of 16, with one number per row. Queries,
    # keys, values and attention's output are BF16. At most nine scalars are added.
    units = (2 + 2 * 384 / 128) * 0.5 * (1 + 2 / 16) + 4 / (2 * 128) + 4
    assert rows["coat"]["saved_units"] == pytest.approx(units, abs=0.01)
    # Nine histories of 16 numbers.
    more = rows["coat, delayed scaling"]["saved_mib"] - rows["coat"]["saved_mib"]
    assert 0 <= more * 2**20 <= 9 * 16 * 4
    assert (folder / "layer.png").stat().st_size > 10_000
    measured = {bar["name"]: bar["measured"] for bar in results["bars"]}
    assert measured["128, 32: coat, U saved"] == rows["coat"]["saved_units"]


def _row(case, ms, units, **remaining):
    row = {"case": case, "hidden": 4096, "seq": 2048, "batch": 4}
    row |= {"forward_backward_ms": ms, "saved_units": units}
    row |= {"backward_temporaries_mib": 500.0}
    return row | {"ratio_to_fastest_bf16": 17 / ms} | remaining


def test_bars_of_a_layer():
    rows = [
        _row("bf16", 17.5, 29.0),
        _row("bf16, products saved", 17.0, 8.0),
        _row("bf16, nothing saved", 21.0, 1.0),
        _row("bf16, fp8_remat", 18.5, 15.5),
        _row("bf16, fp8_remat of products", 18.9, 6.0),
        _row("coat", 10.0, 8.27, backward_temporaries_mib=400.0),
        _row("coat_max", 11.0, 6.6, backward_temporaries_mib=600.0),
    ]
    actual = {
        bar.name.removeprefix("4096, 2048: "): (round(bar.measured, 3), bar.holds)
        for bar in bench_layer.bars(rows)
    }
    assert actual == {
        "coat, times the fastest BF16": (1.7, False),
        "coat_max, times coat": (0.909, False),
        "fp8_remat, time / bf16": (1.057, True),
        "fp8_remat of products, time / bf16": (1.08, False),
        "coat, U saved": (8.27, True),
        "coat_max, U saved": (6.6, False),
        "fp8_remat, times smaller than bf16": (1.871, True),
        "fp8_remat of products, times smaller than bf16": (4.833, True),
        "BF16 policies both smaller and faster than coat": (0, True),
        "coat, temporaries / BF16's": (0.8, True),
        "coat_max, temporaries / BF16's": (1.2, False),
    }
    slow = [*rows[:5], _row("coat", 17.2, 8.27)]
    (frontier,) = [bar for bar in bench_layer.bars(slow) if "policies" in bar.name]
    assert (frontier.measured, frontier.holds) == (1, False)


def test_the_paper_stands_beside():
    args = bench_layer.parser().parse_args([])
    shape = bench_layer.shapes(args)[0]
    paper = layer_report.paper("coat", shape)
    assert paper["paper_forward_backward_ms"] == pytest.approx(16.85)
    assert paper["paper_ratio_to_bf16"] == pytest.approx(1.57, abs=0.01)
    assert paper["paper_saved_units"] == 13.33
    assert set(layer_report.paper("coat_max", shape).values()) == {None}
    row = _row("coat", 10.0, 8.27, forward_ms=3.5, backward_ms=6.5, saved_mib=529.3)
    row |= {"ratio_to_bf16": None} | paper
    (table,) = layer_report.tables([row])
    printed = text_of(table)
    assert all(
        text in printed for text in ("(16.85)", "10.00", "(1,766)", "hidden 4096")
    )


def test_kernels_are_sorted_by_what_they_are():
    kernels = [
        profiling.KernelRun("loop_add_fusion", 20.0, 52.0),
        profiling.KernelRun("norm_grad_mosaic_gpu_kernel", 0.0, 1.0),
        profiling.KernelRun("matmul_heads_mosaic_gpu_kernel", 2.0, 4.0),
        profiling.KernelRun("nvjet_qqtst_128x256", 3.0, 7.0),
        profiling.KernelRun("void cudnn::fusion::convert_dq_to_16bits", 7.0, 15.0),
        profiling.KernelRun("cudnn_generated_flash_bprop", 60.5, 76.5),
    ]
    by_name = profiling.by_name(kernels)
    assert by_name["loop_add_fusion"] == 32
    assert by_name["norm_grad_mosaic_gpu_kernel"] == 1
    assert profiling.by_part(kernels) == {
        "products": 6.0,
        "attention": 24.0,
        "Pallas: norm_grad": 1.0,
        "XLA": 32.0,
        "gaps": 1.0 + 5.0 + 8.5,
    }


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU has kernels")
def test_there_is_nothing_to_profile_without_a_gpu():
    with pytest.raises(ValueError, match="no kernel ran on a GPU"):
        profiling.kernel_ms(partial(jnp.sin, 1.0), calls=1)


@pytest.mark.slow
def test_profiles_stand_beside_floors(monkeypatch):
    actual = iter(
        [
            {"products": 15.0, "attention": 1.2, "XLA": 0.5, "gaps": 0.1},
            {"products": 6.5, "attention": 1.3, "Pallas: norm": 0.25, "gaps": 0.95},
        ]
    )
    monkeypatch.setattr(profiling, "kernel_ms", lambda call: (call(), next(actual))[1])
    (shape,) = bench_layer.shapes(bench_layer.parser().parse_args(_TINY.split()))
    cases = ["bf16", "bf16, nothing saved", "coat"]
    compiled = bench_layer.compile_cases([shape], cases)[shape]
    parts = bench_layer.profile_rows(shape, compiled)
    assert {row["case"] for row in parts} == {"bf16", "coat"}
    ms = {row["part"]: row["ms"] for row in parts if row["case"] == "coat"}
    assert ms == {"products": 6.5, "attention": 1.3, "Pallas: norm": 0.25, "gaps": 0.95}
    floors = {row["part"]: row["floor_ms"] for row in parts if row["case"] == "coat"}
    assert floors == {
        "products": 7.5, "attention": 1.2, "Pallas: norm": 0, "gaps": 0
    }  # fmt: skip
    printed = text_of(layer_report.parts_table(parts))
    assert "Pallas: norm" in printed
    assert "0.950" in printed


def test_profiles_need_what_they_compare(capsys):
    with pytest.raises(SystemExit):
        bench_layer.main(["--profile", "--cases", "coat"])
    assert "compares with bf16" in capsys.readouterr().err


@pytest.mark.parametrize("bench", [bench_kernels, bench_layer, bench_e2e])
def test_files_of_other_devices_are_left_alone(bench, tmp_path, monkeypatch, capsys):
    out = tmp_path / "results.json"
    recorded = {"command": "uv run x", "date": "2026-01-01", "versions": {}, "bars": []}
    recorded |= {"device": {"name": "NVIDIA Z9"}, "rows": [{"ms": 1.0}]}
    recorded = json.dumps(recorded)
    out.write_text(recorded)
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(out)])
    with pytest.raises(SystemExit):
        bench.main()
    assert "results.json is of NVIDIA Z9, this is" in capsys.readouterr().err
    assert out.read_text() == recorded
