"""Compares the exact match of recipes over several seeds, question by question.

    uv run python -m experiments.finetune.compare --base RUN --recipes bf16,te,coat

Each seed is a run of `experiments.finetune` in its own folder. Options that this
program does not know are passed to `experiments.finetune`. The same command continues
where an earlier one ended. All runs ask the same questions, so each recipe is compared
with the first recipe question by question.

A difference has two 95% intervals. The interval over questions holds for these seeds: a
question's differences are averaged over the seeds, and questions are independent. The
interval over seeds holds for these questions. It is wide if seeds are few, and infinite
for one seed.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from rich.console import Console, Group

from experiments.common.answers import percents, points
from experiments.common.intervals import half_of_few
from experiments.common.programs import new_parser, one_line, results_path
from experiments.common.results import default_path, read_results, write_results
from experiments.common.tables import bars as bars_table
from experiments.finetune import arguments, compare_report, program
from experiments.finetune.settings import FinetuneRun
from experiments.training.arguments import read
from experiments.training.plots import curve
from experiments.training.rows import read_rows

_MOST_SEEDS = 10

# Answers by recipe; under "before", the answers of the model before the training.
type Answers = dict[str, list[dict[str, Any]]]


class Hits(NamedTuple):
    """The correctness of the answers of all runs.

    Attributes:
      recipes: "before" for the model before the training, then the recipes.
      families: The family of each question.
      exact: Whether each answer is exact, by recipe, seed and question: 0.0 or 1.0.
    """

    recipes: list[str]
    families: list[str]
    exact: Float[np.ndarray, "recipes seeds questions"]

    def of(self, family: str) -> "Hits":
        """Returns the hits of one family, or of all families for "all"."""
        in_family = [family in ("all", name) for name in self.families]
        families = [
            name
            for name, is_own in zip(self.families, in_family, strict=True)
            if is_own
        ]
        return Hits(self.recipes, families, self.exact[:, :, np.array(in_family)])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    # If abbreviations were allowed, --seed of the runs would be read as --seeds.
    top = new_parser("experiments.finetune.compare", __doc__, allow_abbrev=False)
    out = default_path("finetune", "finetune_compare")
    top.add_argument(
        "--seeds", type=int, default=3, help="runs, of seeds 0, 1, ... (3)"
    )
    top.add_argument("--runs", type=Path, default=Path("runs/finetune-compare"))
    top.add_argument(
        "--out", type=results_path, default=out, help="results file", metavar="F"
    )
    args, flags = top.parse_known_args(argv)
    if not 1 <= args.seeds <= _MOST_SEEDS:
        top.error(f"--seeds must be 1 to {_MOST_SEEDS}, got {args.seeds}")
    if not args.out.parent.is_dir():
        top.error(f"no folder {args.out.parent} to write {args.out.name} to")
    folders = [args.runs / f"seed-{seed}" for seed in range(args.seeds)]
    for seed, folder in enumerate(folders):
        if code := run_seed(folder, [*flags, "--seed", str(seed)]):
            return code
    try:
        results = compared(folders)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    write_results(args.out, **results)
    compare_report.draw_exact_match(results).savefig(args.out.with_suffix(".png"))
    shown = [compare_report.exact_match(results), compare_report.differences(results)]
    Console().print(Group(*shown, bars_table(results["bars"])))
    print(f"{args.out}, and a figure next to it")
    return 0


def run_seed(folder: Path, flags: Sequence[str]) -> int:
    """Runs a fine-tuning in a folder, unless it is finished; returns an exit code.

    An interrupted run is resumed. `flags` are the options of `experiments.finetune`.
    """
    if not (folder / "run.json").exists():
        return program.main([*flags, "--out", str(folder)])
    if not (folder / "summary.json").exists():
        return program.main([*flags, "--resume", str(folder)])
    try:
        FinetuneRun.open(folder, read(arguments.parser(), flags))
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def compared(folders: Sequence[Path]) -> dict[str, Any]:
    """Returns the entries of a results file for finished runs.

    Raises:
      ValueError: If a run is damaged, or its recipes or questions are not the first
        run's.
    """
    hits = read_hits(folders)
    rows, differences = shares(hits), paired(hits)
    return {
        "rows": rows,
        "bars": compare_report.bars(rows, differences),
        "differences": differences,
        "training": training_of(folders[0]),
        "curves": [row for seed, f in enumerate(folders) for row in curves_of(f, seed)],
        "samples": samples_of(answers_of(folders[0])),
    }


def training_of(folder: Path) -> dict[str, Any]:
    """Returns the entries of a run's summary that are the same for all seeds."""
    summary = read_results(folder / "summary.json")
    shared = {key: summary[key] for key in ("preset", "steps", "nats_per", "base")}
    measured = next(iter(summary["recipes"].values()))
    return shared | {"parameters": measured["parameters"]}


