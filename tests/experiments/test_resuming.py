"""Tests that a run can be resumed with more steps and with a few other settings."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from helpers.events import events
from helpers.kills import Killed, on_call
from helpers.main_job import bits, final_state, resume, rows_of, tiny, write_letters

from experiments.finetune import program as finetune
from experiments.finetune.settings import FinetuneRun
from experiments.pretrain import program as pretrain
from experiments.training import plots, runs
from experiments.training.settings import Settings
from experiments.training.tensorboard import Board
from experiments.training.trainer import Trainer

_STEPS, _MORE = 9, 14
_ARGV = ["--preset", "tiny", "--save-every", "4", "--steps", str(_STEPS)]
_ARGV += ["--eval-every", "6", "--eval-batches", "1"]

pytestmark = pytest.mark.usefixtures("shared_trainers")


def _nine_steps(folder, *flags):
    text = write_letters(folder / "text.txt")
    argv = [*_ARGV, "--data", str(text), *flags]
    assert pretrain.main([*argv, "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, shared_trainers):
    """Returns the folder of a run of nine steps."""
    return _nine_steps(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def finished_in_bf16(tmp_path_factory, shared_trainers):
    """Returns the folder of a run of nine steps with one recipe, to compile less."""
    return _nine_steps(tmp_path_factory.mktemp("runs"), "--recipes", "bf16")


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def copied_in_bf16(finished_in_bf16, tmp_path):
    return shutil.copytree(finished_in_bf16, tmp_path / "run")


def _settings(**changes) -> Settings:
    return tiny(steps=_STEPS, **changes)


@pytest.mark.slow
def test_a_finished_run_trains_longer(finished, copied, tmp_path, monkeypatch):
    initial = (finished / "metrics.jsonl").read_text()
    killed = shutil.copytree(finished, tmp_path / "killed")
    assert resume(copied, "--steps", str(_MORE)) == 0
    with monkeypatch.context() as patch:
        # The third step of the second recipe.
        on_call(patch, Trainer, "step", 8)
        with pytest.raises(Killed):
            resume(killed, "--steps", str(_MORE))
    assert resume(killed) == 0
    actual = (copied / "metrics.jsonl").read_text()
    assert actual.startswith(initial)
    for name in ("metrics.jsonl", "moments.jsonl"):
        assert (killed / name).read_bytes() == (copied / name).read_bytes()
    for recipe in ("bf16", "coat"):
        rows = rows_of(copied, recipe)
        assert [row["step"] for row in rows] == list(range(1, _MORE + 1))
        validated = [row["step"] for row in rows if "val_loss" in row]
        assert validated == [6, 9, 12, 14]
        settings = _settings()
        last = settings.end_lr * settings.lr
        rates = [row["lr"] for row in rows[_STEPS:]]
        assert rates == pytest.approx([last] * (_MORE - _STEPS))
        assert bits(final_state(killed, recipe)) == bits(final_state(copied, recipe))
    summary = json.loads((copied / "summary.json").read_text())
    assert (summary["steps"], summary["schedule_steps"]) == (_MORE, _STEPS)
    record = json.loads((copied / "run.json").read_text())
    assert record["settings"]["steps"] == record["steps"] == _MORE
    assert record["schedule_steps"] == _STEPS


@pytest.mark.slow
def test_an_unfinished_run_trains_longer(finished, tmp_path, monkeypatch):
    """The recipe that was finished has one more validation than the other one."""
    data = json.loads((finished / "run.json").read_text())["settings"]["data"][0]
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        on_call(patch, Trainer, "step", _STEPS + 6)
        with pytest.raises(Killed):
            pretrain.main([*_ARGV, "--data", data, "--out", str(out)])
    assert resume(out, "--steps", str(_MORE)) == 0
    for recipe, validated in (("bf16", [6, 9, 12, 14]), ("coat", [6, 12, 14])):
        rows = rows_of(out, recipe)
        assert [row["step"] for row in rows] == list(range(1, _MORE + 1))
        assert [row["step"] for row in rows if "val_loss" in row] == validated
        assert [row["loss"] for row in rows[:_STEPS]] == [
            row["loss"] for row in rows_of(finished, recipe)
        ]
    run = runs.Run.resume(out, {})
    gaps = plots.plot_losses(run, "byte").axes[1]
    (drawn,) = [line for line in gaps.lines if line.get_label() == "coat, validation"]
    assert list(drawn.get_xdata()) == [6, 12, 14]


def test_steps_only_grow(copied_in_bf16, capsys):
    initial = (copied_in_bf16 / "run.json").read_bytes()
    assert resume(copied_in_bf16, "--steps", "5") == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "--steps 5 was given" in output
    assert f"has {_STEPS}" in output
    assert (copied_in_bf16 / "run.json").read_bytes() == initial


@pytest.mark.parametrize("program", [pretrain, finetune])
def test_a_run_is_resumed_by_its_program(program, tmp_path, capsys):
    writer, name = {
        pretrain: (FinetuneRun, "experiments.finetune, not of experiments.pretrain"),
        finetune: (runs.Run, "experiments.pretrain, not of experiments.finetune"),
    }[program]
    path = tmp_path / "run" / "run.json"
    settings = writer.kind(**dataclasses.asdict(_settings()))
    writer.create(path.parent, settings, "data")
    assert program.main(["--resume", str(path.parent)]) == 2
    assert capsys.readouterr().err == f"error: {path} is of {name}\n"
    assert writer.open(path.parent, {}).settings == settings


def test_a_refused_resume_records_nothing(copied_in_bf16, capsys):
    initial = (copied_in_bf16 / "run.json").read_bytes()
    record = json.loads(initial)
    (copied_in_bf16 / "run.json").write_text(json.dumps(record | {"data": "other"}))
    other = (copied_in_bf16 / "run.json").read_bytes()
    assert resume(copied_in_bf16, "--steps", str(_MORE)) == 2
    assert resume(copied_in_bf16, "--spike", "0.5") == 2
    assert (copied_in_bf16 / "run.json").read_bytes() == other


@pytest.mark.slow
def test_an_older_run_trains_longer(finished, copied):
    """The record of an older run has no schedule_steps and no answers to bad steps."""
    record = json.loads((copied / "run.json").read_text())
    del record["schedule_steps"], record["settings"]["bad_step"]
    del record["settings"]["spike"], record["checksum"]
    (copied / "run.json").write_text(json.dumps(record))
    assert resume(copied) == 0
    assert json.loads((copied / "run.json").read_text()) == json.loads(
        (finished / "run.json").read_text()
    )
    (copied / "run.json").write_text(json.dumps(record))
    assert resume(copied, "--steps", str(_STEPS + 1)) == 0
    assert json.loads((copied / "run.json").read_text())["schedule_steps"] == _STEPS


@pytest.mark.slow
def test_what_touches_no_past_step_may_change(copied):
    flags = ["--keep", "1", "--save-every", "5", "--bad-step", "skip", "--spike", "7"]
    run = runs.Run.resume(copied, {})
    expected = dataclasses.replace(
        run.settings, keep=1, save_every=5, bad_step="skip", spike=7.0
    )
    del run
    assert resume(copied, *flags) == 0
    assert runs.Run.resume(copied, {}).settings == expected
    assert resume(copied, "--steps", "12", "--bad-step", "stop") == 0
    names = [path.name for path in (copied / "checkpoints" / "bf16").iterdir()]
    assert names == ["12"]


def test_a_budget_and_a_repeated_command(tmp_path):
    """Fifty of a hundred steps fit in the budget, and the schedule has fifty steps."""
    run = runs.Run.create(tmp_path, _settings(minutes=1.0), "data")

    def resumed(**arguments):
        run = runs.Run.resume(tmp_path, arguments)
        run.record_changes()
        return run.settings.steps, run.steps, run.schedule_steps

    del run
    assert resumed(steps=100) == (100, None, None)
    with pytest.raises(ValueError, match=r"--steps 99 was given and .* has 100"):
        resumed(steps=99)
    runs.Run.resume(tmp_path, {}).fix_steps(50)
    assert resumed(steps=100, minutes=1.0) == (100, 50, 50)
    assert resumed(steps=70) == (70, 70, 50)
    assert resumed(steps=100) == (100, 100, 50)
    with pytest.raises(ValueError, match=r"--minutes 2\.0 was given and .* has 1\.0"):
        resumed(minutes=2.0)


@pytest.mark.slow
def test_a_run_and_its_resume_write_all_rows_for_tensorboard(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        on_call(patch, Board, "write", 3)
        with pytest.raises(Killed):
            _nine_steps(tmp_path, "--recipes", "bf16", "--tensorboard")
    assert resume(tmp_path / "run", "--tensorboard") == 0
    board = events(tmp_path / "run" / "tensorboard" / "bf16")
    values = {(step, tag): value for step, tag, value in board}
    for row in rows_of(tmp_path / "run"):
        for name in ("loss", "grad_norm", "lr", "val_loss"):
            if name in row:
                assert values[row["step"], name] == pytest.approx(row[name], rel=1e-6)


def test_a_run_without_the_flag_writes_nothing_for_tensorboard(finished_in_bf16):
    assert not (finished_in_bf16 / "tensorboard").exists()


@pytest.mark.parametrize(
    "reason",
    [
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.",
        "INTERNAL: Error dispatching computation: Out of memory allocating 1 bytes.",
    ],
)
def test_an_end_of_memory_is_one_line(reason, tmp_path, monkeypatch, capsys):
    def run_out():
        raise jax.errors.JaxRuntimeError(reason)

    on_call(monkeypatch, Trainer, "step", 3, run_out)
    text = write_letters(tmp_path / "text.txt")
    argv = [*_ARGV, "--recipes", "bf16", "--data", str(text)]
    assert pretrain.main([*argv, "--out", str(tmp_path / "run")]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "error" in line]
    assert "bf16: out of memory on a device: a step has parameters 0.00 GiB" in line
    assert "saved activations" in line
    assert len(rows_of(tmp_path / "run")) == 2
    reason = "INTERNAL: another error"
    on_call(monkeypatch, Trainer, "step", 1, run_out)
    with pytest.raises(jax.errors.JaxRuntimeError, match="another error"):
        resume(tmp_path / "run")


def test_means_leave_nan_out():
    x = np.array([np.nan, np.nan, 1.0, 3.0, np.nan, 5.0])
    expected = [np.nan, np.nan, 1.0, 2.0, 3.0, 5.0]
    np.testing.assert_array_equal(plots.trailing_mean(x, 2), expected)


def test_a_run_that_lost_its_checkpoints_keeps_its_rows(copied_in_bf16, capsys):
    shutil.rmtree(copied_in_bf16 / "checkpoints" / "bf16")
    metrics = (copied_in_bf16 / "metrics.jsonl").read_bytes()
    assert resume(copied_in_bf16) == 2
    output = capsys.readouterr().err
    assert (
        f"{copied_in_bf16} has no checkpoint of bf16, whose training went to step 9"
        in output
    )
    assert (copied_in_bf16 / "metrics.jsonl").read_bytes() == metrics
