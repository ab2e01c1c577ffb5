"""Tests the comparison of fine-tunings over seeds."""

import json

import numpy as np
import pytest

from experiments.common.results import read_results
from experiments.finetune import compare

_RECIPES = ("before", "bf16", "coat")


def _write(folder, exact, families, recipes=_RECIPES):
    folder.mkdir(parents=True)
    lines = [
        {"recipe": recipe, "family": family, "question": f"q{n}", "exact": bool(hit)}
        for recipe, hits in zip(recipes, exact, strict=True)
        for n, (family, hit) in enumerate(zip(families, hits, strict=True))
    ]
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(tmp_path, rng):
    """Answers of three seeds to 40 questions of two families."""
    exact = rng.random((3, 3, 40)) < np.array([0.1, 0.6, 0.5])[:, None]
    families = ["sums", "words"] * 20
    folders = [tmp_path / f"seed-{seed}" for seed in range(3)]
    for folder, own in zip(folders, exact, strict=True):
        _write(folder, own, families)
    return folders, exact.astype(float)


def test_differences_are_of_the_same_questions(runs):
    folders, exact = runs
    hits = compare.read_hits(folders)
    rows = {(row["recipe"], row["family"]): row for row in compare.shares(hits)}
    assert rows.keys() == {(r, f) for r in _RECIPES for f in ("sums", "words", "all")}
    found = {row["family"]: row for row in compare.paired(hits)}
    for family, own in (
        ("sums", exact[:, :, ::2]),
        ("words", exact[:, :, 1::2]),
        ("all", exact),
    ):
        for n, recipe in enumerate(_RECIPES):
            row = rows[recipe, family]
            assert row["exact_match_percent"] == pytest.approx(100 * own[:, n].mean())
            assert (row["seeds"], row["questions"]) == (3, own.shape[2])
        row = found[family]
        assert (row["recipe"], row["beside"]) == ("coat", "bf16")
        each = 100 * (own[:, 2] - own[:, 1])
        mean = each.mean()
        assert row["difference_points"] == pytest.approx(mean)
        # The variance of a mean is that of its independent terms over their number.
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
    asked = []
    monkeypatch.setattr(compare.program, "main", lambda argv: asked.append(argv) or 0)
    (folders[1] / "run.json").write_text("{}")  # This run has not ended.
    flags = ["--runs", str(out.parent), "--out", str(out), "--base", "b"]
    assert compare.main(flags) == 0
    given = ["--base", "b", "--seed"]
    assert asked == [
        [*given, "0", "--out", str(folders[0])],
        [*given, "1", "--resume", str(folders[1])],
        [*given, "2", "--out", str(folders[2])],
    ]
    found = read_results(out)
    assert len(found["rows"]) == 9
    assert [bar["holds"] for bar in found["bars"]] == [False]  # 40 questions are few.
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "coat - bf16, all" in capsys.readouterr().out

    monkeypatch.setattr(compare.program, "main", lambda argv: 130)
    assert compare.main(flags) == 130
    (folders[0] / "run.json").write_text("{}")
    (folders[0] / "summary.json").write_text("{}")
    assert compare.main(flags) == 2
    assert "run.json is damaged" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.main(["--seeds", "1"])
    assert "--seeds must be 2 to 10, got 1" in capsys.readouterr().err
