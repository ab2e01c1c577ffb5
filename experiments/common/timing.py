"""Timing of compiled functions in alternation, so that all run on a warm chip."""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from experiments.common.programs import positive_float, positive_int

OPTIONS = {
    # Otherwise XLA tries its own Triton matmuls for a minute; cuBLASLt beats them all.
    "xla_gpu_enable_triton_gemm": False,
    # Otherwise XLA zeroes the stacked arrays that loops over layers fill.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
}

# Seconds for which a matmul runs without a pause. Within this time the GPU reaches the
# clock that the power of this matmul allows.
HOT_S = 0.25


def compile_all(functions: Sequence[Callable], draws: Sequence[tuple]) -> list[Any]:
    """Returns the compiled program of each function, or the exception that it raised.

    A program calls its function with each tuple of arguments in `draws`, one after
    another, which hides the launch overhead. If all draws together exceed the L2 cache,
    each is read from memory. Here only XLA's autotuning runs programs.
    """

    def compiled(function):
        jitted = jax.jit(function)

        def each(draws):
            return [jitted(*arguments) for arguments in draws]

        try:
            return jax.jit(each).lower(draws).compile(OPTIONS)
        except Exception as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(compiled, functions))


def seconds(
    compiled: Sequence[Any],
    draws: Sequence[tuple],
    *,
    calls: int = 5,
    rounds: int = 7,
    round_s: float = 0.02,
) -> list[float]:
    """Returns the median seconds per draw of each program, measured by `in_turns`.

    With the default `round_s` the costs of starting and waiting are negligible.

    Args:
      compiled: The programs of `compile_all`.
      draws: The tuples of arguments with which they were compiled.
      calls: The option of `in_turns`.
      rounds: The option of `in_turns`.
      round_s: The option of `in_turns`.
    """
    functions = [partial(c, draws) for c in compiled]
    times = in_turns(functions, calls=calls, rounds=rounds, round_s=round_s)
    return [time / len(draws) for time in times]


def in_turns(
    functions: Sequence[Callable[[], Any]],
    *,
    calls: int = 10,
    rounds: int = 5,
    round_s: float = 0.0,
) -> list[float]:
    """Returns the median seconds per call of each function, over several rounds.

    Functions run once before the rounds. In each round they run one after another, each
    for `calls` calls, or for more calls if these take less than `round_s` seconds. A
    round should be long, because a GPU slows down after some tenths of a second at its
    power limit.
    """

    def mean(function, count):
        started = time.perf_counter()
        for _ in range(count):
            result = function()
        jax.block_until_ready(result)
        return (time.perf_counter() - started) / count

    for function in functions:
        mean(function, 1)
    counts = [calls] * len(functions)
    if round_s:
        counts = [max(calls, math.ceil(round_s / mean(f, calls))) for f in functions]
    turns = list(zip(functions, counts, strict=True))
    rounds_of_times = [[mean(*turn) for turn in turns] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*rounds_of_times, strict=True)]


def add_turns(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `turns_of` reads to a parser."""
    add = parser.add_argument
    add(
        "--calls",
        type=positive_int,
        default=10,
        help="in a row, in each round, or more",
    )
    add(
        "--rounds", type=positive_int, default=3, help="in which each case has its turn"
    )
    add(
        "--round-s",
        type=positive_float,
        default=0.5,
        help="seconds of a turn, at least",
    )


def turns_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of `in_turns` in parsed command line arguments."""
    return {"calls": args.calls, "rounds": args.rounds, "round_s": args.round_s}


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function to measure, with its arguments.

    Attributes:
      name: The name of the function in rows.
      function: The function.
      arguments: The arguments of the function.
      matmuls: The number of matmuls of a case's shape that the function computes.
    """

    name: str
    function: Callable
    arguments: tuple[Any, ...]
    matmuls: int = 1


def timed(
    programs: Sequence[Program], options: dict[str, Any]
) -> tuple[dict[Program, float], dict[str, str]]:
    """Compiles and times programs in alternation.

    Args:
      programs: The programs.
      options: The keyword arguments of `in_turns`.

    Returns:
      The seconds of each program that ran, and the error messages of the others, by the
      key "<name>_error".
    """
    on_gpu = jax.default_backend() == "gpu"

    def attempted(program: Program) -> Callable | Exception:
        try:
            lowered = jax.jit(program.function).lower(*program.arguments)
            compiled = lowered.compile(OPTIONS if on_gpu else None)
            call = partial(compiled, *program.arguments)
            jax.block_until_ready(call())
            return call
        except Exception as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        # Without a GPU, kernels are interpreted, all in this thread.
        calls = list((pool.map if on_gpu else map)(attempted, programs))
    errors, running = {}, {}
    for program, call in zip(programs, calls, strict=True):
        if isinstance(call, Exception):
            errors[f"{program.name}_error"] = str(call)[:300]
        else:
            running[program] = call
    seconds = in_turns(list(running.values()), **options)
    return dict(zip(running, seconds, strict=True)), errors


# TODO from experiments.common.programs import positive_float, positive_int
