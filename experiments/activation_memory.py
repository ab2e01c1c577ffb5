"""Saved activations of one Llama layer by recipe, beside the paper's table 2.

Traces the backward pass of two layers under `scan`, computes nothing, and counts what
is saved for each in U = batch x sequence x hidden x 2 bytes. On a GPU that is with
flash attention, elsewhere with attention recomputed from queries, keys and values.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

import coat_jax as coat
from coat_jax.blocks import RECIPES, RecipeName
from coat_jax.memory import ResidualReport
from coat_jax.models import llama
from experiments.results import Bar, write_results

# Table 2 of the paper; it has no counterpart to `coat_max`.
PAPER_UNITS: dict[RecipeName, float] = {"bf16": 22.66, "te": 18.33, "coat": 13.33}
TARGET_UNITS: dict[RecipeName, float] = {"coat": 8.3, "coat_max": 6.5}
_LAYERS = 2


def saved_by_layers(recipe: RecipeName, shape: argparse.Namespace) -> ResidualReport:
    """What two layers under `scan` save, with parameters in BF16."""
    config = llama.LlamaConfig(
        vocab_size=1,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=_LAYERS,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads or shape.heads,
        param_dtype=jnp.bfloat16,
        recipe=recipe,
    )
    model = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    graph, layers = nnx.split(model.layers)

    def forward(layers, x):
        return llama.apply_layers(nnx.merge(graph, layers), x)

    x = jax.ShapeDtypeStruct((shape.batch, shape.seq, shape.hidden), jnp.bfloat16)
    return coat.residual_report(forward, layers, x)


def main() -> None:
    """Prints the table and writes the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("hidden", 4096),
        ("intermediate", 11_008),
        ("heads", 32),
        ("kv-heads", None),
        ("batch", 4),
        ("seq", 2048),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--details", action="store_true", help="list every array")
    parser.add_argument(
        "--out", type=Path, default=Path("experiments/results/activation_memory.json")
    )
    args = parser.parse_args()
    unit = args.batch * args.seq * args.hidden * 2
    console = Console()
    table = Table("recipe", "MiB a layer", "U", "U in the paper")
    rows, bars = [], []
    for recipe in RECIPES:
        report = saved_by_layers(recipe, args)
        nbytes = report.nbytes / _LAYERS
        units, paper = nbytes / unit, PAPER_UNITS.get(recipe)
        target = TARGET_UNITS.get(recipe)
        row = {"recipe": recipe, "mib": nbytes / 2**20, "units": units}
        rows.append(row | {"paper_units": paper, "target_units": target})
        if target:
            bars.append(Bar(f"{recipe}, U", f"<= {target}", units, units <= target))
        table.add_row(
            recipe, f"{row['mib']:.1f}", f"{units:.2f}", f"{paper}" if paper else "-"
        )
        if args.details:
            console.print(f"\n{recipe}, {_LAYERS} layers\n{report}")
    console.print(table)
    shape = {k: v for k, v in vars(args).items() if k not in ("details", "out")}
    write_results(args.out, rows=rows, bars=bars, shape=shape)


if __name__ == "__main__":
    main()
