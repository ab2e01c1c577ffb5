"""Worker processes that run random programs and judge them."""

import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import jax

from experiments.rewrites.verdicts import Judged, Outcome
from experiments.rewrites.wide import widen

_KEPT = 200  # The number of programs after which JAX's caches are cleared.


def outcomes(
    seeds: range, processes: int = 1, seconds: float | None = None
) -> Iterator[Outcome]:
    """Yields the outcomes of the programs of some seeds, as the programs end.

    If a program ends its process, the verdict is "error". The process that ended is not
    replaced.

    Args:
      seeds: The seeds.
      processes: The number of processes, which are started here.
      seconds: The time after which no program starts; None sets no limit.
    """
    end = time.monotonic() + (float("inf") if seconds is None else seconds)
    waiting = iter(seeds)
    workers = dict(_started() for _ in range(min(processes, len(seeds))))
    running: dict[Connection, int] = {}

    def start_program(connection: Connection) -> None:
        seed = next(waiting, None) if time.monotonic() < end else None
        if seed is None:
            connection.close()
            return
        running[connection] = seed
        # If the process has ended, reading from the connection will fail.
        with contextlib.suppress(BrokenPipeError):
            connection.send(seed)

    for connection in workers:
        start_program(connection)
    while running:
        for connection in wait(list(running)):
            seed = running.pop(connection)
            try:
                outcome = connection.recv()
            except (EOFError, OSError):
                yield _ended(seed, workers[connection])
            else:
                start_program(connection)
                yield outcome


def _started() -> tuple[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_judge, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _ended(seed: int, process: SpawnProcess) -> Outcome:
    process.join()
    said = f"its process ended with exit code {process.exitcode}"
    return Outcome(seed, (), Judged("error", said=said))


def _judge(connection: Connection) -> None:
    """Sends the outcome of each seed that it receives, until the connection closes."""
    widen()
    # The library reads dtypes when it is imported.
    from experiments.rewrites.judge import judged
    from experiments.rewrites.programs import random_program

    with contextlib.suppress(EOFError):
        for count in itertools.count(1):
            program = random_program(connection.recv())
            connection.send(Outcome(program.seed, program.elements, judged(program)))
            if count % _KEPT == 0:
                jax.clear_caches()
