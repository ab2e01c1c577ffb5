"""A run's folder: settings, metrics and checkpoints, safe against a kill at any time.

run.json         the settings, the data's fingerprint and the number of steps
metrics.jsonl    one line per step and recipe
moments.jsonl    one line per validation, recipe, parameter and moment stored in FP8
tokenizer.json   the BPE of a run with one
checkpoints/     one folder per recipe with the latest states, and their checksums
lock             locked by the process that writes to the folder

A resumed run notices changed files by CRC-32 checksums. run.json holds its own and that
of tokenizer.json. Each checkpoint has a list of its files' checksums beside it, and its
progress holds those of the recipe's rows so far, since rows are on disk before the
checkpoint is. A checkpoint that is damaged gives way to an older one; other damages are
refused. Files of before there were checksums are taken as they are.
"""

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import gc
import io
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from experiments.common.results import command_line, write_json
from experiments.pretrain.settings import Recipe, Settings
from experiments.pretrain.training import TrainState, tree_bytes

_RUN, _METRICS, _MOMENTS = "run.json", "metrics.jsonl", "moments.jsonl"
_LOCK = "lock"
_LEFTOVERS = {_LOCK, "tokenizer.json", f"{_RUN}.partial"}
_RUN_ENTRIES = {"settings", "data", "steps", "command", "files", "checksum"}


@dataclasses.dataclass(kw_only=True)
class Progress:
    """The part of a checkpoint that is not the training state.

    Attributes:
      step: Number of steps done.
      batches: State of the data iterator.
      seconds: Total time of `timed_steps` steps, without validation and checkpoints.
      timed_steps: Number of steps that `seconds` counts: all but the first of each
        process.
      device_peak_bytes: Peak memory of the device. It is None if the device does not
        report it, or if an earlier recipe of the process had a higher peak.
      measured: Sizes and the compile time, measured before the first step.
      rows: Checksums of the recipe's rows up to this step, by the name of their file.
        It is empty in checkpoints of before there were any.
    """

    step: int = 0
    batches: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    timed_steps: int = 0
    device_peak_bytes: int | None = None
    measured: dict[str, int | float | None] = dataclasses.field(default_factory=dict)
    rows: dict[str, int] = dataclasses.field(default_factory=dict)

    def tokens_per_s(self, settings: Settings) -> float | None:
        """Returns the speed of the timed steps, or None before the first one."""
        if not self.seconds:
            return None
        return settings.tokens_per_step * self.timed_steps / self.seconds

    def note_peak(self, before: int | None, now: int | None) -> None:
        """Records the process's peak if it rose while this recipe ran.

        Args:
          before: The process's peak before this recipe, in bytes.
          now: The process's peak now, in bytes.
        """
        if now is not None and now > (before or 0):
            self.device_peak_bytes = max(now, self.device_peak_bytes or 0)


class Checkpoints:
    """The latest checkpoints of one recipe.

    A new checkpoint replaces the oldest one only when it is complete. Beside every
    checkpoint there is a list of its files' checksums. A checkpoint whose files differ
    from the list is moved to a folder of damaged ones, and an older one is used.

    Raises:
      ValueError: If there are checkpoints, and all of them are damaged.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder.resolve()
        # The folder around them is not made, because without it there is no run.
        for needed in (self._folder.parent, self._folder):
            needed.mkdir(exist_ok=True)
        self._set_damaged_aside()
        self._manager = ocp.CheckpointManager(
            self._folder,
            item_names=("state", "progress"),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=False,
                # The next step donates the state, so it has to be on disk by then.
                enable_async_checkpointing=False,
            ),
        )

    def _set_damaged_aside(self) -> None:
        found = [p for p in self._folder.glob("[0-9]*") if p.name.isdigit()]
        steps = sorted(found, key=lambda path: int(path.name))
        damages = []
        while steps and (damage := _damage(steps[-1])):
            damages.append(damage)
            if len(steps) == 1:
                raise ValueError("no checkpoint is whole: " + "; ".join(damages))
            path = steps.pop()
            aside = self._folder.parent / "damaged"
            aside.mkdir(exist_ok=True)
            name = f"{self._folder.name}-{path.name}-{time.time_ns()}"
            os.replace(path, aside / name)
            print(f"{damage}; going on from step {steps[-1].name} instead")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._manager.close()

    def save(self, state: TrainState, progress: Progress) -> None:
        """Saves a checkpoint, unless there is one of this step."""
        if progress.step != self._manager.latest_step():
            _check_space(self._folder, state)
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(_not_empty(state)),
                progress=ocp.args.JsonSave(dataclasses.asdict(progress)),
            )
            path = self._folder / str(progress.step)
            with _errors_of_disk(path):
                self._manager.save(progress.step, args=items)
            listed = _list_of(path)
            for needed in (listed.parent.parent, listed.parent):
                needed.mkdir(exist_ok=True)
            files = _checksums(path)
            write_json(listed, {"files": files, "checksum": _value_checksum(files)})
            for old in listed.parent.iterdir():
                if not (self._folder / old.stem).exists():
                    old.unlink()

    def progress(self) -> Progress:
        """Returns the latest checkpoint's progress; its step is 0 if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return Progress()
        items = ocp.args.Composite(progress=ocp.args.JsonRestore())
        return Progress(**self._manager.restore(step, args=items)["progress"])

    def state(self, abstract: TrainState) -> TrainState:
        """Returns the latest state, bit for bit.

        Args:
          abstract: The shapes, dtypes and placement of the state.
        """
        items = ocp.args.Composite(state=ocp.args.StandardRestore(_not_empty(abstract)))
        step = self._manager.latest_step()
        return TrainState(**self._manager.restore(step, args=items)["state"])


