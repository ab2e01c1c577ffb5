"""Compares trained models on held-out text: losses by kind of text, and questions.

    uv run python -m experiments.pretrain --preset 300m --recipes bf16 --out runs/bf16
    uv run python -m experiments.pretrain --preset 300m --recipes coat --out runs/coat
    uv run python -m experiments.pretrain.compare runs/bf16 runs/coat

The runs must be finished, and have the same preset and the bytes of the same text. Each
model's loss is measured on validation text and on texts of other kinds: with the
recipe's forward pass, and with the same weights in BF16. Each model also answers
multiple-choice questions about these texts. Measurements are stored in the run's
folder, so that the same command measures only what is missing. Recipes are compared
with `bf16` of the same seed, question by question. With --losses nothing is measured:
only the summaries of the runs are compared, with their losses and loads of experts.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32
from rich.console import Console
from tqdm import tqdm

from experiments.common.answers import ALL, percents, points, right_answers, written
from experiments.common.programs import new_parser, one_line, results_path
from experiments.common.results import (
    Bar,
    default_path,
    read_json,
    read_results,
    versions,
    write_json,
    write_results,
)
from experiments.common.tables import bars as bars_table
from experiments.common.tables import grouped
from experiments.pretrain import choices, comparison, held_out, program
from experiments.training import data, text
from experiments.training.job import Inputs
from experiments.training.plots import curve, draw_curves
from experiments.training.runs import Run
from experiments.training.settings import Recipe, Settings, percent

Row = dict[str, Any]
UNREAD = "unread files"  # The run's own validation text.
_SUMMARY, _MEASURED = "summary.json", "compared.json"
_QUESTIONS = 500
# Largest mean gap of the validation loss to bf16's, percent, by preset and recipe.
_TARGETS = {
    "cpu": {"coat": 0.6},
    "124m": {"coat": 0.5, "coat_max": 1.0},
    "300m": {"coat": 0.3, "coat_max": 0.6},
    "moe-300m": {"coat": 0.5},
}


class _Exam(NamedTuple):
    """Batches of text to measure a run's losses on, and questions, by kind of text."""

    batches: dict[str, list[Int32[np.ndarray, "batch length+1"]]]
    questions: dict[str, choices.Questions]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    top = new_parser("experiments.pretrain.compare", __doc__)
    top.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    top.add_argument(
        "--out",
        type=results_path,
        help="results file; a figure goes next to it",
        metavar="F",
    )
    top.add_argument(
        "--losses", action="store_true", help="compare summaries, and measure nothing"
    )
    args = top.parse_args(argv)
    try:
        comparison_of_runs = compared(args.runs, measures=not args.losses)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    out = args.out or default_path(
        "pretrain", f"pretrain_{comparison_of_runs['preset']}_compared"
    )
    written = write_results(out, **comparison_of_runs)
    figure = draw_curves(
        comparison_of_runs["curves"],
        "Training loss",
        f"nats a {comparison_of_runs['nats_per']}",
    )
    figure.savefig(out.with_suffix(".png"))
    console = Console()
    paired = [row for row in comparison_of_runs["rows"] if "val_gap_percent" in row]
    if {row["recipe"] for row in paired} > {"bf16"}:
        console.print(comparison.seeds(paired))
    if comparison_of_runs["texts"]:
        console.print(comparison.texts(comparison_of_runs["texts"]))
    if comparison_of_runs["tasks"]:  # Recipes may have no seed in common.
        console.print(comparison.answers(comparison_of_runs["tasks"]))
    if written["bars"]:
        console.print(bars_table([Bar(**bar) for bar in written["bars"]]))
    print(f"{out}, and a figure next to it")
    return 0


