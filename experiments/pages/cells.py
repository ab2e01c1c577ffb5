"""Tables of cells that are measured here, printed in the paper, or not run and why."""

import dataclasses
from collections.abc import Sequence

_LETTERS = "abcdefghij"


@dataclasses.dataclass(frozen=True)
class Here:
    """A number that was measured here; shown in bold."""

    value: float
    digits: int = 2

    def __str__(self) -> str:
        return f"**{self.value:,.{self.digits}f}**"


@dataclasses.dataclass(frozen=True)
class Printed:
    """A number of the paper."""

    value: float

    def __str__(self) -> str:
        return f"{self.value:,g}" if abs(self.value) < 1e4 else f"{self.value:,.0f}"


@dataclasses.dataclass(frozen=True)
class NotRun:
    """A number that does not exist here, with the reason."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Text:
    """A cell that is no number, such as "OOM"."""

    text: str

    def __str__(self) -> str:
        return self.text


Cell = Here | Printed | NotRun | Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A table of the paper.

    Attributes:
      title: The title, with the paper's number.
      text: What is compared, and why ours differs.
      columns: The heads of the columns, without the column of labels.
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
        """Returns the section in Markdown."""
        reasons = dict.fromkeys(
            c.reason for _, cells in self.rows for c in cells if isinstance(c, NotRun)
        )
        letters = dict(zip(reasons, _LETTERS, strict=False))
        lines = [f"## {self.title}", "", self.text, ""]
        lines.append(f"| | {' | '.join(self.columns)} |")
        lines.append("| --- |" + " --- |" * len(self.columns))
        for label, cells in self.rows:
            shown = [
                f"({letters[c.reason]})" if isinstance(c, NotRun) else str(c)
                for c in cells
            ]
            lines.append(f"| {label} | {' | '.join(shown)} |")
        if letters:
            notes = (f"({letter}) not run: {why}" for why, letter in letters.items())
            lines += ["", "; ".join(notes) + "."]
        if self.source:
            lines += ["", f"Measured {self.source}."]
        return "\n".join([*lines, ""])
