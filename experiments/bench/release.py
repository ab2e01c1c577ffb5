"""Times training steps with the optimizer inside the backward pass, and ordinary steps.

    uv run python -m experiments.bench.release                    # one GPU of 80 GB
    uv run python -m experiments.bench.release --only llama-30b qwen3-30b-a3b  # an H200
    uv run python -m experiments.bench.release --only llama3-8b-4096  # an H200
    uv run python -m experiments.bench.release --only two         # two GPUs

Each row is measured in its own process, as in `experiments.bench.e2e`, and also has the
prediction of `coat.estimate_memory`. The memory of BF16 with policies of
`jax.checkpoint` is predicted in the same way. An ordinary step of Llama-2-13B, which
holds all gradients, does not fit on a GPU of 80 GB. The time that it would take there
follows from models with 10 and with 20 of its layers, since time is linear in layers.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from experiments.bench import e2e
from experiments.bench.model_step import (
    GIB,
    MEMORY_SHARE,
    RELEASED,
    ModelSize,
    Spread,
    take_memory,
)
from experiments.bench.predictions import estimate
from experiments.common import tables
from experiments.common.layer_cases import PLAIN
from experiments.common.programs import (
    new_parser,
    positive_int,
    results_path,
    rows_to_join,
    usage_errors,
)
from experiments.common.results import (
    Bar,
    default_path,
    joined,
    read_results,
    write_json,
    write_results,
)
from experiments.common.tables import Column
from experiments.common.tables import bars as bars_table

Row = dict[str, Any]


class Run(NamedTuple):
    """A row to measure.

    Attributes:
      part: The part of the program that measures it: a choice of `--only`.
      preset: The preset of the model.
      case: The case, as in `experiments.bench.e2e`.
      batch: The number of sequences on each GPU.
      layers: The number of layers; None means the preset's.
      seq: The length of sequences.
      gpus: The number of GPUs.
    """

    part: str
    preset: str
    case: str
    batch: int
    layers: int | None = None
    seq: int = 2048
    gpus: int = 1

    @property
    def model(self) -> ModelSize:
        """The model's sizes."""
        model = ModelSize.of(self.preset, seq=self.seq)
        return dataclasses.replace(model, layers=self.layers or model.layers)


_LONGER = "llama3-8b-4096"
# The first two fit on a GPU of 80 GB. The others compare the best of `coat` and BF16.
_OF_LONGER = (
    ("coat", 3),
    (f"coat{RELEASED}", 5),
    ("bf16, products and attention saved", 3),
    ("bf16, products saved", 3),
    ("coat", 8),
    ("coat", 10),
    (f"coat{RELEASED}", 10),
    ("bf16", 1),
)
RUNS = (
    Run("llama2-7b", "llama2-7b", "coat", 2),
    Run("llama2-7b", "llama2-7b", f"coat{RELEASED}", 2),
    Run("llama2-13b", "llama2-13b", "coat", 3, layers=10),
    Run("llama2-13b", "llama2-13b", "coat", 3, layers=20),
    Run("llama2-13b", "llama2-13b", f"coat{RELEASED}", 3),
    Run("llama3-8b", "llama3-8b", "coat", 1, seq=8192),
    Run("llama3-8b", "llama3-8b", f"coat{RELEASED}", 2, seq=8192),
    *(Run(_LONGER, "llama3-8b", case, batch, seq=4096) for case, batch in _OF_LONGER),
    Run("llama-30b", "llama-30b", f"coat_max{RELEASED}", 1),
    Run("qwen3-30b-a3b", "qwen3-30b-a3b", f"coat_max{RELEASED}", 1, seq=4096),
    Run("qwen3-30b-a3b", "qwen3-30b-a3b", f"coat_max{RELEASED}", 2, seq=4096),
    Run("two", "llama2-7b", f"coat{RELEASED}", 12, gpus=2),
    Run("two", "llama2-7b", "coat", 12, gpus=2),
)
_PARTS = tuple(dict.fromkeys(run.part for run in RUNS))
# The models of 30B take nearly all of an H200's memory.
_SHARES = {"llama-30b": "0.98", "qwen3-30b-a3b": "0.98"}
_ON_ONE_H200 = (_LONGER, *_SHARES)
# Targets: peaks in GiB by model, batch and GPUs; the time of a step relative to an
# ordinary one; and the error of predictions.
_PEAKS = {
    ("llama2-7b", 2, 1): 35.5,
    ("llama2-7b", 12, 2): 65.5,
    # A GPU of 80 GB leaves this much to JAX.
    ("llama3-8b", 5, 1): 75.0,
}
_SECONDS = {"llama2-7b": 1.03, "llama2-13b": 1.03, "two": 1.02}
_ERROR = 0.03
# Targets for the tokens per second of the best batch, and the ratio to the best BF16.
_TOKENS = {"qwen3-30b-a3b": 9500}
_TIMES_BF16 = {_LONGER: 1.65}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = parser()
    args = top.parse_args(argv)
    if args.predict:
        if not args.out.exists():
            top.error(f"--predict needs a results file, and there is no {args.out}")
        with usage_errors(top):
            predict_again(args.out)
        return
    # This process only reads the device's name; measurements run in others.
    take_memory(at_once=False)
    rows = rows_to_join(top, args.out)
    runs = [run for run in RUNS if run.part in args.only]
    console = Console(width=120)
    for run in tqdm(runs, unit="row", disable=None):
        sizes = run.case, run.model, run.batch, args.steps, Spread(gpus=run.gpus)
        row = e2e.measured(*sizes, share=_SHARES.get(run.part, MEMORY_SHARE))
        rows = joined(rows, row | predicted(run), key)
        write_results(args.out, rows=rows, bars=bars(rows))
        console.print(table(rows[-1:]))
    console.print(table(rows))
    console.print(bars_table(bars(rows)))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = new_parser("experiments.bench.release", __doc__)
    add = top.add_argument
    default = [part for part in _PARTS if part not in (*_ON_ONE_H200, "two")]
    add("--only", nargs="+", choices=_PARTS, default=default, metavar="PART")
    add("--steps", type=positive_int, default=6, help="timed, after two that are not")
    add(
        "--out",
        type=results_path,
        default=default_path("release"),
        help="rows are added",
    )
    help = "only predict the peaks of the file's rows again, which needs no GPU"
    add("--predict", action="store_true", help=help)
    return top


