"""Tables for a terminal or a notebook."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from experiments.common.results import Bar


def new_table(title: str, first: str, *columns: str) -> Table:
    """Returns an empty table of numbers, with names in the first column."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def bars(found: Sequence[Bar]) -> Table:
    """Returns a table of targets, measured values and whether the targets hold."""
    table = new_table("What was expected", "", "target", "measured", "holds")
    for bar in found:
        holds = "yes" if bar.holds else "NO"
        table.add_row(bar.name, str(bar.target), f"{bar.measured:.3f}", holds)
    return table
