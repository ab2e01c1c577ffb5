"""Tables and figures of `experiments.finetune.compare`, and the paper's table 4."""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from experiments.common.paper import TABLE_4, TABLE_4_COLUMNS
from experiments.common.results import Bar
from experiments.common.style import RECIPE_COLORS, draw_shares, framed
from experiments.common.tables import grouped, new_table
from experiments.finetune.tasks import BENCHMARKS, Problem
from experiments.training.plots import draw_curves

Row = Mapping[str, Any]
Results = Mapping[str, Any]
# The numbers of questions and seeds without which a comparison has no bars.
_QUESTIONS, _SEEDS = 2000, 3
# The distance from the first recipe that an interval may reach, in points.
_MARGIN = 2.0
# Recipes that have learned nothing do not differ. The low end of the first recipe's
# interval must be so many points above the high end of the untrained model's interval.
_GAIN = 10.0


def bars(rows: Sequence[Row], differences: Sequence[Row]) -> list[Bar]:
    """Returns the targets of a comparison: no targets with few questions or seeds.

    Args:
      rows: The rows of exact match, from `shares`.
      differences: The rows of differences, from `paired`.
    """
    untrained, first = [row for row in rows if row["family"] == "all"][:2]
    if first["questions"] < _QUESTIONS or first["seeds"] < _SEEDS:
        return []
    gain = first["low_percent"] - untrained["high_percent"]
    name = f"{first['recipe']} above before, from interval to interval, points"
    targets = [Bar.of(name, ">=", _GAIN, gain)]
    for row in differences:
        if row["family"] == "all":
            name = f"{row['recipe']} - {row['beside']}, farthest end of the interval"
            farthest = max(abs(row["low_points"]), abs(row["high_points"]))
            targets.append(Bar.of(f"{name}, points", "<=", _MARGIN, farthest))
    return targets


def examples(problems: Sequence[Problem]) -> Table:
    """Returns a table of problems, with the benchmark that each family imitates."""
    result = new_table("Generated problems", "family", "for", "question", "answer")
    for problem in problems:
        stands_for = BENCHMARKS[problem.family]
        result.add_row(problem.family, stands_for, problem.question, problem.answer)
    return _of_text(result)


def answers(results: Results) -> Table:
    """Returns a table of the answers of all models to a question of each family."""
    samples = results["samples"]
    recipes = list(dict.fromkeys(row["recipe"] for row in samples))
    result = new_table("Answers of seed 0", "question", "right", *recipes)
    for question in dict.fromkeys(row["question"] for row in samples):
        rows = [row for row in samples if row["question"] == question]
        texts = (row["given"] for row in rows)
        result.add_row(question, rows[0]["expected"], *texts)
    return _of_text(result)


def _of_text(table: Table) -> Table:
    for column in table.columns:
        column.justify, column.overflow = "left", "fold"
    return table


def exact_match(results: Results) -> Table:
    """Returns a table of exact match by recipe and family, with the paper's numbers."""
    rows = results["rows"]
    result = _by_family("Exact match, %", rows)
    for recipe, rows_of_recipe in _grouped(rows):
        result.add_row(
            recipe, *(f"{row['exact_match_percent']:.1f}" for row in rows_of_recipe)
        )
        ends = (
            f"{row['low_percent']:.1f} to {row['high_percent']:.1f}"
            for row in rows_of_recipe
        )
        result.add_row("  95% interval", *ends)
        _add_paper(result, _paper(recipe, rows_of_recipe), ".1f")
    seeds = rows[-1]["seeds"]
    result.caption = (
        f"{rows[-1]['questions']:,} questions, {seeds} seed{'s' * (seeds > 1)}"
    )
    return result


def differences(results: Results) -> Table:
    """Returns a table of paired differences by family, with the paper's numbers."""
    rows = results["differences"]
    reference = rows[0]["beside"] if rows else "the first recipe"
    title = f"Points above {reference} on the same questions, and 95% intervals"
    result = _by_family(title, results["rows"])
    for recipe, rows_of_recipe in _grouped(rows):
        result.add_row(
            recipe, *(f"{row['difference_points']:+.1f}" for row in rows_of_recipe)
        )
        for over, key in (("questions", ""), ("seeds", "_over_seeds")):
            ends = (
                f"{row[f'low{key}_points']:+.1f} to {row[f'high{key}_points']:+.1f}"
                for row in rows_of_recipe
            )
            result.add_row(f"  over {over}", *ends)
        pairs = zip(
            _paper(recipe, rows_of_recipe),
            _paper(reference, rows_of_recipe),
            strict=True,
        )
        printed = [None if None in pair else pair[0] - pair[1] for pair in pairs]
        _add_paper(result, printed, "+.1f")
    return result


