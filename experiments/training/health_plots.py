"""Draws health.png: amax and underflow of a run's arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.style import framed
from experiments.training.runs import Run

_COLORS = {
    "parameters": "#33415c",
    "gradients": "#d1495b",
    "moments": "#edae49",
    "activations": "#2a9d8f",
}


def plot_health(run: Run) -> Figure | None:
    """Draws health.png in the run's folder, and returns the figure.

    There is one column per recipe. The top row shows the amax of each kind of array.
    The middle row shows the share of elements that underflow, without the moments. The
    bottom row is a map of the activations' amax by step and layer. Without reports
    nothing is drawn, and the result is None.
    """
    rows = run.rows("health")
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    if not recipes:
        return None
    figure = Figure(figsize=(1 + 5 * len(recipes), 8), layout="constrained", dpi=150)
    panels = figure.subplots(3, len(recipes), sharey="row", squeeze=False)
    for recipe, (amax, shares, layers) in zip(recipes, panels.T, strict=True):
        of_recipe = [row for row in rows if row["recipe"] == recipe]
        amax.set_title(recipe, loc="left", fontsize=11)
        layers.set_xlabel("step")
        for kind, color in _COLORS.items():
            of_kind = [row for row in of_recipe if row["of"] == kind]
            if of_kind:
                style = dict(color=color, linewidth=1.4, label=kind)
                amax.plot(*_by_step(of_kind, _largest), **style)
            if of_kind and kind != "moments":
                shares.plot(*_by_step(of_kind, _underflow), **style)
        _map(layers, [row for row in of_recipe if row["of"] == "activations"])
    amax, shares, layers = panels[:, 0]
    amax.set_ylabel("amax")
    shares.set_ylabel("% of elements that underflow")
    layers.set_ylabel("layer")
    panels[0, -1].legend(frameon=False, fontsize=8)
    for axes in panels[:2].flat:
        framed(axes)
    for axes in panels[0]:
        axes.set_yscale("log")
    figure.savefig(run.folder / "health.png")
    return figure


def _by_step(
    rows: list[dict[str, Any]], statistic: Callable[[list], float]
) -> tuple[list[int], list[float]]:
    """Returns the steps, and a statistic of the rows of each step."""
    steps = sorted({row["step"] for row in rows})
    return steps, [statistic([r for r in rows if r["step"] == s]) for s in steps]


def _largest(rows: list[dict[str, Any]]) -> float:
    return float(np.max([row["amax"] for row in rows]))


def _underflow(rows: list[dict[str, Any]]) -> float:
    shares = [100 * row["underflow_share"] for row in rows]
    return float(np.average(shares, weights=[row["size"] for row in rows]))


def _map(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draws the base-2 logarithm of the activations' amax by step and layer."""
    steps = sorted({row["step"] for row in rows})
    count = 1 + max(row["layer"] for row in rows)
    values = [
        [
            _largest([r for r in rows if (r["step"], r["layer"]) == (step, layer)])
            for step in steps
        ]
        for layer in range(count)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log2(np.array(values))
    edges = np.append(
        steps, steps[-1] + (steps[-1] - steps[0]) / max(len(steps), 1) + 1
    )
    shown = np.ma.masked_invalid(shown)
    mesh = axes.pcolormesh(edges, np.arange(count + 1) - 0.5, shown, cmap="viridis")
    axes.figure.colorbar(mesh, ax=axes, label="log2 of activations' amax", pad=0.01)
