"""Reports of a run: summary.json, and the table at the end."""

import math
from typing import Any

import numpy as np
from rich.table import Table

from experiments.common import meshes
from experiments.common.memory import tree_bytes
from experiments.common.results import Bar, write_results
from experiments.common.tables import new_table
from experiments.training import speed
from experiments.training.checkpoints import Progress
from experiments.training.runs import Run
from experiments.training.settings import COAT_RECIPES, Recipe, Settings, percent
from experiments.training.trainer import Trainer


def measured(trainer: Trainer, settings: Settings) -> dict[str, int | float | str]:
    """Returns a training's sizes in memory, compile time, FLOPs, mesh and devices."""
    opt_state = trainer.abstract_state().opt_state
    return {
        "parameters": trainer.parameters,
        "optimizer_bytes_per_param": tree_bytes(opt_state) / trainer.parameters,
        "saved_activation_bytes": trainer.saved_activation_bytes(),
        "step_bytes": trainer.step_bytes(),
        "compile_seconds": trainer.compiled[1],
        "flops_per_token": trainer.flops_per_token,
        "devices": meshes.devices(trainer.mesh),
        "mesh": meshes.name_of(trainer.mesh),
        "microbatches": settings.accumulate,
    }


def summarize(run: Run, token: str) -> dict[str, Any]:
    """Writes summary.json, a results file with a row per recipe, and returns it.

    Args:
      run: A finished run.
      token: The unit of its corpus's tokens: "byte" or "token".
    """
    recipes = recipe_summaries(run)
    return write_results(
        run.folder / "summary.json",
        rows=[{"recipe": recipe} | summary for recipe, summary in recipes.items()],
        bars=_bars(run, recipes, token),
        command=run.command,
        preset=run.settings.preset,
        sizes=run.settings.sizes,
        steps=run.steps,
        bf16_last=run.settings.bf16_last,
        schedule_steps=run.schedule_steps,
        nats_per=token,
        recipes=recipes,
    )


def recipe_summaries(run: Run) -> dict[Recipe, dict[str, Any]]:
    """Returns the losses, memory and speed of each recipe of a finished run."""
    metrics = run.rows("metrics")
    recipes = {}
    for recipe in run.settings.recipes:
        with run.checkpoints(recipe) as checkpoints:
            progress = checkpoints.progress()
        rows = [row for row in metrics if row["recipe"] == recipe]
        recipes[recipe] = _recipe_summary(run, rows, progress)
    first = recipes[run.settings.recipes[0]]
    for summary in recipes.values():
        summary["val_gap_percent"] = 100 * (summary["val_loss"] / first["val_loss"] - 1)
    return recipes


def _recipe_summary(
    run: Run, rows: list[dict[str, Any]], progress: Progress
) -> dict[str, Any]:
    last = rows[-max(1, run.steps // 20) :]
    losses = [row["loss"] for row in last if not row.get("skipped")]
    measured, rate = progress.measured, progress.tokens_per_s(run.settings)
    devices = measured.get("devices", 1)
    flops = measured.get("flops_per_token")
    share = rate and flops and speed.utilization(rate, flops, devices)
    return {
        "train_loss": float(np.mean(losses)) if losses else math.nan,
        "val_loss": rows[-1]["val_loss"],
        **measured,
        "device_peak_bytes": progress.device_peak_bytes,
        "tokens_per_s": rate,
        "tokens_per_s_per_device": rate and rate / devices,
        "model_flop_utilization": share,
        "train_seconds": progress.seconds,
        "skipped_steps": progress.skipped,
    }


def _bars(run: Run, recipes: dict[Recipe, dict[str, Any]], token: str) -> list[Bar]:
    """Returns the targets that apply to a run's recipes and preset."""
    bars = []
    preset = None if run.settings.sizes else run.settings.preset
    for recipe in (r for r in recipes if r in COAT_RECIPES):
        if "bf16" in recipes:
            ratio = recipes[recipe]["val_loss"] / recipes["bf16"]["val_loss"]
            name = f"{recipe} validation loss / bf16"
            strict = recipe == "coat" and preset == "124m"
            bars.append(Bar.of(name, "<=", 1.005 if strict else 1.01, ratio))
        if preset == "124m":
            size = recipes[recipe]["optimizer_bytes_per_param"]
            name = f"{recipe} optimizer bytes a parameter"
            bars.append(Bar(name, "<= 2.075", size, size <= 2.075))
    if preset == "cpu" and token == "byte":
        for recipe, summary in recipes.items():
            loss = summary["val_loss"]
            name = f"{recipe} validation loss, nats a byte"
            bars.append(Bar(name, "< 2.4", loss, loss < 2.4))
    return bars


def table(summary: dict[str, Any]) -> Table:
    """Returns the summary of a run as a table with one column per recipe."""
    title = (
        f"{summary['preset']}, {summary['steps']} steps, {summary['device']['name']}"
    )
    if last := summary["bf16_last"]:
        title += f", the last {percent(last)} with BF16 matmuls"
    result = new_table(title, "", *summary["recipes"])
    first = next(iter(summary["recipes"]))
    nats = f"nats a {summary['nats_per']}"
    for label, key, unit, spec in (
        (f"training loss, {nats}", "train_loss", 1, ".4f"),
        (f"validation loss, {nats}", "val_loss", 1, ".4f"),
        (f"  its gap to {first}, %", "val_gap_percent", 1, "+.2f"),
        ("optimizer state, bytes a parameter", "optimizer_bytes_per_param", 1, ".3f"),
        ("saved activations, MiB", "saved_activation_bytes", 2**20, ",.1f"),
        ("memory of a step as compiled, a device, MiB", "step_bytes", 2**20, ",.1f"),
        ("device peak, MiB", "device_peak_bytes", 2**20, ",.1f"),
        ("tokens/s", "tokens_per_s", 1, ",.0f"),
        ("tokens/s a device", "tokens_per_s_per_device", 1, ",.0f"),
        ("model FLOP/s, % of BF16's peak", "model_flop_utilization", 0.01, ".1f"),
    ):
        values = [row[key] for row in summary["recipes"].values()]
        if key == "val_gap_percent" and len(values) == 1:
            continue
        if any(value is not None for value in values):
            result.add_row(label, *(_number(value, unit, spec) for value in values))
    return result


def _number(value: float | None, unit: int, spec: str) -> str:
    return "-" if value is None else format(value / unit, spec)
