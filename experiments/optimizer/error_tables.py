"""Tables of the studies in `error_studies`, for a terminal or a notebook."""

from operator import itemgetter

import numpy as np
from rich.table import Table

from experiments.common import tables
from experiments.common.paper import MOMENT_CODES, TABLE_1
from experiments.common.tables import Column, grouped, new_table
from experiments.optimizer.error_studies import REFERENCE_ERROR, Row


def spread(rows: list[Row]) -> Table:
    """Returns a table of the captured steps: loss, dynamic range of groups, and k."""
    columns = (
        Column("step", "step"),
        Column("loss", "loss", "{:.3f}"),
        Column("octaves of m", "mu_octaves", "{:.1f}"),
        Column("octaves of v", "nu_octaves", "{:.1f}"),
        Column("k of m", "mu_k", "{:.2f}"),
        Column("k of v", "nu_k", "{:.2f}"),
    )
    title = "The captured moments: medians over groups"
    return tables.table(title, columns, _of(rows, "spread"))


def pairs(
    rows: list[Row], paper: dict[str, tuple[float, ...]], *, with_lost: bool
) -> Table:
    """Returns table 1 or 8: mean errors over captured steps, and the paper's below.

    Args:
      rows: Rows of `error_studies.pair_rows`, possibly among others.
      paper: The paper's `TABLE_1` or `TABLE_8`.
      with_lost: Whether to count elements with a stored second moment of zero.
    """
    title = f"Table {'1' if paper is TABLE_1 else '8'}, "
    title += "lost v counted" if with_lost else "lost v aside"
    columns = MOMENT_CODES[: len(paper["E4M3+Expand"])]
    heads = [column.replace("+", "\n+") for column in columns]
    table = new_table(f"{title} (paper's below)", "m \\ v", *heads)
    entry = "error_with_lost" if with_lost else "error"
    pairs = grouped(_of(rows, "pairs"), itemgetter("mu", "nu"))
    for mu, printed in paper.items():
        cells = [
            f"{_short(np.mean([r[entry] for r in pairs[mu, nu]]))}\n({number:.2f})"
            for nu, number in zip(columns, printed, strict=True)
        ]
        table.add_row(mu, *cells)
    return table


def schemes(rows: list[Row]) -> Table:
    """Returns a table of schemes: bytes per parameter, and errors by captured step.

    The last column is the largest share of elements with a stored second moment of
    zero.
    """
    rows = _of(rows, "schemes")
    steps = list(dict.fromkeys(row["step"] for row in rows))
    names = dict.fromkeys(row["scheme"] for row in rows)
    table = new_table(
        f"Error after each captured step, where COAT has {REFERENCE_ERROR}",
        *("step", "bytes", *map(str, steps), "v lost,\nppm"),
    )
    for name in names:
        rows_of_scheme = [row for row in rows if row["scheme"] == name]
        table.add_row(
            name,
            f"{rows_of_scheme[0]['bytes_per_parameter']:.3f}",
            *(_short(row["error"]) for row in rows_of_scheme),
            f"{1e4 * max(row['lost_percent'] for row in rows_of_scheme):.0f}",
        )
    return table


def replays(rows: list[Row]) -> Table:
    """Returns a table of the errors of replays, by b2 and scheme.

    Squared errors of the update and of the sum of updates are in thousandths of the
    mean square of the exact numbers. The last column is the median of v / exact v.
    """
    rows = _of(rows, "replays")
    steps = list(dict.fromkeys(row["step"] for row in rows))
    shown = sorted({1, 10, steps[-1]} & set(steps))
    table = new_table(
        "Adam with stored moments: squared error of the update, thousandths",
        *("", *(f"step {step}" for step in shown), "summed", "v / exact"),
    )
    for b2 in dict.fromkeys(row["b2"] for row in rows):
        table.add_section()
        table.add_row(f"b2 = {b2:g}")
        for name in dict.fromkeys(row["scheme"] for row in rows):
            rows_of_scheme = [r for r in rows if (r["b2"], r["scheme"]) == (b2, name)]
            errors = [r["update_error"] for r in rows_of_scheme if r["step"] in shown]
            errors.append(rows_of_scheme[-1]["sum_error"])
            cells = [_short(1e3 * error) for error in errors]
            table.add_row(name, *cells, f"{rows_of_scheme[-1]['nu_ratio']:.4f}")
    return table


def _of(rows: list[Row], study: str) -> list[Row]:
    return [row for row in rows if row["study"] == study]


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1e}"
