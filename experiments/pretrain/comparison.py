"""Tables and a figure of trainings, next to the paper's table 3 and its poster.

Rows come from a results file of `experiments.pretrain.compare`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from experiments.common.intervals import half_of_few
from experiments.common.paper import (
    LOSS_COLUMNS,
    POSTER,
    POSTER_TOKENS,
    TABLE_3,
    TASK_COLUMNS,
)
from experiments.common.seeds import mean_and_error, over_seeds
from experiments.common.style import framed
from experiments.common.tables import by_column, new_table

Row = Mapping[str, Any]
_PAPER = {"OLMo-1B, paper": TABLE_3, "OLMo-7B, poster": POSTER}
_TRAIN, _AVERAGE = LOSS_COLUMNS.index("train loss"), LOSS_COLUMNS.index("average ppl")
_SETS = {name: LOSS_COLUMNS.index(f"{name} ppl") for name in ("WikiText", "C4", "Pile")}


class _Final(NamedTuple):
    """The results of a training: its last loss, and the perplexity of held-out text."""

    loss: float
    held_out: float

    def cells(self, bf16: "_Final") -> list[str]:
        """Returns cells: the loss and two perplexities, and their gaps to `bf16`."""
        here, theirs = ((x.loss, math.exp(x.loss), x.held_out) for x in (self, bf16))
        return [
            cell
            for x, reference in zip(here, theirs, strict=True)
            for cell in (f"{x:#.5g}", f"{100 * (x / reference - 1):+.2f}")
        ]


def table_3(results: Mapping[str, Any]) -> Table:
    """Returns a table of losses and perplexities next to the paper's, by recipe.

    Args:
      results: A results file of `experiments.pretrain` or of its `compare`, with a row
        of `bf16`.
    """
    rows = over_seeds(results["rows"])
    name = f"{rows['bf16']['parameters'] / 1e6:.0f}M Llama, here"
    models = {
        name: {
            recipe: _Final(row["train_loss"], math.exp(row["val_loss"]))
            for recipe, row in rows.items()
        }
    }
    for model, values in _PAPER.items():
        models[model] = {r: _Final(x[_TRAIN], x[_AVERAGE]) for r, x in values.items()}
    names = ("training\nloss", "training\nperplexity", "held-out\nperplexity")
    heads = [head for name in names for head in (name, "gap, %")]
    title = "Table 3: losses in nats and perplexities, a byte (here) or a token (paper)"
    table = new_table(title, "", "", *heads)
    for recipe in rows:
        for model, finals in models.items():
            if recipe in finals:
                cells = finals[recipe].cells(finals["bf16"])
                table.add_row(recipe, model, *cells)
    return table


def accuracies() -> Table:
    """Returns a table of the paper's accuracies, which have no counterpart here."""
    table = new_table("The paper's accuracies", "", "", *TASK_COLUMNS)
    for model, rows in _PAPER.items():
        for recipe, values in rows.items():
            table.add_row(recipe, model, *map(str, values[len(LOSS_COLUMNS) :]))
    return table


def days(results: Mapping[str, Any]) -> Table:
    """Returns a table of the days that the poster's training takes on one device.

    `results` is a results file of `experiments.bench.e2e`, which times steps of a 7B
    model.
    """
    device, tokens = results["device"]["name"], POSTER_TOKENS
    title = f"A 7B model on {tokens / 1e9:.0f} billion tokens"
    table = new_table(title, "", "tokens/s", "days")
    speeds = [(row["case"], row["tokens_per_s"]) for row in results["rows"]]
    for recipe in TABLE_3:
        fastest = max(speed for case, speed in speeds if case == recipe)
        label = f"{recipe}, one {device}"
        table.add_row(label, f"{fastest:,.0f}", f"{tokens / fastest / 86_400:.0f}")
    return table


def gaps(rows: Iterable[Row], key: str) -> dict[str, list[float]]:
    """Returns the percentages by which losses exceed `bf16`'s with the same seed.

    Args:
      rows: The rows of a results file of `experiments.pretrain.compare`.
      key: The key of the loss.

    Returns:
      The gaps of all seeds, by recipe, in the order of the rows.
    """
    rows = list(rows)
    plain = {row["seed"]: row[key] for row in rows if row["recipe"] == "bf16"}
    by_recipe: dict[str, list[float]] = {}
    for row in rows:
        if row["recipe"] != "bf16":
            gaps_of_recipe = by_recipe.setdefault(row["recipe"], [])
            gaps_of_recipe.append(100 * (row[key] / plain[row["seed"]] - 1))
    return by_recipe


def seeds(rows: Sequence[Row]) -> Table:
    """Returns a table of gaps to `bf16` with the same seed, with 95% intervals."""
    losses = {"training loss": "train_loss", "validation loss": "val_loss"}
    by_loss = {name: gaps(rows, key) for name, key in losses.items()}
    title = "Loss above bf16's of the same seed, percent, and 95% intervals"
    heads = [head for name in losses for head in (name, "each seed")]
    table = new_table(title, "", "seeds", *heads)
    for recipe, first in by_loss["training loss"].items():
        cells = []
        for by_recipe in by_loss.values():
            each = by_recipe[recipe]
            cells += [interval(each), " ".join(f"{gap:+.2f}" for gap in each)]
        table.add_row(recipe, str(len(first)), *cells)
    return table


