"""Tables and figures of the granularity studies, for a terminal or a notebook."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from experiments.activations.granularity_studies import (
    FLOWS,
    GRANULARITIES,
    Row,
    mean_error,
)
from experiments.activations.layer_flow import OPERATORS, SITES
from experiments.common.style import framed
from experiments.common.tables import new_table

_COLORS = ("#b8c0cc", "#edae49", "#2a9d8f", "#33415c", "#d1495b", "#8338ec")


def arrays(rows: list[Row]) -> Table:
    """Returns a table of activation errors by granularity, averaged over layers."""
    table = new_table(
        "What is lost of an activation, %",
        *("", "read by", *GRANULARITIES, "largest / rms"),
    )
    for site, reader in SITES.items():
        errors = [
            mean_error(rows, "arrays", site=site, granularity=name)
            for name in GRANULARITIES
        ]
        peak = max(row["peak_over_rms"] for row in rows if row.get("site") == site)
        cells = [f"{error:.2f}" for error in errors]
        table.add_row(site, reader, *cells, f"{peak:.0f}")
    return table


def flows(rows: list[Row]) -> Table:
    """Returns a table of errors at the outputs of operators: the paper's figure 4a.

    Errors are averaged over layers. The last column is the error of the residual stream
    after the last layer.
    """
    table = new_table(
        "What is lost behind an operator, %", "", *OPERATORS, "residual stream"
    )
    last = max(row["layer"] for row in rows if "layer" in row)
    for flow in FLOWS:
        errors = [
            mean_error(rows, "operators", operator=name, flow=flow)
            for name in OPERATORS
        ]
        of_last = [row for row in rows if row.get("layer") == last]
        errors.append(mean_error(of_last, "stream", flow=flow))
        table.add_row(flow, *(f"{error:.2f}" for error in errors))
    return table


def times(rows: list[Row]) -> Table:
    """Returns a table of each operator's times by method: the paper's figure 4b."""
    rows = [row for row in rows if row["study"] == "times"]
    shapes = dict.fromkeys((row["operator"], row["shape"]) for row in rows)
    heads = [f"{operator}\n{shape}" for operator, shape in shapes]
    table = new_table("Times in ms, and over the operator's in BF16", "", *heads)
    by_case = {(r["method"], r["operator"], r["shape"]): r for r in rows}
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for operator, shape in shapes:
            row = by_case.get((method, operator, shape))
            cells.append(
                f"{row['ms']:.3f} ({row['ratio_to_bf16']:.2f})" if row else "-"
            )
        table.add_row(method, *cells)
    return table


def draw_flows(rows: list[Row]) -> Figure:
    """Draws figure 4a: errors per layer, of operators and of the residual stream."""
    figure = Figure(figsize=(9, 5.5), layout="constrained", dpi=150)
    panels = figure.subplots(2, 2, sharex=True)
    titles = [f"behind the {name}" for name in OPERATORS]
    for axes, operator in zip(panels.flat, OPERATORS, strict=False):
        _lines(axes, rows, {"study": "operators", "operator": operator})
    _lines(panels.flat[-1], rows, {"study": "stream"})
    for axes, title in zip(panels.flat, [*titles, "residual stream"], strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _tidy(axes)
    for row in panels:
        row[0].set_ylabel("lost, %")
    for axes in panels[-1]:
        axes.set_xlabel("layer")
    handles, labels = panels.flat[-1].get_legend_handles_labels()
    where = dict(loc="outside lower center", ncols=len(FLOWS), fontsize=9)
    figure.legend(handles, labels, frameon=False, **where)
    return figure


def draw_times(rows: list[Row]) -> Figure:
    """Draws figure 4b: the time of each operator, in BF16 and with quantization."""
    rows = [row for row in rows if row["study"] == "times"]
    shown = list(dict.fromkeys((row["operator"], row["shape"]) for row in rows))
    figure = Figure(figsize=(9, 3.2), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    methods = list(dict.fromkeys(row["method"] for row in rows))[::-1]
    for axes, (operator, shape) in zip(panels, shown, strict=True):
        for row in rows:
            if (row["operator"], row["shape"]) == (operator, shape):
                of_tensor = row["method"].startswith("per tensor")
                color = _COLORS[4] if of_tensor else _COLORS[0]
                height = methods.index(row["method"])
                axes.barh(height, row["ms"], color=color, height=0.7)
        axes.set_title(f"{operator}, {shape}", loc="left", fontsize=11)
        axes.set_yticks(range(len(methods)), methods, fontsize=9)
        axes.set_xlabel("ms")
        _tidy(axes)
    return figure


def _lines(axes: Axes, rows: list[Row], names: Row) -> None:
    for color, flow in zip(_COLORS, FLOWS, strict=True):
        selected = [
            row for row in rows if (names | {"flow": flow}).items() <= row.items()
        ]
        layers = [row["layer"] for row in selected]
        errors = [row["error_percent"] for row in selected]
        axes.plot(layers, errors, color=color, marker=".", linewidth=1.4, label=flow)


def _tidy(axes: Axes) -> None:
    framed(axes)
    axes.set_axisbelow(True)