def predict_again(path: Path) -> None:
    """Writes new predictions into a results file, and keeps its measurements."""
    results = read_results(path)
    rows = [row | predicted(run_of(row)) for row in results["rows"]]
    again = [bar._asdict() for bar in bars(rows)]
    write_json(path, results | {"rows": rows, "bars": again})


def run_of(row: Row) -> Run:
    """Returns the run that measured a row."""
    preset = ModelSize.of_row(row).preset
    sizes = {name: row[name] for name in ("batch", "layers", "seq", "gpus")}
    return Run(row["part"], preset, row["case"], **sizes)


def predicted(run: Run) -> Row:
    """Returns the entries of a row for the run's part and its predicted peak."""
    expected = estimate(run.case, run.model, run.batch, run.gpus)
    return {"part": run.part, "predicted_gib": expected.peak_bytes / GIB}


def key(row: Row) -> tuple[Any, ...]:
    """Returns the values that identify a row."""
    return row["part"], row["case"], row["batch"], row["layers"], row["gpus"]


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Returns the targets for the rows that were measured."""
    speeds = [*_tokens(rows), *_times_bf16(rows)]
    return [*_peaks(rows), *_seconds(rows), *speeds, *_predictions(rows)]


def _tokens(rows: Sequence[Row]) -> Iterator[Bar]:
    for part, target in _TOKENS.items():
        rates = [r["tokens_per_s"] for r in _released(rows) if r["part"] == part]
        if rates:
            yield Bar.of(f"{part}: tokens/s", ">=", target, max(rates))


def _times_bf16(rows: Sequence[Row]) -> Iterator[Bar]:
    """Yields the targets for the best speed of `coat` relative to the best of BF16."""
    for part, target in _TIMES_BF16.items():
        best: dict[bool, float] = {}
        for row in rows:
            if row["part"] == part and "tokens_per_s" in row:
                plain = row["case"] in PLAIN
                best[plain] = max(best.get(plain, 0.0), row["tokens_per_s"])
        if len(best) == 2:
            name = f"{part}: tokens/s of coat / BF16's best"
            yield Bar.of(name, ">=", target, best[False] / best[True])


def _peaks(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in _released(rows):
        limit = _PEAKS.get((ModelSize.of_row(row).preset, row["batch"], row["gpus"]))
        if limit and "peak_gib" in row:
            yield Bar.of(f"{_name(row)}: peak, GiB", "<=", limit, row["peak_gib"])


def _seconds(rows: Sequence[Row]) -> Iterator[Bar]:
    """Yields the targets for times of steps relative to ordinary steps."""
    for row in _released(rows):
        case = row["case"].removesuffix(RELEASED)
        others = [
            r
            for r in rows
            if (r["part"], r["case"], r["batch"]) == (row["part"], case, row["batch"])
            and "ms_per_step" in r
        ]
        ordinary = _time_of(row["layers"], others)
        if ordinary and row["part"] in _SECONDS:
            ratio = row["ms_per_step"] / ordinary
            name = f"{_name(row)}: step / ordinary step"
            yield Bar.of(name, "<=", _SECONDS[row["part"]], ratio)


def _time_of(layers: int, rows: Sequence[Row]) -> float | None:
    """Returns the milliseconds of a step of `layers` layers, or None if unknown.

    They come from a row with as many layers, or from a line through two other rows.
    """
    times = {row["layers"]: row["ms_per_step"] for row in rows}
    if layers in times:
        return times[layers]
    if len(times) != 2:
        return None
    (a, fast), (b, slow) = sorted(times.items())
    return fast + (slow - fast) / (b - a) * (layers - a)


def _predictions(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        if "peak_gib" not in row:
            continue
        error = abs(row["predicted_gib"] / row["peak_gib"] - 1)
        yield Bar.of(f"{_name(row)}: error of the estimate", "<=", _ERROR, error)


def _released(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["case"].endswith(RELEASED) and "ms_per_step" in r]


def _name(row: Row) -> str:
    gpus = "" if row["gpus"] == 1 else f"{row['gpus']} GPUs, "
    return f"{ModelSize.of_row(row).name}, {gpus}{row['case']}, batch {row['batch']}"


def table(rows: Sequence[Row]) -> Table:
    """Returns a table of the rows for a terminal."""
    columns = [
        Column("model", lambda row: ModelSize.of_row(row).name),
        Column("GPUs", "gpus", "{}"),
        Column("", "case", "{}"),
        Column("batch", "batch", "{}"),
        Column("ms", lambda row: row.get("error") or f"{row['ms_per_step']:.1f}"),
        Column("tokens/s a GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
        Column("peak, GiB", "peak_gib", "{:.1f}"),
        Column("device's", "device_peak_gib", "{:.1f}"),
        Column("predicted", "predicted_gib", "{:.1f}"),
    ]
    return tables.table("The optimizer's step inside backward", columns, rows)


if __name__ == "__main__":
    main()
