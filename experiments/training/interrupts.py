"""Answers Ctrl-C at once, also while the main thread is inside C++.

This module imports no package, so that it works before the slow ones are imported.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, Self

STOPPED = 130  # The exit code of a process that Ctrl-C ended.
_NOW = "stopping now"
_LATER = "stopping after this step; a checkpoint is saved; Ctrl-C again stops at once"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE = 1.0  # Seconds for Python to unwind before the process is ended.
_CLOSE, _HANDLED = 0, 128  # Bytes of the pipe that are no signal's number.


def run_module(load: "Callable[[], Callable[[None, Interrupts], int]]") -> NoReturn:
    """Runs a program as this process, and ends the process.

    Args:
      load: A function that imports the program and returns it. Importing takes seconds,
        in which Ctrl-C is answered too.
    """

    def work(stop: Interrupts) -> int:
        with stop.abrupt():
            program = load()
        return program(None, stop)

    code = run(work)
    if code == STOPPED:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # Python itself takes seconds to free its memory.
    sys.exit(code)


def run(work: "Callable[[Interrupts], int]") -> int:
    """Runs `work` and returns its exit code, or `STOPPED` if a signal ended it."""
    interrupts = Interrupts()
    try:
        with interrupts:
            return work(interrupts)
    except BaseException:
        # An interrupted import of compiled code raises another error.
        if not interrupts.raised:
            raise
        return STOPPED


class Interrupts:
    """Prints an answer to the first SIGINT or SIGTERM at once, and ends the process.

    Within `deferred` the first signal only sets `made`. Elsewhere it raises
    KeyboardInterrupt. If the main thread does not leave C++ to do so within a second,
    or at a second signal, or within `abrupt`, the process ends without it.

    Python runs signal handlers in the main thread alone, once it is back from C++. A
    thread therefore reads the numbers that `signal.set_wakeup_fd` writes to a pipe. An
    event loop may take that place for a while, so handlers write to the pipe too.

    Attributes:
      raised: Whether a signal has raised KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.raised = False
        self._is_deferred = False
        self._is_abrupt = (
            True  # An exception within `__enter__` would pass `__exit__` by.
        )
        self._answers: dict[None, str] = {}
        self._folders: list[str] = []

    @property
    def made(self) -> bool:
        """True once a signal has come."""
        return bool(self._answers)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Lets the block finish after a first signal; it must look at `made`."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    @contextlib.contextmanager
    def abrupt(self) -> Iterator[None]:
        """Lets a signal end the process at once, without KeyboardInterrupt.

        An import of compiled code would print or swallow the exception.
        """
        self._is_abrupt = True
        try:
            yield
        finally:
            self._is_abrupt = False

    @contextlib.contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """Creates a folder that is removed even if the main thread is stuck in C++."""
        with tempfile.TemporaryDirectory() as folder:
            self._folders.append(folder)
            yield Path(folder)

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._woken = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {s: signal.signal(s, self._handle) for s in _SIGNALS}
        self._is_abrupt = False
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woken)
        os.write(self._writer, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, *_) -> None:
        os.write(self._writer, bytes([_HANDLED]))
        if self._answer() is _NOW and not self.raised and not self._is_abrupt:
            self.raised = True
            raise KeyboardInterrupt

    def _answer(self) -> str:
        """Returns the answer, which the first of the two threads to ask decides."""
        return self._answers.setdefault(None, _LATER if self._is_deferred else _NOW)

    def _watch(self) -> None:
        """Answers the signals that the pipe announces, until it is told to end."""
        counts: Counter[bool] = Counter()
        deadline = None
        while True:
            seconds = deadline and max(0.0, deadline - time.monotonic())
            if not select.select([self._reader], [], [], seconds)[0]:
                self._end()
            (byte,) = os.read(self._reader, 1)
            if byte == _CLOSE:
                return
            if byte not in (*_SIGNALS, _HANDLED):
                continue
            most = max(counts.values(), default=0)
            counts[byte == _HANDLED] += 1
            if max(counts.values()) == most:
                continue  # One signal arrives on both ways.
            if most:
                self._end()
            reaction = self._answer()
            _say(reaction)
            if reaction is _NOW:
                deadline = time.monotonic() + (0.0 if self._is_abrupt else _GRACE)

    def _end(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(STOPPED)


def _say(line: str) -> None:
    """Prints a line, on a terminal below the progress bar and the echoed ^C."""
    with contextlib.suppress(OSError, ValueError):
        print(f"\n{line}" if sys.stdout.isatty() else line, flush=True)
