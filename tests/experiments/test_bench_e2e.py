"""Tests the benchmark of training steps on tiny models, and its targets."""

import dataclasses
import json
import math
import os

import jax
import jax.numpy as jnp
import pytest
from helpers.tables import text_of

from experiments.bench import e2e as bench_e2e
from experiments.bench import model_step

_MODEL = model_step.ModelSize(
    hidden=64, intermediate=96, layers=2, heads=2, kv_heads=1, vocab=128, seq=16
)


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


def test_a_process_gives_way_or_takes_memory(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")
    for at_once, expected in ((False, "false"), (True, "true")):
        model_step.take_memory(at_once=at_once)
        assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == expected
        assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.95"
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ


def _step(case, batch, rate, peak=10.0, commit="first"):
    row = {"case": case, "batch": batch, "tokens_per_s": rate, "peak_gib": peak}
    return row | {"commit": commit} | dataclasses.asdict(model_step.ModelSize())


def _failed(case, batch):
    row = {"case": case, "batch": batch, "error": "out of memory", "commit": "first"}
    return row | dataclasses.asdict(model_step.ModelSize())


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
    actual = {
        bar.name: (round(bar.measured, 3), bar.holds) for bar in bench_e2e.bars(rows)
    }
    assert actual == {
        "coat, batch 2: peak / BF16's": (0.476, True),
        "coat, batch 2: tokens/s / BF16's": (1.8, True),
        "coat, its best, tokens/s": (21_000, True),
        "coat, its best / BF16's best": (1.75, True),
    }
    assert "out of memory" in text_of(bench_e2e.table(rows))
    # Rows of another commit, perhaps of another GPU, are not compared with the new row.
    again = bench_e2e.joined(rows, _step("bf16", 2, 9_000.0, commit="second"))
    again = bench_e2e.with_ratios(again)
    assert [row.get("ratio_to_bf16") for row in again if row["batch"] == 2] == [1, 1.8]


def test_bars_of_four_gpus_depend_on_the_kind():
    def step(gpus, rate, batch=4):
        row = _step("coat", batch, rate) | {"gpus": gpus}
        return row | dataclasses.asdict(model_step.ModelSize.of("llama3-8b", seq=8192))

    rows = []
    for row in (step(1, 16_000.0), step(4, 60_800.0), step(4, 66_000.0, batch=6)):
        rows = bench_e2e.with_ratios(bench_e2e.joined(rows, row))
    share = "4 GPUs, coat, batch 4 a GPU: tokens/s a GPU / one's"
    speed = "4 GPUs, coat, its best, tokens/s a GPU"
    for gpu, expected in (
        ("NVIDIA H100 80GB HBM3", {share: 0.95}),
        ("NVIDIA H200", {share: 0.95, speed: 16_500}),
    ):
        actual = bench_e2e.bars(rows, gpu)
        assert {bar.name: bar.measured for bar in actual} == expected
        assert all(bar.holds for bar in actual)


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
    printed = text_of(bench_e2e.table(rows[:-1]))
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
    assert dataclasses.replace(model_step.ModelSize(), **sizes).name == name


@pytest.mark.slow
def test_each_case_has_a_process_and_joins_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    out = tmp_path / "e2e.json"
    sizes = "--hidden 64 --intermediate 96 --layers 1 --heads 2 --kv-heads 2 --seq 16"
    argv = [*sizes.split(), "--steps", "2", "--out", str(out), "--batch", "1"]
    initial = os.environ["XLA_FLAGS"]
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
    assert os.environ["XLA_FLAGS"] == initial
