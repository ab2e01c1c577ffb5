"""Draws training curves of recipes, and differences to the first recipe's curve."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.style import RECIPE_COLORS, RECIPE_LINES, RECIPE_MARKERS, framed
from experiments.training.runs import Run
from experiments.training.settings import Settings

_CURVE_POINTS = 200
_MARKER = dict(linestyle="none", markersize=5, markerfacecolor="white")


def plot_losses(run: Run, token: str) -> Figure:
    """Draws loss.png in the folder of a finished run; see `draw_losses`."""
    figure = draw_losses(run.rows("metrics"), run.settings, token)
    figure.savefig(run.folder / "loss.png")
    return figure


def draw_losses(
    metrics: Sequence[Mapping[str, Any]], settings: Settings, token: str
) -> Figure:
    """Draws the losses of a run's recipes, and differences to the first recipe's.

    The upper panel shows each recipe's training loss, as a trailing moving average, and
    its validation losses. The lower panel shows how far training and validation losses
    differ from the first recipe's, in percent.

    Args:
      metrics: The rows of each recipe's steps.
      settings: The settings of the trainings.
      token: The unit of the tokens: "byte" or "token".
    """
    figure = Figure(figsize=(9, 6.5), layout="constrained", dpi=150)
    losses, gaps = figure.subplots(2, sharex=True, height_ratios=(5, 2))
    steps_in_all = max(row["step"] for row in metrics)
    window = max(1, steps_in_all // 40)
    first = None
    for recipe in settings.recipes:
        rows = [row for row in metrics if row["recipe"] == recipe]
        val = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
        raw = np.array([row["loss"] for row in rows])
        smooth = trailing_mean(raw, window)
        first = first or (smooth, val)
        style = dict(color=RECIPE_COLORS[recipe])
        line = style | dict(linestyle=RECIPE_LINES[recipe])
        marker = style | _MARKER | dict(marker=RECIPE_MARKERS[recipe])
        steps = np.arange(1, raw.size + 1)
        losses.plot(steps, raw, **style, linewidth=0.6, alpha=0.15)
        losses.plot(steps, smooth, **line, linewidth=1.6, label=recipe)
        losses.plot(*_xy(val), **marker, label=f"{recipe}, validation")
        gaps.plot(steps, 100 * (smooth / first[0] - 1), **line, linewidth=1.4)
        # Recipes of a run that was extended may be validated at different steps.
        gap = {s: 100 * (x / first[1][s] - 1) for s, x in val.items() if s in first[1]}
        gaps.plot(*_xy(gap), **marker, label=f"{recipe}, validation")
    losses.set_ylim(*_interesting(metrics))
    losses.set_ylabel(f"loss, nats / {token}")
    _explain(losses, gaps, settings)
    gaps.set_xlim(0, 1.01 * steps_in_all)
    return figure


def trailing_mean(x: Float[np.ndarray, " n"], window: int) -> Float[np.ndarray, " n"]:
    """Returns the mean of each value and up to `window - 1` values before it.

    Values that are not finite are left out. The mean is NaN if no value is finite.
    """
    finite = np.isfinite(x)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, x, 0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    ends = np.arange(1, x.size + 1)
    starts = np.maximum(ends - window, 0)
    number = counts[ends] - counts[starts]
    return np.where(number, sums[ends] - sums[starts], np.nan) / np.maximum(number, 1)


def curve(losses: Float[np.ndarray, " n"]) -> dict[str, list[float]]:
    """Returns means of losses over equally long blocks, and each block's last step.

    There are at most 200 blocks, to keep results files small. If the last block would
    be shorter than the others, it is dropped.
    """
    each = -(-len(losses) // _CURVE_POINTS)
    ends = list(range(each, len(losses) + 1, each))
    means = losses[: ends[-1]].reshape(-1, each).mean(axis=1)
    return {"steps": ends, "losses": [round(float(x), 5) for x in means]}


def draw_curves(curves: Sequence[Mapping[str, Any]], title: str, unit: str) -> Figure:
    """Draws losses by recipe, averaged over seeds, and below them their gaps.

    The gaps are relative differences to the first recipe. Names that are no recipes
    have Matplotlib's colors.

    Args:
      curves: Rows with "recipe", and "steps" and "losses" as `curve` returns them.
      title: The title.
      unit: The unit of losses.
    """
    drawn = Figure(figsize=(8, 5), layout="constrained", dpi=150)
    losses, gaps = drawn.subplots(2, sharex=True, height_ratios=(5, 2))
    reference = None
    colors, lines = dict(RECIPE_COLORS), dict(RECIPE_LINES)
    recipes = list(dict.fromkeys(row["recipe"] for row in curves))
    for number, recipe in enumerate(recipes):
        runs = [row for row in curves if row["recipe"] == recipe]
        steps = np.array(runs[0]["steps"])
        values = np.mean([row["losses"] for row in runs], axis=0)
        smooth = trailing_mean(values, max(1, len(values) // 25))
        reference = smooth if reference is None else reference
        style = {"color": colors.get(recipe, f"C{number}")}
        style["linestyle"] = lines.get(recipe, "-")
        losses.plot(steps, smooth, **style, linewidth=1.5, label=recipe)
        gaps.plot(steps, 100 * (smooth / reference - 1), **style, linewidth=1.5)
    losses.set_yscale("log")
    low, high = losses.get_ylim()
    if high < 20 * low:  # Otherwise powers of ten are labels enough.
        losses.yaxis.set_major_formatter("{x:g}")
        losses.yaxis.set_minor_formatter("{x:g}")
    losses.set_title(title, loc="left", fontsize=11)
    losses.set_ylabel(unit)
    losses.legend(frameon=False)
    gaps.set_ylabel(f"% from {recipes[0]}")
    gaps.set_xlabel("step")
    for axes in (losses, gaps):
        framed(axes)
    return drawn


def _xy(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(points.keys()), list(points.values())


def _interesting(metrics: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns y limits that exclude the steep fall of the loss in the first steps."""
    values = [row[k] for row in metrics for k in ("loss", "val_loss") if k in row]
    values = np.array(values)[np.isfinite(values)]
    low, high = np.quantile(values, (0.0, 0.95)) if values.size else (0.0, 1.0)
    margin = 0.05 * (high - low) + 1e-3
    return low - margin, high + 3 * margin


def _explain(losses: Axes, gaps: Axes, settings: Settings) -> None:
    losses.set_title(
        f"{settings.preset}: {settings.batch_size} x {settings.seq_len} tokens a step",
        loc="left",
        fontsize=11,
    )
    losses.legend(
        frameon=False, loc="upper right", ncols=len(settings.recipes), handlelength=3
    )
    gaps.set_ylabel(f"% from {settings.recipes[0]}")
    gaps.set_xlabel("step")
    band = gaps.axhspan(-1, 1, color="0.93", zorder=0, label="within 1%")
    gaps.set_ylim(-2.5, 2.5)
    gaps.legend(handles=[band], frameon=False, loc="lower right", fontsize=9)
    for axes in (losses, gaps):
        framed(axes)
