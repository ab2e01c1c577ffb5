"""Finds the fastest tiles of matrix products on this GPU, and where XLA is faster.

    uv run python -m experiments.tune

times what `pallas_kernels.tuning.candidates` lists on the shapes of Llamas, beside
cuBLASLt through XLA, and writes `pallas_kernels/tuning.json`. Shapes that are there are
left as they are unless `--again` is given, so an interrupted run goes on. Several
processes compile; one at a time has the GPU.

What is nearly fastest in short turns has long ones as well. A training step draws all
the power that a GPU may draw, and there the tiles win that take the least energy; in
short turns all of them run at the clock that the others leave.
"""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from experiments import kernel_cases, timing
from experiments.kernel_cases import PRODUCTS, run_product
from experiments.results import device, versions, write_json
from pallas_kernels import tuning

_alone: AbstractContextManager = nullcontext()  # With the GPU.
_NEARLY = 1.08  # Times the least time in short turns.
_SHORT_S, _LONG_S = 0.01, 0.25  # Of a turn.


def main() -> None:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[8192])
    add("--kernels", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    add("--shapes", nargs="+", metavar="M,N,K", help="instead of the models'")
    add("--again", action="store_true", help="also what has been measured")
    add("--workers", type=int, default=min(8, os.cpu_count() // 2 or 1))
    add("--out", type=Path, default=tuning.TABLE)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    table = found.get("tuning", {})
    todo = [
        (kernel, shape, dtypes)
        for kernel in args.kernels
        for shape, dtypes in shapes(args, kernel).items()
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
    """Shapes of which a product each is measured, and dtypes of a and b."""
    both = (kernel_cases.E4M3, kernel_cases.E4M3)
    if args.shapes:
        return {tuple(map(int, s.split(","))): both for s in args.shapes}
    products = kernel_cases.model_products(tuple(args.tokens))
    forward = [p for p in products if p.name.endswith("forward")]
    if layers := kernel_cases.OF_LAYERS.get(kernel):
        forward = [p for p in forward if p.layer in layers]
    chosen = products if kernel == "product" else forward
    cube = {} if kernel in kernel_cases.OF_LAYERS else {(8192,) * 3: both}
    return {p.shape: p.dtypes for p in chosen} | cube


def key(kernel: str, shape: tuple[int, ...]) -> str:
    """The table's name of a product."""
    return tuning.key(PRODUCTS[kernel], *shape)


def fastest(kernel: str, shape: tuple[int, ...], dtypes: tuple[Any, Any]) -> dict:
    """The fastest tiles as fields that are not defaults, and whether XLA is faster."""
    product = PRODUCTS[kernel]
    operands = functools.partial(kernel_cases.operands, kernel, shape, dtypes)
    m, n, _ = shape
    tried = [
        t
        for t in tuning.candidates(product)
        if tuning.obstacle(product, t, m, n) is None
    ]
    mosaic = functools.partial(run_product, kernel, implementation="mosaic")
    calls = [functools.partial(mosaic, tuning=t) for t in tried]
    compiled = timing.compile_all(calls, [jax.eval_shape(operands)])
    with _alone:
        draws = [operands()]
        if kernel != "blocks":  # Of which XLA has none.
            tried.append(None)
            reference = functools.partial(
                run_product, kernel, implementation="reference"
            )
            compiled += timing.compile_all([reference], draws)
        works = [(t, c) for t, c in zip(tried, compiled, strict=True) if callable(c)]
        calls = [c for _, c in works]
        times = timing.seconds(calls, draws, rounds=5, round_s=_SHORT_S)
        least = min(time for time, (t, _) in zip(times, works, strict=True) if t)
        nearly = [
            work
            for work, time in zip(works, times, strict=True)
            if time <= _NEARLY * least
        ]
        calls = [c for _, c in nearly]
        times = timing.seconds(calls, draws, rounds=2, round_s=_LONG_S)
    found = sorted(zip(times, (t for t, _ in nearly), strict=True), key=itemgetter(0))
    best = next(t for _, t in found if t)
    default = tuning.Tuning()
    fields = dataclasses.asdict(best).items()
    tiles = {k: v for k, v in fields if v != getattr(default, k)}
    return {"tiles": tiles, "xla": found[0][1] is None}


if __name__ == "__main__":
    main()
