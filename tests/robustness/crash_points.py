"""Kills a process in every file-system call of two saves of a checkpoint.

    uv run python -m tests.robustness.crash_points

One save is the first of a run, the other replaces the oldest of two checkpoints. A
process dies by SIGKILL in the N-th call that changes the run's folder, for every N; a
write is half done then. Afterwards the folder must give the bits of the state before or
after the save, and take a further checkpoint. A sample of the calls of a complete run
is tried too: a resumed run must end with the undisturbed bits. A killed process loses
nothing that it wrote. Power failures may lose writes, but are not tried.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from experiments.training.checkpoints import Checkpoints, Progress
from tests.robustness import faults, saver, trials

Row = dict[str, Any]
_STEPS = {"first": (2,), "replacing": (2, 4, 6)}  # The last of them is disturbed.
_FURTHER = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    top = trials.new_program("crash_points", __doc__)
    top.add_argument("--count", type=int, help="points of each save (all)")
    top.add_argument("--resumes", type=int, default=12, help="points of a run (12)")
    args = top.parse_args(argv)
    rows, counts = [], {}
    with trials.scratch() as folder:
        library = faults.build(folder)
        with Saver(library, folder / "calls") as saves:
            for kind in _STEPS:
                rows += save_points(saves, kind, args.count, folder / "points")
        rows += run_points(library, folder, args.resumes)
    for kind in dict.fromkeys(row["in"] for row in rows):
        of_kind = [row["holds"] for row in rows if row["in"] == kind]
        counts[f"killed in the {kind}"] = sum(of_kind), len(of_kind)
    return trials.conclude(rows, counts, args.out, "Resumed with the same bits")


class Saver:
    """A context manager that runs a process of `tests.robustness.saver`."""

    def __init__(self, library: Path, log: Path) -> None:
        self._log = log
        # The folder is set by each request, so this one has no meaning.
        environment = faults.environment(library, Path("/nowhere"), log=log)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.robustness.saver"],
            env=os.environ | environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def save(
        self, folder: Path, step: int, kill: int = 0
    ) -> tuple[bool, dict[int, str]]:
        """Saves a step, and dies in call `kill` unless it is 0.

        Returns:
          Whether the process was killed, and the names of the calls it began, by
          their numbers.
        """
        self._log.unlink(missing_ok=True)
        print(json.dumps([str(folder), step, kill]), file=self._process.stdin)
        self._process.stdin.flush()
        status, _ = json.loads(self._process.stdout.readline())
        if status not in (0, signal.SIGKILL):
            raise RuntimeError(f"a save ended with status {status}")
        calls = faults.logged(self._log).items()
        return status != 0, {number: name for number, (name, _) in calls}


def spread(total: int, count: int | None) -> list[int]:
    """Returns `count` numbers from 1 to `total`, spread evenly; None means all."""
    count = total if count is None else min(count, total)
    return sorted(set(np.linspace(1, total, count).round().astype(int).tolist()))


def save_points(
    saves: Saver, kind: str, count: int | None, folder: Path
) -> Iterator[Row]:
    """Kills a save at `count` points and yields a row for each."""
    *initial, step = _STEPS[kind]
    complete, disturbed = folder / f"{kind}-whole", folder / f"{kind}-disturbed"
    checkpoints = Path("checkpoints") / "bf16"
    complete.mkdir(parents=True)
    for recorded in initial:
        saves.save(complete / checkpoints, recorded)
    shutil.copytree(complete, disturbed)
    _, calls = saves.save(disturbed / checkpoints, step)
    points = spread(len(calls), count)
    for call in tqdm(points, desc=f"the {kind} save", unit="point"):
        shutil.rmtree(disturbed)
        shutil.copytree(complete, disturbed)
        died, actual = saves.save(disturbed / checkpoints, step, call)
        loaded, same = load(disturbed / checkpoints)
        yield {
            "in": f"{kind} save",
            "call": call,
            "of": len(calls),
            "name": actual[call] if died else None,
            "loaded_step": loaded,
            "holds": same and loaded in (step, max(initial, default=0)),
        }


def load(folder: Path) -> tuple[int, bool]:
    """Loads the latest checkpoint, and saves and loads a further one.

    Returns:
      The step of the first, and whether both had the bits of their steps.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        saver.state(_FURTHER),
    )

    def same(checkpoints: Checkpoints, step: int) -> bool:
        actual = checkpoints.state(abstract)
        return trials.bits(actual) == trials.bits(saver.state(step))

    with contextlib.ExitStack() as stack:
        stack.enter_context(trials.captured())
        checkpoints = stack.enter_context(Checkpoints(folder, saver.KEEP))
        step = checkpoints.progress().step
        holds = step == 0 or same(checkpoints, step)
        checkpoints.save(saver.state(_FURTHER), Progress(step=_FURTHER))
    with Checkpoints(folder, saver.KEEP) as checkpoints:
        further = checkpoints.progress().step
        return step, holds and further == _FURTHER and same(checkpoints, further)


def run_points(library: Path, folder: Path, count: int) -> Iterator[Row]:
    """Kills a whole run at `count` points, resumes it, and yields a row for each."""
    if not count:
        return
    arguments = (
        *trials.SMALL,
        "--recipes",
        "coat",
        "--data",
        trials.write_corpus(folder),
    )
    log, complete = folder / "run-calls", folder / "whole"
    logging = faults.environment(library, complete, log=log)
    ended = trials.wait(trials.start(*arguments, "--out", complete, **logging))
    if ended.code:
        raise RuntimeError(ended.said)
    calls = faults.logged(log)
    expected = trials.outcome(complete)
    for call in tqdm(spread(len(calls), count), desc="a run", unit="point"):
        run = folder / f"killed-{call}"
        dying = faults.environment(library, run, kill=call)
        died = trials.wait(trials.start(*arguments, "--out", run, **dying))
        ended = trials.call(*trials.go_on(run, arguments))
        actual = None if ended.code else trials.outcome(run).difference(expected)
        yield {
            "in": "run",
            "call": call,
            "of": len(calls),
            "name": calls[call][0] if died.code else None,
            "loaded_step": None,
            "holds": ended.code == 0 and actual is None,
        }
        shutil.rmtree(run)


if __name__ == "__main__":
    sys.exit(main())
