"""Trains one vision-language model with several recipes and compares their answers.

    uv run python -m experiments.vlm
    uv run python -m experiments.vlm --preset gpu

The model is a ViT encoder, a projector and a Llama decoder, all in one recipe. It reads
scenes that are composed of drawings, handwritten digits and photographs, which
installed packages contain. It learns captions, and answers to questions that follow
from the scenes' annotations. All recipes train from the same initializations on the
same batches. The trained models answer questions about scenes that no training saw, and
differences to BF16 are taken question by question. The results file is written after
each training; the same command runs the trainings that the file lacks.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from tqdm import tqdm

from experiments.common import tables
from experiments.common.answers import written
from experiments.common.memory import tree_bytes
from experiments.common.programs import new_parser, one_line, results_path
from experiments.common.results import (
    default_path,
    joined,
    known_rows,
    versions,
    write_results,
)
from experiments.training.interrupts import STOPPED
from experiments.training.plots import curve
from experiments.vlm import data, report
from experiments.vlm.data import Batch, Data
from experiments.vlm.intervals import summarize
from experiments.vlm.questions import KINDS
from experiments.vlm.settings import PRESETS, Recipe, VlmSettings
from experiments.vlm.training import TrainState, VlmTrainer, new_trainer

Row = dict[str, Any]
_CAPTIONS = 3
# Settings that choose trainings, not what a training does.
_NOT_SHARED = ("recipes", "seeds")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    flags = vars(parser().parse_args(argv))
    out = flags.pop("out")
    try:
        settings = read_settings(flags)
        if out is None:
            out = default_path("vlm", f"vlm_{settings.preset}")
            out.parent.mkdir(exist_ok=True)
        if not out.parent.is_dir():
            raise ValueError(f"no folder {out.parent} to write {out.name} to")
        study = Study(settings, out)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    try:
        study.train_missing()
    except KeyboardInterrupt:
        print(f"\n{out} keeps what is finished; the same command goes on from there")
        return STOPPED
    show(study, out)
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the program's parser; an option that is None keeps the preset's value."""
    top = new_parser("experiments.vlm", __doc__)
    add = top.add_argument
    add("--preset", choices=PRESETS, default="cpu", help="shape and settings (cpu)")
    add("--recipes", metavar="A,B", help="recipes, bf16 first (the preset's)")
    add("--seeds", type=int, help="trainings of each recipe, with seeds 0, 1, ...")
    add("--steps", type=int, help="optimizer steps of a training")
    add("--batch-size", type=int, help="questions a step")
    add("--lr", type=float, help="peak learning rate")
    add("--train-scenes", type=int, help="scenes for training")
    add("--test-questions", type=int, help="questions for tests")
    add(
        "--out",
        type=results_path,
        metavar="FILE",
        help="results file; figures go next to it",
    )
    return top


def read_settings(flags: dict[str, Any]) -> VlmSettings:
    """Returns the preset's settings, changed by the options that are not None."""
    flags = {k: v for k, v in flags.items() if v is not None}
    if "recipes" in flags:
        flags["recipes"] = tuple(name.strip() for name in flags["recipes"].split(","))
    return dataclasses.replace(PRESETS[flags["preset"]], **flags)


