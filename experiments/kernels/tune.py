"""Finds the fastest tiles of matmuls on this GPU, and the shapes where XLA is faster.

    uv run python -m experiments.kernels.tune

times the settings that `pallas_kernels.ops.matmul.tuning.candidates` lists, and
cuBLASLt through XLA, on the shapes of Llama models. It writes `tuning.json` in the
folder of that module. Shapes in this file are not measured again unless `--again` is
given, so that an interrupted run continues. Several processes compile; one at a time
uses the GPU.
"""

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from experiments.common import kernel_cases, timing
from experiments.common.kernel_cases import PRODUCTS, run_product
from experiments.common.programs import new_parser, positive_int, shape_of_rank
from experiments.common.results import device, versions, write_json
from pallas_kernels.ops.matmul import tuning

# The lock under which a worker process has the GPU alone.
_alone: AbstractContextManager = nullcontext()
# Tiles, and XLA, that take at most this factor of the fastest tiles' time in short runs
# are timed again in long runs.
_NEARLY = 1.08
_SHORT_S = 0.01  # Seconds of a short run.
# XLA wins if it takes less than this factor of the time of the fastest tiles. The
# second factor is for matmuls that may be in a loop which stacks their results.
_XLA_WINS, _XLA_WINS_STACKED = 0.98, 0.97


def main() -> None:
    """Measures the shapes that are missing in the table, and writes the table."""
    parser = new_parser("experiments.kernels.tune", __doc__)
    add = parser.add_argument
    names = tuple(kernel_cases.TUNED)
    add("--models", nargs="+", choices=names, default=names)
    add("--tokens", type=positive_int, nargs="+", default=[4096, 8192, 16384])
    add("--kernels", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    add(
        "--shapes",
        type=shape_of_rank(3),
        nargs="+",
        metavar="M,N,K",
        help="instead of the models'",
    )
    add("--again", action="store_true", help="also what has been measured")
    add("--workers", type=positive_int, default=min(8, os.cpu_count() // 2 or 1))
    add("--out", type=Path, default=tuning.TABLE)
    args = parser.parse_args()
    contents = json.loads(args.out.read_text()) if args.out.exists() else {}
    table = contents.get("tuning", {})
    todo = [
        (kernel, shape, *how)
        for kernel in args.kernels
        for shape, how in shapes(args, kernel).items()
        if args.again or key(kernel, shape) not in table
    ]
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # Workers share the GPU.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        args.workers, spawn, initializer=_take_turns, initargs=(spawn.Lock(),)
    )
    with pool:
        futures = {pool.submit(fastest, *each): each[:2] for each in todo}
        for future in tqdm(as_completed(futures), total=len(todo), unit="shape"):
            table[key(*futures[future])] = future.result()
            write_json(
                args.out, {"device": device(), "versions": versions(), "tuning": table}
            )


def _take_turns(lock: AbstractContextManager) -> None:
    global _alone
    _alone = lock


def shapes(args: argparse.Namespace, kernel: str) -> dict[tuple[int, ...], Any]:
    """Returns the shapes (m, n, k) to measure, each with its dtypes and XLA's factor.

    The dtypes are the operands' dtypes; if several matmuls have the same shape, the
    last matmul's count. XLA wins if it takes less than the factor times the kernel's
    time. The factor is `_XLA_WINS_STACKED` if a loop may stack the result of at least
    one of the matmuls. That is the case for all matmuls except gradients of activations
    (dx).

    Args:
      args: The arguments of the command line.
      kernel: The kernel's name in `PRODUCTS`.
    """
    other = (kernel_cases.E4M3, kernel_cases.E4M3), _XLA_WINS_STACKED
    if args.shapes:
        return dict.fromkeys(args.shapes, other)
    products = kernel_cases.model_products(args.tokens, args.models)
    cube = {} if kernel in kernel_cases.OF_LAYERS else {(8192,) * 3: other}
    by_shape = {}
    for p in products:
        if p.is_of(kernel):
            wins = _XLA_WINS if p.name.endswith("dx") else _XLA_WINS_STACKED
            _, earlier = by_shape.get(p.shape, (None, wins))
            by_shape[p.shape] = p.dtypes, min(wins, earlier)
    return by_shape | cube


def key(kernel: str, shape: tuple[int, ...]) -> str:
    """Returns the key of a matmul of shape (m, n, k) in the kernels' tuning table."""
    return tuning.key(PRODUCTS[kernel], *shape)


def fastest(
    kernel: str, shape: tuple[int, ...], dtypes: tuple[Any, Any], xla_wins: float
) -> dict:
    """Times all possible tiles of a matmul and XLA, and returns the matmul's `entry`.

    Args:
      kernel: The kernel's name in `PRODUCTS`.
      shape: The sizes m, n and k.
      dtypes: The operands' dtypes.
      xla_wins: The factor of `entry`.
    """
    product = PRODUCTS[kernel]
    draw = functools.partial(kernel_cases.draws, kernel, shape, dtypes)
    m, n, _ = shape
    tried = [
        t
        for t in tuning.candidates(product)
        if tuning.obstacle(product, t, m, n) is None
    ]
    mosaic = functools.partial(run_product, kernel, implementation="mosaic")
    calls = [functools.partial(mosaic, tuning=t) for t in tried]
    compiled = timing.compile_all(calls, jax.eval_shape(draw))
    with _alone:
        draws = draw()
        if kernel != "blocks":  # XLA has no matmul with per-block scales.
            tried.append(None)
            reference = functools.partial(
                run_product, kernel, implementation="reference"
            )
            compiled += timing.compile_all([reference], draws)
        works = {t: c for t, c in zip(tried, compiled, strict=True) if callable(c)}
        return entry(_hot_times(works, draws), xla_wins)


def _hot_times(works: dict, draws: list) -> dict[tuning.Tuning | None, float]:
    """Times the candidates in short runs, and the nearly fastest again in long runs.

    Args:
      works: The compiled program of each candidate. Keys are tiles, and None for XLA.
      draws: The arguments of the programs.

    Returns:
      The seconds of a call in the long runs, by candidate.
    """
    calls = list(works.values())
    times = timing.seconds(calls, draws, rounds=5, round_s=_SHORT_S)
    short = dict(zip(works, times, strict=True))
    least = min(time for tiles, time in short.items() if tiles)
    nearly = [tiles for tiles, time in short.items() if time <= _NEARLY * least]
    calls = [works[tiles] for tiles in nearly]
    times = timing.seconds(calls, draws, rounds=2, round_s=timing.HOT_S)
    return dict(zip(nearly, times, strict=True))


def entry(
    times: dict[tuning.Tuning | None, float], xla_wins: float = _XLA_WINS_STACKED
) -> dict[str, Any]:
    """Returns a matmul's entry in the table: the fastest tiles, and whether XLA wins.

    Args:
      times: The time of each candidate. Keys are tiles, and None for XLA.
      xla_wins: XLA wins if it takes less than this factor times the fastest tiles'
        time.
    """
    ours = {tiles: time for tiles, time in times.items() if tiles}
    best = min(ours, key=ours.__getitem__)
    default = tuning.Tuning()
    fields = dataclasses.asdict(best).items()
    tiles = {k: v for k, v in fields if v != getattr(default, k)}
    xla = times.get(None, math.inf)
    return {"tiles": tiles, "xla": xla < xla_wins * ours[best]}


if __name__ == "__main__":
    main()
