"""Tests trainings in FP8 with BF16 matmuls in the last part of their steps."""

import dataclasses
import json

import jax
import pytest
from helpers.kills import Killed, on_call
from helpers.main_job import (
    bits,
    final_state,
    resume,
    rows_of,
    tiny,
    untrained,
    write_letters,
)

from experiments.common.results import read_results
from experiments.finetune.settings import settings as finetune_settings
from experiments.pretrain import compare, program
from experiments.training import job, runs
from experiments.training.checkpoints import Progress
from experiments.training.settings import model_config
from experiments.training.trainer import Trainer

_STEPS, _EARLY = 9, 5
_LAST = ["--bf16-last", "0.4"]
_ARGV = ["--preset", "tiny", "--steps", str(_STEPS), "--recipes", "te"]
_ARGV += ["--save-every", "2", "--eval-every", "6", "--eval-batches", "1"]

pytestmark = pytest.mark.usefixtures("shared_trainers")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_letters(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text, shared_trainers):
    """Returns the folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    argv = [*_ARGV, *_LAST, "--data", str(text), "--out", str(folder)]
    assert program.main(argv) == 0
    return folder


def _killed_in_step(step, folder, text, monkeypatch, *flags):
    argv = [*_ARGV, *flags, "--data", str(text), "--out", str(folder)]
    with monkeypatch.context() as patch:
        on_call(patch, Trainer, "step", step)
        with pytest.raises(Killed):
            program.main(argv)


def _assert_equal(folder, finished):
    assert rows_of(folder) == rows_of(finished)
    assert bits(final_state(folder, "te")) == bits(final_state(finished, "te"))


def test_first_steps_have_the_recipe_and_last_ones_bf16(finished, text):
    run = runs.Run.resume(finished, {})
    inputs = program._checked_inputs(run, None)
    trainers = {
        recipe: job.Trainer(
            model_config(run.settings, recipe, inputs.vocab_size),
            run.settings,
            steps=_STEPS,
        )
        for recipe in ("te", "bf16")
    }
    batches = job.train_batches(inputs, run.settings)
    del run  # It has the folder's lock.
    state, losses = trainers["te"].init(), []
    for step in range(_STEPS):
        trainer = trainers["te" if step < _EARLY else "bf16"]
        state, metrics = trainer.step(state, next(batches))
        losses.append(float(metrics.loss))
    rows = rows_of(finished, "te")
    assert [row["loss"] for row in rows] == losses
    validated = [row["val_loss"] for row in rows if "val_loss" in row]
    assert validated[-1] == trainers["bf16"].evaluate(state, inputs.validation)
    assert bits(final_state(finished, "te")) == bits(state)
    assert json.loads((finished / "summary.json").read_text())["bf16_last"] == 0.4


@pytest.mark.parametrize("step", [4, 8])
def test_a_killed_run_goes_on_to_the_same_bits(
    step, finished, text, tmp_path, monkeypatch
):
    _killed_in_step(step, tmp_path / "run", text, monkeypatch, *_LAST)
    assert resume(tmp_path / "run") == 0
    _assert_equal(tmp_path / "run", finished)


def test_the_part_may_change_until_it_begins(
    finished, text, tmp_path, monkeypatch, capsys
):
    _killed_in_step(6, tmp_path / "run", text, monkeypatch)
    assert resume(tmp_path / "run", *_LAST) == 0
    _assert_equal(tmp_path / "run", finished)
    record = (tmp_path / "run" / "run.json").read_bytes()
    for part in ("0.3", "0"):
        assert resume(tmp_path / "run", "--bf16-last", part) == 2
        error = capsys.readouterr().err
        assert f"--bf16-last {float(part)} would change steps from 6 on" in error
    assert (tmp_path / "run" / "run.json").read_bytes() == record


def test_the_smallest_part_is_a_step():
    settings = tiny(recipes=("bf16", "te", "coat_max"), bf16_last=1e-6)
    assert settings.early_steps("te", 100) == 99
    largest = dataclasses.replace(settings, bf16_last=0.999)
    assert largest.early_steps("te", 20) == 1  # The recipe has a step.
    assert settings.early_steps("bf16", 100) == 100
    assert settings.early_steps("te", 0) == 0
    lasts = [settings.last_recipe(recipe) for recipe in settings.recipes]
    assert lasts == ["bf16", "bf16", "coat_bf16"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16_last": 1.0}, r"bf16_last must be below 1, got 1\.0"),
        ({"bf16_last": -0.1}, r"bf16_last must be zero or more, got -0\.1"),
        ({"bf16_last": float("nan")}, "bf16_last must be zero or more, got nan"),
        ({"recipes": ("bf16", "coat_bf16")}, "got bf16, coat_bf16"),
        ({"scaling": "delayed"}, "got 'delayed'"),
    ],
)
def test_a_part_without_effect_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**{"bf16_last": 0.5, **changes})


@pytest.mark.parametrize(("step", "recipe"), [(_EARLY, "te"), (_EARLY + 1, "bf16")])
def test_a_message_of_little_memory_is_of_the_step_that_took_it(
    step, recipe, tmp_path, text, monkeypatch, capsys
):
    described = []

    def describe(trainer, settings):
        described.append(trainer.config.recipe)
        return "out of memory"

    monkeypatch.setattr(job.memory, "description", describe)

    def run_out():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    on_call(monkeypatch, Trainer, "step", step, run_out)
    argv = [*_ARGV, *_LAST, "--data", str(text), "--out", str(tmp_path / "run")]
    assert program.main(argv) == 1
    assert described == [recipe]
    assert "te: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("done", "changes"),
    [
        ({}, {"steps": 10, "minutes": 1.0}),  # No recipe has set the steps.
        ({"bf16": 20, "te": 5}, {"steps": 10}),  # Steps of bf16 do not change.
    ],
)
def test_the_part_may_change_if_no_step_changes(done, changes, tmp_path):
    folder = untrained(tmp_path / "run", recipes=("bf16", "te"), **changes)
    progress = {r: Progress(step=done.get(r, 0)) for r in ("bf16", "te")}
    run = runs.Run.open(folder, {"bf16_last": 0.2})
    run._check_early_steps(progress)


def test_adapters_take_no_last_part(tmp_path):
    options = {"model": str(tmp_path), "preset": "folder", "rounding": "nearest"}
    options |= {"data": ("a.jsonl",), "lora": 4, "recipes": ("coat",)}
    settings = finetune_settings(options)
    with pytest.raises(ValueError, match=r"--lora needs bf16_last=0\.0, got 0\.5"):
        dataclasses.replace(settings, bf16_last=0.5)


def test_comparisons_name_the_last_part(finished, tmp_path):
    out = tmp_path / "compared.json"
    assert compare.main([str(finished), "--losses", "--out", str(out)]) == 0
    contents = read_results(out)
    (row,), (curve,) = contents["rows"], contents["curves"]
    assert row["recipe"] == curve["recipe"] == "te, the last 40% in BF16"
    assert out.with_suffix(".png").exists()
    for part, percents in ((0.101, "10.1%"), (0.004, "0.4%")):
        names = compare._names(tiny(recipes=("te",), bf16_last=part), "te")
        assert names["recipe"] == f"te, the last {percents} in BF16"
