r"""Measures training steps of a Llama: tokens per second and use of memory.

    uv run python -m experiments.bench.e2e
    uv run python -m experiments.bench.e2e --cases coat coat_max --batch 2 8
    uv run python -m experiments.bench.e2e --layers 12 --gpus 1 2 --out two_gpus.json
    uv run python -m experiments.bench.e2e --preset llama3-8b --seq 8192 --gpus 4
    uv run python -m experiments.bench.e2e --preset llama3-8b --layers 8 --seq 32768 \
        --cases coat --batch 1 --gpus 2 --context 1 2 --out long_sequences.json

Parameters are BF16, sequences have 2048 tokens by default, and the tokens are random.
BF16 and `te` train with `optax.adamw` and float32 moments. `coat` and `coat_max` train
with `coat.fp8_adamw` in one pass (`coat.fused_update`). In cases named "released" the
optimizer steps inside the backward pass (`coat.value_and_update`). On several GPUs
parameters, moments and the batch are sharded over all of them. With `--context N` each
sequence is sharded over N GPUs, and `--batch` counts the sequences of these N GPUs
together. With `--expert N` the experts are sharded over N GPUs, and the GPUs send one
another tokens. Each case, batch size and number of GPUs runs in its own process. New
rows are added to the rows of the results file, so that cases can be measured one by
one. The file can hold rows of several models.
"""

import argparse
import dataclasses
import itertools
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from flax import nnx
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from coat_jax.models import llama
from experiments.bench.model_step import (
    BY_HAND,
    ONE_GPU,
    RELEASED,
    ModelSize,
    Spread,
    measure_alone,
    take_memory,
)
from experiments.common import results, tables
from experiments.common.layer_cases import CASES, PLAIN
from experiments.common.paper import TABLE_7, TABLE_7_COLUMNS
from experiments.common.programs import (
    new_parser,
    positive_float,
    positive_int,
    results_path,
    rows_to_join,
    usage_errors,
)
from experiments.common.results import (
    Bar,
    default_path,
    device,
    versions,
    write_results,
)
from experiments.common.tables import Column, grouped, with_paper
from experiments.common.tables import bars as bars_table

Row = dict[str, Any]
_DEFAULT = ("bf16", "bf16, products saved", "te", "coat", "coat_max")
_CASES = tuple(dict.fromkeys(("bf16", BY_HAND, *CASES)))
_CASES += tuple(f"{case}{RELEASED}" for case in CASES)
PLAIN_CASES = (*PLAIN, BY_HAND)
# The results files of several models on one to four GPUs, by kind of GPU.
BY_KIND = {"H100": "bench_e2e_h100", "H200": "bench_e2e_h200"}
# The cases in BF16. `coat` should take at most half of their memory.
_HALVED = ("bf16", "bf16, products saved")
# The targets for tokens per second of each of several H200s.
_OF_H200S = {
    ModelSize.of("llama2-7b", seq=4096): 20_500,
    ModelSize.of("llama3-8b", seq=8192): 16_000,
}
# The paper's table 7, on H100s with 80 GB. Batch 1 is on one GPU, where BF16 and TE run
# out of memory. The activations of batch 2 are on each of four GPUs.
_ALONE = dict(zip(TABLE_7_COLUMNS, TABLE_7["Llama-2-7B", 1, 1]["coat"], strict=True))
PAPER: dict[tuple[str, int], Row] = {
    ("coat", 1): {
        "paper_tokens_per_s": _ALONE["tokens/s"],
        "paper_optimizer_gib": _ALONE["optimizer"],
        "paper_activations_gib": _ALONE["activations"],
        "paper_peak_gib": _ALONE["peak"],
    }
}
for _recipe, _values in TABLE_7["Llama-2-7B", 4, 2].items():
    PAPER[_recipe, 2] = {"paper_activations_gib": _values[1]}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = parser()
    args = top.parse_args(argv)
    sizes = {name: getattr(args, name) for name in _sizes()}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    model = dataclasses.replace(ModelSize.of(args.preset), **sizes)
    config = model.config(CASES["bf16"])
    with usage_errors(top):
        nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    if llama.CONFIGS[args.preset].experts and model.preset != args.preset:
        top.error(f"{args.preset} has experts, and only --layers and --seq change it")
    # This process only reads the device's name for the results file. The memory is for
    # the processes that measure.
    take_memory(at_once=False)
    rows = rows_to_join(top, args.out)
    gpu = device()["name"]
    console = Console(width=130)
    splits = itertools.product(args.gpus, args.context, args.expert)
    spreads = [
        Spread(gpus=gpus, context=context, expert=expert, buffer=args.buffer)
        for gpus, context, expert in splits
    ]
    chosen = list(itertools.product(args.cases, spreads, args.batch))
    for case, spread, batch in tqdm(chosen, unit="case", disable=None):
        row = measured(case, model, batch, args.steps, spread, args.xla_flags)
        rows = with_ratios(joined(rows, row))
        write_results(args.out, rows=rows, bars=bars(rows, gpu))
        console.print(table([r for r in rows if _key(r) == _key(row)]))
    for rows_of_model in grouped(rows, ModelSize.of_row).values():
        console.print(table(rows_of_model))
    console.print(bars_table(bars(rows, gpu)))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = new_parser("experiments.bench.e2e", __doc__)
    add = top.add_argument
    add("--cases", nargs="+", choices=_CASES, default=_DEFAULT, metavar="CASE")
    add("--batch", type=positive_int, nargs="+", default=[1, 2, 4, 8], metavar="B")
    add("--gpus", type=positive_int, nargs="+", default=[1], metavar="N")
    add("--context", type=positive_int, nargs="+", default=[1], metavar="N")
    add("--expert", type=positive_int, nargs="+", default=[1], metavar="N")
    add(
        "--buffer",
        type=positive_float,
        help="limits the rows of experts; see llama.Experts",
    )
    add("--steps", type=positive_int, default=6, help="timed, after two that are not")
    presets = "the model's sizes (llama2-7b)"
    add("--preset", choices=llama.CONFIGS, default="llama2-7b", help=presets)
    for name in _sizes():
        add(
            f"--{name.replace('_', '-')}",
            type=positive_int,
            help="the preset's by default",
        )
    add("--xla-flags", default="", metavar="FLAGS", help="more of XLA_FLAGS")
    out = default_path("bench_e2e")
    add("--out", type=results_path, default=out, help="rows are added")
    return top


