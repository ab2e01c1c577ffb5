"""Tests that studies of fine-tunings join runs that several processes made."""

import json
import sys

import pytest

from experiments.common.results import read_results
from experiments.studies import finetune_large, finetune_real
from experiments.training.interrupts import STOPPED


def _write_run(folder, recipe, hits, loss, version="1"):
    """Writes what a finished run of one recipe leaves, with one answer for each hit."""
    folder.mkdir(parents=True)
    answers = [
        {"recipe": name, "family": "stories", "question": f"q{number}"}
        | {"expected": "1", "given": str(int(hit)), "exact": bool(hit)}
        for name, of_name in (("before", [0] * len(hits)), (recipe, hits))
        for number, hit in enumerate(of_name)
    ]
    rows = [{"recipe": recipe, "step": step, "loss": loss} for step in (1, 2)]
    for name, lines in (("answers", answers), ("metrics", rows)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    summary = {"preset": "folder", "steps": 2, "nats_per": "token", "base": "/a/b"}
    summary |= {"command": f"train {recipe}", "date": f"day {recipe}", "rows": []}
    summary |= {"device": {"name": "a GPU"}, "versions": {"jax": version}}
    losses = {"train_loss": loss, "val_loss": loss, "parameters": 7}
    summary |= {"recipes": {recipe: losses}, "perplexity": {"before": 9.0, recipe: 3.0}}
    (folder / "summary.json").write_text(json.dumps(summary))


def _join(path):
    flags = ["--join", "--runs", str(path / "runs"), "--out", str(path / "out.json")]
    flags += ["--model", "m", "--data", "d", "--recipes", "bf16,coat"]
    assert finetune_real.main(flags) == 0
    return read_results(path / "out.json")


def test_recipes_of_several_processes_are_joined(tmp_path):
    hits = {"bf16": [1, 0, 1, 0], "coat": [1, 1, 1, 0]}
    for seed in (0, 2):
        for recipe, of_recipe in hits.items():
            folder = tmp_path / "runs" / recipe / f"seed-{seed}"
            _write_run(folder, recipe, of_recipe, 2.0 + seed)
    # No other recipe has this seed.
    _write_run(tmp_path / "runs/coat/seed-1", "coat", hits["coat"], 5.0)
    results = _join(tmp_path)
    shares = {row["recipe"]: row["exact_match_percent"] for row in results["rows"]}
    assert shares == {"before": 0, "bf16": 50, "coat": 75}
    assert {row["seeds"] for row in results["rows"]} == {2}
    of_seeds = {(x["recipe"], x["seed"], x["val_loss"]) for x in results["losses"]}
    assert of_seeds == {(r, s, 2.0 + s) for r in hits for s in (0, 2)}
    stories = [row for row in results["differences"] if row["family"] == "stories"]
    assert [row["difference_points"] for row in stories] == [25]
    assert results["training"]["base"] == "b"
    assert results["command"].startswith("train bf16; train coat; ")
    assert (results["device"], results["date"]) == ({"name": "a GPU"}, "day coat")
    samples = [(row["recipe"], row["given"]) for row in results["samples"]]
    assert samples == [("before", "0"), ("bf16", "1"), ("coat", "1")]


def test_runs_with_other_versions_are_not_joined(tmp_path):
    for version, recipe in (("1", "bf16"), ("2", "coat")):
        folder = tmp_path / "runs" / recipe / "seed-0"
        _write_run(folder, recipe, [1, 0], 2.0, version)
    with pytest.raises(ValueError, match="measured with the versions"):
        _join(tmp_path)


def test_runs_of_other_questions_are_not_joined(tmp_path):
    for recipe, hits in (("bf16", [1, 0]), ("coat", [1, 0, 1])):
        _write_run(tmp_path / "runs" / recipe / "seed-0", recipe, hits, 2.0)
    with pytest.raises(ValueError, match="has other questions"):
        _join(tmp_path)


def test_a_join_without_finished_runs_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        _join(tmp_path)
    assert "no seed in" in capsys.readouterr().err


def test_a_process_is_interrupted_once_it_has_written_rows(tmp_path):
    path = tmp_path / "rows"
    # It writes, as a run does, a row a step, and ends with a code of its own.
    code = f"""
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit({STOPPED}))
for _ in range(300):
    print(1, file=open({str(path)!r}, "a"))
    time.sleep(0.1)
"""
    finetune_large._run([sys.executable, "-c", code], path, 3)
    assert 3 <= path.read_text().count("\n") < 100
    with pytest.raises(RuntimeError, match="ended with 0"):
        finetune_large._run([sys.executable, "-c", "pass"], path, 1000)
    with pytest.raises(RuntimeError, match="ended with 3"):
        finetune_large._run([sys.executable, "-c", "raise SystemExit(3)"])


def test_bars_need_what_they_compare():
    row = {"step_bytes": 98, "device_peak_bytes": 100, "tokens_per_s": 13.0}
    bars = finetune_large._bars([{"training": "all-coat"} | row])
    assert [bar.measured for bar in bars] == [pytest.approx(0.02)]
    base = {"training": "adapters-bf16"} | row | {"tokens_per_s": 10.0}
    bars = finetune_large._bars([base, {"training": "adapters-coat_max"} | row])
    assert [bar.measured for bar in bars][-1] == pytest.approx(1.3)
