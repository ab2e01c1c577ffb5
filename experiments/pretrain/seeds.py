"""Joins runs of `experiments.pretrain`: the recipes' losses over several seeds.

    uv run python -m experiments.pretrain.seeds runs/*/summary.json

Each training is compared with the `bf16` training of the same seed. Both share the
initialization, the order of the data and the validation batches. The seed and the
scaling of a run are read from the command line that it recorded. The files may
themselves be results of this program.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.common.programs import new_parser
from experiments.common.results import Bar, default_path, read_results, write_json
from experiments.optimizer.curve_summary import mean_and_error
from experiments.pretrain import arguments
from experiments.pretrain.settings import Settings

Row = dict[str, Any]
_BETWEEN = " && "  # Separator of the commands of a joined file.
# Largest percentage by which the mean loss may exceed that of BF16.
_TARGETS = {"coat": 0.5, "coat_max": 1.0}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv`, this process's by default."""
    top = new_parser("experiments.pretrain.seeds", __doc__)
    out = default_path("pretrain", "pretrain_124m_seeds")
    top.add_argument("runs", nargs="+", type=Path, metavar="JSON")
    top.add_argument("--out", type=Path, default=out)
    args = top.parse_args(argv)
    try:
        joined = join([read_results(path) for path in args.runs])
    except (OSError, ValueError) as error:
        top.error(str(error))
    write_json(args.out, joined)
    Console().print(table(joined["summary"]))


def join(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a results file of all runs, with the newest's date, device and versions.

    Raises:
      ValueError: If a seed has no `bf16` training, or has one training twice.
    """
    rows = [row for run in runs for row in trainings(run)]
    keys = [(row["recipe"], row["scaling"], row["seed"]) for row in rows]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"each training comes once, but {twice[0]} more often")
    plain = {row["seed"]: row["val_loss"] for row in rows if row["recipe"] == "bf16"}
    if lacking := {row["seed"] for row in rows} - plain.keys():
        raise ValueError(f"each seed needs a bf16 training, {min(lacking)} has none")
    for row in rows:
        row["val_gap_percent"] = 100 * (row["val_loss"] / plain[row["seed"]] - 1)
    summary = summarize(rows)
    newest = max(runs, key=lambda run: run["date"])
    head = {key: newest[key] for key in ("date", "device", "versions", "preset")}
    commands = _BETWEEN.join(run["command"] for run in runs)
    bars = [bar._asdict() for bar in _bars(summary)]
    return {"command": commands, **head, "rows": rows, "bars": bars, "summary": summary}


def trainings(run: dict[str, Any]) -> Iterator[Row]:
    """Yields one row for each recipe of a run, or each training of a joined file."""
    settings = [_settings(command) for command in run["command"].split(_BETWEEN)]
    of_recipe = {recipe: each for each in settings for recipe in each.recipes}
    for row in run["rows"]:
        own = of_recipe[row["recipe"]]
        yield {
            "recipe": row["recipe"],
            "scaling": own.scaling,
            "seed": own.seed,
            "steps": run["steps"],
            "commit": run["versions"]["commit"],
            **{key: row[key] for key in ("train_loss", "val_loss", "tokens_per_s")},
        }


def _settings(command: str) -> Settings:
    """Returns the settings that a command line of `experiments.pretrain` gives."""
    words = shlex.split(command)
    own = words[words.index("experiments.pretrain") + 1 :]
    given = vars(arguments.parser().parse_args(own))
    # Other flags say where the run's folder is, and on which devices it ran.
    names = {field.name for field in dataclasses.fields(Settings)}
    return arguments.settings({k: v for k, v in given.items() if k in names})


def summarize(rows: Iterable[Row]) -> list[Row]:
    """Returns each recipe and scaling's mean gap to BF16 and its standard error."""
    gaps: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["recipe"] != "bf16":
            own = gaps.setdefault((row["recipe"], row["scaling"]), [])
            own.append(row["val_gap_percent"])
    found = []
    for (recipe, scaling), percent in sorted(gaps.items()):
        mean, error = mean_and_error(np.array(percent))
        found.append(
            {
                "recipe": recipe,
                "scaling": scaling,
                "seeds": len(percent),
                "val_gap_percent": float(mean),
                "standard_error_percent": None if error is None else float(error),
            }
        )
    return found


def _bars(summary: Iterable[Row]) -> Iterator[Bar]:
    for row in summary:
        if row["scaling"] == "just_in_time" and row["recipe"] in _TARGETS:
            name = f"{row['recipe']}, mean gap of {row['seeds']} seeds, %"
            target = _TARGETS[row["recipe"]]
            yield Bar.of(name, "<=", target, row["val_gap_percent"])


def table(summary: Iterable[Row]) -> Table:
    """Returns the summary as a table for a terminal."""
    found = Table(
        title="Validation loss, over BF16's of the same seed",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("recipe", "scaling"):
        found.add_column(name)
    for name in ("seeds", "gap, %", "standard error"):
        found.add_column(name, justify="right")
    for row in summary:
        error = row["standard_error_percent"]
        found.add_row(
            row["recipe"],
            row["scaling"],
            str(row["seeds"]),
            f"{row['val_gap_percent']:+.2f}",
            "-" if error is None else f"{error:.2f}",
        )
    return found


if __name__ == "__main__":
    main()
