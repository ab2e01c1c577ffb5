"""Counts a Llama layer's saved activations by operation, next to the paper's table 2.

    uv run python -m experiments.activations.memory

The command traces the backward pass of two layers under `scan` and computes nothing. It
counts the bytes that one layer saves in units of U = batch x sequence x hidden x 2
bytes. The cases are every recipe, and BF16 under the usual policies of
`jax.checkpoint` and under `fp8_remat`. On a GPU attention is flash attention; elsewhere
attention is recomputed from queries, keys and values.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from rich.console import Console

import coat_jax as coat
from coat_jax.models import llama
from coat_jax.remat.report import ResidualReport
from experiments.activations import operations
from experiments.common.layer_cases import CASES, TARGET_UNITS, Shape
from experiments.common.paper import saved_units
from experiments.common.programs import (
    new_parser,
    positive_int,
    results_path,
    usage_errors,
)
from experiments.common.results import Bar, default_path, write_results

Row = dict[str, Any]
_LAYERS = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = parser()
    args = top.parse_args(argv)
    with usage_errors(top):
        shape = shape_of(args)
    console = Console(width=120)
    reports = case_reports(shape)
    if args.details:
        for case, report in reports.items():
            console.print(f"\n{case}, {_LAYERS} layers\n{report}")
    rows = case_rows(reports, shape)
    console.print(operations.table(rows))
    operations.draw(rows).savefig(args.out.with_suffix(".png"))
    sizes = {k: v for k, v in vars(args).items() if k not in ("details", "out")}
    write_results(args.out, rows=rows, bars=bars(rows), shape=sizes)


def parser() -> argparse.ArgumentParser:
    """Returns the command line parser; the default shape is a layer of Llama-2-7B."""
    top = new_parser("experiments.activations.memory", __doc__)
    for name, default in (
        ("hidden", 4096),
        ("intermediate", 11_008),
        ("heads", 32),
        ("kv-heads", None),
        ("batch", 4),
        ("seq", 2048),
    ):
        top.add_argument(f"--{name}", type=positive_int, default=default)
    top.add_argument("--details", action="store_true", help="list every array")
    out = default_path("activation_memory")
    top.add_argument(
        "--out", type=results_path, default=out, help="a figure goes next to it"
    )
    return top


def shape_of(args: argparse.Namespace) -> Shape:
    """Returns the shape of the layer and its input from command-line arguments.

    Raises:
      ValueError: If the number of heads does not divide the hidden size.
    """
    if args.hidden % args.heads:
        raise ValueError(f"heads must divide {args.hidden}, got {args.heads}")
    return Shape(
        hidden=args.hidden,
        seq=args.seq,
        batch=args.batch,
        intermediate=args.intermediate,
        kv_heads=args.kv_heads or args.heads,
        head_dim=args.hidden // args.heads,
    )


def saved_by_layers(name: str, shape: Shape) -> ResidualReport:
    """Returns the report of the residuals that two layers save under `scan`.

    `name` is the case. Parameters are in BF16.
    """
    case = CASES[name]
    config = llama.LlamaConfig(
        vocab_size=1,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=_LAYERS,
        num_heads=shape.hidden // shape.head_dim,
        num_kv_heads=shape.kv_heads,
        param_dtype=jnp.bfloat16,
        recipe=case.recipe,
        scaling=case.scaling,
    )
    model = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    graph, layers = nnx.split(model.layers)

    def forward(layers, x):
        layer = case.wrap(lambda params, x: nnx.merge(graph, params)(x), True)
        return lax.scan(lambda x, params: (layer(params, x), None), x, layers)[0]

    return coat.residual_report(forward, layers, shape.input())


def case_reports(shape: Shape) -> dict[str, ResidualReport]:
    """Returns reports of the residuals that two layers save, by the case in `CASES`."""
    return {case: saved_by_layers(case, shape) for case in CASES}


def case_rows(reports: Mapping[str, ResidualReport], shape: Shape) -> list[Row]:
    """Returns a row per case: the MiB that a layer saves, and units by operation.

    A unit is `shape.unit` bytes. Rows also have the units in the paper and the target.
    """
    rows = []
    for case, report in reports.items():
        units = {
            f"{name}_units": nbytes / _LAYERS / shape.unit
            for name, nbytes in operations.split(report, shape).items()
        }
        nbytes = report.nbytes / _LAYERS
        paper = saved_units(case)
        row = {"recipe": case, "mib": nbytes / 2**20, "units": nbytes / shape.unit}
        row |= {"paper_units": paper, "target_units": TARGET_UNITS.get(case)}
        rows.append(row | units)
    return rows


def bars(rows: list[Row]) -> list[Bar]:
    """Returns the targets for the bytes that FP8 recipes and `fp8_remat` save."""
    units = {row["recipe"]: row["units"] for row in rows}
    targets = [
        Bar.of(f"{case}, U", "<=", target, units[case])
        for case, target in TARGET_UNITS.items()
    ]
    ratio = units["bf16"] / units["bf16, fp8_remat"]
    return [*targets, Bar.of("bf16 / bf16, fp8_remat", ">=", 1.8, ratio)]


if __name__ == "__main__":
    main()
