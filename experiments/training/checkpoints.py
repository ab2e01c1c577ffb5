"""Checkpoints of a recipe, with checksums, and what is saved next to the state."""

import atexit
import contextlib
import dataclasses
import errno
import gc
import io
import logging
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TextIO

import jax
import orbax.checkpoint as ocp

from experiments.common.memory import tree_bytes
from experiments.training import checksums, processes
from experiments.training.settings import Settings
from experiments.training.state import TrainState


@dataclasses.dataclass(kw_only=True)
class Progress:
    """The part of a checkpoint that is not the training state.

    Attributes:
      step: Number of steps done.
      batches: State of the data iterator.
      seconds: Total time of `timed_steps` steps, without validation and checkpoints,
        on the present mesh.
      timed_steps: Number of steps that `seconds` counts: all but the first of each
        process.
      device_peak_bytes: Peak memory of the device. It is None if the device does not
        report it, or if an earlier recipe of the process had a higher peak.
      measured: Sizes, the compile time and the mesh, measured before the first step,
        and anew on another mesh or with other microbatches.
      rows: Checksums of the recipe's rows up to this step, by the name of their file.
        It is empty in checkpoints that are older than these checksums.
      skipped: Number of steps that changed nothing, because they were bad.
      rollbacks: Number of returns to the checkpoint that `origin` names.
      origin: Step of the checkpoint that a rollback returns to, or 0 for the initial
        state. None means `step` itself. Only the checkpoint of a stop with
        `bad_step="rollback"` may name an earlier step, so that the stop changes no
        later step.
    """

    step: int = 0
    batches: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    timed_steps: int = 0
    device_peak_bytes: int | None = None
    measured: dict[str, int | float | str | None] = dataclasses.field(
        default_factory=dict
    )
    rows: dict[str, int] = dataclasses.field(default_factory=dict)
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

    def note_peak(self, earlier: int | None, now: int | None) -> None:
        """Records the process's peak if it rose while this recipe ran.

        Args:
          earlier: The process's peak before this recipe, in bytes.
          now: The process's peak now, in bytes.
        """
        if now is not None and now > (earlier or 0):
            self.device_peak_bytes = max(now, self.device_peak_bytes or 0)


