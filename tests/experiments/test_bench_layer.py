"""Tests the benchmarks of a layer and of a model, on tiny ones, and their targets."""

import collections
import dataclasses
import io
import json
import math
import os
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from experiments.bench import e2e as bench_e2e
from experiments.bench import kernels as bench_kernels
from experiments.bench import layer as bench_layer
from experiments.bench import layer_report, model_step
from experiments.common import profiling, timing
from experiments.common.layer_cases import Shape, llama_intermediate

_TINY = "--hidden 128 --seq 32 --batch 2 --head-dim 64 --calls 1 --rounds 1 --round-s 0"
_MODEL = model_step.Model(
    hidden=64, intermediate=96, layers=2, heads=2, kv_heads=1, vocab=128, seq=16
)


def _printed(table):
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    return console.file.getvalue()


def test_llamas_have_this_inside():
    sizes = {4096: 11_008, 2048: 5504, 5120: 13_696, 128: 384}
    assert {hidden: llama_intermediate(hidden) for hidden in sizes} == sizes


def test_shapes_are_the_papers():
    args = bench_layer.parser().parse_args([])
    (shape, *others) = bench_layer.shapes(args)
    assert (shape.hidden, shape.seq, shape.kv_heads) == (4096, 2048, 32)
    assert [(s.hidden, s.seq) for s in others] == [
        (4096, 4096),
        (2048, 2048),
        (2048, 4096),
    ]
    assert shape.unit == 64 * 2**20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The results file of a tiny layer in two cases, and its folder."""
    folder = tmp_path_factory.mktemp("layer")
    argv = [*_TINY.split(), "--out", str(folder / "layer.json")]
    cases = ["bf16, nothing saved", "coat", "coat, delayed scaling"]
    bench_layer.main([*argv, "--cases", *cases])
    return json.loads((folder / "layer.json").read_text()), folder


def test_rows_of_other_shapes_are_kept():
    def rows(hidden, seq, *cases):
        sizes = {"batch": 4, "intermediate": 8, "kv_heads": 1, "head_dim": 8}
        own = {"hidden": hidden, "seq": seq} | sizes
        return [own | {"case": case} for case in cases]

    before = rows(4096, 2048, "bf16", "te") + rows(2048, 2048, "bf16")
    own = rows(4096, 2048, "coat")
    assert bench_layer.replaced(before, own) == own + before[2:]
    other = rows(4096, 4096, "bf16", "coat")
    after = bench_layer.replaced(before, other)
    assert after == [*before[:2], *other, *before[2:]]


def test_turns_are_as_long_as_asked():
    made = collections.Counter()

    def sleeping(name, seconds):
        def call():
            made[name] += 1
            time.sleep(seconds)

        return call

    short, long = sleeping("short", 0.002), sleeping("long", 0.02)
    found = timing.in_turns([short, long], calls=2, rounds=3, round_s=0.02)
    assert 0.002 <= found[0] < found[1]
    # Calls: one to begin with, two to measure the time of a call, and three rounds.
    assert made["short"] > 3 + 3 * 2
    assert made["long"] == 3 + 3 * 2


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


def _row(case, ms, units, **rest):
    row = {"case": case, "hidden": 4096, "seq": 2048, "batch": 4}
    row |= {"forward_backward_ms": ms, "saved_units": units}
    row |= {"backward_temporaries_mib": 500.0}
    return row | {"ratio_to_fastest_bf16": 17 / ms} | rest


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
    found = {
        bar.name.removeprefix("4096, 2048: "): (round(bar.measured, 3), bar.holds)
        for bar in bench_layer.bars(rows)
    }
    assert found == {
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
    printed = _printed(table)
    assert all(
        text in printed for text in ("(16.85)", "10.00", "(1,766)", "hidden 4096")
    )


def test_kernels_are_sorted_by_what_they_are():
    kernels = [
        profiling.Kernel("loop_add_fusion", 20.0, 52.0),
        profiling.Kernel("norm_grad_mosaic_gpu_kernel", 0.0, 1.0),
        profiling.Kernel("matmul_heads_mosaic_gpu_kernel", 2.0, 4.0),
        profiling.Kernel("nvjet_qqtst_128x256", 3.0, 7.0),
        profiling.Kernel("void cudnn::fusion::convert_dq_to_16bits", 7.0, 15.0),
        profiling.Kernel("cudnn_generated_flash_bprop", 60.5, 76.5),
    ]
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


def _check_step(row, model, bytes_each):
    assert "error" not in row
    chance = math.log(model.vocab)
    assert 0.9 * chance < row["first_loss"] < 1.1 * chance
    assert row["last_loss"] < row["first_loss"]
    rate = row["batch"] * model.seq / row["ms_per_step"] * 1e3
    assert row["tokens_per_s"] == pytest.approx(rate)
    h, head_dim = model.hidden, model.hidden // model.heads
    layer_size = 2 * h * (h + model.kv_heads * head_dim) + 3 * h * model.intermediate
    size = model.layers * (layer_size + 2 * h) + 2 * model.vocab * h + h
    assert row["parameters_gib"] * 2**30 == 2 * size
    assert row["optimizer_gib"] * 2**30 / size == pytest.approx(bytes_each, rel=0.02)
    assert row["peak_gib"] > row["parameters_gib"] + row["optimizer_gib"]


@pytest.mark.slow
def test_a_model_steps():
    row = model_step.measure("coat, delayed scaling", _MODEL, 2, 2)
    # Groups of 128 on a last axis of 64 or 96 have nine bytes of scales and k each.
    _check_step(row, _MODEL, 2.15)


def test_checkpointed_layers_save_what_they_are_told():
    saved = {}
    for case in ("bf16", "bf16, products saved", "bf16, nothing saved"):
        loss, state = model_step.loss_function(case, _MODEL)
        tokens = jax.ShapeDtypeStruct((2, 17), jnp.int32)
        saved[case] = model_step.coat.residual_report(loss, *state, tokens).nbytes
    assert saved["bf16, nothing saved"] < saved["bf16, products saved"] < saved["bf16"]


def test_out_of_memory_is_a_row(monkeypatch):
    def step(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(model_step, "chain_step", lambda tx: (tx, step))
    row = model_step.measure("te", _MODEL, 1, 1)
    assert row["error"] == "out of memory"
    assert "tokens_per_s" not in row
    assert row["optimizer_gib"] == pytest.approx(4 * row["parameters_gib"], rel=1e-3)


def _step(case, batch, rate, peak=10.0, commit="first"):
    row = {"case": case, "batch": batch, "tokens_per_s": rate, "peak_gib": peak}
    return row | {"commit": commit} | dataclasses.asdict(model_step.Model())


def _failed(case, batch):
    row = {"case": case, "batch": batch, "error": "out of memory", "commit": "first"}
    return row | dataclasses.asdict(model_step.Model())


def test_rows_join_and_bars_compare_them():
    rows = []
    for row in (
        _step("coat", 2, 18_000.0, 50.0),
        _failed("bf16", 4),
        _step("bf16", 2, 1.0),
        _step("coat", 8, 21_000.0),
        _step("bf16, products saved", 4, 12_000.0),
        _step("bf16", 2, 10_000.0, 105.0),
    ):
        rows = bench_e2e.with_ratios(bench_e2e.joined(rows, row))
    assert [(row["case"], row["batch"]) for row in rows] == [
        ("bf16", 2),
        ("bf16", 4),
        ("bf16, products saved", 4),
        ("coat", 2),
        ("coat", 8),
    ]
    coat = rows[-2]
    assert (coat["ratio_to_bf16"], coat["ratio_to_best_bf16"]) == (1.8, 1.5)
    assert "ratio_to_bf16" not in rows[-1]
    found = {
        bar.name: (round(bar.measured, 3), bar.holds) for bar in bench_e2e.bars(rows)
    }
    assert found == {
        "coat, batch 2: peak / BF16's": (0.476, True),
        "coat, batch 2: tokens/s / BF16's": (1.8, True),
        "coat, its best, tokens/s": (21_000, True),
        "coat, its best / BF16's best": (1.75, True),
    }
    assert "out of memory" in _printed(bench_e2e.table(rows))
    # Rows of another commit, perhaps of another GPU, are not compared with the new row.
    again = bench_e2e.joined(rows, _step("bf16", 2, 9_000.0, commit="second"))
    again = bench_e2e.with_ratios(again)
    assert [row.get("ratio_to_bf16") for row in again if row["batch"] == 2] == [1, 1.8]


def test_rows_of_two_gpus_stand_beside_one():
    def step(case, gpus, rate, batch=8):
        row = _step(case, batch, rate)
        return row | {"gpus": gpus, "layers": 12, "mesh": f"fsdp={gpus}"}

    rows = []
    for row in (
        step("bf16", 2, 50_000.0, batch=4),
        step("coat", 1, 60_000.0),
        step("coat", 2, 114_000.0),
    ):
        rows = bench_e2e.with_ratios(bench_e2e.joined(rows, row))
    one, two = rows[1:]
    assert "ratio_to_best_bf16" not in one  # No row of BF16 is on one GPU.
    assert two["ratio_to_one_gpu"] == pytest.approx(0.95)
    assert two["ratio_to_best_bf16"] == pytest.approx(2.28)
    assert {b.name: (round(b.measured, 3), b.holds) for b in bench_e2e.bars(rows)} == {
        "two GPUs, coat, batch 8 a GPU: tokens/s a GPU / one's": (0.95, True),
        "two GPUs, coat, its best / BF16's best": (2.28, True),
    }
    assert "2 x 8" in _printed(bench_e2e.table(rows))


def test_bars_of_four_gpus_depend_on_the_kind():
    def step(gpus, rate, batch=4):
        row = _step("coat", batch, rate) | {"gpus": gpus}
        return row | dataclasses.asdict(model_step.Model.of("llama3-8b", seq=8192))

    rows = []
    for row in (step(1, 16_000.0), step(4, 60_800.0), step(4, 66_000.0, batch=6)):
        rows = bench_e2e.with_ratios(bench_e2e.joined(rows, row))
    share = "4 GPUs, coat, batch 4 a GPU: tokens/s a GPU / one's"
    speed = "4 GPUs, coat, its best, tokens/s a GPU"
    for gpu, expected in (
        ("NVIDIA H100 80GB HBM3", {share: 0.95}),
        ("NVIDIA H200", {share: 0.95, speed: 16_500}),
    ):
        found = bench_e2e.bars(rows, gpu)
        assert {bar.name: bar.measured for bar in found} == expected
        assert all(bar.holds for bar in found)


def test_rows_of_other_flags_and_models_stand_beside_each_other():
    def step(case, rate, *, gpus=2, flags="", layers=12, peak=10.0):
        row = _step(case, 8, rate, peak) | {"gpus": gpus, "layers": layers}
        return row | {"xla_flags": flags}

    rows = []
    for row in (
        step("coat", 120_000.0, flags="--fast", peak=20.0),
        step("bf16", 60_000.0),
        step("bf16, shard_map", 75_000.0),
        step("bf16", 50_000.0, flags="--fast", peak=50.0),
        step("coat", 62_500.0, gpus=1),
        step("coat", 20_000.0, layers=32),
    ):
        rows = bench_e2e.with_ratios(bench_e2e.joined(rows, row))
    assert [(r["case"], r["xla_flags"], r["layers"]) for r in rows] == [
        ("bf16", "", 12),
        ("bf16", "--fast", 12),
        ("bf16, shard_map", "", 12),
        ("coat", "", 12),
        ("coat", "--fast", 12),
        ("coat", "", 32),
    ]
    *_, fast, deep = rows
    assert fast["ratio_to_bf16"] == pytest.approx(2.4)
    assert fast["ratio_to_best_bf16"] == pytest.approx(1.6)
    assert fast["ratio_to_one_gpu"] == pytest.approx(0.96)
    assert "ratio_to_best_bf16" not in deep
    assert {b.name: (round(b.measured, 3), b.holds) for b in bench_e2e.bars(rows)} == {
        "llama2-7b, 12 layers: two GPUs, coat, batch 8 a GPU: tokens/s a GPU / one's": (
            0.96,
            True,
        ),
        "llama2-7b, 12 layers: two GPUs, coat, its best / BF16's best": (1.6, True),
        "llama2-7b, 12 layers: two GPUs, coat, batch 8 a GPU: peak / that of bf16": (
            0.4,
            True,
        ),
    }
    printed = _printed(bench_e2e.table(rows[:-1]))
    assert "llama2-7b, 12 layers" in printed
    assert "--fast" in printed


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({}, "llama2-7b"),
        ({"layers": 12}, "llama2-7b, 12 layers"),
        ({"seq": 8192}, "llama2-7b, sequence 8,192"),
        ({"hidden": 64, "layers": 2}, "2 layers of 64"),
    ],
)
def test_models_have_the_names_of_presets(sizes, name):
    assert dataclasses.replace(model_step.Model(), **sizes).name == name


@pytest.mark.slow
def test_each_case_has_a_process_and_joins_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    out = tmp_path / "e2e.json"
    sizes = "--hidden 64 --intermediate 96 --layers 1 --heads 2 --kv-heads 2 --seq 16"
    argv = [*sizes.split(), "--steps", "2", "--out", str(out), "--batch", "1"]
    before = os.environ["XLA_FLAGS"]
    bench_e2e.main([*argv, "--cases", "bf16, products saved", "--vocab", "128"])
    (row,) = json.loads(out.read_text())["rows"]
    _check_step(row, dataclasses.replace(_MODEL, layers=1, kv_heads=2), 8)
    assert row["ratio_to_best_bf16"] == 1
    flags = "--xla-flags=--xla_cpu_enable_fast_min_max=true"
    bench_e2e.main([*argv, "--cases", "te", "--vocab", "256", flags])
    first, second = json.loads(out.read_text())["rows"]
    assert first == row
    assert (second["case"], second["vocab"]) == ("te", 256)
    assert flags.endswith(second["xla_flags"])
    assert "tokens_per_s" in second
    assert "ratio_to_best_bf16" not in second
    assert os.environ["XLA_FLAGS"] == before


@pytest.mark.slow
def test_profiles_stand_beside_floors(monkeypatch):
    found = iter(
        [
            {"products": 15.0, "attention": 1.2, "XLA": 0.5, "gaps": 0.1},
            {"products": 6.5, "attention": 1.3, "Pallas: norm": 0.25, "gaps": 0.95},
        ]
    )
    monkeypatch.setattr(profiling, "kernel_ms", lambda call: (call(), next(found))[1])
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
    printed = _printed(layer_report.parts_table(parts))
    assert "Pallas: norm" in printed
    assert "0.950" in printed


def test_profiles_need_what_they_compare(capsys):
    with pytest.raises(SystemExit):
        bench_layer.main(["--profile", "--cases", "coat"])
    assert "compares with bf16" in capsys.readouterr().err


@pytest.mark.parametrize("bench", [bench_kernels, bench_layer, bench_e2e])
def test_files_of_other_devices_are_left_alone(bench, tmp_path, monkeypatch, capsys):
    out = tmp_path / "results.json"
    known = {"command": "uv run x", "date": "2026-01-01", "versions": {}, "bars": []}
    known |= {"device": {"name": "NVIDIA Z9"}, "rows": [{"ms": 1.0}]}
    known = json.dumps(known)
    out.write_text(known)
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(out)])
    with pytest.raises(SystemExit):
        bench.main()
    assert "results.json is of NVIDIA Z9, this is" in capsys.readouterr().err
    assert out.read_text() == known


def test_shapes_name_their_heads():
    args = bench_layer.parser().parse_args(["--hidden", "1024", "--kv-heads", "2"])
    assert bench_layer.shapes(args)[0] == Shape(
        hidden=1024, seq=2048, batch=4, intermediate=2816, kv_heads=2, head_dim=128
    )
