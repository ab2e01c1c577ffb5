"""A run's folder: settings, metrics and checkpoints, safe against a kill at any time.

run.json         the settings, the data's fingerprint, the number of steps, and the
                 length of the learning rate schedule in steps
metrics.jsonl    one line per step and recipe
moments.jsonl    one line per validation, recipe, parameter and moment stored in FP8
health.jsonl     with `health_every`, one line per report, recipe and array or layer
tokenizer.json   the BPE, if the run has one
checkpoints/     one folder per recipe with the latest states, and their checksums
lock             locked by the process that writes to the folder

CRC-32 checksums show whether files of a resumed run have changed. run.json holds its
own checksum and the checksum of tokenizer.json. Each checkpoint has a list of its
files' checksums. The checkpoint's progress holds the checksums of the recipe's rows so
far, because rows are written to disk before the checkpoint. A damaged checkpoint is
replaced by the one before it; other damage raises ValueError. Files that older versions
wrote without checksums are not checked.
"""

import dataclasses
import fcntl
import json
import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from experiments.common.results import command_line, replace_file
from experiments.training.checkpoints import Checkpoints, Progress
from experiments.training.checksums import file_checksum
from experiments.training.record import LEFTOVERS, LOCK, RUN, read_record, write_record
from experiments.training.rows import NoRows, RowLog, read_rows, rows_checksum
from experiments.training.settings import Recipe, Settings

Log = Literal["metrics", "moments", "health"]
_METRICS, _HEALTH = "metrics.jsonl", "health.jsonl"
# The settings that do not affect steps already done. A resumed run may also have more
# steps.
_CHANGEABLE = {"keep", "save_every", "bad_step", "spike", "health_every", "accumulate"}
_CHANGEABLE |= {"bf16_last"}  # Until the first step that it changes.
# The settings that are paths of inputs. `check_data` compares the inputs' hash.
_PLACES = {"data", "test", "model"}


