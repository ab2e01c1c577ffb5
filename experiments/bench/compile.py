"""Times tracing, lowering and compiling of unrolled layers, without a GPU.

    uv run python -m experiments.bench.compile

compiles a training step of Llama layers in plain Flax, with the optimizer, for one
H200 and for two. The cases are this library, BF16, and BF16 with `jax.checkpoint` that
saves only matmuls. Each measurement is a fresh process without a persistent cache, and
counts the CPU seconds of all its threads and children. A last process traces a layer,
and counts the functions of this library that run during the trace.

The compiler needs packages that `experiments.common.sm90` names.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from experiments.bench import compile_case
from experiments.common import sm90, tables
from experiments.common.layer_cases import LLAMA_2_7B, add_sizes, shape_of
from experiments.common.programs import (
    new_parser,
    positive_int,
    results_path,
    usage_errors,
)
from experiments.common.results import Bar, default_path, write_results
from experiments.common.tables import Column
from experiments.common.tables import bars as bars_table

Row = dict[str, Any]
# Targets: CPU seconds for 32 layers relative to BF16 with a remat, and seconds of the
# first trace of a layer and of each further one.
_RATIO, _FIRST_S, _FURTHER_S = 2.5, 0.2, 0.02
_LAYERS = 32


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = parser()
    args = top.parse_args(argv)
    if why := sm90.missing():
        top.error(why)
    with usage_errors(top):
        sizes = dataclasses.asdict(shape_of(args))
    cases = [
        {"gpus": gpus, "layers": layers, "case": case}
        for gpus in args.gpus
        for layers in args.layers
        for case in args.cases
    ]
    rows: list[Row] = []
    for case in tqdm([*cases, {"case": "trace"}], unit="process", disable=None):
        rows.append(measured(case | sizes))
        write_results(args.out, rows=rows, bars=bars(rows))
    console = Console(width=110)
    console.print(table(rows))
    console.print(bars_table(bars(rows)))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = new_parser("experiments.bench.compile", __doc__)
    add = top.add_argument
    names = list(compile_case.CASES)
    add("--cases", nargs="+", choices=names, default=names, metavar="CASE")
    add("--gpus", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    add("--layers", nargs="+", type=positive_int, default=[4, _LAYERS])
    add_sizes(top, LLAMA_2_7B)  # The batch is for each GPU.
    add("--out", type=results_path, default=default_path("bench_compile"))
    return top


def measured(case: Row) -> Row:
    """Measures a case in a fresh process, and returns its row.

    Raises:
      RuntimeError: If the process fails.
    """
    command = [sys.executable, "-m", "experiments.bench.compile_case", json.dumps(case)]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{case} failed: {run.stderr[-2000:]}")
    return case | json.loads(run.stdout.splitlines()[-1])


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Returns the targets for the rows that were measured.

    The targets are for the CPU seconds of 32 layers, and for the times of traces.
    """
    seconds = {
        (row["gpus"], row["layers"], row["case"]): row["cpu_s"]
        for row in rows
        if row["case"] != "trace"
    }
    targets = []
    for (gpus, layers, case), cpu_s in seconds.items():
        remat_s = seconds.get((gpus, layers, "bf16, remat"))
        if layers == _LAYERS and case == "both" and remat_s:
            name = f"{layers} layers on {gpus} GPU: CPU seconds over bf16, remat"
            targets.append(Bar.of(name, "<=", _RATIO, cpu_s / remat_s))
    for row in rows:
        if row["case"] == "trace":
            first, further = row["first_trace_s"], row["further_trace_s"]
            targets.append(Bar.of("first trace of a layer, s", "<=", _FIRST_S, first))
            name = "further trace of a layer, s"
            targets.append(Bar.of(name, "<=", _FURTHER_S, further))
    return targets


def table(rows: Sequence[Row]) -> Table:
    """Returns a table of the rows, except for traces."""
    columns = [Column("", "case"), Column("GPUs", "gpus"), Column("layers", "layers")]
    for stage in compile_case.STAGES:
        columns.append(Column(f"{stage} s", f"{stage}_cpu_s", "{:.1f}"))
    columns += [Column("calls", "kernel_calls"), Column("kernels", "kernels")]
    programs = [row for row in rows if row["case"] != "trace"]
    return tables.table("CPU seconds", columns, programs)


if __name__ == "__main__":
    main()
