"""Checkpoints of one recipe's training: its state, its progress, and checksums."""

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
      step: The number of steps done.
      batches: The state of the data iterator.
      seconds: The total time of `timed_steps` steps, without validation and
        checkpoints, on the present mesh.
      timed_steps: The number of steps that `seconds` counts: all except the first step
        of each process.
      device_peak_bytes: The peak memory of the device in bytes. None means that the
        device does not report a peak, or that an earlier recipe of the process had a
        higher peak.
      measured: Sizes, the compile time and the mesh, measured before the first step,
        and again on another mesh or with another number of microbatches.
      rows: Checksums of the recipe's rows up to this step, by the name of their file;
        empty in older checkpoints, which were saved without these checksums.
      skipped: The number of bad steps that updated nothing.
      rollbacks: The number of returns to the checkpoint that `origin` names.
      origin: The step of the checkpoint that a rollback returns to, or 0 for the
        initial state. None means `step` itself. Only the checkpoint of a stop with
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
        """Returns the tokens per second of the timed steps; None if there are none."""
        if not self.seconds:
            return None
        return settings.tokens_per_step * self.timed_steps / self.seconds

    def note_peak(self, earlier: int | None, now: int | None) -> None:
        """Records the process's peak memory if it rose while this recipe ran.

        Args:
          earlier: The process's peak before this recipe, in bytes.
          now: The process's peak now, in bytes.
        """
        if now is not None and now > (earlier or 0):
            self.device_peak_bytes = max(now, self.device_peak_bytes or 0)


class _Heard:
    """A stream that replaces `sys.stderr` and forwards only the main thread's text.

    The text of other threads is collected in `kept`. If a disk is full, orbax's threads
    print many errors in addition to the error that is raised.
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
      path: The checkpoint's folder.
      origin: The `Progress.origin` of the checkpoint.
      written: The future of the thread's work, which has its error if it fails.
      heard: The stream that replaces `sys.stderr` until the checkpoint is written.
    """

    path: Path
    origin: int | None
    written: Future[None]
    heard: _Heard


class Checkpoints:
    """The latest checkpoints of one recipe.

    `save` copies the state to host memory, and a thread writes it to disk while the
    training continues. `finish`, which the next `save` and the end of the `with` block
    call, waits for the thread and raises its errors.

    The oldest checkpoint is deleted only when a new one is complete, and only if the
    new one's `Progress.origin` does not name it. Each checkpoint has a list of its
    files' checksums. A checkpoint that differs from its list is moved to the folder
    "damaged", and the checkpoint before it is used.

    Each process writes the shards on its devices, and reads the shards that its devices
    need. The mesh and the number of processes may differ from the ones at the time of
    saving. All processes must call `save`, `finish`, `state` and `roll_back` together.
    The main process may construct this class and call `progress` without the others.
    Only the main process writes the lists and deletes and moves checkpoints.

    Args:
      folder: The folder of the checkpoints.
      keep: The number of checkpoints that are kept.

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
            # The run's folder is not created, because without it there is no run.
            for needed in (self._folder.parent, self._folder):
                needed.mkdir(exist_ok=True)
            self._set_damaged_aside()

    def _opened(self) -> ocp.CheckpointManager:
        """Returns orbax's manager; the first call must be made by all processes."""
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
        """Begins to save a checkpoint, unless `progress.step` is the latest saved step.

        The state may be donated as soon as `save` returns.
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
        """Waits until a checkpoint is on disk, and writes the list of its checksums."""
        self._opened().wait_until_finished()
        if processes.is_main():
            checksums.write_list(path)

    def finish(self) -> None:
        """Waits until the last checkpoint is on disk, then deletes the oldest ones.

        Raises:
          OSError: If the checkpoint could not be written.
        """
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            with processes.together(), _errors_of_disk(saving.path):
                saving.written.result()
        except BaseException as error:
            self._manager = None  # This manager would raise the error again.
            if not isinstance(error, OSError):
                saving.heard.stream.write(saving.heard.kept.getvalue())
            raise
        finally:
            sys.stderr = saving.heard.stream
        older = sorted(self._opened().all_steps())[: -self._keep]
        self._delete(step for step in older if step != saving.origin)

    def roll_back(self, step: int) -> None:
        """Deletes all checkpoints of steps after `step`.

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
        """Deletes checkpoints; if the process is killed, none is deleted in part."""
        aside = self._folder.parent / "deleted"

        def delete() -> None:
            for step in steps:
                shutil.rmtree(aside, ignore_errors=True)
                # The next checkpoint of this step would not match an old list.
                checksums.list_of(self._folder / str(step)).unlink(missing_ok=True)
                os.replace(self._folder / str(step), aside)
                shutil.rmtree(aside)

        processes.on_main(delete)
        self._opened().reload()

    def progress(self) -> Progress:
        """Returns the latest checkpoint's progress, or a new one if there is none."""
        steps = self._steps()
        if not steps:
            return Progress()
        # Unlike the manager, the handler does not wait for other processes.
        return Progress(**ocp.JsonCheckpointHandler().restore(steps[-1] / "progress"))

    def state(self, abstract: TrainState) -> TrainState:
        """Returns the state in the latest checkpoint, bit for bit.

        Args:
          abstract: The shapes, dtypes and shardings of the state.
        """
        self.finish()
        items = ocp.args.Composite(state=ocp.args.StandardRestore(_not_empty(abstract)))
        manager = self._opened()
        restored = manager.restore(manager.latest_step(), args=items)
        return TrainState(**restored["state"])


@contextlib.contextmanager
def _errors_of_disk(path: Path) -> Iterator[None]:
    """Converts tensorstore's errors of the operating system to OSError.

    This happens in the context. orbax also prints these errors. Its output is dropped
    if an OSError is raised, and shown otherwise.
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
    """Frees the tasks that an error in orbax left running, and hides their errors.

    They cannot be freed at exit, because modules that they need are then gone.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _without_closed_loops(sys.unraisablehook)
    with contextlib.redirect_stderr(io.StringIO()):
        traceback.clear_frames(error.__traceback__)
        gc.collect()
    atexit.register(gc.collect)


def _without_closed_loops(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns an `unraisablehook` that ignores errors of calls to closed event loops.

    All other errors are passed to `hook`.
    """

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
    """Returns the fields of a state that contain arrays, by name.

    Most runs have no amax histories.
    """
    return {name: x for name, x in state._asdict().items() if jax.tree.leaves(x)}
