"""Tables, targets and figures of the training curves of several optimizers and seeds.

The rows come from `experiments.studies.curves`. Each optimizer is compared with the
optimizer that its rows name as `beside`, or with the first optimizer if they name none.
A difference is taken between two trainings with the same seed, which share the
initialization, the batches and the validation. The standard error is the error of the
mean difference over seeds.
"""

import itertools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from experiments.common import tables
from experiments.common.intervals import half_of_few
from experiments.common.results import Bar
from experiments.common.seeds import mean_and_error
from experiments.common.style import framed
from experiments.common.tables import Column, grouped

_COLORS = ("#33415c", "#2a9d8f", "#d1495b", "#8d99ae", "#edae49", "#5a4fcf")
_MOST_PERCENT = 0.5


def losses(rows: Sequence[dict[str, Any]]) -> dict[str, Float[np.ndarray, "seed step"]]:
    """Returns validation losses by optimizer, for the seeds that all of them ran."""
    by_run = grouped(rows, itemgetter("optimizer", "seed"))
    names, seeds = map(dict.fromkeys, zip(*by_run, strict=True))
    shared = sorted(s for s in seeds if all((name, s) in by_run for name in names))
    return {
        name: np.array(
            [[row["val_loss"] for row in by_run[name, seed]] for seed in shared]
        )
        for name in names
    }


def compared_with(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Returns the name of each optimizer's reference, by the optimizer's name."""
    first = rows[0]["optimizer"]
    return {row["optimizer"]: row.get("beside") or first for row in rows}


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each optimizer: its last validation loss and its difference.

    `difference` is relative to the optimizer `beside`, and `percent` is `difference`
    over the mean loss of `beside`. `most_percent` is the upper end of the 95% interval
    of `percent` by Student's t distribution, or None for a single seed.
    """
    by_optimizer, reference_of, summary = losses(rows), compared_with(rows), []
    for name, curves in by_optimizer.items():
        last, reference = curves[:, -1], by_optimizer[reference_of[name]][:, -1]
        mean, error = mean_and_error(last - reference)
        unit = 100 / reference.mean()
        row = {
            "optimizer": name,
            "beside": reference_of[name],
            "seeds": len(last),
            "val_loss": float(last.mean()),
            "difference": float(mean),
            "standard_error": None,
            "percent": float(unit * mean),
            "most_percent": None,
        }
        if error is not None:
            row["standard_error"] = float(error)
            half = half_of_few(float(error), len(last))
            row["most_percent"] = float(unit * (mean + half))
        summary.append(row)
    return summary


def bars(summary: Sequence[dict[str, Any]]) -> list[Bar]:
    """Returns a target for each optimizer that does not round parameters to nearest.

    Rounding BF16 parameters to nearest is expected to cost loss, so it has no target.
    References have none, either.
    """
    targets = []
    for row in summary:
        name, reference_name = row["optimizer"], row["beside"]
        if name != reference_name and "nearest" not in name:
            most = row["most_percent"]
            end = "" if most is None else ", upper end of 95%"
            measured = row["percent"] if most is None else most
            name = f"{name}, % of loss above {reference_name}{end}"
            targets.append(Bar.of(name, "<=", _MOST_PERCENT, measured))
    return targets


def table(summary: Sequence[dict[str, Any]], title: str) -> Table:
    """Returns the summary as a table for a terminal."""
    columns = (
        Column("optimizer", "optimizer"),
        Column("validation loss", "val_loss", "{:.4f}"),
        Column("difference", "difference", "{:+.4f}"),
        Column("standard error", "standard_error", "{:.4f}"),
        Column("%", "percent", "{:+.2f}"),
        Column("at most", "most_percent", "{:+.2f}"),
    )
    return tables.table(title, columns, summary)


def figure(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Draws the validation losses of optimizers, and below them their differences.

    Lines are means over seeds. Bands reach one standard error to each side. If rows
    name several optimizers as `beside`, these have solid lines, and the optimizers that
    are compared with them have dashed lines of the same color.
    """
    by_optimizer, reference_of = losses(rows), compared_with(rows)
    steps = sorted({row["step"] for row in rows})
    drawn = Figure(figsize=(9, 7.5), layout="constrained", dpi=150)
    above, below = drawn.subplots(2, sharex=True, height_ratios=(5, 4))
    gaps = {
        name: curves - by_optimizer[reference_of[name]]
        for name, curves in by_optimizer.items()
    }
    references = list(dict.fromkeys(reference_of.values()))
    in_pairs = len(references) > 1
    colors = dict(
        zip(references if in_pairs else by_optimizer, itertools.cycle(_COLORS))
    )
    for name, curves in by_optimizer.items():
        dashed = name not in references if in_pairs else "BF16" in name
        color = colors[reference_of[name] if in_pairs else name]
        style = dict(color=color, linestyle="--" if dashed else "-")
        _line(above, steps, curves, **style, label=name)
        if name not in references:
            _line(below, steps, gaps[name], **style)
    below.axhline(0, color="0.4", linewidth=0.8)
    _limit(above, np.stack(list(by_optimizer.values())))
    _limit(below, np.stack(list(gaps.values())))
    above.set_title(title, loc="left", fontsize=11)
    above.set_ylabel("validation loss, nats")
    handles, labels = above.get_legend_handles_labels()
    if above.collections:
        handles.append(Patch(color="0.85"))
        labels.append("one standard error")
    where = dict(loc="outside lower center", ncols=4, fontsize=9)
    drawn.legend(handles, labels, frameon=False, **where)
    name = "its counterpart" if in_pairs else references[0]
    below.set_ylabel(f"difference to {name}, nats")
    below.set_xlabel("step")
    for axes in (above, below):
        framed(axes)
    return drawn


def _line(axes: Axes, steps: list[int], curves: np.ndarray, **style: Any) -> None:
    mean, error = mean_and_error(curves)
    axes.plot(steps, mean, linewidth=1.5, marker=".", **style)
    if error is not None:
        color = style["color"]
        axes.fill_between(steps, mean - error, mean + error, color=color, alpha=0.15)


def _limit(axes: Axes, curves: Float[np.ndarray, "optimizer seed step"]) -> None:
    """Sets y limits by the last three quarters, because losses fall steeply before."""
    means = curves.mean(axis=1)[:, curves.shape[-1] // 4 :]
    low, high = means[np.isfinite(means)].min(), means[np.isfinite(means)].max()
    margin = 0.1 * (high - low) + 1e-3
    axes.set_ylim(low - margin, high + margin)
