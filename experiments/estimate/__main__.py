"""Predicts the GiB that a training step takes on each GPU, by kind of memory.

    uv run python -m experiments.estimate
    uv run python -m experiments.estimate --preset llama2-13b --mesh fsdp=2 --batch 8
    uv run python -m experiments.estimate --largest-batch --gpu-memory 80

The program needs no GPU. The table has one column for each recipe, with the kinds of
memory at the peak of the step. `--largest-batch` finds the largest batch of a step that
fits into `--gpu-memory` GiB of each GPU. The bars in the figure show the share of each
kind. A .json file next to the figure holds the rows of the table.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.table import Table

import coat_jax as coat
from coat_jax.layers.recipes import RecipeName, Scaling
from coat_jax.memory.kinds import GIB, MemoryEstimate
from coat_jax.models import llama
from experiments.common import meshes
from experiments.common.memory_figure import KINDS, draw
from experiments.common.programs import new_parser, one_line, results_path
from experiments.common.results import write_results
from experiments.common.tables import new_table

_FLOW = {"coat", "coat_max"}  # The recipes with delayed scaling.
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = parser()
    args = top.parse_args(argv)
    if args.scaling == "delayed" and not _FLOW & {*args.recipes}:
        top.error(
            f"--scaling delayed needs coat or coat_max, got {' '.join(args.recipes)}"
        )
    try:
        rows = [row_of(args, recipe) for recipe in args.recipes]
    except ValueError as error:
        top.error(one_line(error))
    console = Console(width=110)
    console.print(title(rows[0]))
    console.print(table(rows))
    write_results(args.out, rows=rows)
    figure = args.out.with_suffix(".png")
    draw(rows).savefig(figure)
    print(f"{args.out} and {figure.name} hold these figures", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = new_parser("experiments.estimate", __doc__)
    add = top.add_argument
    add("--preset", choices=llama.CONFIGS, default="llama2-7b")
    add("--layers", type=int, help="instead of the preset's number of layers")
    add("--vocab-size", type=int, help="instead of the preset's vocabulary")
    recipes = get_args(RecipeName)
    add("--recipes", nargs="+", choices=recipes, default=recipes, metavar="RECIPE")
    add("--scaling", choices=get_args(Scaling), default="just_in_time")
    add("--param-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--batch", type=int, help="sequences of a step on all GPUs; one for each GPU")
    add("--sequence", type=int, default=2048, help="tokens of a sequence")
    add("--mesh", default="", help="such as data=2,fsdp=4,tensor=2")
    add("--largest-batch", action="store_true", help="find the most that fits")
    add("--gpu-memory", type=float, default=80.0, help="GiB of a GPU")
    add("--memory-share", type=float, default=0.95, help="the share that JAX may take")
    out = Path("runs/estimate.json")
    add("--out", type=results_path, default=out, help="a figure goes next to it")
    return top


def config_of(args: argparse.Namespace, recipe: RecipeName) -> llama.LlamaConfig:
    """Returns the configuration of a model for command-line arguments and a recipe."""
    changes = {"num_layers": args.layers, "vocab_size": args.vocab_size}
    return dataclasses.replace(
        llama.CONFIGS[args.preset],
        **{name: value for name, value in changes.items() if value is not None},
        recipe=recipe,
        scaling=args.scaling if recipe in _FLOW else "just_in_time",
        param_dtype=jnp.dtype(args.param_dtype),
    )


def row_of(args: argparse.Namespace, recipe: RecipeName) -> Row:
    """Returns the row of a recipe: its sizes, and its predicted memory.

    Raises:
      ValueError: If the sizes of the model, the batch and the mesh do not fit, or the
        memory or its share is out of range.
    """
    if not 0 < args.memory_share <= 1:
        raise ValueError(f"--memory-share is from 0 to 1, got {args.memory_share}")
    if not 0 < args.gpu_memory < math.inf:
        raise ValueError(f"--gpu-memory must be positive, got {args.gpu_memory}")
    config = config_of(args, recipe)
    sizes = meshes.parse(args.mesh) if args.mesh else {}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes)) if sizes else None
    options = {"sequence": args.sequence, "mesh": mesh}
    gpus = math.prod(sizes.values())
    batch = gpus if args.batch is None else args.batch
    row: Row = {"recipe": recipe, "preset": args.preset, "gpus": gpus, "batch": batch}
    row |= {"sequence": args.sequence, "mesh": args.mesh}
    row |= record(coat.estimate_memory(config, batch=batch, **options))
    available = args.gpu_memory * args.memory_share
    if args.largest_batch:
        row["largest_batch"] = coat.largest_batch(
            config, memory_gib=available, **options
        )
    return row | {"fits": row["peak_gib"] <= available, "available_gib": available}


def record(estimate: MemoryEstimate) -> Row:
    """Returns entries of a row: the GiB of the peak, its kinds, and saved arrays."""
    peak = dataclasses.asdict(estimate.peak)
    kinds = {f"{kind}_gib": peak[kind] / GIB for kind in KINDS}
    kinds |= {"peak_gib": estimate.peak_bytes / GIB, "peak_phase": estimate.peak_phase}
    return kinds | {"all_saved_gib": estimate.saved_bytes / GIB}


def title(row: Row) -> str:
    """Returns a title with the preset, the batch and the mesh or GPU."""
    where = row["mesh"] or "one GPU"
    return f"{row['preset']}, {row['batch']} x {row['sequence']} tokens on {where}"


def table(rows: list[Row]) -> Table:
    """Returns a table of kinds of memory, with a column for each row's recipe."""
    result = new_table("GiB a GPU at the peak", "", *(row["recipe"] for row in rows))
    for kind, name in KINDS.items():
        result.add_row(name, *(f"{row[f'{kind}_gib']:.2f}" for row in rows))
    result.add_section()
    result.add_row("peak", *(f"{row['peak_gib']:.2f}" for row in rows))
    result.add_row("in the", *(row["peak_phase"] for row in rows))
    available = f"{rows[0]['available_gib']:.0f} GiB"
    fits = ("yes" if row["fits"] else "NO" for row in rows)
    result.add_row(f"fits in {available}", *fits)
    if "largest_batch" in rows[0]:
        most = (str(row["largest_batch"] or "none") for row in rows)
        result.add_row("largest batch", *most)
    return result


if __name__ == "__main__":
    main()
