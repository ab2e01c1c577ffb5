"""Fine-tunes SmolLM2-135M-Instruct with several recipes over seeds.

    uv run python -m experiments.studies.finetune_real --model FOLDER --data FOLDER

`experiments.finetune.smollm2` makes the model's folder, and
`experiments.studies.finetune_data` the folder of the data. Each seed of a recipe is a
run of `experiments.finetune` in its own folder, and the same command continues where an
earlier one ended. Several processes may share the folder of runs, each with other
`--recipes`. With `--join` the program trains nothing, and joins the seeds that all
recipes have. Models answer word problems before and after the training, and a checker
compares the last number. Dialogues count only in losses. Few kernels support the hidden
size 576, so the results are about quality and not about speed.
"""

import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.common.programs import new_parser, results_path
from experiments.common.results import Bar, default_path, read_results, write_results
from experiments.common.tables import bars as bars_table
from experiments.common.tables import grouped
from experiments.finetune import compare
from experiments.studies.finetune_data import DIALOGUES

_RECIPES = "bf16,te,coat,coat_max"
_FLAGS = ["--checker", "number", "--lr", "5e-5", "--steps", "600", "--batch-size", "16"]
_FLAGS += ["--seq-len", "512", "--eval-every", "200", "--save-every", "600"]
_FLAGS += ["--keep", "1", "--long", "skip", "--eval-questions", "0"]
_LOSS_PERCENT, _POINTS = 1.0, 2.0
_SEEDS, _QUESTIONS = 3, 300  # There are no bars for fewer.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    top = new_parser("experiments.studies.finetune_real", __doc__, allow_abbrev=False)
    add = top.add_argument
    add("--model", type=Path, required=True, help="SmolLM2's folder")
    add("--data", type=Path, required=True, help="folder of train.jsonl and test.jsonl")
    add("--seeds", type=int, default=5, help="runs, of seeds 0, 1, ... (5)")
    add("--recipes", default=_RECIPES, help=f"({_RECIPES})")
    add("--runs", type=Path, default=Path("runs/finetune-real"))
    add("--join", action="store_true", help="trains nothing, joins finished runs")
    add(
        "--out",
        type=results_path,
        default=default_path("finetune_real", "finetune_real"),
    )
    args, flags = top.parse_known_args(argv)
    recipes = args.recipes.split(",")
    runs = {
        seed: [args.runs / recipe / f"seed-{seed}" for recipe in recipes]
        for seed in range(args.seeds)
    }
    if args.join:
        runs = {
            seed: folders for seed, folders in runs.items() if _are_finished(folders)
        }
        if not runs:
            top.error(f"no seed in {args.runs} has finished runs of {args.recipes}")
    else:
        data = ["--data", str(args.data / "train.jsonl")]
        data += ["--test", str(args.data / "test.jsonl")]
        if code := _train(runs, ["--model", str(args.model), *data, *_FLAGS, *flags]):
            return code
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = summarized(runs)
    write_results(args.out, **results)
    Console().print(bars_table(results["bars"]))
    print(args.out)
    return 0


def _train(runs: Mapping[int, Sequence[Path]], flags: Sequence[str]) -> int:
    """Runs the trainings that are not finished, and returns an exit code."""
    for seed, folders in runs.items():
        for folder in folders:
            recipe = folder.parent.name
            options = [*flags, "--recipes", recipe, "--seed", str(seed)]
            if code := compare.run_seed(folder, options):
                return code
    return 0


def _are_finished(folders: Sequence[Path]) -> bool:
    return all((folder / "summary.json").exists() for folder in folders)


def summarized(runs: Mapping[int, Sequence[Path]]) -> dict[str, Any]:
    """Returns the entries of a results file for the finished runs of each seed.

    Args:
      runs: The folders of each seed, one for each recipe.
    """
    answers = {f"seed {seed}": _answers(folders) for seed, folders in runs.items()}
    hits = problems_of(compare.hits_of(answers))
    differences, losses = compare.paired(hits), _losses(runs)
    training = compare.training_of(next(iter(runs.values()))[0])
    return {
        "rows": compare.shares(hits),
        "bars": _bars(differences, losses) if _suffices(hits) else [],
        "differences": differences,
        "losses": losses,
        "training": training | {"base": Path(training["base"]).name},
        "curves": [
            row
            for seed, folders in runs.items()
            for folder in folders
            for row in compare.curves_of(folder, seed)
        ],
        "samples": compare.samples_of(next(iter(answers.values()))),
        "measured": [
            read_results(folder / "summary.json")
            for folders in runs.values()
            for folder in folders
        ],
    }


def _answers(folders: Sequence[Path]) -> compare.Answers:
    """Returns the answers of one seed by recipe; "before" comes from the first run."""
    answers: compare.Answers = {}
    for folder in folders:
        for name, of_model in compare.answers_of(folder).items():
            answers.setdefault(name, of_model)
    return answers


def problems_of(hits: compare.Hits) -> compare.Hits:
    """Returns the hits of word problems, without dialogues."""
    is_problem = np.array([family != DIALOGUES for family in hits.families])
    families = [family for family in hits.families if family != DIALOGUES]
    return compare.Hits(hits.recipes, families, hits.exact[:, :, is_problem])


def _losses(runs: Mapping[int, Sequence[Path]]) -> list[dict[str, Any]]:
    """Returns a row for each recipe and seed, with losses and perplexities."""
    rows = []
    for seed, folders in runs.items():
        for folder in folders:
            summary = read_results(folder / "summary.json")
            perplexity = summary["perplexity"]
            for recipe, measured in summary["recipes"].items():
                row = {"recipe": recipe, "seed": seed}
                row |= {key: measured[key] for key in ("train_loss", "val_loss")}
                row["perplexity"] = perplexity[recipe]
                rows.append(row | {"perplexity_before": perplexity["before"]})
    return rows


def _suffices(hits: compare.Hits) -> bool:
    _, seeds, questions = hits.exact.shape
    return seeds >= _SEEDS and questions >= _QUESTIONS


def _bars(
    differences: Sequence[dict[str, Any]], losses: Sequence[dict[str, Any]]
) -> list[Bar]:
    """Returns the targets of `coat` and `coat_bf16` relative to `bf16`."""
    of_recipe = {
        recipe: np.mean([row["val_loss"] for row in rows])
        for recipe, rows in grouped(losses, itemgetter("recipe")).items()
    }
    bars = []
    for recipe in ("coat", "coat_bf16"):
        if not {recipe, "bf16"} <= of_recipe.keys():
            continue
        gap = 100 * abs(of_recipe[recipe] / of_recipe["bf16"] - 1)
        name = f"{recipe} - bf16, validation loss, percent"
        bars.append(Bar.of(name, "<=", _LOSS_PERCENT, float(gap)))
        for row in differences:
            if (row["recipe"], row["beside"], row["family"]) == (recipe, "bf16", "all"):
                farthest = max(abs(row["low_points"]), abs(row["high_points"]))
                name = f"{recipe} - bf16, right answers, farthest end of the interval"
                bars.append(Bar.of(f"{name}, points", "<=", _POINTS, farthest))
    return bars


if __name__ == "__main__":
    sys.exit(main())