@contextlib.contextmanager
def _errors_of_disk(path: Path) -> Iterator[None]:
    """Raises tensorstore's errors of the operating system as OSError, and no others.

    orbax prints them as well, and its tasks that are left behind raise errors of their
    own, which nothing handles. Neither is shown.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except Exception as error:
        code = re.search(r"\[os_error_code='(\d+)'\]", str(error))
        if not code and not isinstance(error, OSError):
            sys.stderr.write(said.getvalue())
            raise
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        sys.unraisablehook = _without_closed_loops(sys.unraisablehook)
        atexit.register(gc.collect)  # At exit, tasks need modules that are still there.
        if not code:
            raise
        number = int(code[1])
        raise OSError(number, os.strerror(number), str(path)) from None
    sys.stderr.write(said.getvalue())


def _without_closed_loops(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns an `unraisablehook` that ignores calls to a closed event loop."""

    def ignore(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    return ignore


def _list_of(checkpoint: Path) -> Path:
    folder = checkpoint.parent
    return folder.parent / "checksums" / folder.name / f"{checkpoint.name}.json"


def _checksums(folder: Path) -> dict[str, int]:
    """Returns the checksum of each file in a folder, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _file_checksum(path) for path in files}


def _file_checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _value_checksum(value: Any) -> int:
    """Returns the checksum of a JSON value, whatever its file's spaces."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _damage(checkpoint: Path) -> str | None:
    """Returns what is wrong with a checkpoint, or None.

    A process that was killed right after saving has left no list of checksums. The
    checkpoint itself is complete then.
    """
    if not _list_of(checkpoint).exists():
        return None
    expected = _listed_checksums(_list_of(checkpoint))
    if expected is None:
        return f"{_list_of(checkpoint)} is damaged"
    found = _checksums(checkpoint)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            return f"{checkpoint / name} is damaged"
    return None


def _listed_checksums(path: Path) -> dict[str, int] | None:
    """Returns the checksums in a list, or None if it is damaged.

    Older lists are the dictionary alone, without a checksum of it.
    """
    try:
        listed = json.loads(path.read_text())
    except ValueError:
        return None
    if listed.keys() == {"files", "checksum"}:
        whole = listed["checksum"] == _value_checksum(listed["files"])
        return listed["files"] if whole else None
    return listed if all(isinstance(x, int) for x in listed.values()) else None


def _check_space(folder: Path, state: TrainState) -> None:
    """Raises OSError unless a checkpoint of `state` fits on the disk."""
    needed = tree_bytes(state) + 2**20
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint takes {needed:,} bytes, but {free:,} are free in {folder}",
        )


