"""Times how long processes take until the first step of a training has run.

    uv run python -m experiments.bench.starts

Each case has a folder for JAX's persistent compilation cache, which is empty at first.
Two processes compile and run the same step of a Llama with it, one after the other, as
a training and its next start do. The times are seconds on the clock, without the import
of JAX and the making of parameters.
"""

import dataclasses
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from tqdm import tqdm

from coat_jax.models import llama
from experiments.bench.model_step import ModelSize, loss_function, step_of, take_memory
from experiments.common import tables
from experiments.common.layer_cases import CASES, first_histories, random_params
from experiments.common.programs import new_parser, positive_int, results_path
from experiments.common.results import default_path, write_results
from experiments.common.tables import Column
from experiments.common.timing import OPTIONS

Row = dict[str, Any]
STARTS = ("first", "second")
STAGES = ("trace", "lower", "compile", "step")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = new_parser("experiments.bench.starts", __doc__)
    add = top.add_argument
    add("--cases", nargs="+", choices=CASES, default=["bf16", "coat"], metavar="CASE")
    add("--preset", choices=llama.CONFIGS, default="124m", help="the model (124m)")
    add("--layers", type=positive_int, help="the preset's by default")
    add("--batch", type=positive_int, default=8)
    add("--out", type=results_path, default=default_path("bench_starts"))
    args = top.parse_args(argv)
    model = ModelSize.of(args.preset)
    model = dataclasses.replace(model, layers=args.layers or model.layers)
    # The memory is for the processes that run steps.
    take_memory(at_once=False)
    rows: list[Row] = []
    bar = tqdm(total=len(args.cases) * len(STARTS), unit="process", disable=None)
    for case in args.cases:
        for row in starts(case, model, args.batch):
            rows.append(row)
            bar.update()
            write_results(args.out, rows=rows, bars=[])
    bar.close()
    columns = [Column("", "case"), Column("start", "start")]
    columns += [Column(f"{stage}, s", f"{stage}_s", "{:.2f}") for stage in STAGES]
    columns.append(Column("in all", "seconds", "{:.2f}"))
    Console().print(tables.table("Starts of a training", columns, rows))


def starts(case: str, model: ModelSize, batch: int) -> Iterator[Row]:
    """Yields a row for each of two processes that share a compilation cache."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for start in STARTS:
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                seconds = pool.submit(seconds_of, case, model, batch, folder).result()
            stages = {f"{s}_s": x for s, x in zip(STAGES, seconds, strict=True)}
            row = {"case": case, "model": model.name, "batch": batch, "start": start}
            yield row | stages | {"seconds": sum(seconds)}


def seconds_of(case: str, model: ModelSize, batch: int, folder: str) -> list[float]:
    """Returns the seconds of each stage of a first step, with a compilation cache."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    loss, (params, histories) = loss_function(case, model)
    tx, step = step_of(case, loss)
    params = random_params(params)
    carry = (params, tx.init(params)), first_histories(histories)
    arrays = carry, jnp.zeros((batch, model.seq + 1), jnp.int32)
    jax.block_until_ready(arrays)
    times = [time.perf_counter()]
    traced = jax.jit(step, donate_argnums=0).trace(*arrays)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile(OPTIONS)
    times.append(time.perf_counter())
    jax.block_until_ready(compiled(*arrays))
    times.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(times)]


if __name__ == "__main__":
    main()
