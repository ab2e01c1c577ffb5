"""Tests the comparison of fine-tunings over seeds."""

import json
import math

import numpy as np
import pytest

from experiments.common.intervals import wilson
from experiments.common.results import read_results
from experiments.finetune import compare, compare_report, small_form
from experiments.finetune.tasks import BENCHMARKS

_RECIPES = ("before", "bf16", "coat")


def _write(folder, exact, families, recipes=_RECIPES):
    folder.mkdir(parents=True)
    lines = [
        {
            "recipe": recipe,
            "family": family,
            "question": f"q{n}",
            "expected": "1",
            "given": "1" if hit else "0",
            "exact": bool(hit),
        }
        for recipe, hits in zip(recipes, exact, strict=True)
        for n, (family, hit) in enumerate(zip(families, hits, strict=True))
    ]
    _write_lines(folder / "answers.jsonl", lines)


def _write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def runs(tmp_path, rng):
    """Returns the folders of three seeds, and which of their answers are exact.

    The answers [seed, recipe, question] are to 40 questions of two families.
    """
    exact = rng.random((3, 3, 40)) < np.array([0.1, 0.6, 0.5])[:, None]
    families = ["sums", "words"] * 20
    folders = [tmp_path / f"seed-{seed}" for seed in range(3)]
    for seed, (folder, answers) in enumerate(zip(folders, exact, strict=True)):
        _write(folder, answers, families)
        rows = [
            {"recipe": recipe, "step": step, "loss": 2.0 + seed + step / 10}
            for recipe in _RECIPES[1:]
            for step in (1, 2, 3)
        ]
        _write_lines(folder / "metrics.jsonl", rows)
    summary = {"preset": "tiny", "steps": 3, "nats_per": "byte", "base": "b"}
    summary |= {"command": "c", "date": "d", "device": {"name": "n"}, "rows": []}
    summary |= {"recipes": {"bf16": {"parameters": 7}}}
    (folders[0] / "summary.json").write_text(json.dumps(summary))
    return folders, exact.astype(float)


def test_differences_are_of_the_same_questions(runs):
    folders, exact = runs
    hits = compare.read_hits(folders)
    rows = {(row["recipe"], row["family"]): row for row in compare.shares(hits)}
    assert rows.keys() == {(r, f) for r in _RECIPES for f in ("sums", "words", "all")}
    actual = {row["family"]: row for row in compare.paired(hits)}
    for family, of_family in (
        ("sums", exact[:, :, ::2]),
        ("words", exact[:, :, 1::2]),
        ("all", exact),
    ):
        for n, recipe in enumerate(_RECIPES):
            row = rows[recipe, family]
            assert row["exact_match_percent"] == pytest.approx(
                100 * of_family[:, n].mean()
            )
            assert (row["seeds"], row["questions"]) == (3, of_family.shape[2])
            ends = wilson(of_family[:, n].sum() / 3, of_family.shape[2])
            percents = row["low_percent"], row["high_percent"]
            assert percents == pytest.approx([100 * end for end in ends])
        row = actual[family]
        assert (row["recipe"], row["beside"]) == ("coat", "bf16")
        each = 100 * (of_family[:, 2] - of_family[:, 1])
        mean = each.mean()
        assert row["difference_points"] == pytest.approx(mean)
        # The variance of a mean is its independent terms' variance over their number.
        for values, quantile, name in (
            (each.mean(0), 1.96, ""),
            (each.mean(1), 4.303, "_over_seeds"),
        ):
            variance = ((values - mean) ** 2).sum() / (values.size - 1) / values.size
            half = quantile * np.sqrt(variance)
            ends = row[f"low{name}_points"], row[f"high{name}_points"]
            assert ends == pytest.approx((mean - half, mean + half), rel=1e-3)


def test_runs_of_other_questions_are_refused(runs):
    folders, _ = runs
    _write(folders[0].parent / "other", np.zeros((3, 2)), ["sums", "words"])
    _write(folders[0].parent / "plain", np.zeros((1, 40)), ["x"] * 40, ("before",))
    with pytest.raises(ValueError, match="other has other questions than"):
        compare.read_hits([*folders, folders[0].parent / "other"])
    with pytest.raises(ValueError, match="plain has the recipes before"):
        compare.read_hits([*folders, folders[0].parent / "plain"])


