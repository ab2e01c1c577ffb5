"""Tables and figures of `experiments.vlm`, next to the paper's numbers."""

import textwrap
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from experiments.common import tables
from experiments.common.answers import ALL
from experiments.common.paper import TABLE_5, TABLE_5_COLUMNS
from experiments.common.results import Bar
from experiments.common.style import draw_shares, framed
from experiments.common.tables import Column, by_column, new_table
from experiments.training.plots import draw_curves
from experiments.vlm.data import Examples
from experiments.vlm.pictures import CREDIT
from experiments.vlm.questions import KINDS

Results = Mapping[str, Any]
# The numbers of questions and seeds without which a run has no bars.
_QUESTIONS, _SEEDS = 2000, 3
_MOST_POINTS = 2.0


def paper() -> Table:
    """Returns the paper's table 5."""
    title = "The paper's table 5: VILA1.5-7B, percent"
    result = new_table(title, "", *TABLE_5_COLUMNS)
    for recipe, values in TABLE_5.items():
        result.add_row(recipe, *map(str, values))
    return result


def accuracies(results: Results) -> Table:
    """Returns a table of accuracies by recipe and kind, with 95% intervals."""
    first = results["summary"][0]
    title = "Right answers, percent, and 95% intervals; the paper's average last"
    result = new_table(title, "", *KINDS, ALL, "table 5")
    for recipe, cells in _by_recipe(results).items():
        texts = []
        for kind in (*KINDS, ALL):
            row = cells[kind]
            low, high = row["accuracy_low_percent"], row["accuracy_high_percent"]
            texts.append(f"{row['accuracy_percent']:.1f}\n{low:.0f} to {high:.0f}")
        average = TABLE_5[recipe][-1] if recipe in TABLE_5 else "-"
        result.add_row(recipe, *texts, str(average))
    seeds = "seed" if first["seeds"] == 1 else "seeds"
    result.caption = (
        f"{_by_recipe(results)['bf16'][ALL]['questions']:,} questions, "
        f"{first['seeds']} {seeds}"
    )
    return result


def differences(results: Results) -> Table:
    """Returns a table of paired differences to `bf16`, with 95% intervals."""
    title = "Points above bf16 on the same questions, and 95% intervals"
    result = new_table(title, "", *KINDS, ALL, "seeds", "table 5")
    for recipe, cells in _by_recipe(results).items():
        if recipe == "bf16":
            continue
        texts = []
        for kind in (*KINDS, ALL):
            row = cells[kind]
            half = row["difference_high_points"] - row["difference_points"]
            texts.append(f"{row['difference_points']:+.1f}\n± {half:.1f}")
        row = cells[ALL]
        least = row["difference_least_seed_points"]
        most = row["difference_most_seed_points"]
        printed = "-"
        if recipe in TABLE_5:
            printed = f"{TABLE_5[recipe][-1] - TABLE_5['bf16'][-1]:+.2f}"
        result.add_row(recipe, *texts, f"{least:+.1f},\n{most:+.1f}", printed)
    return result


def costs(results: Results) -> Table:
    """Returns a table of losses, memory and speed, each the mean over seeds."""
    means = []
    for recipe in _by_recipe(results):
        rows = [row for row in results["rows"] if row["recipe"] == recipe]
        numbers = (k for k, value in rows[0].items() if isinstance(value, int | float))
        mean = {key: float(np.mean([row[key] for row in rows])) for key in numbers}
        means.append({"recipe": recipe} | mean)
    columns = (
        Column("", "recipe"),
        Column("training loss", "train_loss", "{:.4f}"),
        Column("test loss", "test_loss", "{:.4f}"),
        Column("saved activations", _saved_mib, "{:,.1f} MiB"),
        Column("moments, B each", "optimizer_bytes_per_param", "{:.2f}"),
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
    )
    title = "Losses in nats a token of answers, and what training takes"
    return tables.table(title, columns, means)


def _saved_mib(row: Mapping[str, Any]) -> float:
    return row["saved_activation_bytes"] / 2**20


def bars(summary: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Returns a target for each recipe except `bf16`, with enough questions and seeds.

    The measured value is the end of the paired difference's 95% interval that is
    farther from zero, without its sign.
    """
    targets = []
    for row in summary:
        enough = row["questions"] >= _QUESTIONS and row["seeds"] >= _SEEDS
        if row["kind"] == ALL and row["recipe"] != "bf16" and enough:
            ends = row["difference_low_points"], row["difference_high_points"]
            name = f"{row['recipe']}, points from bf16, farther end of 95%"
            targets.append(Bar.of(name, "<=", _MOST_POINTS, max(map(abs, ends))))
    return targets


def draw_losses(results: Results) -> Figure:
    """Draws training losses by recipe, and below them gaps to `bf16`.

    The losses are averages over seeds.
    """
    title = "Loss of answers while training"
    return draw_curves(results["curves"], title, "nats a token")


def draw_accuracies(results: Results) -> Figure:
    """Draws accuracies by kind of question, with their intervals."""
    drawn = Figure(figsize=(8, 3.2), layout="constrained", dpi=150)
    axes = drawn.subplots()
    kinds = (*KINDS, ALL)
    names = ("accuracy", "accuracy_low", "accuracy_high")
    ends = itemgetter(*(f"{name}_percent" for name in names))
    shares = {
        recipe: [ends(cells[kind]) for kind in kinds]
        for recipe, cells in _by_recipe(results).items()
    }
    draw_shares(axes, shares, kinds)
    axes.set_ylabel("right answers, %")
    axes.set_ylim(0, 115)
    framed(axes, grid=None)
    return drawn


def draw_questions(examples: Examples, count: int = 6) -> Figure:
    """Draws the scenes of the first `count` questions, with questions and answers."""
    texts = [
        f"{q.question}?\n{textwrap.fill(q.answer, 30)}"
        for q in examples.questions[:count]
    ]
    return _draw_scenes(examples, list(range(count)), texts)


def draw_captions(examples: Examples, results: Results) -> Figure:
    """Draws scenes of the test, with captions of all recipes and the annotation."""
    shown = list(dict.fromkeys(row["question"] for row in results["captions"]))
    texts = []
    for question in shown:
        lines = [f"annotation: {examples.questions[question].answer}"]
        lines += [
            f"{row['recipe']}: {row['caption']}"
            for row in results["captions"]
            if row["question"] == question
        ]
        texts.append("\n".join(textwrap.fill(line, 38) for line in lines))
    return _draw_scenes(examples, shown, texts, columns=min(3, len(shown)))


def _draw_scenes(
    examples: Examples, shown: Sequence[int], texts: Sequence[str], columns: int = 3
) -> Figure:
    rows = -(-len(shown) // columns)
    lines = max(text.count("\n") for text in texts) + 1
    height = rows * (2.2 + 0.16 * lines)
    drawn = Figure(figsize=(3 * columns, height), layout="constrained", dpi=120)
    panels = np.ravel(drawn.subplots(rows, columns, squeeze=False))
    for axes in panels:
        axes.set_axis_off()
    for axes, question, text in zip(panels, shown, texts, strict=False):
        axes.imshow(examples.images[examples.which[question]], interpolation="nearest")
        axes.set_title(text, fontsize=8, loc="left", y=-0.03, va="top")
    drawn.supxlabel(CREDIT, fontsize=6, color="0.4")
    return drawn


def _by_recipe(results: Results) -> dict[str, dict[str, Mapping[str, Any]]]:
    return by_column(results["summary"], "recipe", "kind")
