"""Tables that are defined by columns, for a terminal, a notebook or Markdown."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from experiments.common.results import Bar


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      title: The title.
      key: The key of the value in a row, the keys of several values, or a function of
        the row.
      form: The format of the values, as in "{:.1f} GiB" or "{:.1f} to {:.1f}". If a
        value is a string where the format expects a number, the cell is that string.
      missing: The text of a cell if its value, or the first of several, is None or not
        in the row.
    """

    title: str
    key: str | tuple[str, ...] | Callable[[Any], Any]
    form: str = "{}"
    missing: str = "-"

    def cell(self, row: Any) -> str:
        """Returns the text of this column's cell in a row."""
        if callable(self.key):
            value = self.key(row)
        elif isinstance(self.key, tuple):
            value = tuple(map(row.get, self.key))
        else:
            value = row.get(self.key)
        values = value if isinstance(value, tuple) else (value,)
        if values[0] is None:
            return self.missing
        if isinstance(values[0], str) and "{:" in self.form:
            return values[0]
        return self.form.format(*values)


def table(
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Any],
    caption: str | None = None,
) -> Table:
    """Returns a table for a terminal, with a line for each row.

    Args:
      title: The title.
      columns: The columns; the first has the names of lines.
      rows: The rows.
      caption: The text below the table, if any.
    """
    result = new_table(title, *(column.title for column in columns))
    for row in rows:
        result.add_row(*(column.cell(row) for column in columns))
    result.caption = caption
    return result


def with_paper(title: str, key: str, spec: str, paper: str | None = None) -> Column:
    """Returns a column of values, with the paper's values, if any, below in brackets.

    Args:
      title: The title.
      key: The key of the value. The key of the paper's value is this key after
        "paper_".
      spec: The format of the value.
      paper: The format of the paper's value; None means `spec`.
    """
    column = Column(title, key, f"{{:{spec}}}")
    theirs = Column("", f"paper_{key}", f"\n({{:{paper or spec}}})", missing="")
    return Column(title, lambda row: column.cell(row) + theirs.cell(row))


def markdown(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """Returns a table in Markdown."""
    titles = "".join(f"| {column.title} " for column in columns)
    lines = [f"{titles}|".replace("|  ", "| "), "| --- " * len(columns) + "|"]
    for row in rows:
        lines.append("".join(f"| {column.cell(row)} " for column in columns) + "|")
    return "\n".join(lines)


def grouped[Row, Key: Hashable](
    rows: Iterable[Row], key: Callable[[Row], Key]
) -> dict[Key, list[Row]]:
    """Returns the list of rows of each value of `key`, in the order of the rows."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def by_column(
    rows: Iterable[Mapping[str, Any]], line: str, column: str
) -> dict[Any, dict[Any, Mapping[str, Any]]]:
    """Returns rows by their value of `line`, then by their value of `column`.

    The keys of all dictionaries are in the order of the rows. Of several rows with the
    same values, the last one counts.
    """
    lines: dict[Any, dict[Any, Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault(row[line], {})[row[column]] = row
    return lines


def new_table(title: str, first: str, *columns: str) -> Table:
    """Returns an empty table; the first column is for names, the others for numbers.

    The arguments are the table's title and the titles of its columns.
    """
    result = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    result.add_column(first)
    for column in columns:
        result.add_column(column, justify="right")
    return result


def bars(targets: Iterable[Bar]) -> Table:
    """Returns a table of targets, measured values and whether the targets hold."""
    columns = (
        Column("", lambda bar: bar.name),
        Column("target", lambda bar: bar.target),
        Column("measured", lambda bar: bar.measured, "{:.3f}"),
        Column("holds", lambda bar: "yes" if bar.holds else "NO"),
    )
    return table("What was expected", columns, targets)
