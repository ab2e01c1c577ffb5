"""The pictures of README.md: memory and speed of a training step by recipe."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.common.memory_figure import LOOKS, stack
from experiments.common.style import RECIPE_COLORS, RECIPE_HATCHES, framed

# The kinds of memory that `bench_e2e` measures; the last is the rest of the peak.
_KINDS = {
    "optimizer": "optimizer",
    "saved": "saved activations",
    "rest": "parameters, gradients and the rest",
}
_LOOKS = {kind: LOOKS[kind] for kind in ("optimizer", "saved")}
_LOOKS["rest"] = LOOKS["gradients"]
_SIZE = (6.4, 3.2)


def draw_memory(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws the memory of a step by kind, a bar for each row of `bench_e2e`."""
    figure = Figure(figsize=_SIZE, layout="constrained", dpi=150)
    axes = figure.subplots()
    saved = [row["activations_gib"] for row in rows]
    optimizer = [row["optimizer_gib"] for row in rows]
    peaks = [row["peak_gib"] for row in rows]
    remaining = [p - o - s for p, o, s in zip(peaks, optimizer, saved, strict=True)]
    parts = {"optimizer": optimizer, "saved": saved, "rest": remaining}
    stack(axes, list(map(_label, rows)), parts, names=_KINDS, looks=_LOOKS)
    axes.set_title("memory at the peak of a step, GiB", loc="left", fontsize=10)
    axes.set_xlim(right=1.1 * max(peaks))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def draw_speed(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws the tokens per second, a bar for each row of `bench_e2e`."""
    figure = Figure(figsize=_SIZE, layout="constrained", dpi=150)
    axes = figure.subplots()
    for position, row in enumerate(rows):
        recipe = row["case"].split(",")[0]
        style = {"color": RECIPE_COLORS[recipe], "hatch": RECIPE_HATCHES[recipe]}
        rate = row["tokens_per_s"]
        axes.barh(-position, rate, 0.6, edgecolor="white", **style)
        axes.text(rate, -position, f" {rate:,.0f}", va="center", fontsize=9)
    axes.set_yticks([-position for position in range(len(rows))], map(_label, rows))
    axes.set_xlim(right=1.15 * max(row["tokens_per_s"] for row in rows))
    axes.set_axisbelow(True)
    axes.set_title("tokens/s", loc="left", fontsize=10)
    framed(axes, grid="x")
    return figure


def _label(row: Mapping[str, Any]) -> str:
    case = row["case"].replace(", ", ",\n", 1)
    return f"{case}\nbatch {row['batch']}"
