"""Tests of live training steps, and of tables and the figure next to the paper's."""

import numpy as np
import pytest
from helpers.marks import slow
from helpers.tables import cells_of

from experiments.bench import e2e_report
from experiments.bench.model_step import ModelSize
from experiments.common.paper import TABLE_7
from experiments.common.results import load
from experiments.estimate import live, table_7

_GIB = 2**30
# Parameters of Llama-2-13B.
_PARAMETERS_13B = 13_015_864_320


@pytest.fixture(scope="module")
def predicted():
    return load("estimate", "estimate_table_7")["rows"]


@pytest.mark.slow
def test_the_largest_model_fits():
    """Parameters, gradients and moments of `coat` take 6 bytes for each parameter."""
    least = 6 * _PARAMETERS_13B
    assert live.largest_model(least) == ModelSize()
    assert live.largest_model(2 * least) == ModelSize.of("llama2-13b")
    assert live.largest_model(30 * _GIB) == live.TINY


@pytest.fixture
def called(monkeypatch):
    """Returns the cases, models and batches that are tried on a GPU of 80 GB."""
    calls = []

    def measured(case, model, batch, steps):
        calls.append((case, model, batch))
        return {"case": case, "error": "out of memory"} | vars(model)

    monkeypatch.setattr(live, "device_limit_bytes", lambda: 76 * _GIB)
    monkeypatch.setattr(live, "measured", measured)
    return calls


@pytest.mark.slow
def test_on_a_gpu_each_case_of_the_largest_model_runs(called):
    rows = live.measured_here()
    cases = ["bf16", "te", "coat", "coat_max"]
    assert called == [(case, ModelSize(), 1) for case in cases]
    peaks = [row["predicted_peak_gib"] for row in rows]
    # In BF16 the 7B model takes 12 bytes for each of 6.7 billion parameters.
    assert peaks[0] > 75
    assert peaks == sorted(peaks, reverse=True)
    first = cells_of(e2e_report.live(rows))[0]
    assert first[:6] == ("bf16", "out of memory", "", "", "", "")
    assert first[6] == f"{1024 * peaks[0]:,.1f}"


@pytest.mark.slow
def test_on_a_gpu_of_80_gb_a_released_step_of_13b_runs(called):
    [row] = live.released_here()
    assert called == [("coat, released", ModelSize.of("llama2-13b"), 1)]
    # The moments and parameters of 13 billion parameters, and some activations.
    assert 51 < row["predicted_peak_gib"] < 65


@pytest.mark.slow
def test_a_tiny_model_steps_both_ways():
    ordinary, released = live.released_here()
    assert (ordinary["case"], released["case"]) == ("coat", "coat, released")
    assert released["predicted_peak_gib"] < ordinary["predicted_peak_gib"]
    assert released["peak_gib"] < ordinary["peak_gib"]
    assert released["optimizer_gib"] == ordinary["optimizer_gib"]


def test_tables_hold_what_was_measured():
    rows, predicted = (load(name)["rows"] for name in ("bench_e2e", "estimate"))
    [coat] = [r for r in rows if (r["case"], r["batch"]) == ("coat", 2)]
    table = cells_of(e2e_report.memory(rows, predicted))
    assert table[1][:5] == ("  paper, 4 H100s", "13.1", "25.8", "16.2", "55.1")
    actual = (table[4][0], table[4][1], table[4][4])
    sizes = (f"{coat[name]:.1f}" for name in ("optimizer_gib", "device_peak_gib"))
    assert actual == ("coat, one H200", *sizes)
    [cells] = [c for c in cells_of(e2e_report.speed(rows)) if c[:2] == ("coat", "2")]
    assert cells[2:4] == (
        f"{coat['tokens_per_s']:,.0f}",
        f"{coat['ratio_to_bf16']:.2f}",
    )
    for row in cells_of(e2e_report.several(e2e_report.by_kind(), predicted)):
        error = float(row[9].rstrip("%"))
        assert float(row[8]) / float(row[7]) == pytest.approx(1 + error / 100, abs=4e-3)


