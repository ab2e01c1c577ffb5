"""Saved activations of one Llama layer by operation, beside the paper's table 2.

    uv run python -m experiments.activation_memory

traces the backward pass of two layers under `scan`, computes nothing, and counts what
is saved for each in U = batch x sequence x hidden x 2 bytes: for every recipe, and for
BF16 under the usual policies of `jax.checkpoint` and under `fp8_remat`. On a GPU that
is with flash attention, elsewhere with attention recomputed from queries, keys and
values.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from rich.console import Console

import coat_jax as coat
from coat_jax.blocks import RecipeName
from coat_jax.memory import ResidualReport
from coat_jax.models import llama
from experiments import activation_operations as operations
from experiments.results import Bar, write_results

Row = dict[str, Any]
_policies = jax.checkpoint_policies
# A recipe, and what a layer is wrapped in.
CASES: dict[str, tuple[RecipeName, Callable]] = {
    "bf16": ("bf16", lambda layer: layer),
    "bf16, products saved": (
        "bf16",
        partial(jax.checkpoint, policy=_policies.dots_with_no_batch_dims_saveable),
    ),
    "bf16, nothing saved": ("bf16", jax.checkpoint),
    "bf16, fp8_remat": ("bf16", coat.fp8_remat),
    "te": ("te", lambda layer: layer),
    "coat": ("coat", lambda layer: layer),
    "coat_max": ("coat_max", lambda layer: layer),
}
TARGET_UNITS = {"coat": 8.3, "coat_max": 6.5}
_LAYERS = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv`, this process's by default."""
    args = parser().parse_args(argv)
    console = Console(width=110)
    if args.details:
        for case in CASES:
            console.print(f"\n{case}, {_LAYERS} layers\n{saved_by_layers(case, args)}")
    rows = case_rows(args)
    console.print(operations.table(rows))
    operations.draw(rows).savefig(args.out.with_suffix(".png"))
    shape = {k: v for k, v in vars(args).items() if k not in ("details", "out")}
    write_results(args.out, rows=rows, bars=bars(rows), shape=shape)


def parser() -> argparse.ArgumentParser:
    """The command line: a layer's shape, by default Llama-2-7B's."""
    top = argparse.ArgumentParser(
        prog="python -m experiments.activation_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default in (
        ("hidden", 4096),
        ("intermediate", 11_008),
        ("heads", 32),
        ("kv-heads", None),
        ("batch", 4),
        ("seq", 2048),
    ):
        top.add_argument(f"--{name}", type=int, default=default)
    top.add_argument("--details", action="store_true", help="list every array")
    out = Path("experiments/results/activation_memory.json")
    top.add_argument("--out", type=Path, default=out, help="a figure goes beside it")
    return top


def saved_by_layers(case: str, shape: argparse.Namespace) -> ResidualReport:
    """What two layers under `scan` save, with parameters in BF16."""
    recipe, wrap = CASES[case]
    config = config_of(shape, recipe)
    model = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    graph, layers = nnx.split(model.layers)

    def forward(layers, x):
        layer = wrap(lambda params, x: nnx.merge(graph, params)(x))
        return lax.scan(lambda x, params: (layer(params, x), None), x, layers)[0]

    x = jax.ShapeDtypeStruct((shape.batch, shape.seq, shape.hidden), jnp.bfloat16)
    return coat.residual_report(forward, layers, x)


def config_of(shape: argparse.Namespace, recipe: RecipeName) -> llama.LlamaConfig:
    """A model of layers of this shape, and hardly anything else."""
    return llama.LlamaConfig(
        vocab_size=1,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=_LAYERS,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads or shape.heads,
        param_dtype=jnp.bfloat16,
        recipe=recipe,
    )


def case_rows(shape: argparse.Namespace) -> list[Row]:
    """What each of `CASES` saves of a layer: all of it, and by operation."""
    unit = shape.batch * shape.seq * shape.hidden * 2
    rows = []
    for case, (recipe, _) in CASES.items():
        report = saved_by_layers(case, shape)
        by_operation = operations.split(report, config_of(shape, recipe))
        units = {
            f"{name}_units": nbytes / _LAYERS / unit
            for name, nbytes in by_operation.items()
        }
        nbytes = report.nbytes / _LAYERS
        paper = operations.PAPER.get(case, {}).get("total")
        row = {"recipe": case, "mib": nbytes / 2**20, "units": nbytes / unit}
        row |= {"paper_units": paper, "target_units": TARGET_UNITS.get(case)}
        rows.append(row | units)
    return rows


def bars(rows: list[Row]) -> list[Bar]:
    """What the FP8 flow may save at most, and `fp8_remat` of what it is put around."""
    units = {row["recipe"]: row["units"] for row in rows}
    found = [
        Bar.of(f"{case}, U", "<=", target, units[case])
        for case, target in TARGET_UNITS.items()
    ]
    ratio = units["bf16"] / units["bf16, fp8_remat"]
    return [*found, Bar.of("bf16 / bf16, fp8_remat", ">=", 1.8, ratio)]


if __name__ == "__main__":
    main()
