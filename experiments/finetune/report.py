"""Reports of a fine-tuning: summary.json, answers.jsonl, tables, exact_match.png."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.common.results import replace_file, write_results
from experiments.common.style import RECIPE_COLORS, framed
from experiments.common.tables import new_table
from experiments.finetune import exact_match
from experiments.finetune.exact_match import Answer
from experiments.finetune.settings import FinetuneRun
from experiments.training import report as training_report

_LARGEST_LOSS = 700.0  # No float is as large as e ** 710.


def summarize(
    run: FinetuneRun,
    token: str,
    by_recipe: Mapping[str, Sequence[Answer]],
    losses: Mapping[str, float],
) -> dict[str, Any]:
    """Writes summary.json, a results file, and answers.jsonl; returns the summary.

    Args:
      run: A finished run.
      token: The unit of the run's tokens: "byte" or "token".
      by_recipe: The answers of each recipe's model, and by the key "before" the answers
        of the model before the training.
      losses: The validation losses of the same models, with BF16 matmuls.
    """
    lines = [
        json.dumps({"recipe": recipe} | dataclasses.asdict(record))
        for recipe, answers in by_recipe.items()
        for record in answers
    ]
    replace_file(
        run.folder / "answers.jsonl", "".join(f"{x}\n" for x in lines).encode()
    )
    rows = [
        row
        for recipe, records in by_recipe.items()
        for row in (exact_match.rows(recipe, records) if records else ())
    ]
    return write_results(
        run.folder / "summary.json",
        rows=rows,
        command=run.command,
        preset=run.settings.preset,
        steps=run.steps,
        bf16_last=run.settings.bf16_last,
        schedule_steps=run.schedule_steps,
        nats_per=token,
        base=run.settings.model or run.settings.base or "random parameters",
        perplexity={name: _perplexity(loss) for name, loss in losses.items()},
        recipes=training_report.recipe_summaries(run),
    )


def _perplexity(loss: float) -> float:
    """Returns e ** loss, or infinity if the result would overflow."""
    return math.exp(loss) if loss < _LARGEST_LOSS else math.inf


def tables(summary: dict[str, Any]) -> Group:
    """Returns a summary as tables for a terminal."""
    shown = [perplexity_table(summary), training_report.table(summary)]
    if summary["rows"]:
        shown.insert(0, exact_match_table(summary["rows"]))
    return Group(*shown)


def perplexity_table(summary: dict[str, Any]) -> Table:
    """Returns a table of the validation perplexity, before training and by recipe."""
    table = new_table("Perplexity", "", *summary["perplexity"])
    values = (f"{value:,.4g}" for value in summary["perplexity"].values())
    table.add_row(f"a {summary['nats_per']}", *values)
    return table


def exact_match_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of exact match by family and recipe, with 95% intervals."""
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    table = new_table("Exact match, % (95% interval)", "", "questions", *recipes)
    for family in dict.fromkeys(row["family"] for row in rows):
        by_recipe = {row["recipe"]: row for row in rows if row["family"] == family}
        count = f"{by_recipe[recipes[0]]['questions']:,}"
        table.add_row(family, count, *(_cell(by_recipe[recipe]) for recipe in recipes))
    return table


def _cell(row: dict[str, Any]) -> str:
    low, high = row["low_percent"], row["high_percent"]
    return f"{row['exact_match_percent']:.1f} ({low:.1f}-{high:.1f})"


def plot_exact_match(run: FinetuneRun, summary: dict[str, Any]) -> Figure:
    """Draws exact_match.png in the run's folder, and returns the figure.

    Lines are the exact match of some questions during the training. Points are the
    exact match of all test questions, with 95% intervals.
    """
    figure = Figure(figsize=(9, 4.5), layout="constrained", dpi=150)
    axes = figure.subplots()
    rows = [row for row in run.rows("metrics") if "exact_match_percent" in row]
    last = [row for row in summary["rows"] if row["family"] == "all"]
    untrained = next(row for row in last if row["recipe"] == "before")
    for number, recipe in enumerate(run.settings.recipes):
        rows_of_recipe = [row for row in rows if row["recipe"] == recipe]
        steps = [row["step"] for row in rows_of_recipe]
        shares = [row["exact_match_percent"] for row in rows_of_recipe]
        color = RECIPE_COLORS[recipe]
        axes.plot(steps, shares, color=color, linewidth=1.6, label=recipe)
        end = next(row for row in last if row["recipe"] == recipe)
        # The recipes' points are drawn side by side, after the last step.
        step = (run.steps or 1) * (1.02 + 0.015 * number)
        _point(axes, step, end, color)
    _point(axes, 0, untrained, "0.4", label="before")
    axes.set_title(
        f"Exact match: {run.settings.eval_questions} questions during the training, "
        f"{untrained['questions']:,} at the end",
        loc="left",
        fontsize=11,
    )
    axes.set(xlabel="step", ylabel="%", ylim=(-2, 102))
    axes.legend(frameon=False, loc="upper left")
    framed(axes)
    figure.savefig(run.folder / "exact_match.png")
    return figure


def _point(
    axes: Any, x: float, row: dict[str, Any], color: str, label: str | None = None
) -> None:
    y = row["exact_match_percent"]
    error = [[y - row["low_percent"]], [row["high_percent"] - y]]
    axes.errorbar([x], [y], error, fmt="o", color=color, capsize=3, label=label)
