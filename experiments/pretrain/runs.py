"""A run's folder: settings, metrics and checkpoints, safe against a kill at any time.

run.json         the settings, the data's fingerprint, the number of steps, and for
                 how many the learning rate is scheduled
metrics.jsonl    one line per step and recipe
moments.jsonl    one line per validation, recipe, parameter and moment stored in FP8
checkpoints/     one folder per recipe with the latest states, and their checksums
lock             locked by the process that writes to the folder
"""

import dataclasses
import errno
import fcntl
import json
import math
import os
import shutil
import time
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
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
# The settings that touch no step that is done. A resumed run may also have more steps.
_CHANGEABLE = {"keep", "save_every", "bad_step", "spike"}


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
      skipped: Number of steps that changed nothing, because they were bad.
      rollbacks: Number of returns to the checkpoint that `origin` names.
      origin: Step of the checkpoint that a rollback returns to, or 0 for the initial
        state. It is `step` itself, and None means that, except in a checkpoint of a
        stop with `bad_step="rollback"`. So a stop changes no later step.
    """

    step: int = 0
    batches: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    timed_steps: int = 0
    device_peak_bytes: int | None = None
    measured: dict[str, int | float | None] = dataclasses.field(default_factory=dict)
    skipped: int = 0
    rollbacks: int = 0
    origin: int | None = None

    def __post_init__(self) -> None:
        if self.origin is None:
            self.origin = self.step

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

    A new checkpoint replaces the oldest one only when it is complete, and never the one
    that its `Progress.origin` names. Beside every checkpoint there is a list of its
    files' checksums. A checkpoint whose files differ from the list is moved to a folder
    of damaged ones, and an older one is used.

    Raises:
      ValueError: If there are checkpoints, and all of them are damaged.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder.resolve()
        self._keep = keep
        self._set_damaged_aside()
        self._manager = ocp.CheckpointManager(
            self._folder,
            item_names=("state", "progress"),
            options=ocp.CheckpointManagerOptions(
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
            _list_of(path).unlink(missing_ok=True)
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
            self._manager.save(progress.step, args=items)
            path = self._folder / str(progress.step)
            listed = _list_of(path)
            listed.parent.mkdir(parents=True, exist_ok=True)
            write_json(listed, _checksums(path))
            older = sorted(self._manager.all_steps())[: -self._keep]
            self._delete(step for step in older if step != progress.origin)

    def roll_back(self, step: int) -> None:
        """Deletes the checkpoints after `step`, whose own is then the latest.

        Raises:
          OSError: If the checkpoint of `step` is damaged or missing.
        """
        path = self._folder / str(step)
        if step and (damage := _damage(path) if path.exists() else f"no {path}"):
            raise OSError(damage)
        found = sorted(self._manager.all_steps(), reverse=True)
        self._delete(later for later in found if later > step)

    def _delete(self, steps: Iterable[int]) -> None:
        """Deletes checkpoints; a kill leaves either all or nothing of each."""
        aside = self._folder.parent / "deleted"
        for step in steps:
            shutil.rmtree(aside, ignore_errors=True)
            # A list without its checkpoint would refuse the next one of this step.
            _list_of(self._folder / str(step)).unlink(missing_ok=True)
            os.replace(self._folder / str(step), aside)
            shutil.rmtree(aside)
        self._manager.reload()

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


def _list_of(checkpoint: Path) -> Path:
    folder = checkpoint.parent
    return folder.parent / "checksums" / folder.name / f"{checkpoint.name}.json"


def _checksums(folder: Path) -> dict[str, int]:
    """Returns the CRC-32 of each file in a folder, by its path."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        checksum = 0
        with path.open("rb") as file:
            while block := file.read(2**24):
                checksum = zlib.crc32(block, checksum)
        found[str(path.relative_to(folder))] = checksum
    return found


