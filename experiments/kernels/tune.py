"""Finds the fastest tiles of matrix products on this GPU, and where XLA is faster.

    uv run python -m experiments.kernels.tune

times what `pallas_kernels.ops.matmul.tuning.candidates` lists on the shapes of Llamas,
beside cuBLASLt through XLA, and writes `tuning.json` beside that module. Shapes that
are there are left as they are unless `--again` is given, so an interrupted run goes on.
Several processes compile; one at a time has the GPU.
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
from experiments.common.results import device, versions, write_json
from pallas_kernels.ops.matmul import tuning

_alone: AbstractContextManager = nullcontext()  # With the GPU.
_NEARLY = 1.08  # Times the least time in short turns.
_SHORT_S = 0.01  # Of a turn.
# Times what the fastest tiles take, at most.
_XLA_WINS, _XLA_WINS_STACKED = 0.98, 0.97


def main() -> None:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    names = tuple(kernel_cases.TUNED)
    add("--models", nargs="+", choices=names, default=names)
    add("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    add("--kernels", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    add("--shapes", nargs="+", metavar="M,N,K", help="instead of the models'")
    add("--again", action="store_true", help="also what has been measured")
    add("--workers", type=int, default=min(8, os.cpu_count() // 2 or 1))
    add("--out", type=Path, default=tuning.TABLE)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    table = found.get("tuning", {})
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
                args.out,
                {"device": device(), "versions": versions(), "tuning": table},
            )


def _take_turns(lock: AbstractContextManager) -> None:
    global _alone
    _alone = lock


def shapes(args: argparse.Namespace, kernel: str) -> dict[tuple[int, ...], Any]:
    """Shapes of which a product each is measured, dtypes of a and b, and when XLA wins.

    Of products of one shape what the last one takes, and whether one may be stacked:
    all but gradients of activations.
    """
    other = (kernel_cases.E4M3, kernel_cases.E4M3), _XLA_WINS_STACKED
    if args.shapes:
        return {tuple(map(int, s.split(","))): other for s in args.shapes}
    products = kernel_cases.model_products(args.tokens, args.models)
    cube = {} if kernel in kernel_cases.OF_LAYERS else {(8192,) * 3: other}
    found = {}
    for p in products:
        if p.is_of(kernel):
            wins = _XLA_WINS if p.name.endswith("dx") else _XLA_WINS_STACKED
            _, before = found.get(p.shape, (None, wins))
            found[p.shape] = p.dtypes, min(wins, before)
    return found | cube


def key(kernel: str, shape: tuple[int, ...]) -> str:
    """The table's name of a product."""
    return tuning.key(PRODUCTS[kernel], *shape)


def fastest(
    kernel: str, shape: tuple[int, ...], dtypes: tuple[Any, Any], xla_wins: float
) -> dict:
    """Times a product in all tiles that can compute it, and by XLA; see `entry`."""
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
        if kernel != "blocks":  # Of which XLA has none.
            tried.append(None)
            reference = functools.partial(
                run_product, kernel, implementation="reference"
            )
            compiled += timing.compile_all([reference], draws)
        works = {t: c for t, c in zip(tried, compiled, strict=True) if callable(c)}
        return entry(_hot_times(works, draws), xla_wins)


def _hot_times(works: dict, draws: list) -> dict[tuning.Tuning | None, float]:
    """Seconds in long turns of what is nearly fastest in short ones."""
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
    """What the table has of a product: its tiles, and whether XLA, at None, wins.

    That is if it takes no more than `xla_wins` times as long.
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
