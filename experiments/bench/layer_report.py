"""Tables of `experiments.bench.layer`, and a plot of its Pareto frontier."""

import collections
import itertools
from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from experiments.common.layer_cases import Shape
from experiments.common.paper import TABLE_6, saved_units
from experiments.common.style import RECIPE_COLORS, framed
from experiments.common.tables import Column, table, with_paper

Row = dict[str, Any]
# All cases of a recipe have its color, and markers in this order.
_MARKERS = "osD^vP"


def paper(case: str, shape: Shape) -> Row:
    """Returns the paper's numbers for a case, from tables 6 and 2; None if missing."""
    table = TABLE_6.get((shape.hidden, shape.seq), {}) if shape.batch == 4 else {}
    forward, backward, mib = table.get(case, (None, None, None))
    ms = forward and forward + backward
    return {
        "paper_forward_ms": forward,
        "paper_backward_ms": backward,
        "paper_forward_backward_ms": ms,
        "paper_ratio_to_bf16": ms and sum(table["bf16"][:2]) / ms,
        "paper_saved_mib": mib,
        "paper_saved_units": saved_units(case),
    }


def tables(rows: list[Row]) -> Iterator[Table]:
    """Yields a table for each shape, like table 6, with the paper's numbers below."""
    columns = (
        Column("", "case"),
        with_paper("fwd, ms", "forward_ms", ".2f"),
        with_paper("bwd, ms", "backward_ms", ".2f"),
        with_paper("both, ms", "forward_backward_ms", ".2f"),
        with_paper("x bf16", "ratio_to_bf16", ".2f"),
        with_paper("x fastest", "ratio_to_fastest_bf16", ".2f"),
        with_paper("saved, U", "saved_units", ".2f"),
        with_paper("MiB", "saved_mib", ",.0f"),
        with_paper("temp. MiB", "backward_temporaries_mib", ",.0f"),
    )
    for title, group in _by_shape(rows):
        yield table(f"{title} (the paper's below)", columns, group)


def parts_table(parts: list[Row]) -> Table:
    """Returns a table of the profiled milliseconds per part, and of their floors."""
    columns = (
        Column("", "shape"),
        Column("case", "case"),
        Column("part", "part"),
        Column("ms", "ms", "{:.3f}"),
        Column("floor", lambda row: row["floor_ms"] or None, "{:.2f}", missing=""),
    )
    lines = [{"shape": name} | row for name, rows in _by_shape(parts) for row in rows]
    return table("Where time goes, ms", columns, lines)


def draw(rows: list[Row]) -> Figure:
    """Plots time against saved activations, with the Pareto frontier of the cases.

    No case has both less time and fewer saved activations than a point of the frontier.
    """
    groups = list(_by_shape(rows))
    columns = min(2, len(groups))
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(6 * columns, 4.5 * lines), layout="constrained", dpi=150)
    for axes, (title, group) in zip(
        figure.subplots(lines, columns, squeeze=False).flat, groups, strict=False
    ):
        _frontier(axes, group)
        axes.set_title(title, loc="left", fontsize=10)
    handles, cases = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, cases, loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    return figure


def _frontier(axes: Axes, rows: list[Row]) -> None:
    points = {
        row["case"]: (row["saved_units"], row["forward_backward_ms"]) for row in rows
    }
    markers: collections.Counter[str] = collections.Counter()
    for case, point in points.items():
        recipe = case.split(",")[0]
        marker = _MARKERS[markers[recipe]]
        # The first case of a recipe lies below the others, so its marker is larger.
        size = 6 if markers[recipe] else 10
        markers[recipe] += 1
        style = {"color": RECIPE_COLORS[recipe], "markersize": size}
        style |= {"markeredgecolor": "white", "markeredgewidth": 0.6}
        axes.plot(*point, marker, label=case, linestyle="none", **style)
    best = [
        (units, ms)
        for units, ms in sorted(points.values())
        if not any(u <= units and m < ms for u, m in points.values())
    ]
    line = {"color": "0.6", "linewidth": 1, "zorder": 1, "label": "frontier"}
    axes.step(*zip(*best, strict=True), where="post", **line)
    axes.set_xlabel("saved, U = batch x sequence x hidden x 2 bytes")
    axes.set_ylabel("forward and backward, ms")
    axes.set_xlim(0, 1.25 * max(units for units, _ in points.values()))
    axes.set_ylim(0, 1.15 * max(ms for _, ms in points.values()))
    framed(axes)
    axes.set_axisbelow(True)


def _by_shape(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yields the title and rows of each shape; its rows must follow one another."""
    for (hidden, seq, batch), group in itertools.groupby(
        rows, key=lambda row: (row["hidden"], row["seq"], row["batch"])
    ):
        yield f"hidden {hidden}, sequence {seq}, batch {batch}", list(group)