def _sizes() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(ModelSize))


def measured(
    case: str,
    model: ModelSize,
    batch: int,
    steps: int,
    spread: Spread = ONE_GPU,
    xla_flags: str = "",
    **options: Any,
) -> Row:
    """Measures a case in a new process, and returns its row.

    The row has an error if the process dies.

    Args:
      case: The name of the case.
      model: The sizes of the model.
      batch: The number of sequences of each GPU, or of the GPUs that share a sequence.
      steps: The number of timed steps.
      spread: The GPUs, and how they share sequences and experts.
      xla_flags: Additions to the environment variable XLA_FLAGS.
      **options: Further arguments of `measure_alone`.
    """
    spawn = multiprocessing.get_context("spawn")
    row: Row = {"case": case, "batch": batch} | dataclasses.asdict(model)
    row |= dataclasses.asdict(spread)
    row |= {"commit": versions()["commit"], "xla_flags": xla_flags}
    if model == ModelSize() and spread.gpus == 1:
        row |= PAPER.get((case, batch), {})
    with _environment(xla_flags), ProcessPoolExecutor(1, mp_context=spawn) as pool:
        try:
            sizes = case, model, batch, steps, spread
            row |= pool.submit(measure_alone, *sizes, **options).result()
        except BrokenProcessPool:
            row["error"] = "its process died"
    return row


@contextmanager
def _environment(xla_flags: str) -> Iterator[None]:
    """Appends to XLA_FLAGS in this context; new processes inherit the variable."""
    outer_flags = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{outer_flags or ''} {xla_flags}".strip()
    try:
        yield
    finally:
        del os.environ["XLA_FLAGS"]
        if outer_flags is not None:
            os.environ["XLA_FLAGS"] = outer_flags


def joined(rows: list[Row], row: Row) -> list[Row]:
    """Returns `rows` with `row` added, sorted by `_key`.

    A row of `rows` with the same key is a measurement of the same case, and `row`
    replaces it. The key is the model, the case, the number of GPUs, the batch, the
    sharding of sequences and experts, the buffer of experts, and the flags.
    """
    return sorted(results.joined(rows, row, _key), key=_key)


def _key(row: Row) -> tuple[Any, ...]:
    places = _CASES.index(row["case"]), _gpus(row), row["batch"]
    return (
        *dataclasses.astuple(ModelSize.of_row(row)),
        *places,
        *_splits(row),
        row.get("xla_flags", ""),
    )


def _splits(row: Row) -> tuple[int, int, float]:
    """Returns the numbers of GPUs that share a sequence and the experts, and a buffer.

    The buffer limits the rows of experts, see `Spread`; it is infinite in a row without
    one. Rows of earlier versions can lack all three entries.
    """
    return row.get("context", 1), row.get("expert", 1), row.get("buffer") or math.inf