class Study:
    """The trainings with the settings' recipes and seeds, and their results file.

    Args:
      settings: The settings.
      out: The results file, which is written after each training. Trainings in the file
        are not repeated. None writes no file.

    Raises:
      ValueError: If `out` has trainings with other settings.
    """

    def __init__(self, settings: VlmSettings, out: Path | None = None) -> None:
        self._settings = settings
        self._out = out
        self._trainers: dict[str, VlmTrainer] = {}
        shared = dataclasses.asdict(settings)
        self._shared = {k: v for k, v in shared.items() if k not in _NOT_SHARED}
        earlier = (lambda of: known_rows(out, of)) if out else (lambda of: [])
        self._rows, self._curves = earlier("rows"), earlier("curves")
        self._captions, theirs = earlier("captions"), earlier("settings_rows")
        if theirs and theirs != [self._shared]:
            raise ValueError(
                f"{out} has trainings of other settings; name another --out"
            )

    @cached_property
    def data(self) -> Data:
        """The scenes and questions of all trainings."""
        return data.make(self._settings)

    def train_missing(self) -> None:
        """Runs the trainings that have no row in the results, and writes their rows."""
        missing, steps = self.missing(), self._settings.steps
        with tqdm(total=len(missing) * steps, unit="step", disable=None) as bar:
            for recipe, seed in missing:
                bar.set_description(f"{recipe}, seed {seed}")
                self.train(recipe, seed, bar)
                self.write()

    def missing(self) -> list[tuple[Recipe, int]]:
        """Returns the recipe and seed of each training without a row, seed by seed."""
        finished = {(row["recipe"], row["seed"]) for row in self._rows}
        return [
            (recipe, seed)
            for seed in range(self._settings.seeds)
            for recipe in self._settings.recipes
            if (recipe, seed) not in finished
        ]

    def train(self, recipe: Recipe, seed: int, bar: tqdm) -> None:
        """Runs a training, and records its results and its answers to the test."""
        words = len(self.data.vocabulary.words)
        if recipe not in self._trainers:
            self._trainers[recipe] = new_trainer(self._settings, recipe, words)
        trainer = self._trainers[recipe]
        state, losses, seconds = _fit(trainer, self._settings, self.data, seed, bar)
        test = self.data.test
        loss, right = trainer.evaluate(state, test.batch(np.arange(len(test.which))))
        tokens = self._settings.batch_size * (self._settings.length - 1)
        row = {
            "recipe": recipe,
            "seed": seed,
            "commit": versions()["commit"],
            "parameters": trainer.parameters,
            "train_loss": float(losses[-max(1, len(losses) // 10) :].mean()),
            "test_loss": loss,
            "seconds": seconds,
            "tokens_per_s": tokens * len(losses) / seconds,
            "saved_activation_bytes": trainer.saved_activation_bytes(),
            "optimizer_bytes_per_param": tree_bytes(state.opt_state)
            / trainer.parameters,
            "right": written(right),
        }
        self._rows = joined(self._rows, row, _training)
        curve_row = {"recipe": recipe, "seed": seed} | curve(losses)
        self._curves = joined(self._curves, curve_row, _training)
        if seed == 0:
            for caption in _captions(trainer, state, self.data, recipe):
                self._captions = joined(self._captions, caption, _captioned)

    def results(self) -> dict[str, Any]:
        """Returns the results of the settings' recipes and seeds, as in the file."""
        recipes = self._settings.recipes

        def chosen(rows: list[Row]) -> list[Row]:
            selected = [row for row in rows if row["recipe"] in recipes]
            selected = [r for r in selected if r.get("seed", 0) < self._settings.seeds]
            return sorted(selected, key=lambda row: recipes.index(row["recipe"]))

        rows = chosen(self._rows)
        summary = summarize(rows)
        return {
            "rows": rows,
            "bars": report.bars(summary),
            "summary": summary,
            "curves": chosen(self._curves),
            "captions": chosen(self._captions),
        }

    def write(self) -> None:
        """Writes all trainings so far to the results file, if the study has a file."""
        if self._out is None:
            return
        summary = summarize(self._rows)
        write_results(
            self._out,
            rows=self._rows,
            bars=report.bars(summary),
            settings_rows=[self._shared],
            summary=summary,
            curves=self._curves,
            captions=self._captions,
        )


def show(study: Study, out: Path) -> None:
    """Prints tables of a study, and draws figures in the folder of its results file."""
    results = study.results()
    figures = {
        "losses": report.draw_losses(results),
        "kinds": report.draw_accuracies(results),
        "captions": report.draw_captions(study.data.test, results),
    }
    for name, figure in figures.items():
        figure.savefig(out.with_name(f"{out.stem}_{name}.png"))
    console = Console()
    for table in (report.accuracies, report.differences, report.costs):
        console.print(table(results))
    if results["bars"]:
        console.print(tables.bars(results["bars"]))
    print(f"{out}, and figures next to it")


def _fit(
    trainer: VlmTrainer, settings: VlmSettings, dataset: Data, seed: int, bar: tqdm
) -> tuple[TrainState, np.ndarray, float]:
    """Trains a model; returns the state, the loss of each step, and the seconds."""
    state, losses = trainer.init(seed), []
    stream = data.batches(dataset, settings, seed)
    _ = trainer.compiled  # Compiling is not training.
    started = time.perf_counter()
    for _ in range(settings.steps):
        state, metrics = trainer.step(state, next(stream))
        losses.append(metrics.loss)
        bar.update()
    values = np.array(jax.device_get(losses))
    return state, values, time.perf_counter() - started


def _captions(
    trainer: VlmTrainer, state: TrainState, dataset: Data, recipe: Recipe
) -> list[Row]:
    """Returns rows with a model's captions of the first test scenes with captions."""
    step, offset = len(KINDS), KINDS.index("caption")
    chosen = np.arange(offset, len(dataset.test.questions), step)[:_CAPTIONS]
    batch: Batch = dataset.test.batch(chosen)
    prompts = data.prompt_length(batch.is_answer)
    room = batch.tokens.shape[1] - int(prompts.max())
    written = trainer.answers(state, batch, prompts, room)
    return [
        {
            "recipe": recipe,
            "question": int(question),
            "caption": dataset.vocabulary.decode(tokens),
        }
        for question, tokens in zip(chosen, written, strict=True)
    ]


def _training(row: Row) -> tuple[str, int]:
    return row["recipe"], row["seed"]


def _captioned(row: Row) -> tuple[str, int]:
    return row["recipe"], row["question"]
