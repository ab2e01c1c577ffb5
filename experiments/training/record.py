"""run.json, the record of a run's settings, and the checks of what it says."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.results import read_json, write_json
from experiments.training.checksums import value_checksum
from experiments.training.settings import Settings

RUN, LOCK = "run.json", "lock"
# The files that a start leaves if it is interrupted before run.json is complete.
LEFTOVERS = {LOCK, "tokenizer.json", f"{RUN}.partial"}
_ENTRIES = {"settings", "data", "steps", "command"}
_NEWER_ENTRIES = {"schedule_steps", "files", "checksum"}


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Writes run.json with a checksum of the other entries."""
    write_json(folder / RUN, record | {"checksum": value_checksum(record)})


def read_settings(folder: Path) -> Settings:
    """Returns the settings of a run, even while another process writes to it.

    Raises:
      ValueError: If there is no run in `folder`, or its run.json is damaged.
    """
    if not (folder / RUN).exists():
        raise ValueError(f"there is no run in {folder}: it has no {RUN}")
    return Settings.from_json(read_record(folder, Settings)["settings"])


def read_record(folder: Path, kind: type[Settings]) -> dict[str, Any]:
    """Returns the contents of run.json without the checksum.

    Raises:
      ValueError: If the file is damaged, or of another program.
    """
    path = folder / RUN
    try:
        record = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(record, dict) or not (
        _ENTRIES <= record.keys() <= _ENTRIES | _NEWER_ENTRIES
    ):
        raise ValueError(f"{path} is damaged: its entries are not those of a run")
    checksum = record.pop("checksum", None)
    if checksum not in (None, value_checksum(record)):
        raise ValueError(
            f"{path} is damaged: it does not have its checksum; if the change is "
            'meant, remove the entry "checksum"'
        )
    _check_program(path, record["settings"], kind)
    try:
        _check_record(record, kind)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return record


def _check_program(path: Path, settings: Any, kind: type[Settings]) -> None:
    """Raises ValueError if another program wrote the settings of a run.

    All runs of fine-tuning, also of older versions, have the setting `base`.
    """
    fields = {field.name for field in dataclasses.fields(kind)}
    written, needed = (
        "experiments.finetune" if "base" in names else "experiments.pretrain"
        for names in (settings if isinstance(settings, dict) else fields, fields)
    )
    if written != needed:
        raise ValueError(f"{path} is of {written}, not of {needed}")


def _check_record(record: Mapping[str, Any], kind: type[Settings]) -> None:
    """Raises ValueError unless all entries of run.json have valid values."""
    settings = kind.from_json(record["settings"])
    steps, files = record["steps"], record.get("files", {})
    for name in ("steps", "schedule_steps"):
        count = record.get(name, steps)
        counted = type(count) is int and count > 0
        if not counted and (count is not None or settings.minutes is None):
            raise ValueError(f"{name} must be a positive integer, got {count!r:.100}")
    for name in ("data", "command"):
        if not isinstance(record[name], str):
            raise ValueError(f"{name} must be a string, got {record[name]!r:.100}")
    # A run has no other files, and reading a file such as /dev/zero would never end.
    if not isinstance(files, dict) or not files.keys() <= LEFTOVERS:
        raise ValueError(f"files must be of the run, got {files!r:.100}")
