"""Compares the losses of meshes of eight devices with the losses of one device.

    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8
    uv run python -m experiments.pretrain.mesh_losses

Each training has the same initialization and the same batches. `bf16` is computed in
float32, where only the order of sums differs. In the recipe `coat`, the order of sums
also changes FP8 codes. For comparison, a training with two microbatches on one device
has another order of sums.
"""

import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.console import Console
from tqdm import tqdm

from experiments.common import meshes, tables
from experiments.common.programs import new_parser, results_path
from experiments.common.results import Bar, default_path, write_results
from experiments.common.style import framed
from experiments.pretrain import program as pretrain
from experiments.training import data
from experiments.training.job import train_batches
from experiments.training.settings import PRESETS, Recipe, Settings, model_config
from experiments.training.trainer import Trainer

Row = dict[str, Any]
MESHES = ("data=8", "fsdp=8", "tensor=8", "data=2,fsdp=2,tensor=2")
ALONE, _HALVES = "fsdp=1", "fsdp=1, 2 microbatches"
_DTYPES: dict[Recipe, Any] = {"bf16": jnp.float32, "coat": jnp.bfloat16}
EARLY = 20  # Steps before training amplifies the differences between orders.


class Curve(typing.NamedTuple):
    """The losses of a training on one mesh.

    Attributes:
      losses: The loss of each step.
      val_loss: The validation loss after the last step.
    """

    losses: Float[np.ndarray, " steps"]
    val_loss: float


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = new_parser("experiments.pretrain.mesh_losses", __doc__)
    top.add_argument("--steps", type=int, default=200)
    out = default_path("pretrain", "mesh_losses")
    top.add_argument("--out", type=results_path, default=out, metavar="FILE")
    args = top.parse_args(argv)
    if (count := len(jax.devices())) != 8:
        top.error(f"this needs 8 devices, got {count}; the description has the flag")
    if args.steps < 1:
        top.error(f"--steps must be positive, got {args.steps}")
    settings = dataclasses.replace(
        PRESETS["tiny"].settings, batch_size=8, steps=args.steps
    )
    curves = {recipe: train_all(settings, recipe) for recipe in _DTYPES}
    rows = [row for recipe in curves for row in summarize(recipe, curves[recipe])]
    write_results(args.out, rows=rows, bars=bars(rows), steps=args.steps)
    plot(curves, args.out.with_suffix(".png"))
    Console().print(tables.bars(bars(rows)))


def train_all(settings: Settings, recipe: Recipe) -> dict[str, Curve]:
    """Trains with a recipe on one device and on each mesh; returns the curves."""
    corpus = data.load_corpus()
    halves = dataclasses.replace(settings, accumulate=2)
    cases = {ALONE: settings, _HALVES: halves, **dict.fromkeys(MESHES, settings)}
    return {
        name: train(case_settings, recipe, corpus, name if name in MESHES else None)
        for name, case_settings in cases.items()
    }


def train(
    settings: Settings, recipe: Recipe, corpus: data.Corpus, mesh: str | None
) -> Curve:
    """Trains with a recipe on a mesh, or on one device for None; returns the losses.

    `mesh` has the form of the option `--mesh`.
    """
    where = mesh and meshes.make(meshes.parse(mesh))
    inputs = pretrain.select_inputs(corpus, settings, where)
    config = model_config(settings, recipe, inputs.vocab_size)
    config = dataclasses.replace(config, dtype=_DTYPES[recipe])
    trainer = Trainer(config, settings, steps=settings.steps, mesh=where)
    state, batches = trainer.init(), train_batches(inputs, settings)
    losses = []
    for _ in tqdm(range(settings.steps), f"{recipe}, {mesh or ALONE}", unit="step"):
        state, metrics = trainer.step(state, next(batches))
        losses.append(float(metrics.loss))
    return Curve(np.array(losses), trainer.evaluate(state, inputs.validation))


def summarize(recipe: Recipe, curves: dict[str, Curve]) -> list[Row]:
    """Returns a row for each training of a recipe: its differences to one device."""
    alone, rows = curves[ALONE], []
    for mesh, curve in curves.items():
        gaps = np.abs(curve.losses / alone.losses - 1)
        rows.append(
            {
                "recipe": recipe,
                "dtype": jnp.dtype(_DTYPES[recipe]).name,
                "mesh": mesh,
                "val_loss": curve.val_loss,
                "val_gap_percent": 100 * (curve.val_loss / alone.val_loss - 1),
                "largest_early_difference": float(gaps[:EARLY].max()),
                "largest_difference": float(gaps.max()),
            }
        )
    return rows


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Returns the targets for differences to one device, by mesh and recipe."""
    targets = []
    for row in (row for row in rows if row["mesh"] in MESHES):
        name = f"{row['recipe']} on {row['mesh']}, "
        if row["recipe"] == "bf16":
            name += f"largest difference of {EARLY} steps"
            value = row["largest_early_difference"]
            targets.append(Bar.of(name, "<=", 1e-4, value))
        else:
            name += "validation gap, %, either sign"
            targets.append(Bar.of(name, "<=", 1.0, abs(row["val_gap_percent"])))
    return targets


def plot(curves: dict[Recipe, dict[str, Curve]], path: Path) -> None:
    """Draws the loss curves, and below them their differences to one device."""
    figure = Figure(figsize=(9, 5.5), layout="constrained", dpi=150)
    axes = figure.subplots(2, len(curves), sharex=True, sharey="row", squeeze=False)
    for (recipe, by_mesh), (losses, gaps) in zip(curves.items(), axes.T, strict=True):
        alone = by_mesh[ALONE].losses
        for name, curve in by_mesh.items():
            steps = np.arange(1, alone.size + 1)
            losses.plot(steps, curve.losses, linewidth=0.8, label=name)
            gaps.plot(steps, 100 * np.abs(curve.losses / alone - 1), linewidth=0.8)
        dtype = jnp.dtype(_DTYPES[recipe]).name
        losses.set_title(f"{recipe}, {dtype}", loc="left", fontsize=11)
        gaps.set_yscale("log")
        gaps.set_xlabel("step")
    axes[0, 0].set_ylabel("nats / byte")
    axes[1, 0].set_ylabel("% from one device")
    lines, names = axes[0, 0].get_legend_handles_labels()
    where = dict(loc="outside lower center", ncols=3, fontsize=8)
    figure.legend(lines, names, frameon=False, **where)
    for panel in axes.flat:
        framed(panel)
    figure.savefig(path)


if __name__ == "__main__":
    main()
