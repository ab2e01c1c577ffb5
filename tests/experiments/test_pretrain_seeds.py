"""Tests of joining runs of the main job over seeds."""

import json

import pytest

from experiments.pretrain import seeds as pretrain_seeds

BEGINNING = "uv run python -m experiments.pretrain --preset 124m"


def run(options, losses, date="2026-01-01"):
    """Returns a run's summary, with this validation loss for each recipe."""
    rows = [
        {"recipe": recipe, "val_loss": loss, "train_loss": loss, "tokens_per_s": 1.0}
        for recipe, loss in losses.items()
    ]
    return {
        "command": f"{BEGINNING} {options} --recipes {','.join(losses)} --out 'a b'",
        "date": date,
        "device": {"name": "a chip"},
        "versions": {"commit": "c0ffee"},
        "rows": rows,
        "preset": "124m",
        "steps": 7,
    }


def test_each_training_is_compared_with_that_of_its_seed(tmp_path):
    runs = [
        run("--seed 1", {"bf16": 2.0, "coat": 2.01}),
        run("--seed 2", {"bf16": 4.0, "coat": 4.06}, date="2026-01-02"),
        run("--seed 2 --scaling delayed", {"coat": 4.04}),
        run("", {"bf16": 1.0, "coat_max": 1.02}),
    ]
    # The first file joins two runs.
    runs[0]["command"] += " && " + run("--seed 1", {"te": 2.0})["command"]
    runs[0]["rows"] += run("", {"te": 2.0})["rows"]
    paths = [tmp_path / f"{j}.json" for j in range(len(runs))]
    for path, each in zip(paths, runs, strict=True):
        path.write_text(json.dumps(each))
    out = tmp_path / "out.json"
    pretrain_seeds.main([*map(str, paths), "--out", str(out)])
    joined = json.loads(out.read_text())
    found = {
        (row["recipe"], row["scaling"]): [
            row[key] for key in ("seeds", "val_gap_percent", "standard_error_percent")
        ]
        for row in joined["summary"]
    }
    assert found == {
        ("coat", "delayed"): [1, pytest.approx(1.0), None],
        # The mean and the standard error of 0.5 and 1.5.
        ("coat", "just_in_time"): [2, pytest.approx(1.0), pytest.approx(0.5)],
        ("coat_max", "just_in_time"): [1, pytest.approx(2.0), None],
        ("te", "just_in_time"): [1, pytest.approx(0.0), None],
    }
    assert [bar["holds"] for bar in joined["bars"]] == [False, False]
    assert joined["date"] == "2026-01-02"
    assert {row["seed"] for row in joined["rows"]} == {0, 1, 2}


def test_what_cannot_be_compared_is_named():
    plain = run("--seed 1", {"bf16": 2.0, "coat": 2.01})
    with pytest.raises(ValueError, match="seed needs a bf16 training, 3 has none"):
        pretrain_seeds.join([plain, run("--seed 3", {"coat": 1.0})])
    with pytest.raises(ValueError, match=r"once, but \('coat', 'just_in_time', 1\)"):
        pretrain_seeds.join([plain, run("--seed 1", {"coat": 1.0})])