def _damage(checkpoint: Path) -> str | None:
    """Returns what is wrong with a checkpoint, or None.

    A process that was killed right after saving has left no list of checksums. The
    checkpoint itself is complete then.
    """
    if not _list_of(checkpoint).exists():
        return None
    try:
        expected = json.loads(_list_of(checkpoint).read_text())
    except ValueError:
        return f"{_list_of(checkpoint)} is damaged"
    found = _checksums(checkpoint)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            return f"{checkpoint / name} is damaged"
    return None


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
      schedule_steps: Steps after which the learning rate stays as it is; None like
        `steps`. They are the steps that the run was started with.
      command: The command line that started the run.
    """

    def __init__(self, folder: Path, record: dict[str, Any], lock: int) -> None:
        weakref.finalize(self, os.close, lock)
        self.folder = folder
        self.settings = Settings.from_json(record["settings"])
        self.steps: int | None = record["steps"]
        self.schedule_steps: int | None = record.get("schedule_steps", self.steps)
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
        steps = settings.steps if settings.minutes is None else None
        record = {
            "settings": dataclasses.asdict(settings),
            "data": fingerprint,
            "steps": steps,
            "schedule_steps": steps,
            "command": command_line(),
        }
        write_json(folder / _RUN, record)
        return cls(folder, record, lock)

    @classmethod
    def resume(cls, folder: Path, given: Mapping[str, Any]) -> Self:
        """Continues a run; `record_changes` stores what `given` changes of it.

        Args:
          folder: The run's folder.
          given: Settings of the command line. They must equal the run's own, except for
            more steps and for what touches no step that is done.

        Raises:
          ValueError: If there is no run in `folder`, or it has other settings.
        """
        if not (folder / _RUN).exists():
            raise ValueError(f"--resume needs a run's folder, got {folder} without one")
        try:
            record = json.loads((folder / _RUN).read_text())
            run = cls(folder, record, _locked(folder))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{folder / _RUN} is damaged: {error!r}") from None
        run._change(given)
        run._drop_unsaved_rows()
        return run

    def _change(self, given: Mapping[str, Any]) -> None:
        """Takes over the settings that a resumed run may change."""
        for name, value in given.items():
            own = getattr(self.settings, name)
            if value != own and name not in _CHANGEABLE | {"steps"}:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"a resumed run keeps its settings, but {flag} {value!r} was given "
                    f"and {self.folder} has {own!r}"
                )
        # The command that a run was started with changes nothing, even if its budget
        # has lowered the number of steps.
        repeated = "minutes" in given and given.get("steps") == self.settings.steps
        if "steps" in given and not repeated:
            self._extend(given["steps"])
        self.settings = dataclasses.replace(self.settings, **given)

    def _extend(self, steps: int) -> None:
        own = self.steps or self.settings.steps
        if steps < own:
            raise ValueError(
                f"a resumed run may only get more steps, but --steps {steps} was given "
                f"and {self.folder} has {own}"
            )
        if self.steps is not None:
            self.steps = steps

    def record_changes(self) -> None:
        """Writes run.json if it differs from the settings and steps of this object."""
        record = self._record | {
            "settings": dataclasses.asdict(self.settings),
            "steps": self.steps,
            "schedule_steps": self.schedule_steps,
        }
        if json.loads(json.dumps(record)) != json.loads(json.dumps(self._record)):
            self._record = record
            write_json(self.folder / _RUN, record)

    def check_data(self, fingerprint: str) -> None:
        """Raises ValueError if the data changed since the run began."""
        if fingerprint != self._record["data"]:
            raise ValueError(f"the data is not what {self.folder} was started with")

    def fix_steps(self, steps: int) -> None:
        """Records the number of steps, for all recipes and for a resumed run."""
        self.steps = self.schedule_steps = steps
        self.record_changes()

    def checkpoints(self, recipe: Recipe) -> Checkpoints:
        """Returns the recipe's checkpoints, a context manager."""
        folder = self.folder / "checkpoints" / recipe
        return Checkpoints(folder, self.settings.keep)

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl, without an incomplete last line.

        A null is NaN in them.
        """
        return list(_read_rows(self.folder / _METRICS))

    def append_metrics(self) -> "RowLog":
        """Opens metrics.jsonl for more rows; a context manager."""
        return RowLog(self.folder / _METRICS)

    def moments(self) -> list[dict[str, Any]]:
        """Returns the rows of moments.jsonl, without an incomplete last line."""
        return list(_read_rows(self.folder / _MOMENTS))

    def append_moments(self) -> "RowLog":
        """Opens moments.jsonl for more rows; a context manager."""
        return RowLog(self.folder / _MOMENTS)

    def _drop_unsaved_rows(self) -> None:
        """Drops the rows of metrics and moments after each recipe's checkpoint."""
        saved = {}
        for recipe in self.settings.recipes:
            with self.checkpoints(recipe) as checkpoints:
                saved[recipe] = checkpoints.progress().step
        for name in (_METRICS, _MOMENTS):
            rows = _read_rows(self.folder / name)
            rows = [row for row in rows if row["step"] <= saved[row["recipe"]]]
            if name == _METRICS:
                self._check_rows(rows, saved)
            _replace_rows(self.folder / name, rows)

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
    """A file of JSON rows, open for appending; a written row is readable at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row."""
        self._file.write(_line_of(row))

    def drop_after(self, recipe: Recipe, step: int) -> None:
        """Drops the rows of later steps of a recipe, all or none."""
        rows = _read_rows(self._path)
        kept = [row for row in rows if row["recipe"] != recipe or row["step"] <= step]
        _replace_rows(self._path, kept)
        self._file.close()
        self._file = self._path.open("a", buffering=1)

    def sync(self) -> None:
        """Blocks until all rows are on disk."""
        os.fsync(self._file.fileno())


def _not_empty(state: TrainState) -> dict[str, Any]:
    """Returns the fields that have arrays, because most runs have no histories."""
    return {name: x for name, x in state._asdict().items() if jax.tree.leaves(x)}


def check_unused(folder: Path) -> None:
    """Raises ValueError if a new run in `folder` could overwrite something.

    A start that was killed may have left a lock and a tokenizer there.
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


def _read_rows(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            row = json.loads(line)
            yield {k: math.nan if v is None else v for k, v in row.items()}


def _replace_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replaces a file by rows, atomically."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(map(_line_of, rows)))
    os.replace(partial, path)


def _line_of(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of JSON, which has null where Python has NaN."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"
