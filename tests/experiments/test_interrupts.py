"""Tests that Ctrl-C is answered at once, with real processes and signals."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments.pretrain import interrupts

_TINY = ["--preset", "tiny", "--recipes", "bf16", "--eval-batches", "1"]
_NOW = "stopping now\n"
_LATER = "stopping after this step; a checkpoint is saved; Ctrl-C again stops at once\n"
_PATIENCE = 240.0  # Seconds in which a process reaches what it is awaited at.


class Process:
    """A process of the main job, with a folder of its own for temporary files."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.scratch, self.out = folder / "scratch", folder / "run"
        self.scratch.mkdir()
        program = [sys.executable, "-W", "error", "-m", "experiments.pretrain"]
        self._process = subprocess.Popen(
            [*program, *_TINY, *flags, "--out", str(self.out)],
            # Nothing is compiled yet, and LLVM takes its time, as without tests.
            env=os.environ
            | {"TMPDIR": str(self.scratch), "XLA_FLAGS": ""}
            | {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")},
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("wb"),
        )
        self._stderr = folder / "stderr"
        self._lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.append((time.monotonic(), line.decode()))

    def said(self, beginning: str) -> float | None:
        """Returns when it printed a line that begins so, or None."""
        found = [at for at, line in self._lines if line.startswith(beginning)]
        return found[0] if found else None

    def catches_signals(self) -> bool:
        """Returns whether it has a handler for SIGTERM."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (line,) = [x for x in status.splitlines() if x.startswith("SigCgt")]
        return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    def wait(self, condition) -> None:
        """Waits until `condition()` is true."""
        end = time.monotonic() + _PATIENCE
        while not condition():
            assert self._process.poll() is None, self._stderr.read_text()
            assert time.monotonic() < end
            time.sleep(0.005)

    def signal(self, number: int, answer: str) -> float:
        """Sends a signal and returns the seconds until the answer is read."""
        started = time.monotonic()
        self._process.send_signal(number)
        self.wait_for_line(answer)
        return self.said(answer) - started

    def wait_for_line(self, line: str) -> None:
        """Waits for a line, which an ended process may have printed before."""
        end = time.monotonic() + _PATIENCE
        while self.said(line) is None and time.monotonic() < end:
            time.sleep(0.002)
        assert self.said(line) is not None

    def end(self) -> float:
        """Returns the seconds until its end; the exit code is that of Ctrl-C."""
        started = time.monotonic()
        assert self._process.wait(_PATIENCE) == interrupts.STOPPED, self.errors()
        seconds = time.monotonic() - started
        self._reader.join()
        return seconds

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def output(self) -> str:
        return "".join(line for _, line in self._lines)

    def errors(self) -> str:
        return self._stderr.read_text()


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a process; it does not outlive the test."""
    started = []

    def start(*flags):
        started.append(Process(tmp_path, *flags))
        return started[-1]

    yield start
    for process in started:
        process.kill()
