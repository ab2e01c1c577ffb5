"""Tests of the progress of steps on a terminal and in a log file."""

import io

import pytest

from experiments.training.step_bar import StepBar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def streams(monkeypatch):
    """Returns a function that replaces standard output and standard error."""

    def replaced(out, err):
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        return out, err

    return replaced


def _shown(steps, done=0, seconds=10.0, **options):
    """Shows the steps after `done`, each of which takes `seconds`."""
    times = iter(seconds * n for n in range(steps + 2))
    with StepBar("coat", steps, done, clock=lambda: next(times), **options) as bar:
        for step in range(done + 1, steps + 1):
            bar.show(step, {"loss": f"{1 / step:.2f}"})


def test_a_log_file_gets_a_line_every_half_minute(streams):
    out, err = streams(io.StringIO(), io.StringIO())
    _shown(8)
    assert out.getvalue().splitlines() == [
        "coat: step 1 of 8, 12%, loss 1.00, 01:10 left",
        "coat: step 4 of 8, 50%, loss 0.25, 00:40 left",
        "coat: step 7 of 8, 88%, loss 0.14, 00:10 left",
        "coat: step 8 of 8, 100%, loss 0.12",
    ]
    assert not err.getvalue()


def test_a_terminal_gets_a_bar_and_no_lines(streams):
    out, err = streams(_Terminal(), _Terminal())
    _shown(3)
    assert not out.getvalue()
    assert "coat: 100%" in err.getvalue()
    assert "\r" in err.getvalue()


def test_a_resumed_run_begins_at_its_step(streams):
    out, _ = streams(io.StringIO(), io.StringIO())
    _shown(6, done=4)
    first, last = out.getvalue().splitlines()
    assert first == "coat: step 5 of 6, 83%, loss 0.20, 00:10 left"
    assert last.startswith("coat: step 6 of 6, 100%")


def test_other_processes_are_silent(streams):
    out, err = streams(io.StringIO(), _Terminal())
    _shown(3, enabled=False)
    assert out.getvalue() == err.getvalue() == ""