def with_ratios(rows: list[Row]) -> list[Row]:
    """Returns the rows with their speeds relative to other rows of the same model.

    `ratio_to_bf16` is relative to the case `bf16` with the same batch size, flags and
    commit. GPUs of one kind differ by 2%, and rows of one commit were measured on one
    GPU. A row keeps its ratio if only `bf16` was measured again, at another commit.
    `ratio_to_one_gpu` is the row's tokens per second and GPU, relative to one GPU with
    the same case, batch size and commit, and with the fastest flags.
    `ratio_to_best_bf16` is relative to the fastest BF16 row on as many GPUs, with any
    batch size, flags and commit.
    """
    rates = {_identity(row): _rate(row) for row in rows if _ran(row)}
    best: dict[Any, float] = {}
    alone: dict[Any, float] = {}
    for row in filter(_ran, rows):
        if row["case"] in PLAIN_CASES:
            key = ModelSize.of_row(row), _gpus(row)
            best[key] = max(best.get(key, 0.0), _rate(row))
        if _gpus(row) == 1:
            key = _identity(row | {"xla_flags": ""})
            alone[key] = max(alone.get(key, 0.0), _rate(row))
    rows_with_ratios = []
    for row in rows:
        references = {
            "ratio_to_best_bf16": best.get((ModelSize.of_row(row), _gpus(row))),
            "ratio_to_bf16": rates.get(_identity(row | {"case": "bf16"})),
        }
        if _gpus(row) > 1:
            one = row | dataclasses.asdict(ONE_GPU) | {"xla_flags": ""}
            references["ratio_to_one_gpu"] = alone.get(_identity(one))
        ratios = {k: _rate(row) / v for k, v in references.items() if v and _ran(row)}
        rows_with_ratios.append(row | ratios)
    return rows_with_ratios


def _gpus(row: Row) -> int:
    """Returns the number of GPUs: 1 for rows of earlier versions, which lack it."""
    return row.get("gpus", 1)


def _identity(row: Row) -> tuple[Any, ...]:
    return row["commit"], *_key(row)


def _rate(row: Row) -> float:
    """Returns the tokens per second and GPU of a row."""
    return row["tokens_per_s"] / _gpus(row)


def _ran(row: Row) -> bool:
    return "tokens_per_s" in row


def _best(rows: list[Row], gpus: int, cases: Sequence[str]) -> float:
    """Returns the most tokens per second and GPU among `cases`, or 0.0 if none ran."""
    of_cases = [r for r in rows if r["case"] in cases and _gpus(r) == gpus and _ran(r)]
    return max(map(_rate, of_cases), default=0.0)


def bars(rows: list[Row], gpu: str = "") -> list[Bar]:
    """Returns the targets for the models and cases that were measured.

    `gpu` is the name of the GPUs: some targets are only for H200s.
    """
    all_targets = []
    # No target is for GPUs that split sequences or experts.
    whole = [row for row in rows if _splits(row)[:2] == (1, 1)]
    groups = grouped(whole, ModelSize.of_row)
    for model, rows_of_model in groups.items():
        targets = _bars_of_one(rows_of_model) if model == ModelSize() else []
        targets += _bars_of_two(rows_of_model)
        targets += _best_of_two(rows_of_model) if model == ModelSize() else []
        targets += _bars_of_more(
            rows_of_model, _OF_H200S.get(model) if "H200" in gpu else None
        )
        if len(groups) > 1:
            names = (f"{model.name}: {bar.name}" for bar in targets)
            targets = [b._replace(name=n) for b, n in zip(targets, names, strict=True)]
        all_targets += targets
    return all_targets


def _bars_of_one(rows: list[Row]) -> list[Bar]:
    """Returns the targets for memory and speed of the 7B model on one GPU."""
    targets = []
    rows = [row for row in rows if _gpus(row) == 1]
    at = {(row["case"], row["batch"]): row for row in rows if _ran(row)}
    if {("coat", 2), ("bf16", 2)} <= at.keys():
        coat, bf16 = at["coat", 2], at["bf16", 2]
        peak = coat["peak_gib"] / bf16["peak_gib"]
        speed = coat["tokens_per_s"] / bf16["tokens_per_s"]
        targets.append(Bar.of("coat, batch 2: peak / BF16's", "<=", 0.5, peak))
        targets.append(Bar.of("coat, batch 2: tokens/s / BF16's", ">=", 1.7, speed))
    best, plain = _best(rows, 1, ("coat",)), _best(rows, 1, PLAIN_CASES)
    if best:
        targets.append(Bar.of("coat, its best, tokens/s", ">=", 20_000, best))
    if best and plain:
        name = "coat, its best / BF16's best"
        targets.append(Bar.of(name, ">=", 1.65, best / plain))
    return targets