def test_ratios_of_the_papers_speeds_are_those_that_it_prints():
    printed = {
        ("Llama-2-7B", "2"): {"te": 1.11, "coat": 1.85},
        ("Llama-2-7B", "4"): {"te": 1.24, "coat": 1.45},
        ("Llama-2-7B", "8"): {"te": 1.42, "coat": 1.36},
        ("Llama-2-13B", "4"): {"te": 1.21, "coat": 2.25},
        ("Llama-2-13B", "8"): {"te": 1.43, "coat": 1.44},
    }
    actual: dict[tuple[str, str], dict[str, float]] = {}
    for model, gpus, recipe, _, _, ratio in cells_of(e2e_report.paper_speed()):
        if ratio and recipe != "bf16":
            actual.setdefault((model, gpus), {})[recipe] = float(ratio)
    assert actual.keys() == printed.keys()
    for key, ratios in printed.items():
        # The paper cuts digits off.
        assert actual[key] == pytest.approx(ratios, abs=0.011)


def test_each_row_of_the_paper_stands_below_its_prediction(predicted):
    rows = cells_of(e2e_report.of_the_paper(predicted))
    papers = [row for row in rows if row[0] == "  paper"]
    assert len(papers) == sum(map(len, TABLE_7.values()))
    assert len(rows) == len(papers) + 4 * len(TABLE_7)
    assert sum(row[5] == "out of memory" for row in papers) == 6
    at = [row[0] for row in rows].index("Llama-2-13B, 4 GPUs, batch 1")
    assert rows[at + 1][2:] == ("25.1", "20.1", "30.9", "76.1", "1")
    # Two float32 moments, split over four GPUs.
    assert float(rows[at][2]) == pytest.approx(
        8 * _PARAMETERS_13B / 4 / _GIB, abs=0.051
    )


def test_more_memory_and_smaller_recipes_fit_larger_batches(predicted):
    rows = cells_of(e2e_report.of_gpus(predicted))
    assert len(rows) == len(table_7.STUDIED) * len(table_7.GPUS)
    most = {
        row[:3]: [
            [int(batch.replace("none", "0")) for batch in cell.split(" / ")]
            for cell in row[3:]
        ]
        for row in rows
    }
    for (model, sequence, gpus), of_recipes in most.items():
        assert all(small <= large for small, large in of_recipes)
        for of_memory in zip(*of_recipes, strict=True):
            assert list(of_memory) == sorted(of_memory)
        if gpus != "8":
            more = most[model, sequence, str(2 * int(gpus))]
            assert np.all(np.array(of_recipes) <= more)
    bf16, _, coat, _ = most["Llama-2-7B", "2,048", "1"]
    assert coat[0] > bf16[0] == 0


@pytest.mark.parametrize(
    ("model", "recipe", "gpus"),
    [
        ("Llama-2-7B", "bf16", 1),
        slow("Llama-2-7B", "coat", 1),
        ("Llama-2-13B", "bf16", 2),
    ],
)
def test_committed_predictions_are_those_of_today(predicted, model, recipe, gpus):
    row = table_7.prediction("gpus", model, recipe, gpus=gpus, batch=gpus)
    names = ("study", "model", "recipe", "gpus", "gpu_memory_gib", "batch", "sequence")
    [committed] = [r for r in predicted if all(r[name] == row[name] for name in names)]
    assert row.keys() == committed.keys()
    for name in ("parameters_gib", "optimizer_gib", "all_saved_gib", "peak_gib"):
        assert row[name] == pytest.approx(committed[name], rel=0.01)


def test_speeds_stand_beside_the_papers_and_published_ones():
    by_kind = e2e_report.by_kind()
    panels = e2e_report.draw_scaling(by_kind).axes
    lines = [
        {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
        for axes in panels
    ]
    papers = [[1, 5906], [2, 11351], [4, 11257], [8, 11241]]
    assert lines[0]["coat, paper"] == papers
    [best] = [
        row["tokens_per_s_per_gpu"]
        for row in by_kind["H100"]
        if ModelSize.of_row(row) == ModelSize()
        and (row["case"], row["gpus"], row["batch"]) == ("coat", 2, 12)
    ]
    assert lines[0]["coat, here"][1] == [2, best]
    assert lines[1]["FP8 on H100s, NeMo"] == [[8, 16_934]]
    assert lines[2]["FP8 on H100s, Megatron Bridge"] == [[8, 14_451]]
    assert not any("paper" in label for points in lines[1:] for label in points)
