"""A figure of a training step's memory by kind, like figure 1 of the paper."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.style import framed

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
# Parts above this share of the longest bar have their own share written into them.
_LEAST = 0.04


class Look(NamedTuple):
    """The color and the hatch of a kind of memory in the figure."""

    color: str
    hatch: str = ""


LOOKS = {
    "parameters": Look("#33415c"),
    "optimizer": Look("#d1495b", "//"),
    "gradients": Look("#8a94a8"),
    "saved": Look("#a9dfd6", ".."),
    "workspace": Look("#f3cf8a"),
    "gathered": Look("#8338ec", "\\\\"),
    "logits": Look("#b08968", "xx"),
}


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draws a bar of each row's memory in GiB, divided into kinds of memory."""
    figure = Figure(figsize=(9, 2 + 0.6 * len(rows)), layout="constrained", dpi=150)
    axes = figure.subplots()
    parts = {kind: [row[f"{kind}_gib"] for row in rows] for kind in KINDS}
    stack(axes, [row["recipe"] for row in rows], parts, names=KINDS, looks=LOOKS)
    first = rows[0]
    where = first["mesh"] or "one GPU"
    axes.set_title(
        f"{first['preset']}, {first['batch']} x {first['sequence']} tokens, {where}",
        loc="left",
        fontsize=10,
    )
    axes.set_xlabel("GiB a GPU at the peak of a step")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def stack(
    axes: Axes,
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    names: Mapping[str, str],
    looks: Mapping[str, Look],
) -> None:
    """Draws horizontal bars of stacked parts, with the parts' shares and the sums.

    Args:
      axes: The axes to draw on.
      labels: The bars' labels, from top to bottom.
      parts: The sizes of each kind of part, one for each bar.
      names: The names of the kinds in the legend.
      looks: The colors and hatches of the kinds.
    """
    places = np.arange(len(labels))[::-1]
    sums = np.sum(list(parts.values()), axis=0)
    starts = np.zeros(len(labels))
    for kind, sizes in parts.items():
        values = np.array(sizes)
        if not values.any():
            continue
        color, hatch = looks[kind]
        style = {"color": color, "hatch": hatch, "label": names[kind]}
        axes.barh(places, values, 0.6, left=starts, edgecolor="white", **style)
        for height, start, value, total in zip(
            places, starts, values, sums, strict=True
        ):
            if value > _LEAST * max(sums):
                _write_share(axes, start + value / 2, height, value / total)
        starts += values
    for height, total in zip(places, sums, strict=True):
        axes.text(total, height, f" {total:.1f}", va="center", fontsize=9)
    axes.set_yticks(places, labels)
    framed(axes, grid=None)


def _write_share(axes: Axes, x: float, y: float, share: float) -> None:
    """Writes a share on a light background, to be readable on any color and hatch."""
    ground = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
    style = {"ha": "center", "va": "center", "fontsize": 8, "bbox": ground}
    axes.text(x, y, f"{share:.0%}", **style)
