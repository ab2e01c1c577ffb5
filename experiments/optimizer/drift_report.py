"""Reports of `drift`: a table and a figure, for a terminal or a notebook."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from experiments.common.style import framed
from experiments.common.tables import new_table
from experiments.optimizer.drift_cases import METHODS, OURS, STORIES

Row = dict[str, Any]
_COLORS = ("#8d99ae", "#edae49", "#b5651d", "#3a86ff", "#8338ec", "#d1495b", "#2a9d8f")


def table(rows: Sequence[Row], *, b2: float, steps: int) -> Table:
    """Returns a table of ratios of updates to exact updates, by sequence and method.

    A line of the table is a sequence of gradients. A cell has the mean and the largest
    ratio, in runs of `steps` steps with `b2`.
    """
    shown = [row for row in rows if (row["b2"], row["steps"]) == (b2, steps)]
    title = f"Updates over exact ones, b2 = {b2:g}, {steps:,} steps: mean and largest"
    result = new_table(title, "", *(name.replace(" ", "\n") for name in METHODS))
    for column in result.columns:
        column.no_wrap = True
    cells = {(row["story"], row["method"]): _cell(row) for row in shown}
    for story in STORIES:
        result.add_row(
            story.name, *(cells.get((story.name, method), "") for method in METHODS)
        )
    return result


def _cell(row: Row) -> str:
    if row["ratio"] is None:
        return "-"
    return f"{_short(row['ratio'])} {_short(row['largest'])}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}" if value < 1e3 else "many"


def drawn(runs: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Returns b2 and the length of the run that `figure` draws, one of `runs`.

    The choice prefers runs of at most 10,000 steps to longer runs, then runs with b2 =
    0.999 to other runs, and then the longest run.
    """
    usual = [run for run in runs if run[1] <= 10_000] or list(runs)
    return max(usual, key=lambda run: (run[0] == 0.999, run[1]))


def figure(curves: Sequence[Row]) -> Figure:
    """Draws the mean ratio of updates to exact updates over a run.

    There is a panel for each sequence of gradients. Adam with float32 moments has the
    ratio 1. The shaded band is the target, 5% around 1.
    """
    columns = 4
    drawing = Figure(figsize=(13, 8.5), layout="constrained", dpi=150)
    panels = drawing.subplots(-(-len(STORIES) // columns), columns, sharey=True).flat
    for story, axes in zip(STORIES, panels, strict=False):
        axes.set_title(story.name, loc="left", fontsize=10)
        axes.axhspan(0.95, 1.05, color="0.9", zorder=0, label="within 5%")
        for method, color in zip(METHODS, _COLORS, strict=True):
            points = [
                (row["step"], np.nan if row["ratio"] is None else row["ratio"])
                for row in curves
                if (row["story"], row["method"]) == (story.name, method)
            ]
            axes.plot(
                *np.array(points).T,
                color=color,
                linewidth=2.2 if method == OURS else 1.3,
                zorder=3 if method == OURS else 2,
                label=method,
            )
        axes.set(yscale="log", ylim=(0.1, 10))
        framed(axes)
    for axes in list(panels):
        axes.set_axis_off()
    first = drawing.axes[0]
    drawing.supylabel("updates over exact ones", fontsize=10)
    drawing.supxlabel("step", fontsize=10)
    legend = dict(frameon=False, loc="lower right", bbox_to_anchor=(0.99, 0.04))
    drawing.legend(*first.get_legend_handles_labels(), **legend)
    run = curves[0]
    title = f"b2 = {run['b2']:g}, {run['steps']:,} steps"
    drawing.suptitle(title, x=0.01, ha="left", fontsize=11)
    return drawing