class _Heard:
    """A stream for errors that passes on the main thread's text.

    It collects the text of other threads. Where a disk is full, orbax's threads print
    tens of errors in addition to the one that is raised.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.kept = io.StringIO()

    def write(self, text: str) -> int:
        is_main = threading.current_thread() is threading.main_thread()
        return (self.stream if is_main else self.kept).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Saving:
    """A checkpoint that a thread is writing.

    Attributes:
      path: Its folder.
      origin: The step of its `Progress.origin`.
      written: The thread's result.
      heard: The stream for errors meanwhile.
    """

    path: Path
    origin: int | None
    written: Future[None]
    heard: _Heard


class Checkpoints:
    """The latest checkpoints of one recipe.

    `save` copies the state to host memory, and a thread writes it to disk while the
    training goes on. `finish`, which the next `save` and the end of the `with` block
    call, waits for the thread and raises its errors.

    A new checkpoint replaces the oldest one only when it is complete, and never the one
    that its `Progress.origin` names. Next to every checkpoint there is a list of its
    files' checksums. A checkpoint that differs from its list is moved to a folder of
    damaged ones, and an older one is used.

    Each process writes the shards that its devices hold, and reads those that they
    need, whatever mesh and number of processes saved them. All processes take part in
    `save`, `state` and `roll_back`. The main one alone may open checkpoints and read
    their `progress`, and all else that is in the folder is written by it.

    Raises:
      ValueError: If there are checkpoints, and all of them are damaged.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder.resolve()
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._thread = ThreadPoolExecutor(1)
        self._saving: _Saving | None = None
        if processes.is_main():
            # The folder around them is not made, because without it there is no run.
            for needed in (self._folder.parent, self._folder):
                needed.mkdir(exist_ok=True)
            self._set_damaged_aside()

    def _opened(self) -> ocp.CheckpointManager:
        """Returns orbax's manager, which all processes open at once."""
        if self._manager is None:
            self._manager = ocp.CheckpointManager(
                self._folder,
                item_names=("state", "progress"),
                options=ocp.CheckpointManagerOptions(create=False),
            )
        return self._manager

    def _steps(self) -> list[Path]:
        """Returns the folders of all checkpoints, in the order of their steps."""
        folders = [p for p in self._folder.glob("[0-9]*") if p.name.isdigit()]
        return sorted(folders, key=lambda path: int(path.name))

    def _set_damaged_aside(self) -> None:
        steps = self._steps()
        damages = []
        while steps and (damage := checksums.damage(steps[-1])):
            damages.append(damage)
            if len(steps) == 1:
                raise ValueError("no checkpoint is whole: " + "; ".join(damages))
            path = steps.pop()
            aside = self._folder.parent / "damaged"
            aside.mkdir(exist_ok=True)
            name = f"{self._folder.name}-{path.name}-{time.time_ns()}"
            os.replace(path, aside / name)
            checksums.list_of(path).unlink(missing_ok=True)
            print(f"{damage}; going on from step {steps[-1].name} instead")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        try:
            self.finish()
        finally:
            self._thread.shutdown()
            if self._manager is not None:
                self._manager.close()

    def save(self, state: TrainState, progress: Progress) -> None:
        """Begins to save a checkpoint, unless there is one of this step.

        The state may be donated as soon as this returns.
        """
        self.finish()
        manager = self._opened()
        if progress.step == manager.latest_step():
            return
        processes.on_main(lambda: _check_space(self._folder, state))
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_not_empty(state)),
            progress=ocp.args.JsonSave(dataclasses.asdict(progress)),
        )
        path = self._folder / str(progress.step)
        with _errors_of_disk(path):
            manager.save(progress.step, args=items)
        self._saving = _Saving(
            path=path,
            origin=progress.origin,
            written=self._thread.submit(self._write, path),
            heard=_Heard(sys.stderr),
        )
        sys.stderr = self._saving.heard

    def _write(self, path: Path) -> None:
        """Waits until a checkpoint is on disk, and writes its list of checksums."""
        self._opened().wait_until_finished()
        if processes.is_main():
            checksums.write_list(path)

    def finish(self) -> None:
        """Waits until the last checkpoint is on disk, and deletes older ones.

        Raises:
          OSError: If it could not be written.
        """
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            with processes.together(), _errors_of_disk(saving.path):
                saving.written.result()
        except BaseException as error:
            self._manager = None  # It would raise the error again.
            if not isinstance(error, OSError):
                saving.heard.stream.write(saving.heard.kept.getvalue())
            raise
        finally:
            sys.stderr = saving.heard.stream
        older = sorted(self._opened().all_steps())[: -self._keep]
        self._delete(step for step in older if step != saving.origin)

    def roll_back(self, step: int) -> None:
        """Deletes the checkpoints after `step`, so that this step's is the latest.

        Raises:
          OSError: If the checkpoint of `step` is damaged or missing.
        """
        self.finish()
        path = self._folder / str(step)

        def check() -> None:
            if step and (
                damage := checksums.damage(path) if path.exists() else f"no {path}"
            ):
                raise OSError(damage)

        processes.on_main(check)
        steps = sorted(self._opened().all_steps(), reverse=True)
        self._delete(later for later in steps if later > step)

    def _delete(self, steps: Iterable[int]) -> None:
        """Deletes checkpoints; a kill leaves either all or nothing of each."""
        aside = self._folder.parent / "deleted"

        def delete() -> None:
            for step in steps:
                shutil.rmtree(aside, ignore_errors=True)
                # A list without its checkpoint would refuse the next one of this step.
                checksums.list_of(self._folder / str(step)).unlink(missing_ok=True)
                os.replace(self._folder / str(step), aside)
                shutil.rmtree(aside)

        processes.on_main(delete)
        self._opened().reload()

    def progress(self) -> Progress:
        """Returns the latest checkpoint's progress; its step is 0 if there is none."""
        steps = self._steps()
        if not steps:
            return Progress()
        # The handler by itself waits for no other process.
        return Progress(**ocp.JsonCheckpointHandler().restore(steps[-1] / "progress"))

    def state(self, abstract: TrainState) -> TrainState:
        """Returns the latest state, bit for bit."""
        self.finish()
        items = ocp.args.Composite(state=ocp.args.StandardRestore(_not_empty(abstract)))
        manager = self._opened()
        restored = manager.restore(manager.latest_step(), args=items)
        return TrainState(**restored["state"])


@contextlib.contextmanager
def _errors_of_disk(path: Path) -> Iterator[None]:
    """Raises tensorstore's errors of the operating system as OSError, and no others.

    orbax prints them as well. Its output is shown only if another error is raised.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            yield
    except Exception as error:
        code = re.search(r"\[os_error_code='(\d+)'\]", str(error))
        if not code and not isinstance(error, OSError):
            sys.stderr.write(output.getvalue())
            raise
        _forget_tasks(error)
        if not code:
            raise
        number = int(code[1])
        raise OSError(number, os.strerror(number), str(path)) from None
    sys.stderr.write(output.getvalue())


def _forget_tasks(error: BaseException) -> None:
    """Frees orbax's tasks that an error has left running, without their own errors.

    They could not be freed at exit, when modules that they need are gone.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _without_closed_loops(sys.unraisablehook)
    with contextlib.redirect_stderr(io.StringIO()):
        traceback.clear_frames(error.__traceback__)
        gc.collect()
    atexit.register(gc.collect)


def _without_closed_loops(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns an `unraisablehook` that ignores calls to a closed event loop."""

    def ignore(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    return ignore


def _check_space(folder: Path, state: TrainState) -> None:
    """Raises OSError unless a checkpoint of `state` fits on the disk."""
    needed = tree_bytes(state) + 2**20
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint takes {needed:,} bytes, but {free:,} are free in {folder}",
        )


def _not_empty(state: TrainState) -> dict[str, Any]:
    """Returns the fields that have arrays, because most runs have no histories."""
    return {name: x for name, x in state._asdict().items() if jax.tree.leaves(x)}