class Run:
    """A run's folder, new or resumed.

    The object locks the folder while it exists, so that no other process can write to
    it. If several processes train together, only the main process has an object with
    the lock. The other processes have followers: objects without the lock, which write
    nothing. Subclasses are runs of other programs, with settings of another type.

    Attributes:
      folder: The path of the folder.
      settings: The run's settings, of the type `kind`.
      steps: The number of steps of each recipe; None until the first recipe has set it.
      schedule_steps: The number of steps after which the learning rate stays constant:
        the steps that the run was started with. None until the first recipe has set it.
      command: The command line that started the run.
    """

    kind: type[Settings] = Settings

    def __init__(
        self, folder: Path, record: dict[str, Any], lock: int | None = None
    ) -> None:
        if lock is not None:
            weakref.finalize(self, os.close, lock)
        self._follows = lock is None
        self.folder = folder
        self.settings = self.kind.from_json(record["settings"])
        self.steps: int | None = record["steps"]
        self.schedule_steps: int | None = record.get("schedule_steps", self.steps)
        self.command: str = record["command"]
        self._record = record

    @property
    def record(self) -> dict[str, Any]:
        """The contents of run.json, from which other processes make followers."""
        return self._record | {
            "settings": dataclasses.asdict(self.settings),
            "steps": self.steps,
            "schedule_steps": self.schedule_steps,
        }

    @classmethod
    def create(
        cls,
        folder: Path,
        settings: Settings,
        fingerprint: str,
        files: Sequence[Path] = (),
    ) -> Self:
        """Creates a run in a new or empty folder, with copies of `files`.

        `fingerprint` is a hash of the run's data.

        Raises:
          ValueError: If `check_unused` raises it, or another process writes to the
            folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
        check_unused(folder)
        for file in files:
            shutil.copyfile(file, folder / file.name)
        steps = settings.steps if settings.minutes is None else None
        record = {
            "settings": dataclasses.asdict(settings),
            "data": fingerprint,
            "steps": steps,
            "schedule_steps": steps,
            "command": command_line(),
            "files": {file.name: file_checksum(file) for file in files},
        }
        write_record(folder, record)
        return cls(folder, record, lock)

    @classmethod
    def resume(cls, folder: Path, overrides: Mapping[str, Any]) -> Self:
        """Opens a run to continue it from its latest checkpoints.

        Rows after these checkpoints are dropped. Settings that `overrides` changes are
        written by `record_changes`. The arguments are the arguments of `open`.

        Raises:
          ValueError: If `open` raises it, if rows are damaged, if a recipe has rows but
            has lost its checkpoints, or if `overrides` change the recipe of a step that
            is done.
        """
        run = cls.open(folder, overrides)
        saved = {}
        for recipe in run.settings.recipes:
            with run.checkpoints(recipe) as checkpoints:
                saved[recipe] = checkpoints.progress()
        run._check_early_steps(saved)
        run._drop_unsaved_rows(saved)
        return run

    @classmethod
    def open(cls, folder: Path, overrides: Mapping[str, Any]) -> Self:
        """Opens a run and locks its folder, and leaves its files unchanged.

        Args:
          folder: The run's folder.
          overrides: The settings of the command line. They must equal the run's
            settings, except for more steps and for settings that do not affect steps
            already done.

        Raises:
          ValueError: If there is no run in `folder`, another process writes to it, its
            files are damaged, or its settings differ from `overrides`.
        """
        if not (folder / RUN).exists():
            raise ValueError(
                f"--resume needs a run's folder, got {folder} without {folder / RUN}"
            )
        record = read_record(folder, cls.kind)
        lock = _locked(folder)
        run = cls(folder, record, lock)
        run._change(overrides)
        for name, checksum in record.get("files", {}).items():
            path = folder / name
            if not path.exists() or file_checksum(path) != checksum:
                raise ValueError(f"{path} is damaged")
        return run

    def _change(self, overrides: Mapping[str, Any]) -> None:
        """Applies `overrides` to the settings and the number of steps.

        Raises:
          ValueError: If a setting may not change.
        """
        for name, value in overrides.items():
            current = getattr(self.settings, name)
            if value != current and name not in _CHANGEABLE | _PLACES | {"steps"}:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"a resumed run keeps its settings, but {flag} {value!r} was given "
                    f"and {self.folder} has {current!r}"
                )
        # Repeating the command that started the run changes nothing, even if its time
        # budget has lowered the number of steps.
        repeated = (
            "minutes" in overrides and overrides.get("steps") == self.settings.steps
        )
        if "steps" in overrides and not repeated:
            self._extend(overrides["steps"])
        self.settings = dataclasses.replace(self.settings, **overrides)

    def _extend(self, steps: int) -> None:
        current = self.steps or self.settings.steps
        if steps < current:
            raise ValueError(
                f"a resumed run may only get more steps, but --steps {steps} was given "
                f"and {self.folder} has {current}"
            )
        if self.steps is not None:
            self.steps = steps

    def record_changes(self) -> None:
        """Writes run.json if it differs from the settings and steps of this object."""
        record = self.record
        if self._follows:
            return
        if json.loads(json.dumps(record)) != json.loads(json.dumps(self._record)):
            self._record = record
            write_record(self.folder, record)

    def check_data(self, fingerprint: str) -> None:
        """Raises ValueError if the data changed since the run began."""
        if fingerprint != self._record["data"]:
            raise ValueError(f"the data is not what {self.folder} was started with")

    def fix_steps(self, steps: int) -> None:
        """Records the number of steps of all recipes in run.json."""
        self.steps = self.schedule_steps = steps
        self.record_changes()

    def checkpoints(self, recipe: Recipe) -> Checkpoints:
        """Returns the checkpoints of a recipe, a context manager.

        Raises:
          FileNotFoundError: If the run's folder was moved or deleted.
        """
        folder = self.folder / "checkpoints" / recipe
        return Checkpoints(folder, self.settings.keep)

    def rows(self, log: Log) -> list[dict[str, Any]]:
        """Returns the rows of a log, except for an incomplete last line.

        Nulls become NaNs.
        """
        return [row for row, _ in read_rows(self.folder / f"{log}.jsonl")]

    def append(self, log: Log, recipe: Recipe) -> RowLog | NoRows:
        """Opens a log to append rows of a recipe, and returns it, a context manager.

        Followers get a log that writes nothing. health.jsonl is created only if the
        settings ask for reports.
        """
        path = self.folder / f"{log}.jsonl"
        reports = self.settings.health_every is not None or path.exists()
        writes = not self._follows and (log != "health" or reports)
        return RowLog(path, recipe) if writes else NoRows(path)

    def early_steps(self, recipe: Recipe) -> int:
        """Returns the number of a recipe's steps before `bf16_last` begins."""
        return self.settings.early_steps(recipe, self.schedule_steps or 0)

    def _check_early_steps(self, saved: Mapping[Recipe, Progress]) -> None:
        """Raises ValueError if `bf16_last` has changed for a step that is done.

        `saved` has the progress of each recipe's latest checkpoint.
        """
        before = type(self)(self.folder, self._record)
        for recipe, progress in saved.items():
            first, last = sorted(run.early_steps(recipe) for run in (self, before))
            if first < last and progress.step > first:
                raise ValueError(
                    f"--bf16-last {self.settings.bf16_last} would change steps from "
                    f"{first + 1} on, and {recipe} is at step {progress.step}"
                )

    def _drop_unsaved_rows(self, saved: Mapping[Recipe, Progress]) -> None:
        """Drops each recipe's rows after its latest checkpoint, from all logs.

        Args:
          saved: The progress of each recipe's latest checkpoint.

        Raises:
          ValueError: If earlier rows differ from the rows that were written, or a
            recipe has lost its checkpoints.
        """
        last = {recipe: progress.step for recipe, progress in saved.items()}
        for path in (self.folder / f"{log}.jsonl" for log in get_args(Log)):
            if path.name != _HEALTH:
                path.touch()
            rows = list(read_rows(path))
            rows_to_keep = [
                (row, line)
                for row, line in rows
                if row["step"] <= last.get(row["recipe"], 0)
            ]
            if path.name == _METRICS:
                self._check_checkpoints([row for row, _ in rows], last)
                self._check_rows([row for row, _ in rows_to_keep], last)
            for recipe, progress in saved.items():
                checksum = rows_checksum(rows_to_keep, recipe)
                if progress.rows.get(path.name, checksum) != checksum:
                    raise ValueError(
                        f"{path} is damaged: {recipe}'s rows up to step {last[recipe]} "
                        "are not those that were written"
                    )
            lines = b"".join(line for _, line in rows_to_keep)
            if path.exists() and lines != path.read_bytes():
                replace_file(path, lines)

    def _check_checkpoints(
        self, rows: Sequence[Mapping], saved: Mapping[str, int]
    ) -> None:
        """Raises ValueError if a recipe has lost its checkpoints.

        A process can end while it is writing the first checkpoint. Then there are rows
        of up to `2 * save_every` steps, because the second checkpoint waits for the
        first. Rows of later steps show that checkpoints are missing.

        Args:
          rows: The rows of all recipes.
          saved: The step of each recipe's latest checkpoint, or 0.
        """
        for recipe in (recipe for recipe, last in saved.items() if not last):
            steps = [row["step"] for row in rows if row["recipe"] == recipe]
            if max(steps, default=0) > 2 * self.settings.save_every:
                raise ValueError(
                    f"{self.folder} has no checkpoint of {recipe}, whose training went "
                    f"to step {max(steps)}: it cannot go on"
                )

    def _check_rows(self, rows: Sequence[Mapping], saved: Mapping[str, int]) -> None:
        """Raises ValueError unless each recipe has one row for every saved step.

        Args:
          rows: The rows of all recipes.
          saved: The step of each recipe's latest checkpoint, or 0.
        """
        for recipe, last in saved.items():
            steps = [row["step"] for row in rows if row["recipe"] == recipe]
            if steps != list(range(1, last + 1)):
                wrong = set(range(1, last + 1)).symmetric_difference(steps) or {"order"}
                raise ValueError(
                    f"{self.folder / _METRICS} is damaged: {recipe} has {len(steps)} "
                    f"rows for {last} steps, see step {min(wrong, key=str)}"
                )


def check_unused(folder: Path) -> None:
    """Raises ValueError if a new run in `folder` could overwrite something.

    Files that an interrupted start may have left are ignored: a lock, a tokenizer, and
    part of run.json.
    """
    if folder.exists() and (
        not folder.is_dir() or {p.name for p in folder.iterdir()} - LEFTOVERS
    ):
        raise ValueError(
            f"--out must be new or an empty folder, but {folder} is not; --resume "
            "continues a run"
        )


def _locked(folder: Path) -> int:
    """Locks a folder, and returns a file descriptor; closing it ends the lock.

    Raises:
      ValueError: If another process has the lock.
    """
    descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ValueError(f"another process writes to {folder}") from None
    return descriptor


def latest(parent: Path) -> Path:
    """Returns the folder in `parent` with the newest run.json.

    Raises:
      ValueError: If there is no run.
    """
    run_files = sorted(parent.glob(f"*/{RUN}"), key=lambda path: path.stat().st_mtime)
    if not run_files:
        raise ValueError(f"--resume found no run in {parent}/")
    return run_files[-1].parent
