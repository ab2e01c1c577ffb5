"""Lists the largest batch of each model that fits on one GPU, without a GPU.

    uv run python -m experiments.estimate.cards

The GPUs have 80 and 141 GB, parameters are BF16, and moments are FP8. Batches are
listed for two kinds of steps: ordinary steps, which hold the gradients of the full
model, and steps with the optimizer inside the backward pass.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from tqdm import tqdm

import coat_jax as coat
from coat_jax.memory.kinds import GIB
from coat_jax.models import llama
from experiments.common.programs import new_parser, results_path
from experiments.common.results import default_path, write_results
from experiments.common.tables import Column, table

Row = dict[str, Any]
# Models and the lengths of their sequences.
_MODELS = (
    ("llama2-7b", 2048),
    ("llama3-8b", 8192),
    ("llama2-13b", 2048),
    ("llama-30b", 2048),
)
_RECIPES = ("coat", "coat_max")
# The GiB that JAX may use on an H100 and on an H200: their memory times a share.
GPUS = {"80 GB": 79.1 * 0.95, "141 GB": 139.8 * 0.97}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    args = parser().parse_args(argv)
    cases = list(itertools.product(_MODELS, _RECIPES, (False, True)))
    rows = [row_of(*case) for case in tqdm(cases, unit="case", disable=None)]
    write_results(args.out, rows=rows)
    Console(width=110).print(table("The largest batch on one GPU", COLUMNS, rows))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = new_parser("experiments.estimate.cards", __doc__)
    out = default_path("release", "cards")
    top.add_argument("--out", type=results_path, default=out)
    return top


def row_of(model: tuple[str, int], recipe: str, released: bool) -> Row:
    """Returns a row with a model's largest batch on each GPU, and its peak at batch 1.

    Args:
      model: The preset, and the length of sequences.
      recipe: The recipe.
      released: Whether the optimizer steps inside the backward pass.
    """
    preset, sequence = model
    config = llama.CONFIGS[preset]
    config = dataclasses.replace(config, recipe=recipe, param_dtype=jnp.bfloat16)
    options = {"sequence": sequence, "released": released}
    row: Row = {"model": preset, "sequence": sequence, "recipe": recipe}
    row["released"] = released
    one = coat.estimate_memory(config, batch=1, **options)
    row["batch_1_gib"] = one.peak_bytes / GIB
    fits = functools.partial(coat.largest_batch, config, **options)
    return row | {f"batch_{gpu}": fits(memory_gib=gib) for gpu, gib in GPUS.items()}


COLUMNS = (
    Column("Model", "model"),
    Column("sequence", "sequence", "{:,}"),
    Column("recipe", "recipe", "`{}`"),
    Column("gradients", lambda row: "of a layer" if row["released"] else "of all"),
    Column("GiB at batch 1", "batch_1_gib", "{:.1f}"),
    *(
        Column(f"batch on {gpu}", lambda row, gpu=gpu: row[f"batch_{gpu}"] or "-")
        for gpu in GPUS
    ),
)


if __name__ == "__main__":
    main()