def test_the_program_goes_through_seeds_and_writes_results(runs, monkeypatch, capsys):
    folders, _ = runs
    out = folders[0].parent / "found.json"
    commands = []
    monkeypatch.setattr(
        compare.program, "main", lambda argv: commands.append(argv) or 0
    )
    (folders[1] / "run.json").write_text("{}")  # This run has not ended.
    flags = ["--runs", str(out.parent), "--out", str(out), "--base", "b"]
    assert compare.main(flags) == 0
    arguments = ["--base", "b", "--seed"]
    assert commands == [
        [*arguments, "0", "--out", str(folders[0])],
        [*arguments, "1", "--resume", str(folders[1])],
        [*arguments, "2", "--out", str(folders[2])],
    ]
    actual = read_results(out)
    assert len(actual["rows"]) == 9
    assert not actual["bars"]  # 40 questions are few.
    assert actual["training"]["parameters"] == 7
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "Points above bf16 on the same questions" in capsys.readouterr().out

    monkeypatch.setattr(compare.program, "main", lambda argv: 130)
    assert compare.main(flags) == 130
    (folders[0] / "run.json").write_text("{}")
    (folders[0] / "summary.json").write_text("{}")
    assert compare.main(flags) == 2
    assert "run.json is damaged" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.main(["--seeds", "0"])
    assert "--seeds must be 1 to 10, got 0" in capsys.readouterr().err


def test_results_hold_curves_and_samples(runs):
    folders, exact = runs
    actual = compare.compared(folders)
    assert [(row["recipe"], row["seed"]) for row in actual["curves"]] == [
        (recipe, seed) for seed in range(3) for recipe in _RECIPES[1:]
    ]
    assert actual["curves"][3]["losses"] == pytest.approx([3.1, 3.2, 3.3])
    samples = [(row["question"], row["recipe"]) for row in actual["samples"]]
    assert samples == [(q, r) for r in _RECIPES for q in ("q0", "q1")]
    arguments = [row["given"] for row in actual["samples"]]
    assert arguments == [str(int(hit)) for hit in exact[0, :, :2].ravel()]


def test_one_seed_has_no_interval_over_seeds(runs):
    folders, exact = runs
    actual = compare.compared(folders[:1])
    row = actual["differences"][-1]
    difference = 100 * (exact[0, 2] - exact[0, 1]).mean()
    assert row["difference_points"] == pytest.approx(difference)
    assert row["high_over_seeds_points"] == math.inf
    assert math.isfinite(row["high_points"])
    assert len(compare_report.draw_exact_match(actual).axes) == 2


def test_bars_need_questions_seeds_and_something_learned():
    first = {"recipe": "bf16", "family": "all", "questions": 2000, "seeds": 3}
    initial = first | {"recipe": "before", "high_percent": 5.0}
    row = {"recipe": "coat", "beside": "bf16", "family": "all"}
    row |= {"low_points": -2.5, "high_points": 0.5}
    for low, holds in ((15.0, True), (14.0, False)):
        rows = [initial, first | {"low_percent": low}]
        gain, distance = compare_report.bars(rows, [row, row | {"family": "steps"}])
        assert (gain.measured, gain.holds) == (low - 5, holds)
        assert (distance.measured, distance.holds) == (2.5, False)
    assert not compare_report.bars([initial, first | {"seeds": 2}], [row])
    assert not compare_report.bars([initial, first | {"questions": 1999}], [row])


def _cells(table, label):
    columns = [list(column.cells) for column in table.columns]
    at = columns[0].index(label)
    return [[column[n] for column in columns[1:]] for n in range(at, len(columns[0]))]


def test_tables_have_the_paper_below(tmp_path, rng):
    families = [*BENCHMARKS] * 5
    _write(tmp_path / "run", rng.random((3, 20)) < 0.5, families)
    hits = compare.read_hits([tmp_path / "run"])
    actual = {"rows": compare.shares(hits), "differences": compare.paired(hits)}
    share, _, printed = _cells(compare_report.exact_match(actual), "coat")
    assert len(share) == 5
    # The figures are printed in the paper's table 4.
    assert printed == ["(47.8)", "(64.4)", "(53.3)", "(56.6)", "(55.5)"]
    printed = _cells(compare_report.differences(actual), "coat")[-1]
    assert printed == ["(+1.5)", "(+0.2)", "(-1.5)", "(-1.1)", "(-0.2)"]


def test_other_questions_have_no_figures_of_the_paper(runs):
    actual = compare.compared(runs[0])
    for table in (
        compare_report.exact_match(actual),
        compare_report.differences(actual),
    ):
        assert not any("paper" in cell for cell in table.columns[0].cells)


@pytest.mark.slow
def test_the_small_form_says_why_it_failed(monkeypatch):
    monkeypatch.setattr(small_form, "FLAGS", ["--seeds", "0"])
    with pytest.raises(RuntimeError, match="--seeds must be 1 to 10, got 0"):
        small_form.run()