def interval(values: Sequence[float]) -> str:
    """Returns a text with the mean of values and half the width of its 95% interval.

    A single value has no interval.
    """
    mean, half = _mean_and_half(values)
    return f"{mean:+.2f}" if half is None else f"{mean:+.2f} ± {half:.2f}"


def _mean_and_half(values: Sequence[float]) -> tuple[float, float | None]:
    mean, error = mean_and_error(np.array(values))
    half = None if error is None else half_of_few(float(error), len(values))
    return float(mean), half


def draw_gaps(rows: Sequence[Row]) -> Figure:
    """Draws the gaps of each recipe's training loss to `bf16`, next to the paper's."""
    drawn = Figure(figsize=(8, 3.4), layout="constrained", dpi=150)
    axes = drawn.subplots()
    by_recipe = gaps(rows, "train_loss")
    places = {recipe: -row for row, recipe in enumerate(by_recipe)}
    for recipe, values in by_recipe.items():
        mean, half = _mean_and_half(values)
        if half is not None:
            axes.errorbar(mean, places[recipe], xerr=half, fmt="|k", capsize=4, ms=14)
        here = axes.scatter(values, [places[recipe]] * len(values), c="0.3", zorder=3)
    here.set_label("one seed, here")
    for (model, values), marker in zip(_PAPER.items(), "sD", strict=True):
        bf16 = values["bf16"][_TRAIN]
        recipes = [recipe for recipe in values if recipe in places]
        percent = [100 * (values[recipe][_TRAIN] / bf16 - 1) for recipe in recipes]
        heights = [places[recipe] - 0.28 for recipe in recipes]
        style = {"marker": marker, "facecolor": "white", "edgecolor": "black"}
        axes.scatter(percent, heights, **style, label=model)
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.set_yticks(list(places.values()), list(places))
    axes.set_ylim(min(places.values()) - 0.6, 0.6)
    axes.set_xlabel("training loss above bf16's, % (bars: 95% interval of the mean)")
    axes.set_ylabel("recipe")
    axes.legend(frameon=False, fontsize=9)
    framed(axes, grid="x")
    return drawn


def texts(rows: Sequence[Row]) -> Table:
    """Returns a table of perplexities by kind of text, next to the paper's.

    Gaps are to `bf16` with the same seed, with 95% intervals over seeds. One gap is for
    the recipe's forward pass, the other for its weights with all matmuls in BF16.

    Args:
      rows: Rows with "recipe", "seed", "text", "loss" and "loss_in_bf16".
    """
    losses = {
        (row["recipe"], row["seed"], row["text"]): (row["loss"], row["loss_in_bf16"])
        for row in rows
    }
    recipes, _, kinds = (list(dict.fromkeys(k)) for k in zip(*losses, strict=True))
    title = "Perplexity of held-out text, a byte (here) or a token (paper)"
    heads = ("bf16", "perplexity", "gap, %", "weights in\nBF16: gap, %")
    table = new_table(title, "", "text", *heads)
    for recipe in recipes:
        if recipe == "bf16":
            continue
        for kind in kinds:
            pairs = [
                (losses["bf16", seed, kind][0], *quantized)
                for (name, seed, text), quantized in losses.items()
                if (name, text) == (recipe, kind) and ("bf16", seed, kind) in losses
            ]
            if not pairs:
                continue
            plain, quantized, in_bf16 = np.array(pairs).T
            cells = [f"{math.exp(x.mean()):.3f}" for x in (plain, quantized)]
            cells += [interval(100 * np.expm1(x - plain)) for x in (quantized, in_bf16)]
            table.add_row(recipe, f"{kind}, here", *cells)
        for model, values in _PAPER.items():
            for name, at in _SETS.items() if recipe in values else ():
                plain, quantized = values["bf16"][at], values[recipe][at]
                gap = f"{100 * (quantized / plain - 1):+.2f}"
                cells = str(plain), str(quantized), gap, ""
                table.add_row(recipe, f"{name}, {model}", *cells)
    return table


def answers(rows: Sequence[Row]) -> Table:
    """Returns a table of right answers by recipe and kind of text, in percent.

    Intervals are 95% over questions. Points are differences to `bf16` on the same
    questions. The last columns have the paper's averages of its four tasks.
    """
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    title = "Right answers to multiple-choice questions, percent"
    papers = [f"{model}, 4 tasks" for model in _PAPER]
    table = new_table(title, "", *kinds, *papers)
    for recipe, by_kind in by_column(rows, "recipe", "text").items():
        shares = (
            f"{row['accuracy_percent']:.1f}\n"
            f"{row['low_percent']:.1f} to {row['high_percent']:.1f}"
            for row in (by_kind[kind] for kind in kinds)
        )
        averages = (_average(model, recipe) for model in _PAPER)
        table.add_row(recipe, *shares, *averages)
        if all("difference_points" in by_kind[kind] for kind in kinds):
            points = (
                f"{row['difference_points']:+z.1f} ± {row['half_points']:.1f}"
                for row in (by_kind[kind] for kind in kinds)
            )
            table.add_row("  points above bf16", *points)
    first = rows[0]
    seeds = f"{first['seeds']} seed{'s' * (first['seeds'] > 1)}"
    table.caption = f"{first['questions']:,} questions of each kind, {seeds}"
    return table


def _average(model: str, recipe: str) -> str:
    """Returns the paper's average over its tasks in percent, or "" if there is none."""
    values = _PAPER[model].get(recipe)
    return "" if values is None else f"{100 * values[-1]:.1f}"