class Run:
    """A run's folder, new or resumed.

    While the object lives no other process can write to the folder.

    Attributes:
      folder: The path of the folder.
      settings: The run's settings.
      steps: Steps of each recipe; None until the first recipe has settled it.
      command: The command line that started the run.
    """

    def __init__(self, folder: Path, record: dict[str, Any], lock: int) -> None:
        weakref.finalize(self, os.close, lock)
        self.folder = folder
        self.settings = Settings.from_json(record["settings"])
        self.steps: int | None = record["steps"]
        self.command: str = record["command"]
        self._record = record

    @classmethod
    def create(
        cls,
        folder: Path,
        settings: Settings,
        fingerprint: str,
        files: Sequence[Path] = (),
    ) -> Self:
        """Starts a run in a folder that passes `check_unused`.

        Copies of `files` belong to the run.

        Raises:
          ValueError: If another process has started a run there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
        check_unused(folder)
        for file in files:
            shutil.copyfile(file, folder / file.name)
        record = {
            "settings": dataclasses.asdict(settings),
            "data": fingerprint,
            "steps": settings.steps if settings.minutes is None else None,
            "command": command_line(),
            "files": {file.name: _file_checksum(file) for file in files},
        }
        _write_record(folder, record)
        return cls(folder, record, lock)

    @classmethod
    def resume(cls, folder: Path, given: Mapping[str, Any]) -> Self:
        """Continues a run.

        Args:
          folder: The run's folder.
          given: Settings of the command line. They must equal the run's own.

        Raises:
          ValueError: If there is no run in `folder`, its files are damaged, or it has
            other settings.
        """
        if not (folder / _RUN).exists():
            raise ValueError(
                f"--resume needs a run's folder, got {folder} without {folder / _RUN}"
            )
        record = _read_record(folder)
        lock = _locked(folder)
        try:
            run = cls(folder, record, lock)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / _RUN} is damaged: {error!r}") from None
        for name, value in given.items():
            if value != (own := getattr(run.settings, name)):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"a resumed run keeps its settings, but {flag} {value!r} was given "
                    f"and {folder} has {own!r}"
                )
        for name, checksum in record.get("files", {}).items():
            path = folder / name
            if not path.exists() or _file_checksum(path) != checksum:
                raise ValueError(f"{path} is damaged")
        run._drop_unsaved_rows()
        return run

    def check_data(self, fingerprint: str) -> None:
        """Raises ValueError if the data changed since the run began."""
        if fingerprint != self._record["data"]:
            raise ValueError(f"the data is not what {self.folder} was started with")

    def fix_steps(self, steps: int) -> None:
        """Records the number of steps, for all recipes and for a resumed run."""
        self.steps = self._record["steps"] = steps
        _write_record(self.folder, self._record)

    def checkpoints(self, recipe: Recipe) -> Checkpoints:
        """Returns the recipe's checkpoints, a context manager.

        Raises:
          FileNotFoundError: If the run's folder was moved or deleted.
        """
        folder = self.folder / "checkpoints" / recipe
        return Checkpoints(folder, self.settings.keep)

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl, without an incomplete last line."""
        return [row for row, _ in _read_rows(self.folder / _METRICS)]

    def append_metrics(self, recipe: Recipe) -> "RowLog":
        """Opens metrics.jsonl for more rows of a recipe; a context manager."""
        return RowLog(self.folder / _METRICS, recipe)

    def moments(self) -> list[dict[str, Any]]:
        """Returns the rows of moments.jsonl, without an incomplete last line."""
        return [row for row, _ in _read_rows(self.folder / _MOMENTS)]

    def append_moments(self, recipe: Recipe) -> "RowLog":
        """Opens moments.jsonl for more rows of a recipe; a context manager."""
        return RowLog(self.folder / _MOMENTS, recipe)

    def _drop_unsaved_rows(self) -> None:
        """Drops the rows of metrics and moments after each recipe's checkpoint.

        Raises:
          ValueError: If the rows before it are not those that were written.
        """
        saved = {}
        for recipe in self.settings.recipes:
            with self.checkpoints(recipe) as checkpoints:
                saved[recipe] = checkpoints.progress()
        last = {recipe: progress.step for recipe, progress in saved.items()}
        for path in (self.folder / _METRICS, self.folder / _MOMENTS):
            path.touch()
            kept = [
                (row, line)
                for row, line in _read_rows(path)
                if row["step"] <= last.get(row["recipe"], 0)
            ]
            if path.name == _METRICS:
                self._check_rows([row for row, _ in kept], last)
            for recipe, progress in saved.items():
                checksum = _rows_checksum(kept, recipe)
                if progress.rows.get(path.name, checksum) != checksum:
                    raise ValueError(
                        f"{path} is damaged: {recipe}'s rows up to step {last[recipe]} "
                        "are not those that were written"
                    )
            lines = b"".join(line for _, line in kept)
            if lines != path.read_bytes():
                _replace(path, lines)

    def _check_rows(self, rows: Sequence[Mapping], saved: Mapping[str, int]) -> None:
        """Raises ValueError unless there is one row for each step that was saved."""
        for recipe, last in saved.items():
            steps = [row["step"] for row in rows if row["recipe"] == recipe]
            if steps != list(range(1, last + 1)):
                wrong = set(range(1, last + 1)).symmetric_difference(steps) or {"order"}
                raise ValueError(
                    f"{self.folder / _METRICS} is damaged: {recipe} has {len(steps)} "
                    f"rows for {last} steps, see step {min(wrong, key=str)}"
                )


