"""Files of JSON rows with checksums, which survive a kill at any time."""

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from experiments.common.results import replace_file
from experiments.training.settings import Recipe


class RowLog:
    """A file of JSON rows of one recipe, open for appending.

    A written row is readable at once.

    Attributes:
      name: The name of the file.
    """

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.name = path.name
        self._path, self._recipe = path, recipe
        self._open()

    def _open(self) -> None:
        self._checksum = rows_checksum(read_rows(self._path), self._recipe)
        self._file = self._path.open("a", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row."""
        line = _line_of(row)
        self._file.write(line)
        self._checksum = zlib.crc32(line.encode(), self._checksum)

    def drop_after(self, step: int) -> None:
        """Drops the recipe's rows of steps after `step`, atomically."""
        self._file.close()
        remaining = [
            line
            for row, line in read_rows(self._path)
            if row["recipe"] != self._recipe or row["step"] <= step
        ]
        replace_file(self._path, b"".join(remaining))
        self._open()

    def sync(self) -> int:
        """Waits until all rows are on disk, and returns the checksum of the log.

        The checksum is over the rows of the log's recipe.
        """
        os.fsync(self._file.fileno())
        return self._checksum


class NoRows:
    """A replacement of `RowLog` that writes nothing.

    It is used in processes other than the main process, and for logs that the run does
    not have.

    Attributes:
      name: The name of the file.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        pass

    def write(self, row: Mapping[str, Any]) -> None:
        """Does nothing with `row`."""

    def drop_after(self, step: int) -> None:
        """Does nothing, because there are no rows."""

    def sync(self) -> int:
        """Returns 0, the checksum of an empty file."""
        return 0


def read_rows(path: Path) -> Iterable[tuple[dict[str, Any], bytes]]:
    """Yields the rows of a file and their lines, except for an incomplete last line.

    Raises:
      ValueError: If a line is not a JSON object with a recipe and a step.
    """
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            complete = isinstance(row["recipe"], str) and row["step"] > 0
        except (ValueError, LookupError, TypeError, RecursionError):
            complete = False
        if not complete:
            raise ValueError(f"{path} is damaged: line {number} is no row")
        # A number that is not finite is null in JSON.
        row = {k: math.nan if v is None else v for k, v in row.items()}
        yield row, line + b"\n"


def rows_checksum(
    rows: Iterable[tuple[Mapping[str, Any], bytes]], recipe: Recipe
) -> int:
    """Returns the checksum of the lines of a recipe.

    `rows` are pairs of a row and its line.
    """
    return zlib.crc32(b"".join(line for row, line in rows if row["recipe"] == recipe))


def _line_of(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of JSON; numbers that are not finite become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"
