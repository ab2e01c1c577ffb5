"""Compares the exact match of recipes over several seeds, question by question.

    uv run python -m experiments.finetune.compare --base RUN --recipes bf16,te,coat

Each seed is a run of `experiments.finetune` in a folder of its own. Flags that this
program does not know are those of `experiments.finetune`. The same command goes on
where an earlier one ended. All runs ask the same questions, so recipes are compared
with the first one question by question.

There are two intervals of a difference. That over questions holds for these seeds: a
question's differences are averaged over the seeds, and questions are independent. That
over seeds holds for these questions, and is wide where seeds are few.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.table import Table

from experiments.common.intervals import mean_and_half
from experiments.common.programs import new_parser, one_line
from experiments.common.results import Bar, default_path, write_results
from experiments.common.style import RECIPE_COLORS
from experiments.common.tables import bars as bars_table
from experiments.common.tables import new_table
from experiments.finetune import arguments, program
from experiments.finetune.settings import FinetuneRun
from experiments.pretrain.arguments import read

# The distance from the first recipe that an interval may reach, in points.
_MARGIN = 2.0
# The 97.5% quantile of Student's distribution, by degrees of freedom.
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
_STUDENT |= {8: 2.306, 9: 2.262}


class Hits(NamedTuple):
    """Exact answers of all runs.

    Attributes:
      recipes: The recipes, behind "before".
      families: The family of each question.
      exact: Whether each answer is exact, by recipe, seed and question: 0.0 or 1.0.
    """

    recipes: list[str]
    families: list[str]
    exact: Float[np.ndarray, "recipes seeds questions"]

    def of(self, family: str) -> "Hits":
        """Returns those of a family, or of "all"."""
        own = [family in ("all", name) for name in self.families]
        families = [
            name for name, is_own in zip(self.families, own, strict=True) if is_own
        ]
        return Hits(self.recipes, families, self.exact[:, :, np.array(own)])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    # An abbreviation of --seeds would take the runs' own --seed.
    top = new_parser("experiments.finetune.compare", __doc__, allow_abbrev=False)
    out = default_path("finetune", "finetune_compare")
    top.add_argument(
        "--seeds", type=int, default=3, help="runs, of seeds 0, 1, ... (3)"
    )
    top.add_argument("--runs", type=Path, default=Path("runs/finetune-compare"))
    top.add_argument("--out", type=Path, default=out, help="results file", metavar="F")
    args, flags = top.parse_known_args(argv)
    if not 2 <= args.seeds <= len(_STUDENT) + 1:
        top.error(f"--seeds must be 2 to {len(_STUDENT) + 1}, got {args.seeds}")
    if not args.out.parent.is_dir():
        top.error(f"no folder {args.out.parent} to write {args.out.name} to")
    folders = [args.runs / f"seed-{seed}" for seed in range(args.seeds)]
    for seed, folder in enumerate(folders):
        if code := _run(folder, [*flags, "--seed", str(seed)]):
            return code
    try:
        hits = read_hits(folders)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    rows, differences = shares(hits), paired(hits)
    bars = list(_bars(differences))
    write_results(args.out, rows=rows, bars=bars, differences=differences)
    figure(rows, differences).savefig(args.out.with_suffix(".png"))
    Console().print(Group(*tables(rows, differences), bars_table(bars)))
    print(f"{args.out}, and a figure beside it")
    return 0


def _run(folder: Path, flags: Sequence[str]) -> int:
    """Trains and asks in a folder, unless that is done; returns an exit code."""
    if not (folder / "run.json").exists():
        return program.main([*flags, "--out", str(folder)])
    if not (folder / "summary.json").exists():
        return program.main([*flags, "--resume", str(folder)])
    try:
        FinetuneRun.resume(folder, read(arguments.parser(), flags))
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def read_hits(folders: Sequence[Path]) -> Hits:
    """Reads the answers of finished runs.

    Raises:
      ValueError: If the runs have other recipes or questions than the first.
    """
    found: list[dict[str, list[dict]]] = []
    for folder in folders:
        own: dict[str, list[dict]] = {}
        for line in (folder / "answers.jsonl").read_text().splitlines():
            answer = json.loads(line)
            own.setdefault(answer["recipe"], []).append(answer)
        found.append(own)
    first = found[0]
    asked = [(a["family"], a["question"]) for a in first["before"]]
    for folder, own in zip(folders, found, strict=True):
        if list(own) != list(first):
            raise ValueError(f"{folder} has the recipes {', '.join(own)}")
        for answers in own.values():
            if [(a["family"], a["question"]) for a in answers] != asked:
                raise ValueError(f"{folder} has other questions than {folders[0]}")
    exact = [[[a["exact"] for a in own[name]] for own in found] for name in first]
    return Hits(list(first), [family for family, _ in asked], np.array(exact, float))


def shares(hits: Hits) -> list[dict[str, Any]]:
    """Returns each recipe's exact match by family, with intervals over questions."""
    rows = []
    for family in _families(hits):
        for recipe, exact in zip(hits.recipes, hits.of(family).exact, strict=True):
            share, half = _over_questions(exact)
            rows.append(
                {
                    "recipe": recipe,
                    "family": family,
                    "seeds": exact.shape[0],
                    "questions": exact.shape[1],
                    "exact_match_percent": share,
                    "low_percent": max(share - half, 0.0),
                    "high_percent": min(share + half, 100.0),
                }
            )
    return rows