class RowLog:
    """A file of JSON rows, open for appending; a written row is readable at once.

    Attributes:
      name: The name of the file.
    """

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.name = path.name
        self._checksum = _rows_checksum(_read_rows(path), recipe)
        self._file = path.open("a", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row."""
        line = json.dumps(row) + "\n"
        self._file.write(line)
        self._checksum = zlib.crc32(line.encode(), self._checksum)

    def sync(self) -> int:
        """Blocks until all rows are on disk; returns the checksum of the recipe's."""
        os.fsync(self._file.fileno())
        return self._checksum


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request; the second acts as usual."""

    def __init__(self) -> None:
        self.made = False

    def __enter__(self) -> Self:
        signals = signal.SIGINT, signal.SIGTERM
        self._handlers = {s: signal.signal(s, self._make) for s in signals}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _make(self, *_) -> None:
        self.made = True
        self.__exit__()


def _not_empty(state: TrainState) -> dict[str, Any]:
    """Returns the fields that have arrays, because most runs have no histories."""
    return {name: x for name, x in state._asdict().items() if jax.tree.leaves(x)}


def check_unused(folder: Path) -> None:
    """Raises ValueError if a new run in `folder` could overwrite something.

    A start that was killed may have left a lock, a tokenizer and part of run.json.
    """
    if folder.exists() and (
        not folder.is_dir() or {p.name for p in folder.iterdir()} - _LEFTOVERS
    ):
        raise ValueError(
            f"--out must be new or an empty folder, but {folder} is not; --resume "
            "continues a run"
        )


def _locked(folder: Path) -> int:
    """Returns the descriptor of a locked file; the lock ends when it is closed.

    Raises:
      ValueError: If another process has the lock.
    """
    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ValueError(f"another process writes to {folder}") from None
    return descriptor


def latest(parent: Path) -> Path:
    """Returns the folder in `parent` whose run.json was written last."""
    found = sorted(parent.glob(f"*/{_RUN}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"--resume found no run in {parent}/")
    return found[-1].parent


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    """Writes run.json with a checksum of the other entries."""
    write_json(folder / _RUN, record | {"checksum": _value_checksum(record)})


def _read_record(folder: Path) -> dict[str, Any]:
    """Returns the contents of run.json without the checksum.

    Raises:
      ValueError: If the file is damaged.
    """
    path = folder / _RUN
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(record, dict) or record.keys() - _RUN_ENTRIES:
        raise ValueError(f"{path} is damaged: its entries are not those of a run")
    checksum = record.pop("checksum", None)
    if checksum not in (None, _value_checksum(record)):
        raise ValueError(
            f"{path} is damaged: it does not have its checksum; if the change is "
            'meant, remove the entry "checksum"'
        )
    return record


def _replace(path: Path, content: bytes) -> None:
    """Replaces a file's content, atomically and durably."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _read_rows(path: Path) -> Iterable[tuple[dict[str, Any], bytes]]:
    """Yields the rows of a file and their lines, without an incomplete last line.

    Raises:
      ValueError: If a line is not a row of a recipe and step.
    """
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            whole = isinstance(row["recipe"], str) and row["step"] > 0
        except (ValueError, LookupError, TypeError):
            whole = False
        if not whole:
            raise ValueError(f"{path} is damaged: line {number} is no row")
        yield row, line + b"\n"


def _rows_checksum(
    rows: Iterable[tuple[Mapping[str, Any], bytes]], recipe: Recipe
) -> int:
    """Returns the checksum of a recipe's lines."""
    return zlib.crc32(b"".join(line for row, line in rows if row["recipe"] == recipe))