def curves_of(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Returns the loss curves of a run's recipes, one row per recipe."""
    losses: dict[str, list[float]] = {}
    for row, _ in read_rows(folder / "metrics.jsonl"):
        losses.setdefault(row["recipe"], []).append(row["loss"])
    return [
        {"recipe": recipe, "seed": seed} | curve(np.array(losses_of_recipe))
        for recipe, losses_of_recipe in losses.items()
    ]


def samples_of(answers: Answers) -> list[dict[str, str]]:
    """Returns a run's answers to one question of each family, the first one."""
    records = [record for of_recipe in answers.values() for record in of_recipe]
    first = {record["family"]: record["question"] for record in records[::-1]}
    keys = ("recipe", "family", "question", "expected", "given")
    return [
        {key: record[key] for key in keys}
        for record in records
        if record["question"] == first[record["family"]]
    ]


def answers_of(folder: Path) -> Answers:
    """Returns the answers of a finished run by recipe, including "before"."""
    by_recipe: Answers = {}
    for line in (folder / "answers.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_recipe.setdefault(record["recipe"], []).append(record)
    return by_recipe


def read_hits(folders: Sequence[Path]) -> Hits:
    """Reads the answers of finished runs, and returns which are exact.

    Raises:
      ValueError: If the runs have other recipes or questions than the first.
    """
    return hits_of({str(folder): answers_of(folder) for folder in folders})


def hits_of(runs: Mapping[str, Answers]) -> Hits:
    """Returns the correctness of the answers of runs.

    `runs` has the answers of each run, by the run's name.

    Raises:
      ValueError: If the runs have other recipes or questions than the first.
    """
    first_name, first = next(iter(runs.items()))
    all_questions = [(a["family"], a["question"]) for a in first["before"]]
    for name, of_run in runs.items():
        if list(of_run) != list(first):
            raise ValueError(f"{name} has the recipes {', '.join(of_run)}")
        for answers in of_run.values():
            if [(a["family"], a["question"]) for a in answers] != all_questions:
                raise ValueError(f"{name} has other questions than {first_name}")
    exact = [
        [[a["exact"] for a in of_run[recipe]] for of_run in runs.values()]
        for recipe in first
    ]
    return Hits(
        list(first), [family for family, _ in all_questions], np.array(exact, float)
    )


def shares(hits: Hits) -> list[dict[str, Any]]:
    """Returns a row for each family and recipe: exact match in percent and interval.

    The intervals are over questions.
    """
    rows = []
    for family in _families(hits):
        for recipe, exact in zip(hits.recipes, hits.of(family).exact, strict=True):
            share, low, high = percents(exact)
            row = {"recipe": recipe, "family": family}
            row |= {"seeds": exact.shape[0], "questions": exact.shape[1]}
            row |= {"exact_match_percent": share}
            rows.append(row | {"low_percent": low, "high_percent": high})
    return rows


def paired(hits: Hits) -> list[dict[str, Any]]:
    """Returns a row for each family and recipe: its difference to the first recipe.

    Each difference has two intervals, over questions and over seeds.
    """
    rows = []
    for family in _families(hits):
        exact = hits.of(family).exact[1:]  # The first entry is "before".
        for recipe, of_recipe in zip(hits.recipes[2:], exact[1:], strict=True):
            mean, half = points(of_recipe, exact[0])
            wide = _half_over_seeds(100 * (of_recipe - exact[0]).mean(axis=1))
            rows.append(
                {
                    "recipe": recipe,
                    "beside": hits.recipes[1],
                    "family": family,
                    "difference_points": mean,
                    "low_points": mean - half,
                    "high_points": mean + half,
                    "low_over_seeds_points": mean - wide,
                    "high_over_seeds_points": mean + wide,
                }
            )
    return rows


def _half_over_seeds(differences: Float[np.ndarray, " seeds"]) -> float:
    """Returns half the width of the 95% interval over seeds; infinite for one seed."""
    if differences.size < 2:
        return math.inf
    error = differences.std(ddof=1) / np.sqrt(differences.size)
    return float(half_of_few(error, differences.size))


def _families(hits: Hits) -> list[str]:
    families = list(dict.fromkeys(hits.families))
    return families if families == ["all"] else [*families, "all"]


if __name__ == "__main__":
    sys.exit(main())