def _bars_of_two(rows: list[Row]) -> list[Bar]:
    """Returns the targets for the cases that were measured on two GPUs."""
    plain = {_key(row): row for row in rows if "peak_gib" in row}
    rows = [row for row in rows if _gpus(row) == 2 and _ran(row)]
    best = _best(rows, 2, PLAIN_CASES)
    coat = [row for row in rows if row["case"] == "coat"]
    targets = _beside_one(coat, "two GPUs", 0.94)
    if best and coat:
        name = "two GPUs, coat, its best / BF16's best"
        targets.append(Bar.of(name, ">=", 1.6, max(map(_rate, coat)) / best))
    for case in _HALVED:
        both = [row for row in coat if _key(row | {"case": case}) in plain]
        if both:
            row = max(both, key=lambda row: row["batch"])
            ratio = row["peak_gib"] / plain[_key(row | {"case": case})]["peak_gib"]
            name = f"two GPUs, coat, batch {row['batch']} a GPU: peak / that of {case}"
            targets.append(Bar.of(name, "<=", 0.5, ratio))
    return targets


def _beside_one(coat: list[Row], where: str, target: float) -> list[Bar]:
    """Returns the target for the speed of each of several GPUs, relative to one GPU.

    Args:
      coat: The rows of `coat` on several GPUs.
      where: The GPUs, as the target's name calls them.
      target: The least ratio.
    """
    paired = [row for row in coat if "ratio_to_one_gpu" in row]
    if not paired:
        return []
    row = max(paired, key=lambda row: row["ratio_to_one_gpu"])
    name = f"{where}, coat, batch {row['batch']} a GPU: tokens/s a GPU / one's"
    return [Bar.of(name, ">=", target, row["ratio_to_one_gpu"])]


def _best_of_two(rows: list[Row]) -> list[Bar]:
    """Returns the target for the fastest batch on two GPUs, relative to one GPU."""
    best = [_best(rows, gpus, ("coat",)) for gpus in (1, 2)]
    if not all(best):
        return []
    name = "two GPUs, coat, its best batch: tokens/s a GPU / one's with its best"
    return [Bar.of(name, ">=", 0.92, best[1] / best[0])]


def _bars_of_more(rows: list[Row], speed: int | None) -> list[Bar]:
    """Returns the targets for `coat` on the largest number of GPUs, if above two.

    `speed` is the target for the tokens per second of each GPU; None means no target.
    """
    most = max(map(_gpus, rows))
    coat = [r for r in rows if _ran(r) and (r["case"], _gpus(r)) == ("coat", most)]
    if most <= 2 or not coat:
        return []
    targets = _beside_one(coat, f"{most} GPUs", 0.95)
    if speed:
        name = f"{most} GPUs, coat, its best, tokens/s a GPU"
        targets.append(Bar.of(name, ">=", speed, max(map(_rate, coat))))
    return targets


def table(rows: list[Row]) -> Table:
    """Returns a table of one model's rows, with the paper's figures below ours."""
    tokens = with_paper("tokens/s", "tokens_per_s", ",.0f", "g")
    columns = [
        Column("", _case),
        Column("batch", _batch),
        Column("tokens/s", lambda row: row.get("error") or tokens.cell(row)),
        with_paper("x bf16", "ratio_to_bf16", ".2f", "g"),
        with_paper("x its best", "ratio_to_best_bf16", ".2f", "g"),
        with_paper("optimizer", "optimizer_gib", ".1f", "g"),
        with_paper("activations", "activations_gib", ".1f", "g"),
        with_paper("peak, GiB", "peak_gib", ".1f", "g"),
        Column("device's", "device_peak_gib", "{:.1f}"),
        Column("compiled in s", "compile_s", "{:.0f}"),
    ]
    if any("ratio_to_one_gpu" in row for row in rows):
        columns.insert(5, Column("x one GPU", "ratio_to_one_gpu", "{:.2f}"))
    name = ModelSize.of_row(rows[0]).name
    return tables.table(f"Training steps of {name} (the paper's below)", columns, rows)


def _case(row: Row) -> str:
    return row["case"] + (f"\n{row['xla_flags']}" if row.get("xla_flags") else "")


def _batch(row: Row) -> str:
    gpus, (context, expert, _) = _gpus(row), _splits(row)
    if gpus == 1:
        return f"{row['batch']}"
    of_each = f", each on {context}" if context > 1 else ""
    of_each += f", experts on {expert}" if expert > 1 else ""
    return f"{gpus // context} x {row['batch']}{of_each}"


if __name__ == "__main__":
    main()
