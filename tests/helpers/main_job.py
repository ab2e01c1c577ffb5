"""Tiny runs of the main job: their settings, their text, and what they leave."""

import dataclasses
import gc
import json
from pathlib import Path

import jax
import numpy as np

from experiments.pretrain import program as pretrain
from experiments.training import job, runs
from experiments.training.settings import PRESETS, Settings, model_config


def tiny(**changes) -> Settings:
    return dataclasses.replace(PRESETS["tiny"].settings, **changes)


def untrained(folder: Path, **changes) -> Path:
    """Creates a run that has trained no step, and returns its folder."""
    return runs.Run.create(folder, tiny(**changes), "data").folder


def write_letters(path: Path, count=20_000) -> Path:
    """Writes a text of random letters, and returns its path."""
    path.write_bytes(np.random.default_rng(0).integers(97, 123, count, np.uint8))
    return path


def resume(folder, *flags) -> int:
    gc.collect()  # The lock of a run that was ended by an exception.
    return pretrain.main(["--resume", str(folder), *flags])


def rows_of(folder, recipe=None) -> list[dict]:
    """Returns the rows of metrics of a recipe, or of all recipes if it is None.

    Asserts that the file is standard JSON, without NaN and infinities.
    """

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    return [row for row in rows if recipe in (None, row["recipe"])]


def bits(tree) -> list:
    return [(x.dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def final_state(folder, recipe, trainer=None):
    """Returns the last state of a finished run.

    `trainer` may be a trainer with a state of the same shapes, to save time.
    """
    run = runs.Run.resume(folder, {})
    if trainer is None:
        config = model_config(run.settings, recipe, 257)
        trainer = job.Trainer(config, run.settings, steps=run.schedule_steps)
    with run.checkpoints(recipe) as checkpoints:
        assert checkpoints.progress().step == run.steps
        return checkpoints.state(trainer.abstract_state())
