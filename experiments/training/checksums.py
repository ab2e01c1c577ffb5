"""Checksums of a run's files, and lists of them next to checkpoints."""

import json
import zlib
from pathlib import Path
from typing import Any

from experiments.common.results import read_json, write_json


def list_of(checkpoint: Path) -> Path:
    """Returns the path of the file that lists a checkpoint's checksums."""
    folder = checkpoint.parent
    return folder.parent / "checksums" / folder.name / f"{checkpoint.name}.json"


def write_list(checkpoint: Path) -> None:
    """Writes the list of the checksums of a checkpoint's files."""
    listed, files = list_of(checkpoint), _checksums(checkpoint)
    for needed in (listed.parent.parent, listed.parent):
        needed.mkdir(exist_ok=True)
    write_json(listed, {"files": files, "checksum": value_checksum(files)})


def _checksums(folder: Path) -> dict[str, int]:
    """Returns the checksum of each file in a folder, by the file's relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): file_checksum(path) for path in files}


def file_checksum(path: Path) -> int:
    """Returns the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def value_checksum(value: Any) -> int:
    """Returns the CRC-32 of a JSON value; the order of keys does not matter."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def damage(checkpoint: Path) -> str | None:
    """Returns a message about a damaged checkpoint, or None if it is intact.

    A checkpoint without a list of checksums counts as intact: its process was killed
    after the checkpoint was complete, and before the list was written.
    """
    if not list_of(checkpoint).exists():
        return None
    expected = _listed_checksums(list_of(checkpoint))
    if expected is None:
        return f"{list_of(checkpoint)} is damaged"
    actual = _checksums(checkpoint)
    for name in sorted(expected.keys() | actual.keys()):
        if actual.get(name) != expected.get(name):
            return f"{checkpoint / name} is damaged"
    return None


def _listed_checksums(path: Path) -> dict[str, int] | None:
    """Returns the checksums in a list, or None if the list is damaged.

    Older lists are only the dictionary of checksums, without their own checksum.
    """
    try:
        listed = read_json(path)
    except ValueError:
        return None
    if not isinstance(listed, dict):
        return None
    if listed.keys() == {"files", "checksum"}:
        intact = listed["checksum"] == value_checksum(listed["files"])
        return listed["files"] if intact else None
    return listed if all(isinstance(x, int) for x in listed.values()) else None