def paired(hits: Hits) -> list[dict[str, Any]]:
    """Returns the differences to the first recipe by family, with both intervals."""
    rows = []
    for family in _families(hits):
        exact = hits.of(family).exact[1:]  # The first entry is "before".
        for recipe, own in zip(hits.recipes[2:], exact[1:], strict=True):
            difference = own - exact[0]
            mean, half = _over_questions(difference)
            by_seed = 100 * difference.mean(axis=1)
            error = by_seed.std(ddof=1) / np.sqrt(by_seed.size)
            wide = float(_STUDENT[by_seed.size - 1] * error)
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


def _over_questions(
    values: Float[np.ndarray, "seeds questions"],
) -> tuple[float, float]:
    """Returns the mean and half of its 95% interval over questions, times 100."""
    return mean_and_half(100 * values.mean(axis=0))


def _families(hits: Hits) -> list[str]:
    families = list(dict.fromkeys(hits.families))
    return families if families == ["all"] else [*families, "all"]


def _bars(differences: Sequence[dict[str, Any]]) -> list[Bar]:
    bars = []
    for row in differences:
        if row["family"] == "all":
            name = f"{row['recipe']} - {row['beside']}, farthest end of the interval"
            farthest = max(abs(row["low_points"]), abs(row["high_points"]))
            bars.append(Bar.of(f"{name}, points", "<=", _MARGIN, farthest))
    return bars


def tables(
    rows: Sequence[dict[str, Any]], differences: Sequence[dict[str, Any]]
) -> list[Table]:
    """Returns the shares and the differences as tables for a terminal."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    count = f"{rows[-1]['questions']:,} questions, {rows[-1]['seeds']} seeds"
    share = new_table(f"Exact match, %, {count}", "", *families)
    for recipe in recipes:
        own = [row for row in rows if row["recipe"] == recipe]
        share.add_row(recipe, *(f"{row['exact_match_percent']:.1f}" for row in own))
    apart = new_table("Differences, points", "", "", "over questions", "over seeds")
    for row in differences:
        over = [f"{row[f'low{x}_points']:+.2f} to {row[f'high{x}_points']:+.2f}"
                for x in ("", "_over_seeds")]  # fmt: skip
        name = f"{row['recipe']} - {row['beside']}, {row['family']}"
        apart.add_row(name, f"{row['difference_points']:+.2f}", *over)
    return [share, apart]


def figure(
    rows: Sequence[dict[str, Any]], differences: Sequence[dict[str, Any]]
) -> Figure:
    """Draws shares by family, and differences with their intervals over questions."""
    found = Figure(figsize=(11, 4.2), layout="constrained", dpi=150)
    share, apart = found.subplots(1, 2, width_ratios=(3, 2))
    families = list(dict.fromkeys(row["family"] for row in rows))
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    width = 0.8 / len(recipes)
    for number, recipe in enumerate(recipes):
        own = [row for row in rows if row["recipe"] == recipe]
        heights = np.array([row["exact_match_percent"] for row in own])
        ends = np.array([[row["low_percent"], row["high_percent"]] for row in own])
        places = np.arange(len(families)) + (number - (len(recipes) - 1) / 2) * width
        color = dict(RECIPE_COLORS).get(recipe, "0.75")
        errors = np.abs(ends.T - heights)
        share.bar(places, heights, width, yerr=errors, color=color, label=recipe)
    share.set_xticks(range(len(families)), families)
    share.set(ylabel="exact match, %", ylim=(0, 105))
    share.legend(frameon=False, ncols=len(recipes), loc="upper center")
    for number, row in enumerate(differences[::-1]):
        mean, color = row["difference_points"], RECIPE_COLORS[row["recipe"]]
        half = row["high_points"] - mean
        apart.errorbar([mean], [number], xerr=[half], fmt="o", color=color, capsize=3)
    names = [f"{row['recipe']}, {row['family']}" for row in differences[::-1]]
    apart.set_yticks(range(len(names)), names)
    apart.axvspan(-_MARGIN, _MARGIN, color="0.93", zorder=0)
    apart.axvline(0, color="0.6", linewidth=0.8)
    beside = differences[0]["beside"] if differences else ""
    apart.set_xlabel(f"points from {beside}, 95% interval over questions")
    for axes in (share, apart):
        axes.spines[["top", "right"]].set_visible(False)
    return found


if __name__ == "__main__":
    sys.exit(main())
