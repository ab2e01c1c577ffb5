"""Tests that Ctrl-C is answered at once, with real processes and signals."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments.training import interrupts

_TINY = ["--preset", "tiny", "--recipes", "bf16", "--eval-batches", "1"]
_NOW = "stopping now\n"
_LATER = "stopping after this step; a checkpoint is saved; Ctrl-C again stops at once\n"
_PATIENCE = 60.0  # Seconds in which a process reaches what it is awaited at.


class Process:
    """A process of the main job, with its own folder for temporary files."""

    def __init__(self, folder: Path, *flags: str, **variables: str) -> None:
        self.scratch, self.out = folder / "scratch", folder / "run"
        self.scratch.mkdir()
        program = [sys.executable, "-W", "error", "-m", "experiments.pretrain"]
        self._stderr = folder / "stderr"
        with self._stderr.open("wb") as errors:
            self._process = subprocess.Popen(
                [*program, *_TINY, *flags, "--out", str(self.out)],
                env=os.environ | {"TMPDIR": str(self.scratch)} | variables,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                self._lines.append((time.monotonic(), line.decode()))

    def said(self, beginning: str) -> float | None:
        """Returns when it printed the first line with this beginning, or None."""
        actual = [at for at, line in self._lines if line.startswith(beginning)]
        return actual[0] if actual else None

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

    def signal(self, number: int, reply: str) -> float:
        """Sends a signal and returns the seconds until the line `reply` is read."""
        started = time.monotonic()
        self._process.send_signal(number)
        self.wait_for_line(reply)
        return self.said(reply) - started

    def wait_for_line(self, line: str) -> None:
        """Waits for a line, which an ended process may have printed before."""
        end = time.monotonic() + _PATIENCE
        while self.said(line) is None and time.monotonic() < end:
            time.sleep(0.002)
        assert self.said(line) is not None

    def end(self) -> float:
        """Waits for its end and returns the seconds that this takes.

        Asserts that the exit code means Ctrl-C.
        """
        started = time.monotonic()
        assert self._process.wait(_PATIENCE) == interrupts.STOPPED, self.errors()
        seconds = time.monotonic() - started
        self._reader.join()
        return seconds

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def output(self) -> str:
        """Returns what it has printed."""
        return "".join(line for _, line in self._lines)

    def errors(self) -> str:
        """Returns what it has written to stderr, its progress bar included."""
        return self._stderr.read_text()


@pytest.fixture
def start(tmp_path):
    """Yields a function that starts a process, which is killed after the test."""
    started = []

    def start(*flags, **variables):
        started.append(Process(tmp_path, *flags, **variables))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_imports_ends_at_once(number, start):
    process = start()
    process.wait(process.catches_signals)
    assert process.signal(number, _NOW) < 1
    assert process.end() < 1
    assert (process.output(), process.errors()) == (_NOW, "")
    assert not process.out.exists()


@pytest.mark.slow
def test_training_of_a_tokenizer_is_left(start):
    process = start("--tokenizer", "bpe")
    process.wait(lambda: any(process.scratch.iterdir()))
    time.sleep(3)  # It reads the text first.
    assert process.signal(signal.SIGTERM, _NOW) < 0.8
    assert process.end() < 5
    assert (process.output(), process.errors()) == (_NOW, "")
    assert not list(process.scratch.iterdir())
    assert not process.out.exists()


@pytest.mark.slow
def test_compilation_is_left(start, tmp_path):
    # Nothing is compiled yet, and LLVM takes its time, as without tests.
    compiled = str(tmp_path / "compiled")
    process = start(XLA_FLAGS="", JAX_COMPILATION_CACHE_DIR=compiled)
    process.wait(lambda: process.said("bf16: compiling"))
    time.sleep(2)  # It traces first.
    assert process.signal(signal.SIGINT, _NOW) < 0.8
    assert process.end() < 5
    assert process.output().endswith("for cpu\n" + _NOW)
    assert process.errors() == ""
    assert not list(process.scratch.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_a_step_is_finished_unless_there_is_a_second_signal(twice, start):
    # A step takes a second on two idle cores. The second signal must come within it.
    size = "16" if twice else "4"
    process = start("--steps", "99", "--batch-size", size, "--seq-len", "512")
    process.wait(lambda: process.said("bf16: compiled in"))
    process.wait(lambda: (process.out / "metrics.jsonl").read_text())
    assert process.signal(signal.SIGINT, _LATER) < 0.8
    if twice:
        process.signal(signal.SIGINT, _LATER)
    process.end()
    assert "Traceback" not in process.errors()
    last = process.output().split(_LATER)[1]
    saved = list((process.out / "checkpoints" / "bf16").iterdir())
    if twice:
        assert (last, saved) == ("", [])
    else:
        assert last.startswith("saved; to go on:\n")
        assert len(saved) == 1


def test_what_an_interruption_raises_is_its_exit_code():
    def work(stop):
        try:
            with stop.temporary_folder() as folder:
                actual.append(folder)
                os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("compiled code was interrupted") from None

    actual = []
    assert interrupts.run(work) == interrupts.STOPPED
    assert not actual[0].exists()


def test_other_errors_and_exit_codes_pass():
    def fail(stop):
        raise ValueError("no signal")

    with pytest.raises(ValueError, match="no signal"):
        interrupts.run(fail)
    assert interrupts.run(lambda stop: 7) == 7


def test_handlers_are_restored_and_a_block_may_finish(capsys):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interrupts.Interrupts() as stop:
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.made
        while not (output := capsys.readouterr().out):
            time.sleep(0.001)
    assert output == _LATER
    assert signal.set_wakeup_fd(-1) == -1
    after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert after == before


def test_a_signal_that_comes_with_its_handler_is_answered():
    program = """
import os, signal, time
from experiments.training import interrupts

install = signal.signal

def install_and_send(number, handler):
    install(number, handler)
    if number == signal.SIGTERM:
        os.kill(os.getpid(), signal.SIGINT)

signal.signal = install_and_send
interrupts.run_module(lambda: lambda _, stop: time.sleep(60))
"""
    actual = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert (actual.returncode, actual.stdout) == (interrupts.STOPPED, _NOW)
    assert actual.stderr == ""
