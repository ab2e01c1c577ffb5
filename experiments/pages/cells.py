"""Tables of numbers that were measured here, are in the paper, or were not measured."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

_LETTERS = "abcdefghij"
# The number of columns that fit into a window of 1,280 pixels next to the contents.
_MOST_COLUMNS = 8


@dataclasses.dataclass(frozen=True)
class Here:
    """A cell with a number that an experiment of this repository measured, in bold.

    `digits` is the number of digits after the decimal point.
    """

    value: float
    digits: int = 2

    def __str__(self) -> str:
        return f"**{self.value:,.{self.digits}f}**"


@dataclasses.dataclass(frozen=True)
class Printed:
    """A cell with a number that the paper prints."""

    value: float

    def __str__(self) -> str:
        return f"{self.value:,g}" if abs(self.value) < 1e4 else f"{self.value:,.0f}"


@dataclasses.dataclass(frozen=True)
class NotRun:
    """A cell for a number that this repository has not measured, with the reason."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Text:
    """A cell with a text, for example "OOM"."""

    text: str

    def __str__(self) -> str:
        return self.text


Cell = Here | Printed | NotRun | Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A table of the paper, with a title and text.

    Attributes:
      title: The title, with the paper's number.
      text: A text on what is compared, and why our numbers differ.
      columns: The titles of the columns, without the column of labels.
      rows: The rows: a label, and a cell for each column.
      source: The command and device of the measurements; empty if there are none.
    """

    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    source: str = ""

    def __post_init__(self) -> None:
        for label, cells in self.rows:
            if len(cells) != len(self.columns):
                raise ValueError(
                    f"row {label!r} of {self.title!r} needs {len(self.columns)} cells, "
                    f"got {len(cells)}"
                )

    def render(self) -> str:
        """Returns the section in Markdown.

        A table with more columns than fit on a page is transposed. A row with only
        `NotRun` cells is left out, and the note below the table says why.
        """
        letters = dict(zip(self._reasons(), _LETTERS, strict=False))
        rows = [
            (label, [_shown(cell, letters) for cell in cells])
            for label, cells in self.rows
            if not all(isinstance(cell, NotRun) for cell in cells)
        ]
        labels, cells = zip(*rows, strict=True)
        if len(self.columns) > _MOST_COLUMNS:
            lines = _table(
                labels, zip(self.columns, zip(*cells, strict=True), strict=True)
            )
        else:
            lines = _table(self.columns, rows)
        lines = [f"## {self.title}", "", self.text, "", *lines]
        if letters:
            text = "\n".join(lines)
            notes = (
                f"({letter}) not run: {why}"
                if f"({letter})" in text
                else f"Not run here: {why}"
                for why, letter in letters.items()
            )
            lines += ["", "; ".join(notes) + "."]
        if self.source:
            lines += ["", f"Measured {self.source}."]
        return "\n".join([*lines, ""])

    def _reasons(self) -> list[str]:
        """Returns the distinct reasons of `NotRun` cells."""
        cells = (cell for _, row in self.rows for cell in row)
        return list(dict.fromkeys(c.reason for c in cells if isinstance(c, NotRun)))


def _shown(cell: Cell, letters: Mapping[str, str]) -> str:
    return f"({letters[cell.reason]})" if isinstance(cell, NotRun) else str(cell)


def _table(
    columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]
) -> list[str]:
    """Returns the lines of a table with labels in its first column."""
    head = [f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    return head + [f"| {label} | {' | '.join(cells)} |" for label, cells in rows]
