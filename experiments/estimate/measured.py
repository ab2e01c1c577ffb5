"""Compares predicted memory with the peaks that were measured on GPUs.

    uv run python -m experiments.estimate.measured

The peaks come from the results files of `experiments.bench.e2e` and
`experiments.pretrain`. A device's peak includes the memory that the program used before
its steps. If a device's peak is missing, the peak of the compiled step takes its place.
This program needs no GPU.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import coat_jax as coat
from coat_jax.memory.kinds import GIB, MemoryEstimate
from coat_jax.models import llama
from experiments.bench.e2e import BY_KIND
from experiments.bench.model_step import ModelSize
from experiments.bench.predictions import estimate
from experiments.common import tables
from experiments.common.layer_cases import CASES
from experiments.common.programs import new_parser, results_path
from experiments.common.results import Bar, default_path, load, write_results
from experiments.common.seeds import over_seeds
from experiments.common.tables import Column
from experiments.common.tables import bars as bars_table
from experiments.estimate.__main__ import record

Row = dict[str, Any]
# The results files of pretraining, with a row for each recipe.
PRETRAINED = ("pretrain_124m_compared", "pretrain_300m_compared")
# The sizes of a step in both files, and the bytes' vocabulary, padded to whole tiles.
PRETRAINED_SIZES = {"batch": 32, "sequence": 1024}
BYTES_VOCAB_SIZE = 384
_TARGET = 0.05


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = new_parser("experiments.estimate.measured", __doc__)
    top.add_argument("--out", type=results_path, default=default_path("estimate"))
    args = top.parse_args(argv)
    steps = (end_to_end(row) for row in measured_steps())
    rows = list(tqdm(steps, unit="row", disable=None))
    rows += [row for name in PRETRAINED for row in pretraining(name)]
    write_results(args.out, rows=rows, bars=bars(rows))
    console = Console(width=130)
    console.print(table(rows))
    console.print(bars_table(bars(rows)))


def measured_steps() -> list[Row]:
    """Returns the rows with a peak in the results files of `experiments.bench.e2e`.

    Only the cases in `CASES` can be predicted and are returned.
    """
    steps = []
    for name in ("bench_e2e", *BY_KIND.values()):
        for row in load("bench_e2e", name)["rows"]:
            if row["case"] in CASES and "peak_gib" in row:
                steps.append({"of": name} | row)
    return steps


def end_to_end(row: Row) -> Row:
    """Returns a row that compares a measured step of `bench.e2e` and its prediction."""
    model = ModelSize.of_row(row)
    gpus = row.get("gpus", 1)
    names = {"of": row["of"], "model": model.name, "case": row["case"]}
    names |= {"gpus": gpus, "batch": row["batch"]}
    return names | compared(
        estimate(row["case"], model, row["batch"], gpus),
        step=row["peak_gib"],
        device=row.get("device_peak_gib"),
        saved=row["activations_gib"],
        optimizer=row["optimizer_gib"],
    )


def pretraining(name: str) -> Iterator[Row]:
    """Yields a row with a prediction for each recipe in the pretraining file `name`."""
    results = load("pretrain", name)
    model = llama.CONFIGS[results["preset"]]
    for recipe, row in over_seeds(results["rows"]).items():
        changes = {"recipe": recipe, "vocab_size": BYTES_VOCAB_SIZE}
        config = dataclasses.replace(model, **changes)
        device = row["device_peak_bytes"]
        names = {"of": name, "model": results["preset"], "case": recipe}
        names |= {"gpus": 1, "batch": PRETRAINED_SIZES["batch"]}
        yield names | compared(
            coat.estimate_memory(config, **PRETRAINED_SIZES),
            step=row["step_bytes"] / GIB,
            device=device and device / GIB,
            saved=row["saved_activation_bytes"] / GIB,
            optimizer=row["optimizer_bytes_per_param"] * row["parameters"] / GIB,
        )


def compared(
    prediction: MemoryEstimate,
    *,
    step: float,
    device: float | None,
    saved: float,
    optimizer: float,
) -> Row:
    """Returns a row with a prediction, the measured GiB, and the relative errors.

    Args:
      prediction: The prediction.
      step: The peak of the compiled step.
      device: The device's peak, if it was measured.
      saved: The saved activations, as the measured program counted them.
      optimizer: The optimizer's state in the measured program.
    """
    predicted = record(prediction)
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
    targets = []
    for name in dict.fromkeys(row["of"] for row in rows):
        errors = [abs(r["error_percent"]) / 100 for r in rows if r["of"] == name]
        title = f"{name}, largest error of a peak"
        targets.append(Bar.of(title, "<=", _TARGET, max(errors)))
    return targets


def table(rows: list[Row]) -> Table:
    """Returns a table of the predicted and the measured GiB."""
    columns = (
        Column("", ("model", "case"), "{}: {}"),
        Column("GPUs", "gpus"),
        Column("batch", "batch"),
        Column("predicted", "peak_gib", "{:.2f}"),
        Column("compiled step", "step_peak_gib", "{:.2f}"),
        Column("device", "device_peak_gib", "{:.2f}"),
        Column("error, %", "error_percent", "{:+.2f}"),
        Column("saved, predicted", "all_saved_gib", "{:.3f}"),
        Column("measured", "measured_saved_gib", "{:.3f}"),
    )
    return tables.table("Peaks in GiB", columns, rows)


if __name__ == "__main__":
    main()
