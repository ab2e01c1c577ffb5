"""Training curves of several optimizers and seeds: their table, bars and figure.

Rows are those of `experiments.optimizer_curves`. Differences are between trainings with
one seed, which share initialization, batches and validation; the standard error is that
of their mean over seeds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from experiments.results import Bar

_COLORS = ("#33415c", "#2a9d8f", "#d1495b", "#8d99ae", "#edae49", "#5a4fcf")


def losses(rows: Sequence[dict[str, Any]]) -> dict[str, Float[np.ndarray, "seed step"]]:
    """Validation losses by optimizer, of the seeds that all optimizers have."""
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    own = [{row["seed"] for row in rows if row["optimizer"] == name} for name in names]
    seeds = set.intersection(*own)
    found = {
        (name, seed): [
            row["val_loss"]
            for row in rows
            if (row["optimizer"], row["seed"]) == (name, seed)
        ]
        for name in names
        for seed in seeds
    }
    return {
        name: np.array([found[name, seed] for seed in sorted(seeds)]) for name in names
    }


def mean_and_error(
    x: Float[np.ndarray, "seed *rest"],
) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"] | None]:
    """The mean over seeds and its standard error; None of a single seed."""
    if len(x) == 1:
        return x[0], None
    return x.mean(axis=0), x.std(axis=0, ddof=1) / np.sqrt(len(x))


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last validation of each optimizer, and its difference to the first one's."""
    found = losses(rows)
    reference = next(iter(found.values()))[:, -1]
    summary = []
    for name, curves in found.items():
        last = curves[:, -1]
        mean, error = mean_and_error(last - reference)
        summary.append(
            {
                "optimizer": name,
                "seeds": len(last),
                "val_loss": float(last.mean()),
                "difference": float(mean),
                "standard_error": None if error is None else float(error),
                "percent": float(100 * mean / reference.mean()),
            }
        )
    return summary


def bars(summary: Sequence[dict[str, Any]]) -> list[Bar]:
    """What rounds parameters to nearest may fall behind, what does not may not."""
    found = []
    for row in summary[1:]:
        if "nearest" not in row["optimizer"]:
            ratio = 1 + row["percent"] / 100
            name = f"{row['optimizer']} validation loss / {summary[0]['optimizer']}"
            found.append(Bar(name, "<= 1.01", ratio, ratio <= 1.01))
    return found


def table(summary: Sequence[dict[str, Any]], title: str) -> Table:
    """The summary for a terminal."""
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    found.add_column("optimizer")
    for name in ("validation loss", "difference", "standard error", "%"):
        found.add_column(name, justify="right")
    for row in summary:
        error = row["standard_error"]
        found.add_row(
            row["optimizer"],
            f"{row['val_loss']:.4f}",
            f"{row['difference']:+.4f}",
            "-" if error is None else f"{error:.4f}",
            f"{row['percent']:+.2f}",
        )
    return found


def figure(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Validation losses above, differences to the first optimizer's below.

    Means over seeds; the bands are a standard error wide to either side.
    """
    found = losses(rows)
    steps = sorted({row["step"] for row in rows})
    drawn = Figure(figsize=(9, 7.5), layout="constrained", dpi=150)
    above, below = drawn.subplots(2, sharex=True, height_ratios=(5, 4))
    reference = next(iter(found.values()))
    for color, (name, curves) in zip(_COLORS, found.items(), strict=False):
        style = dict(color=color, linestyle="--" if "BF16" in name else "-")
        _line(above, steps, curves, **style, label=name)
        _line(below, steps, curves - reference, **style)
    _limit(above, np.stack(list(found.values())))
    _limit(below, np.stack([curves - reference for curves in found.values()]))
    above.set_title(title, loc="left", fontsize=11)
    above.set_ylabel("validation loss, nats")
    above.legend(frameon=False, loc="upper right")
    below.set_ylabel(f"difference to {next(iter(found))}, nats")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _line(axes: Axes, steps: list[int], curves: np.ndarray, **style: Any) -> None:
    mean, error = mean_and_error(curves)
    axes.plot(steps, mean, linewidth=1.5, marker=".", **style)
    if error is not None:
        color = style["color"]
        axes.fill_between(steps, mean - error, mean + error, color=color, alpha=0.15)


def _limit(axes: Axes, curves: Float[np.ndarray, "optimizer seed step"]) -> None:
    """Leaves out the first quarter, where losses fall steeply."""
    means = curves.mean(axis=1)[:, curves.shape[-1] // 4 :]
    low, high = means[np.isfinite(means)].min(), means[np.isfinite(means)].max()
    margin = 0.1 * (high - low) + 1e-3
    axes.set_ylim(low - margin, high + margin)
