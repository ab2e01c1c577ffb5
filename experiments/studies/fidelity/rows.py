"""The file to which every finished training is added at once, a JSON object a line."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def add(path: Path, row: Row) -> None:
    """Adds a row to a file, durably; a row that was cut before it is dropped."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(_whole(file.read()))
        file.write(f"{json.dumps(row)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, setup_id: str) -> list[Row]:
    """Returns the rows of a file, none without a file; the last of equal ones counts.

    A last line that was cut while it was written is left out.

    Args:
      path: The file.
      setup_id: The hash that `Setup.id` returns, which rows have as "setup".

    Raises:
      ValueError: If a line is no row, or a row is of another setup: its losses could
        not be compared.
    """
    by_run: dict[tuple[str, int], Row] = {}
    for number, row in _rows(path):
        if row["setup"] != setup_id:
            raise ValueError(
                f"{path}, line {number}, has other settings, data or another device; "
                "name another --out"
            )
        by_run[row["variant"], row["seed"]] = row
    return list(by_run.values())


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    if not path.exists():
        return
    content = path.read_bytes()
    lines = content[: _whole(content)].splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not {"setup", "variant", "seed"} <= row.keys():
            raise ValueError(f"{path}, line {number}, is no row: {line[:60]!r}")
        yield number, row


def _whole(content: bytes) -> int:
    """Returns the number of bytes of whole lines."""
    return content.rfind(b"\n") + 1
