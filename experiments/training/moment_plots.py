"""Draws moments.png: statistics of the FP8 moments during a run."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.style import framed
from experiments.training.runs import Run

_COLORS = {"mu": "#33659c", "nu": "#d1495b"}
_NAMES = {"mu": "first", "nu": "second"}
_BINS = 16


def plot_moments(run: Run) -> Figure | None:
    """Draws moments.png in the run's folder, and returns the figure.

    There is one column per recipe. The top row shows the exponents k of dynamic range
    expansion, as a map if each group has its own k. The middle row shows the shares of
    codes at zero and at the format's maximum. The bottom row shows the error that
    rounding causes in updates, with its range over parameters. Without FP8 moments
    nothing is drawn, and the result is None.
    """
    rows = run.rows("moments")
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    if not recipes:
        return None
    figure = Figure(figsize=(1 + 5 * len(recipes), 8), layout="constrained", dpi=150)
    panels = figure.subplots(3, len(recipes), sharex=True, sharey="row", squeeze=False)
    for recipe, (powers, shares, errors) in zip(recipes, panels.T, strict=True):
        powers.set_title(recipe, loc="left", fontsize=11)
        errors.set_xlabel("step")
        for moment in _NAMES:
            rows_of_moment = [
                r for r in rows if (r["recipe"], r["moment"]) == (recipe, moment)
            ]
            history = History.of(rows_of_moment)
            _draw_powers(powers, history, moment)
            _draw_lines(shares, errors, history, moment)
    _explain(panels)
    figure.savefig(run.folder / "moments.png")
    return figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """Statistics of one moment of all parameters over a run.

    Attributes:
      steps: The steps at which the moment was measured.
      power: The exponent k of dynamic range expansion that all groups share, or None if
        each group has its own.
      powers: The share of groups with k in [0, 1), [1, 2), ... [15, 16); all zeros if
        groups share one k.
      zero_share: The share of codes that are zero, over all parameters.
      max_share: The share of codes at the format's maximum, over all parameters.
      error: The root mean square of the update error, over all elements.
      error_range: The smallest and the largest error of a single parameter.
    """

    steps: Int[np.ndarray, " n"]
    power: float | None
    powers: Float[np.ndarray, "n 16"]
    zero_share: Float[np.ndarray, " n"]
    max_share: Float[np.ndarray, " n"]
    error: Float[np.ndarray, " n"]
    error_range: Float[np.ndarray, "2 n"]

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> "History":
        """Returns the history in the rows of moments.jsonl for one recipe and moment.

        Means over parameters are weighted by the parameters' sizes.
        """
        steps = sorted({row["step"] for row in rows})
        at_step = [[row for row in rows if row["step"] == step] for step in steps]

        def mean(name: str, power: int = 1) -> np.ndarray:
            means = [
                np.average(
                    [row[name] ** power for row in group],
                    weights=[row["size"] for row in group],
                )
                for group in at_step
            ]
            return np.array(means) ** (1 / power)

        errors = [[row["error"] for row in group] for group in at_step]
        counts = np.array(
            [
                [sum(row.get(f"k{k}", 0) for row in group) for k in range(_BINS)]
                for group in at_step
            ]
        )
        return cls(
            steps=np.array(steps),
            power=rows[0].get("k"),
            powers=counts / np.maximum(counts.sum(axis=1, keepdims=True), 1),
            zero_share=mean("zero_share"),
            max_share=mean("max_share"),
            error=mean("error", power=2),
            error_range=np.array([[f(e) for e in errors] for f in (np.min, np.max)]),
        )


def _draw_powers(axes: Axes, history: History, moment: str) -> None:
    """Draws a map of the exponents k of groups, or a line for a k that all share."""
    if history.power is not None:
        style = dict(color=_COLORS[moment], linewidth=1.4)
        axes.axhline(
            history.power, **style, label=f"{_NAMES[moment]} moment, all groups"
        )
        axes.legend(frameon=False, loc="upper right")
        return
    step_edges = np.concatenate([[0], history.steps])
    edges = np.concatenate(
        [[0.0], (step_edges[1:-1] + step_edges[2:]) / 2, step_edges[-1:]]
    )
    shown = np.where(history.powers > 0, history.powers, np.nan)
    mesh = axes.pcolormesh(
        edges, np.arange(_BINS + 1), shown.T, cmap="Reds", vmin=0, vmax=1
    )
    label = f"share of groups, {_NAMES[moment]} moment"
    axes.figure.colorbar(mesh, ax=axes, label=label, pad=0.01)


def _draw_lines(shares: Axes, errors: Axes, history: History, moment: str) -> None:
    style = dict(color=_COLORS[moment], linewidth=1.4)
    for values, name, line in (
        (history.zero_share, "zero", "-"),
        (history.max_share, "maximum", "--"),
    ):
        label = f"{_NAMES[moment]} at {name}"
        shares.plot(history.steps, 100 * values, **style, linestyle=line, label=label)
    errors.plot(
        history.steps, 100 * history.error, **style, label=f"{_NAMES[moment]} moment"
    )
    low, high = 100 * history.error_range
    band = dict(color=style["color"], alpha=0.15, label="smallest to largest")
    errors.fill_between(history.steps, low, high, **band)


def _explain(panels: np.ndarray) -> None:
    powers, shares, errors = panels[:, 0]
    powers.set_ylabel("power k of a group")
    shares.set_ylabel("% of codes")
    shares.set_ylim(0, 1.5 * shares.get_ylim()[1])
    shares.legend(frameon=False, loc="upper left", ncols=2)
    errors.set_ylabel("expected error, % of m / sqrt(v)")
    errors.set_ylim(0, 1.2 * errors.get_ylim()[1])
    errors.legend(frameon=False, loc="upper left", ncols=2)
    for axes in panels[1:].flat:
        framed(axes)
