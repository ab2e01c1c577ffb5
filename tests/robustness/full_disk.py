"""Takes the disk away from runs of `experiments.pretrain`, and gives it back.

    uv run python -m tests.robustness.full_disk

The disk is full after a number of bytes, the folder becomes read-only, or it is renamed
or deleted while a process trains. The process must end with one line "error: ..." and
a code other than 0. Once the disk is back, a resumed run (or a new one, if there was
no run yet) must end with the undisturbed bits. Of two processes that start or resume
one run at the same time, one must go on and the other must be refused in one line.
"""

import dataclasses
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tests.robustness import faults, trials
from tests.robustness.kills import last_step

Row = dict[str, Any]
_GIVEN = (*trials.SMALL, "--recipes", "coat", "--tokenizer", "bpe")
_GIVEN += ("--vocab-size", "300")
_STEPS = (0, 1, 4, 8)  # The folder is lost when these have their rows.


@dataclasses.dataclass(frozen=True)
class Setup:
    """The files that all trials share.

    Attributes:
      folder: A scratch folder.
      library: The library of `faults`.
      given: The arguments of each run, without its folder.
      expected: The outcome of a run that nothing disturbed.
      writes: The bytes of each write of that run, in their order.
    """

    folder: Path
    library: Path
    given: tuple[object, ...]
    expected: trials.Outcome
    writes: list[int]

    @classmethod
    def of(cls, folder: Path) -> "Setup":
        """Makes the undisturbed run and returns the setup."""
        library, log, run = faults.build(folder), folder / "calls", folder / "whole"
        arguments = (*_GIVEN, "--data", trials.write_corpus(folder))
        noting = faults.environment(library, run, log=log)
        ended = trials.wait(trials.start(*arguments, "--out", run, **noting))
        if ended.code:
            raise RuntimeError(ended.said)
        writes = [size for _, size in faults.logged(log).values() if size]
        return cls(folder, library, arguments, trials.outcome(run), writes)

    def budgets(self, count: int) -> list[int]:
        """Returns `count` disk sizes that end within writes, spread over the run.

        The last hundredth of the bytes is left out, because runs differ by some bytes.
        """
        initial = np.cumsum([0, *self.writes])
        middles = (initial[:-1] + initial[1:]) // 2
        middles = middles[middles < 0.99 * initial[-1]]
        chosen = np.linspace(0, len(middles) - 1, count, dtype=int)
        return middles[chosen].tolist()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    top = trials.new_program("full_disk", __doc__)
    top.add_argument("--count", type=int, default=20, help="sizes of the disk (20)")
    args = top.parse_args(argv)
    with trials.scratch() as folder:
        setup = Setup.of(folder)
        trials_ = [("full", budget) for budget in setup.budgets(args.count)]
        trials_ += [(k, s) for k in ("read-only", "renamed", "deleted") for s in _STEPS]
        trials_ += [(kind, n) for kind in ("two starts", "two resumes") for n in (1, 2)]
        rows = [trial(setup, *each) for each in tqdm(trials_, unit="trial")]
    counts = {}
    for kind in dict.fromkeys(row["of"] for row in rows):
        of_kind = [row["wrong"] is None for row in rows if row["of"] == kind]
        counts[kind] = sum(of_kind), len(of_kind)
    return trials.conclude(rows, counts, args.out, "Ended in one line, then resumed")


def trial(setup: Setup, kind: str, at: int) -> Row:
    """Makes one trial and returns its row.

    Args:
      setup: The files that all trials share.
      kind: The kind of the trial.
      at: The disk's size in bytes, the step at which the folder is lost, or the number
        of the repetition, depending on the kind.
    """
    run = setup.folder / "run"
    if kind.startswith("two"):
        output, wrong = _both(setup, run, resume=kind == "two resumes")
    else:
        output, wrong = _alone(setup, run, kind, at)
    shutil.rmtree(run, ignore_errors=True)

    def anywhere(text: str | None) -> str | None:
        named = text and text.replace(str(run), "RUN")
        return named and named.replace(tempfile.gettempdir(), "TMP")

    return {"of": kind, "at": at, "said": anywhere(output), "wrong": anywhere(wrong)}


def _alone(setup: Setup, run: Path, kind: str, at: int) -> tuple[str, str | None]:
    """Disturbs a run; returns its last line and what was wrong, if anything."""
    switch = setup.folder / "read-only"
    faulty = {"bytes_": at} if kind == "full" else {"switch": switch}
    environment = faults.environment(setup.library, run, **faulty)
    process = trials.start(*setup.given, "--out", run, **environment)
    if kind != "full":
        _wait_for_step(process, run, at)
    if kind == "read-only":
        switch.touch()
    elif kind in ("renamed", "deleted"):
        run.rename(moved := setup.folder / "moved")
        if kind == "deleted":
            shutil.rmtree(moved)
    ended = trials.wait(process)
    switch.unlink(missing_ok=True)
    wrong = None if ended.in_one_line() else f"code {ended.code}: {ended.said[-2000:]}"
    if kind in ("renamed", "deleted"):
        if run.exists():
            wrong = wrong or f"wrote {[p.name for p in run.rglob('*')]} again"
            shutil.rmtree(run)
        if kind == "renamed":
            moved.rename(run)
    return _last_error(ended), wrong or _difference(setup, run)


def _both(setup: Setup, run: Path, resume: bool) -> tuple[str, str | None]:
    """Starts two processes on a run; returns the refused one's error, and any fault."""
    arguments = (*setup.given, "--out", run)
    if resume:
        process = trials.start(*arguments)
        _wait_for_step(process, run, 4)
        process.kill()
        trials.wait(process)
        arguments = ("--resume", run)
    processes = [trials.start(*arguments) for _ in range(2)]
    ended = sorted(map(trials.wait, processes), key=lambda e: e.code)
    codes = [e.code for e in ended]
    wrong = None if codes == [0, 2] and ended[1].in_one_line() else f"codes {codes}"
    return _last_error(ended[1]), wrong or _difference(setup, run)


def _wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    while not (run / "run.json").exists() or last_step(run) < step:
        if process.poll() is not None:
            raise RuntimeError(f"ended before step {step}: {trials.wait(process).said}")
        time.sleep(0.002)


def _difference(setup: Setup, run: Path) -> str | None:
    """Resumes a run until its end; returns what is wrong with the result, or None."""
    ended = trials.call(*trials.go_on(run, setup.given))
    if ended.code:
        return f"not resumed: {ended.said[-2000:]}"
    field = trials.outcome(run).difference(setup.expected)
    return field and f"{field} differ"


def _last_error(ended: trials.Ended) -> str:
    errors = [x for x in ended.said.splitlines() if x.startswith("error: ")]
    return errors[-1] if errors else ""


if __name__ == "__main__":
    sys.exit(main())
