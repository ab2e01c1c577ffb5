"""Compares predicted memory with the peaks that were measured on GPUs.

    uv run python -m experiments.estimate.measured

The peaks are those of `experiments.bench.e2e` and `experiments.pretrain`, in their
results files. A device's peak includes what the program did before its steps. Where it
is missing, the peak of the compiled step takes its place. Nothing runs on a GPU here.
"""

import dataclasses
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import coat_jax as coat
from coat_jax.models.loss import chunk_of_logits
from coat_jax.models.memory import GIB, MemoryEstimate, default_optimizer, estimate_step
from experiments.bench.model_step import Model, loss_function
from experiments.common.layer_cases import CASES
from experiments.common.programs import new_parser
from experiments.common.results import Bar, default_path, load, write_results
from experiments.common.tables import bars as bars_table
from experiments.common.tables import new_table
from experiments.estimate.__main__ import record
from experiments.pretrain.settings import PRESETS, model_config
from experiments.pretrain.text import BYTES_VOCAB_SIZE

Row = dict[str, Any]
_TARGET = 0.05


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv`, this process's by default."""
    top = new_parser("experiments.estimate.measured", __doc__)
    top.add_argument("--out", type=Path, default=default_path("estimate"))
    args = top.parse_args(argv)
    rows = [*end_to_end(), *pretraining()]
    write_results(args.out, rows=rows, bars=bars(rows))
    console = Console(width=130)
    console.print(table(rows))
    console.print(bars_table(bars(rows)))


def end_to_end(cases: Container[str] = CASES) -> Iterator[Row]:
    """Yields the rows of `bench_e2e` of some cases, each with its prediction."""
    for row in load("bench_e2e")["rows"]:
        if "peak_gib" not in row or row["case"] not in cases:
            continue
        sizes = {field.name: row[field.name] for field in dataclasses.fields(Model)}
        names = {"of": "bench_e2e", "case": row["case"], "batch": row["batch"]}
        yield names | compared(
            estimate(row["case"], Model(**sizes), row["batch"]),
            step=row["peak_gib"],
            device=row.get("device_peak_gib"),
            saved=row["activations_gib"],
            optimizer=row["optimizer_gib"],
        )


def estimate(case: str, model: Model, batch: int) -> MemoryEstimate:
    """Returns the prediction for a case's step on one GPU."""
    loss, state = loss_function(case, model)
    tokens = jax.ShapeDtypeStruct((batch, model.seq + 1), jnp.int32)
    return estimate_step(
        loss,
        *state,
        tokens,
        optimizer=default_optimizer(CASES[case].recipe),
        logits=chunk_of_logits(batch * model.seq, model.vocab),
    )


def pretraining() -> Iterator[Row]:
    """Yields the recipes of `pretrain_124m`, each with its prediction."""
    results = load("pretrain", "pretrain_124m")
    settings = PRESETS[results["preset"]].settings
    sizes = {"batch": settings.batch_size, "sequence": settings.seq_len}
    for row in results["rows"]:
        config = model_config(settings, row["recipe"], BYTES_VOCAB_SIZE)
        device = row["device_peak_bytes"]
        names = {"of": "pretrain_124m", "case": row["recipe"]}
        names |= {"batch": settings.batch_size}
        yield names | compared(
            coat.estimate_memory(config, **sizes),
            step=row["step_bytes"] / GIB,
            device=device and device / GIB,
            saved=row["saved_activation_bytes"] / GIB,
            optimizer=row["optimizer_bytes_per_param"] * row["parameters"] / GIB,
        )


def compared(
    found: MemoryEstimate,
    *,
    step: float,
    device: float | None,
    saved: float,
    optimizer: float,
) -> Row:
    """Returns a prediction beside the measured GiB, and its relative error.

    Args:
      found: The prediction.
      step: The peak of the compiled step.
      device: The device's peak, if it was measured.
      saved: The saved activations, as the measured program counted them.
      optimizer: The optimizer's state in the measured program.
    """
    predicted = record(found)
    measured = step if device is None else device
    return predicted | {
        "step_peak_gib": step,
        "device_peak_gib": device,
        "error_percent": 100 * (predicted["peak_gib"] / measured - 1),
        "step_error_percent": 100 * (predicted["peak_gib"] / step - 1),
        "measured_saved_gib": saved,
        "measured_optimizer_gib": optimizer,
    }


def bars(rows: list[Row]) -> list[Bar]:
    """Returns a target for the largest error of each experiment's rows."""
    found = []
    for name in dict.fromkeys(row["of"] for row in rows):
        errors = [abs(r["error_percent"]) / 100 for r in rows if r["of"] == name]
        title = f"{name}, largest error of a peak"
        found.append(Bar.of(title, "<=", _TARGET, max(errors)))
    return found


def table(rows: list[Row]) -> Table:
    """Returns a table of the predicted and the measured GiB."""
    columns = {
        "batch": ("batch", "d"),
        "predicted": ("peak_gib", ".2f"),
        "compiled step": ("step_peak_gib", ".2f"),
        "device": ("device_peak_gib", ".2f"),
        "error, %": ("error_percent", "+.2f"),
        "saved, predicted": ("all_saved_gib", ".3f"),
        "measured": ("measured_saved_gib", ".3f"),
    }
    found = new_table("Peaks in GiB", "", *columns)
    for row in rows:
        cells = []
        for key, spec in columns.values():
            cells.append("-" if row[key] is None else format(row[key], spec))
        found.add_row(f"{row['of']}: {row['case']}", *cells)
    return found


if __name__ == "__main__":
    main()
