"""How long compiled functions take, in turns, so that a warm chip is warm for all."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

OPTIONS = {
    # Else XLA tries its own matrix products for a minute; none is cuBLASLt's match.
    "xla_gpu_enable_triton_gemm": False,
    # Else what loops over layers fill is zeroed first.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
}

# Of a turn of one product, so that it is at the clock that its own power leaves.
HOT_S = 0.25


def compile_all(functions: Sequence[Callable], draws: Sequence[tuple]) -> list[Any]:
    """Functions compiled for draws, or the exceptions that they raise.

    Each calls a function for all draws of its arguments, one after the other, so that
    the time of the call itself is hidden, and no draw is in the cache. Nothing runs,
    but for what XLA tries out.
    """

    def compiled(function):
        once = jax.jit(function)

        def each(draws):
            return [once(*arguments) for arguments in draws]

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
    """The median time of each for one draw, in turns as those of `in_turns`.

    By default turns are so long that starting and waiting count for little.
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
    """The median time of a call of each, over rounds in which each has its turn.

    A turn has so many calls, or more if it takes less than `round_s` seconds: a GPU is
    slower when it has been at the most power that it may draw for some tenths of one.
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
    found = [[mean(*turn) for turn in turns] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*found, strict=True)]
