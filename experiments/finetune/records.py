"""Reads records of all formats from JSON lines and Parquet files.

All records of a file have one format of `experiments.finetune.formats`. They may also
have other fields, which only a checker reads; a line per file reports their names.
"""

import codecs
import dataclasses
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.finetune.conversations import Record
from experiments.finetune.formats import (
    FORMATS,
    format_of,
    string_of,
    weight_of,
    without_nulls,
)
from experiments.training import files

SUFFIXES = (".jsonl", ".parquet")
_LARGEST_LINE = 2**26  # Bytes of a line; longer lines are refused.


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Reads the records of .jsonl and .parquet files, or of folders of them.

    Raises:
      FileNotFoundError: If there is no file at a path.
      ImportError: If a file is Parquet and pyarrow is not installed.
      ValueError: If a file is of another kind, or a line is not a record or not of the
        format of the lines before it. The error names the file and the line.
    """
    records: list[Record] = []
    for path in files.find_files(paths, SUFFIXES):
        is_parquet = path.suffix.lower() == ".parquet"
        if not is_parquet:
            files.check_texts([path])
        records += _of_file(path, _parquet_rows(path) if is_parquet else _lines(path))
    if not records:
        raise ValueError(f"there is no record in {', '.join(map(str, paths))}")
    return records


def _of_file(path: Path, rows: Iterator[tuple[str, Any]]) -> Iterator[Record]:
    """Yields the records of a file, and prints what is not used of them.

    Args:
      path: The path of the file.
      rows: The location and the fields of each record.

    Raises:
      ValueError: If a record is invalid, or its format is not the first record's. The
        message names the location.
    """
    first: tuple[str, str] | None = None
    unread: set[str] = set()
    weightless = 0
    for location, row in rows:
        try:
            values = without_nulls(row)
            name = format_of(values)
            first = first or (name, location)
            if name != first[0]:
                raise ValueError(
                    f"the records of a file have one format, got {name} after "
                    f"{first[0]} at {first[1].rpartition(', ')[2]}"
                )
            if not weight_of(values):
                weightless += 1
                continue
            record = FORMATS[name].read(values)
            unread |= FORMATS[name].unread(values)
            family = string_of(values, "family") if "family" in values else "all"
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{location}: {error!s:.300}") from None
        yield dataclasses.replace(record, family=family, place=location, fields=row)
    if weightless:
        print(
            f"{path}: records of weight 0, which are left out: {weightless:,}",
            flush=True,
        )
    if unread:
        names = ", ".join(f"{name!r:.40}" for name in sorted(unread))
        print(f"{path}: only a checker reads the fields {names:.300}", flush=True)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the location and the JSON value of each line that is not blank.

    Raises:
      ValueError: If a line is not JSON. The message names the line.
    """
    with files.named(path), path.open("rb") as file:
        number = 0
        while line := file.readline(_LARGEST_LINE + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            location = f"{path}, line {number}"
            try:
                if len(line) > _LARGEST_LINE:
                    raise ValueError(f"a line has at most {_LARGEST_LINE:,} bytes")
                if line.strip():
                    yield location, _json(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{location}: a line must be one object of JSON: {error!s:.200}"
                ) from None


def _json(line: bytes) -> Any:
    return json.loads(
        line.decode(),
        object_pairs_hook=_object,
        parse_constant=_no_number,
        parse_int=_integer,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object from pairs of a name and a value.

    Raises:
      ValueError: If a name occurs twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twice!r:.60} more than once")
    return values


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _integer(text: str) -> int | float:
    # Python refuses integers of thousands of digits, which some files have.
    return int(text) if len(text) < 20 else float(text)


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the location and the fields of each row."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(
            f"{path} is a Parquet file, and pyarrow, which reads these, is not "
            'installed; the extra "experiments" has it: pip install pyarrow'
        ) from None
    try:
        with files.named(path):
            batches = parquet.ParquetFile(path).iter_batches(batch_size=1024)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path}, row {number}", row
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{path} is no whole Parquet file: {error!s:.200}") from None
    except importlib.import_module("pyarrow").ArrowException as error:
        raise ValueError(f"{path} is no whole Parquet file: {error!s:.200}") from None
