"""Assigns saved arrays to a layer's operations, the columns of the paper's table 2.

An array that several operations read is saved once and counted once: for the matmul if
it was saved for a matmul, and otherwise for the operation that its shape indicates.
"""

import math
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from coat_jax.remat.report import Residual, ResidualReport
from experiments.common.layer_cases import Shape
from experiments.common.paper import TABLE_2, TABLE_2_COLUMNS
from experiments.common.style import framed
from experiments.common.tables import new_table

Operation = Literal["norm", "gate", "rope", "attention", "linear"]
_NAMES: tuple[Operation, ...] = ("norm", "gate", "rope", "attention", "linear")
TITLES: dict[Operation, str] = dict(zip(_NAMES, TABLE_2_COLUMNS, strict=False))
_COLORS = ("#2a9d8f", "#d1495b", "#8338ec", "#edae49", "#33415c")


# Functions that save operands of matmuls.
_PRODUCTS = ("_plain_linear", "in PlainRecipe", "attention_out")
# Group sizes of FP8 activations, and of FP8 activations that only matmuls read.
_GROUP, _PRODUCT_GROUP = 16, 128


def split(report: ResidualReport, shape: Shape) -> dict[Operation, int]:
    """Returns the bytes of all saved arrays, except arguments, by operation.

    Raises:
      ValueError: If there is an array that no operation of a layer saves.
    """
    sizes: dict[Operation, int] = dict.fromkeys(TITLES, 0)
    for row in report.rows:
        if not row.is_argument:
            sizes[operation(row, shape)] += row.nbytes
    return sizes


def operation(row: Residual, shape: Shape) -> Operation:
    """Returns the operation that saves an array.

    Args:
      row: An array that layers under `scan` save; its first axis is the layer.
      shape: The layer's shape.

    Raises:
      ValueError: If no operation of a layer saves an array of this shape.
    """
    _, *sizes = row.shape
    if math.prod(sizes) == 1 or any(name in row.asked_by for name in _PRODUCTS):
        return "linear"
    if sizes == [shape.batch, shape.seq]:
        return "gate"  # Each token's largest group scale of gate and up.
    half = shape.head_dim // 2
    if "turned" in row.asked_by and sizes[-1] in (half, -(-half // _GROUP)):
        return "rope"
    if _is_attentions(sizes, shape):
        return "attention"
    for name, size in (
        ("gate", shape.intermediate),
        ("norm", shape.hidden),
        ("norm", 1),  # Statistics of tokens.
    ):
        if sizes[-1] in (size, -(-size // _GROUP)):
            return name
    raise ValueError(f"no operation of a layer saves {row}")


def _is_attentions(sizes: list[int], shape: Shape) -> bool:
    """Returns whether an array of `sizes` belongs to attention.

    These arrays are the heads, the qkv output before it is split into heads, the scales
    of these two, and the statistics of attention's rows.
    """
    if shape.hidden // shape.head_dim in sizes[1:-1]:
        return True
    joined = shape.hidden + 2 * shape.kv_heads * shape.head_dim
    if sizes[-1] in (joined, -(-joined // _GROUP)):
        return True
    *_, columns, last = sizes
    of_head = [-(-shape.head_dim // size) for size in (1, _GROUP, _PRODUCT_GROUP)]
    return columns == shape.kv_heads and last in of_head


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns table 2: saved units by operation, their total, and ratios of totals.

    The ratio is the first row's total over the total of each row. The paper's numbers
    are below ours in brackets.
    """
    title = "Saved activations of a layer in U (paper's below)"
    result = new_table(title, "", *TITLES.values(), "Total", "Ratio", "MiB")
    for row in rows:
        paper = TABLE_2.get(row["recipe"])
        units = [row[f"{name}_units"] for name in TITLES] + [row["units"]]
        units.append(rows[0]["units"] / row["units"])
        cells = [f"{value:.2f}" for value in units]
        if paper:
            printed = zip(cells, paper, strict=True)
            cells = [f"{cell}\n({value:g})" for cell, value in printed]
        result.add_row(row["recipe"], *cells, f"{row['mib']:,.0f}")
    return result


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draws bars of the saved units of each case, with the paper's bars below them."""
    figure = Figure(figsize=(9, 5), layout="constrained", dpi=150)
    axes = figure.subplots()
    places = np.arange(len(rows))[::-1]
    for position, row in zip(places, rows, strict=True):
        _bar(axes, position, [row[f"{name}_units"] for name in TITLES], height=0.45)
        axes.text(row["units"] + 0.2, position, f"{row['units']:.2f}", va="center")
        if paper := TABLE_2.get(row["recipe"]):
            *values, total, _ = paper
            _bar(axes, position - 0.4, values, height=0.15, alpha=0.55)
            label = f"paper: {total:g}"
            at = (total + 0.2, position - 0.4)
            axes.text(*at, label, va="center", fontsize=7, color="0.4")
    axes.set_yticks(places, [row["recipe"] for row in rows])
    axes.set_xlabel("saved, U = batch x sequence x hidden x 2 bytes")
    handles = axes.containers[: len(TITLES)]
    axes.legend(handles, TITLES.values(), frameon=False, loc="lower right")
    framed(axes, grid="x")
    axes.set_axisbelow(True)
    return figure


def _bar(axes, position: float, values: list[float], **style: Any) -> None:
    starts = np.cumsum([0.0, *values[:-1]])
    for start, value, color in zip(starts, values, _COLORS, strict=True):
        axes.barh(position, value, left=start, color=color, **style)