def draw_losses(results: Results) -> Figure:
    """Draws training losses by recipe, and below them gaps to the first recipe.

    The losses are averages over seeds.
    """
    unit = f"nats a {results['training']['nats_per']}"
    return draw_curves(results["curves"], "Loss of answers while training", unit)


def draw_exact_match(results: Results) -> Figure:
    """Draws exact match by family, and differences with two intervals each."""
    drawing = Figure(figsize=(11, 4.2), layout="constrained", dpi=150)
    share, differences = drawing.subplots(1, 2, width_ratios=(3, 2))
    _draw_shares(share, results["rows"])
    _draw_differences(differences, results["differences"])
    for axes in (share, differences):
        framed(axes, grid=None)
    return drawing


def _draw_shares(axes: Axes, rows: Sequence[Row]) -> None:
    ends = ("exact_match_percent", "low_percent", "high_percent")
    shares = {name: list(map(itemgetter(*ends), of)) for name, of in _grouped(rows)}
    families = dict.fromkeys(row["family"] for row in rows)
    draw_shares(axes, shares, _heads(families))
    top = max(row["high_percent"] for row in rows)
    # The legend lies above the bars.
    axes.set(ylabel="exact match, %", ylim=(0, 1.2 * top))


def _draw_differences(axes: Axes, rows: Sequence[Row]) -> None:
    names = []
    for recipe, rows_of_recipe in _grouped(rows)[::-1]:
        for row in rows_of_recipe[::-1]:
            mean, height = row["difference_points"], len(names)
            style = {"color": RECIPE_COLORS[recipe], "fmt": "none"}
            for key, width, cap in (("", 2.0, 4), ("_over_seeds", 0.8, 0)):
                half = row[f"high{key}_points"] - mean
                if np.isfinite(half):
                    axes.errorbar(
                        mean, height, xerr=half, linewidth=width, capsize=cap, **style
                    )
            axes.plot(mean, height, "o", color=RECIPE_COLORS[recipe])
            names.append(f"{recipe}, {row['family']}")
    axes.set_yticks(range(len(names)), names)
    axes.axvspan(-_MARGIN, _MARGIN, color="0.93", zorder=0)
    axes.axvline(0, color="0.6", linewidth=0.8)
    # Intervals over few seeds are so wide that the others could not be seen.
    reach = [abs(row[f"{end}_points"]) for row in rows for end in ("low", "high")]
    reach = 1.5 * max([_MARGIN, *reach])
    axes.set_xlim(-reach, reach)
    reference = rows[0]["beside"] if rows else "the first recipe"
    axes.set_xlabel(
        f"points above {reference}; 95% intervals over questions\n"
        "(thick) and over seeds (thin, may go on)\n"
        "bars ask for the grey part"
    )


def _by_family(title: str, rows: Sequence[Row]) -> Table:
    """Returns an empty table with a column for each family."""
    return new_table(title, "", *_heads(dict.fromkeys(row["family"] for row in rows)))


def _heads(families: Iterable[str]) -> list[str]:
    """Returns the heads of columns: the names of families.

    If the families include a family for every benchmark, a second line names the
    benchmark.
    """
    families = list(families)
    names = BENCHMARKS if set(BENCHMARKS) <= set(families) else {}
    return [f"{name}\n({names[name]})" if name in names else name for name in families]


def _grouped(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Returns pairs of a recipe and its rows."""
    return list(grouped(rows, itemgetter("recipe")).items())


def _paper(recipe: str, rows: Sequence[Row]) -> list[float | None]:
    """Returns the number in the paper's table 4 for each row; None if there is none.

    All are None unless the rows have a family for every benchmark, because the paper's
    average is over all benchmarks.
    """
    families = [row["family"] for row in rows]
    columns = BENCHMARKS | {"all": "average"}
    if not set(BENCHMARKS) <= set(families):
        return [None] * len(rows)
    printed = dict(zip(TABLE_4_COLUMNS, TABLE_4.get(recipe, ()), strict=False))
    return [printed.get(columns.get(family, "")) for family in families]


def _add_paper(table: Table, values: Sequence[float | None], spec: str) -> None:
    """Adds a row of the paper's numbers in parentheses, unless all are None."""
    if any(value is not None for value in values):
        texts = ("-" if v is None else f"({v:{spec}})" for v in values)
        table.add_row("  the paper's", *texts)