def compared(folders: Sequence[Path], *, measures: bool = True) -> dict[str, Any]:
    """Returns the entries of a results file for finished runs.

    Args:
      folders: The runs' folders.
      measures: Whether the entries include losses of texts and answers. Missing
        measurements are made and stored in the runs' folders.

    Raises:
      ValueError: If a run is unfinished or damaged, is not on bytes, differs from the
        first run in its preset, steps or data, has a recipe and seed of another run, is
        given twice, or if its data have changed.
    """
    if twice := [x for n, x in enumerate(folders) if x in folders[:n]]:
        raise ValueError(f"{twice[0]} is given twice")
    # All runs are checked before the first is measured, which can take long.
    finished = {folder: _finished(folder) for folder in folders}
    shared = _shared(finished)
    rows, texts, right, curves = [], [], [], []
    for summary, run in finished.values():
        measured = _measured(run) if measures else {}
        for row in summary["rows"]:
            names = _names(run.settings, row["recipe"])
            metrics = [m for m in run.rows("metrics") if m["recipe"] == row["recipe"]]
            row = row | _loads(metrics[-max(1, run.steps // 20) :])
            rows.append(row | names | {"commit": summary["versions"]["commit"]})
            curves.append(names | curve(np.array([m["loss"] for m in metrics])))
            if not measures:
                continue
            of_recipe = measured[row["recipe"]]
            texts += [
                names
                | {"text": k, "loss": x, "loss_in_bf16": of_recipe["losses_in_bf16"][k]}
                for k, x in of_recipe["losses"].items()
            ]
            right += [
                names | {"text": k, "right": x} for k, x in of_recipe["right"].items()
            ]
    plain = {row["seed"]: row["val_loss"] for row in rows if row["recipe"] == "bf16"}
    for row in rows:
        # The gap in a run's summary is to the run's first recipe.
        del row["val_gap_percent"]
        if loss := plain.get(row["seed"]):
            row["val_gap_percent"] = 100 * (row["val_loss"] / loss - 1)
    return {
        "rows": rows,
        "bars": bars(shared["preset"], rows, texts),
        "texts": texts,
        "tasks": tasks(right) if right else [],
        "curves": curves,
        **{k: v for k, v in shared.items() if k != "data"},
    }


def _shared(finished: Mapping[Path, tuple[dict[str, Any], Run]]) -> dict[str, Any]:
    """Returns the entries of summaries that all runs have in common, and their data.

    Raises:
      ValueError: If runs differ in them, or train a recipe with the same seed.
    """
    by_folder: dict[Path, dict[str, Any]] = {}
    trained: list[dict[str, Any]] = []
    for folder, (summary, run) in finished.items():
        shared = {key: summary[key] for key in ("preset", "steps", "nats_per")}
        shared["sizes"] = summary.get("sizes", {})
        by_folder[folder] = shared | {"data": run.record["data"]}
        first = next(iter(by_folder))
        if by_folder[folder] != by_folder[first]:
            raise ValueError(
                f"{folder} has {by_folder[folder]}, and {first} {by_folder[first]}"
            )
        for row in summary["rows"]:
            names = _names(run.settings, row["recipe"])
            if names in trained:
                raise ValueError(f"{folder} trains {names}, as another run does")
            trained.append(names)
    return by_folder[first]


def _finished(folder: Path) -> tuple[dict[str, Any], Run]:
    """Returns the summary of a finished run on bytes, and the run.

    Raises:
      ValueError: If the run is not finished, or its tokens are not bytes.
    """
    if not (folder / _SUMMARY).exists():
        raise ValueError(f"{folder} is no finished run: it has no {_SUMMARY}")
    summary, run = read_results(folder / _SUMMARY), Run.open(folder, {})
    if summary["nats_per"] != "byte":
        raise ValueError(f"runs on bytes can be compared, {folder} has tokens of a BPE")
    return summary, run


def _names(settings: Settings, recipe: Recipe) -> dict[str, Any]:
    """Returns the names of a training in comparisons: its recipe and its seed.

    The recipe's name says if the last steps have BF16 matmuls.
    """
    name: str = recipe
    if settings.last_recipe(recipe) != recipe:
        name = f"{recipe}, the last {percent(settings.bf16_last)} in BF16"
    return {"recipe": name, "seed": settings.seed}


def _loads(metrics: Sequence[Row]) -> dict[str, float]:
    """Returns the means of the experts' loads over steps; empty without experts."""
    keys = [k for k in ("largest_load", "smallest_load") if k in metrics[0]]
    return {key: float(np.mean([row[key] for row in metrics])) for key in keys}


def _measured(run: Run) -> dict[Recipe, Row]:
    """Returns the measurements of each recipe of a run.

    Recipes that have no measurements in the run's folder are measured now.
    """
    path = run.folder / _MEASURED
    examined = read_json(path) if path.exists() else {"steps": run.steps, "recipes": {}}
    if examined["steps"] != run.steps:  # The run was extended since then.
        examined = {"steps": run.steps, "recipes": {}}
    missing = [r for r in run.settings.recipes if r not in examined["recipes"]]
    if missing:
        corpus = program.load_corpus(run.settings, run.folder)
        run.check_data(corpus.fingerprint())
        inputs = program.select_inputs(corpus, run.settings)
        exam = _exam(run, corpus, inputs)
        for recipe in tqdm(missing, f"{run.folder}", unit="recipe", disable=None):
            examined["recipes"][recipe] = _examined(run, recipe, inputs, exam)
            write_json(path, examined)
    return examined["recipes"]


def _exam(run: Run, corpus: data.Corpus, inputs: Inputs) -> _Exam:
    """Returns a run's batches and questions, without documents that it trained on."""
    unread, trained_on = (
        [piece for tokens in split for piece in text.split_bytes(tokens)]
        for split in (corpus.validation, corpus.train)
    )
    by_kind = held_out.documents(map(text.decode_bytes, trained_on))
    for kind in [kind for kind, documents in by_kind.items() if not documents]:
        print(f"{run.folder}: no {kind}, it has read them all")
        del by_kind[kind]
    encoded = {UNREAD: unread} | {
        kind: [text.encode_bytes([each]) for each in documents]
        for kind, documents in by_kind.items()
    }
    return _Exam(
        {UNREAD: inputs.validation} | held_out.batches(by_kind, run.settings),
        {kind: choices.ask(arrays, _QUESTIONS) for kind, arrays in encoded.items()},
    )


def _examined(run: Run, recipe: Recipe, inputs: Inputs, exam: _Exam) -> Row:
    """Returns the losses and answers of the last checkpoint of a run with a recipe.

    Raises:
      ValueError: If the latest checkpoint is not the checkpoint of the run's last step.
    """
    last = run.settings.last_recipe(recipe)
    trainer = inputs.trainer(run.settings, last, run.schedule_steps or 0)
    with run.checkpoints(recipe) as checkpoints:
        if (last := checkpoints.progress().step) != run.steps:
            raise ValueError(
                f"the latest checkpoint of {recipe} in {run.folder} is of step {last}, "
                f"not of {run.steps}"
            )
        state = checkpoints.state(trainer.abstract_state())
    model = partial(trainer.log_likelihoods, state, last=choices.PIECE)
    right = {k: choices.answered(q, model) for k, q in exam.questions.items()}
    texts = exam.batches.items()
    return {
        "losses": {k: trainer.evaluate(state, b) for k, b in texts},
        "losses_in_bf16": {k: trainer.evaluate_in_bf16(state, b) for k, b in texts},
        "right": {k: written(each) for k, each in right.items()},
        "commit": versions()["commit"],
    }


def tasks(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Returns accuracies by recipe and kind of text, with differences to `bf16`.

    Answers to a question are averaged over the seeds that all recipes have. Intervals
    are 95% over questions. Differences are between answers to the same questions.

    Args:
      rows: Rows with "recipe", "seed", "text" and "right", a string of 0 and 1.
    """
    by_kind = grouped(rows, itemgetter("text"))
    answers = {kind: right_answers(shares) for kind, shares in by_kind.items()}
    first, *_ = answers.values()
    answers[ALL] = {
        recipe: np.concatenate([right[recipe] for right in answers.values()], axis=1)
        for recipe in first
    }
    result = []
    for kind, by_recipe in answers.items():
        for recipe, right in by_recipe.items():
            share, low, high = percents(right)
            row = {"recipe": recipe, "text": kind, "questions": right.shape[1]}
            row |= {"seeds": len(right), "accuracy_percent": share}
            row |= {"low_percent": low, "high_percent": high}
            if recipe != "bf16" and "bf16" in by_recipe:
                mean, half = points(right, by_recipe["bf16"])
                row |= {"difference_points": mean, "half_points": half}
            result.append(row)
    return result


def bars(
    preset: str, rows: Sequence[Mapping[str, Any]], texts: Sequence[Mapping[str, Any]]
) -> list[Bar]:
    """Returns the targets for mean gaps between validation losses and `bf16`'s.

    Args:
      preset: The preset of the runs.
      rows: Rows with "recipe", "seed" and "val_loss".
      texts: Rows with "recipe", "seed", "text" and "loss_in_bf16".
    """
    plain = {row["seed"] for row in rows if row["recipe"] == "bf16"}
    unread = [row for row in texts if row["text"] == UNREAD]
    measured = (
        ("validation loss", rows, "val_loss"),
        ("the same weights in BF16", unread, "loss_in_bf16"),
    )
    targets = []
    for name, rows_of_name, key in measured:
        gaps = comparison.gaps(
            (row for row in rows_of_name if row["seed"] in plain), key
        )
        for recipe, most in _TARGETS.get(preset, {}).items():
            if recipe in gaps:
                mean = float(np.mean(gaps[recipe]))
                targets.append(
                    Bar.of(f"{recipe}, {name} above bf16's, %", "<=", most, mean)
                )
    return targets


if __name__ == "__main__":
    sys.exit(main())
