"""Text and cells of tables."""

import io

from rich.console import Console
from rich.table import Table


def text_of(table: Table) -> str:
    """Returns a table as it is printed."""
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    return console.file.getvalue()


def cells_of(table: Table) -> list[tuple[str, ...]]:
    """Returns the rows of a table."""
    return list(zip(*(column.cells for column in table.columns), strict=True))
