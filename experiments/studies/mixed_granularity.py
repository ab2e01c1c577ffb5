"""Measures the error and the time of FP8 activations by granularity: figure 4.

    uv run python -m experiments.studies.mixed_granularity

The command trains the model of `experiments.pretrain` and stores the activations of an
unseen batch in E4M3: with per-block (4x4), per-group (16), per-token or per-tensor
scales, and at mixed granularity, which has per-group scales for norms and gates and
per-token or per-tensor scales for matmuls. It measures the errors of every activation,
of the output of each norm and gate, and of the residual stream (the paper's figure 4a).
Then it times norms and gates that quantize their output (figure 4b), on this device.
The paper's figure is a chart without numbers, so only the order of the methods is
compared.
"""

import argparse
import sys
from collections.abc import Sequence

import jax
from rich.console import Console

from experiments.activations import granularity_report, granularity_times
from experiments.activations.granularity_studies import Row, layer_rows, mean_error
from experiments.activations.layer_flow import OPERATORS
from experiments.common.programs import shape_of_rank
from experiments.common.results import Bar, write_results
from experiments.studies import trained
from experiments.training import arguments

# Tokens and features of the timed arrays. They are small on other devices, because
# times there say nothing about a GPU.
_SHAPES = {"gpu": ((8192, 4096), (8192, 11_008))}
_SMALL = ((1024, 512),)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    flags = arguments.read(parser(), argv)
    shapes = flags.pop("shapes", default_shapes())
    try:
        out = trained.results_file("mixed_granularity", flags)
        model = trained.train_as(flags)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = layer_rows(model)
    rows += [row for shape in shapes for row in granularity_times.time_rows(shape)]
    console = Console(width=110)
    for table in ("arrays", "flows", "times"):
        console.print(getattr(granularity_report, table)(rows))
    for name in ("flows", "times"):
        figure = getattr(granularity_report, f"draw_{name}")(rows)
        figure.savefig(out.with_name(f"{out.stem}_{name}.png"))
    about = {"preset": flags.get("preset", "cpu"), "recipe": model.config.recipe}
    write_results(out, rows=rows, bars=check(rows), val_loss=model.loss, **about)
    print(f"{out}, and two figures next to it")
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the command line parser; missing settings come from the preset."""
    top = trained.parser("studies.mixed_granularity", __doc__)
    top.add_argument(
        "--shapes", nargs="+", type=shape_of_rank(2), metavar="ROWS,N", help="timed"
    )
    return top


def default_shapes() -> tuple[tuple[int, int], ...]:
    """Returns the shapes that are timed by default on this device."""
    return _SHAPES.get(jax.default_backend(), _SMALL)


def check(rows: list[Row]) -> list[Bar]:
    """Returns the targets: methods must be in the order of the paper's figure 4.

    Errors are compared on every device, and times only on a GPU.
    """
    bars = []
    for better, worse in (("1x16", "4x4"), ("mixed", "per tensor")):
        for name in OPERATORS:
            errors = [
                mean_error(rows, "operators", operator=name, flow=flow)
                for flow in (better, worse)
            ]
            name = f"behind the {name}: error, {better} / {worse}"
            bars.append(Bar.of(name, "<=", 1.0, errors[0] / errors[1]))
    if jax.default_backend() != "gpu":
        return bars
    times = {
        (row["operator"], row["shape"], row["method"]): row["ms"]
        for row in rows
        if row["study"] == "times"
    }
    for operator, shape, method in times:
        if method == "per tensor, group scaling":
            slow = times[operator, shape, "per tensor, just in time"]
            ratio = times[operator, shape, method] / slow
            name = f"{operator}, {shape}: time, group scaling / just in time"
            bars.append(Bar.of(name, "<=", 1.0, ratio))
    return bars


if __name__ == "__main__":
    sys.exit(main())
