"""The figure of a step's memory by kind, as the paper's figure 1."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

# The kinds of memory, from left to right in the figure, and their names.
KINDS = {
    "parameters": "parameters",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "saved": "saved activations",
    "workspace": "workspace",
    "gathered": "gathered weights",
    "logits": "logits",
}
_COLORS = (
    "#33415c",
    "#d1495b",
    "#8a94a8",
    "#2a9d8f",
    "#edae49",
    "#8338ec",
    "#b08968",
)
# The smallest share whose number is written into the bar.
_LEAST = 0.04


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draws a bar for each recipe, in GiB, with the share of each kind."""
    figure = Figure(figsize=(9, 1.4 + 0.6 * len(rows)), layout="constrained", dpi=150)
    axes = figure.subplots()
    places = np.arange(len(rows))[::-1]
    starts = np.zeros(len(rows))
    totals = np.array([row["peak_gib"] for row in rows])
    for (kind, name), color in zip(KINDS.items(), _COLORS, strict=True):
        values = np.array([row[f"{kind}_gib"] for row in rows])
        if not values.any():
            continue
        axes.barh(places, values, 0.6, left=starts, color=color, label=name)
        for place, start, value, total in zip(
            places, starts, values, totals, strict=True
        ):
            if value > _LEAST * max(totals):
                at = start + value / 2, place
                text = f"{value / total:.0%}"
                axes.text(*at, text, ha="center", va="center", color="w", fontsize=8)
        starts += values
    for place, total in zip(places, totals, strict=True):
        axes.text(total, place, f" {total:.1f}", va="center", fontsize=9)
    axes.set_yticks(places, [row["recipe"] for row in rows])
    first = rows[0]
    where = first["mesh"] or "one GPU"
    axes.set_title(
        f"{first['preset']}, {first['batch']} x {first['sequence']} tokens, {where}",
        loc="left",
        fontsize=10,
    )
    axes.set_xlabel("GiB a GPU at the peak of a step")
    figure.legend(
        ncols=4,
        frameon=False,
        fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3),
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure
