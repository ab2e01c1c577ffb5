"""Reacts to Ctrl-C at once, even while the main thread runs C++ code.

This module imports only the standard library, so that Ctrl-C works while packages are
imported, which takes seconds.
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
_CLOSE, _HANDLED = 0, 128  # Bytes in the pipe that are not numbers of signals.


def run_module(load: "Callable[[], Callable[[None, Interrupts], int]]") -> NoReturn:
    """Runs a program, and ends the process with the program's exit code.

    Args:
      load: A function that imports the program and returns it. Importing takes seconds,
        during which Ctrl-C works, too.
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
    """Returns the exit code of `work`, or `STOPPED` if a signal ended it."""
    interrupts = Interrupts()
    try:
        with interrupts:
            return work(interrupts)
    except BaseException:
        # An interrupted import of compiled code may raise another error.
        if not interrupts.raised:
            raise
        return STOPPED


class Interrupts:
    """A context manager in which SIGINT and SIGTERM end the process with a message.

    Within `deferred` the first signal only sets `made`. Elsewhere it raises
    KeyboardInterrupt. The process ends without this exception within `abrupt`, at a
    second signal, or if the main thread does not return from C++ within a second.

    Python runs signal handlers only in the main thread, after it has returned from C++.
    Therefore another thread reads the numbers that `signal.set_wakeup_fd` writes to a
    pipe. An event loop may replace this descriptor for a while, so the handlers write
    to the pipe, too.

    Attributes:
      raised: Whether a signal has raised KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.raised = False
        self._is_deferred = False
        self._is_abrupt = (
            True  # After an exception in `__enter__`, `__exit__` would not run.
        )
        self._answers: dict[None, str] = {}
        self._folders: list[str] = []

    @property
    def made(self) -> bool:
        """True if a signal has arrived."""
        return bool(self._answers)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Lets this context continue after a first signal; it must check `made`."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    @contextlib.contextmanager
    def abrupt(self) -> Iterator[None]:
        """Makes a signal end the process at once in this context.

        No KeyboardInterrupt is raised: an import of compiled code would print or
        swallow it.
        """
        self._is_abrupt = True
        try:
            yield
        finally:
            self._is_abrupt = False

    @contextlib.contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """Yields a new folder, which is removed at the end of this context.

        It is removed even if the process ends while the main thread is in C++.
        """
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
        """Returns the message about the first signal; the first call chooses it."""
        return self._answers.setdefault(None, _LATER if self._is_deferred else _NOW)

    def _watch(self) -> None:
        """Reacts to the signals in the pipe, until it reads the byte `_CLOSE`."""
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
                continue  # Each signal can arrive twice.
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
    """Prints a line; on a terminal it is below the progress bar and the echoed ^C."""
    with contextlib.suppress(OSError, ValueError):
        print(f"\n{line}" if sys.stdout.isatty() else line, flush=True)
