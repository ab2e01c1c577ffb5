"""Fine-tunes Llama-3-8B's shape with made-up weights on one GPU: memory and speed.

    uv run --extra cuda13 python -m experiments.studies.finetune_large

Each training is a process of `experiments.finetune`: every parameter in `coat` with the
optimizer inside backward, half of its steps and then the rest as a resumed run; and
adapters over FP8 (`coat`, `coat_max`) and over BF16 (`bf16`). Parameters of a preset
that is smaller make it a test of the program on a CPU.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.common.programs import new_parser
from experiments.common.results import (
    Bar,
    default_path,
    read_results,
    write_results,
)
from experiments.common.tables import bars as bars_table
from experiments.studies import made_up

_GIB = 2**30
_PEAK, _LORA_GIB, _LORA_SPEED = 0.03, 16.0, 1.2
# The flags of each training, and whether it is resumed half way.
_TRAININGS: dict[str, list[str]] = {
    "all, coat": ["--recipes", "coat", "--release", "once"],
    "adapters, coat_max": ["--recipes", "coat_max", "--lora", "16"],
    "adapters, coat": ["--recipes", "coat", "--lora", "16"],
    "adapters, bf16": ["--recipes", "bf16", "--lora", "16"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    top = new_parser("experiments.studies.finetune_large", __doc__)
    add = top.add_argument
    add("--preset", default="llama3-8b", help="shape (llama3-8b)")
    add("--steps", type=int, default=100)
    add("--seq-len", type=int, default=4096)
    add("--runs", type=Path, default=Path("runs/finetune-large"))
    add("--out", type=Path, default=default_path("finetune_real", "finetune_large"))
    args = top.parse_args(argv)
    model = args.runs / args.preset
    if not (model / "config.json").exists():
        made_up.write(model, made_up.llama.CONFIGS[args.preset])
    rows = []
    for name, flags in _TRAININGS.items():
        folder = args.runs / name.replace(", ", "-")
        shared = ["--model", str(model), "--seq-len", str(args.seq_len), *flags]
        rows.append({"training": name} | _trained(folder, shared, args.steps))
        print(json.dumps(rows[-1]), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_results(args.out, rows=rows, bars=_bars(rows))
    Console().print(bars_table(_bars(rows)))
    return 0


def _trained(folder: Path, flags: Sequence[str], steps: int) -> dict[str, Any]:
    """Trains half of the steps, resumes for the rest, and returns what it took.

    Raises:
      RuntimeError: If a process fails.
    """
    command = [sys.executable, "-m", "experiments.finetune"]
    half = str(max(1, steps // 2))
    options = ["--batch-size", "1", "--eval-batches", "2", "--test-questions", "8"]
    options += ["--eval-questions", "0", "--steps", half, "--eval-every", half]
    options += ["--save-every", half, "--keep", "1", "--out", str(folder)]
    if not (folder / "summary.json").exists():
        _run([*command, *flags, *options])
    _run([*command, "--resume", str(folder), "--steps", str(steps)])
    (measured,) = read_results(folder / "summary.json")["recipes"].values()
    names = ("parameters", "step_bytes", "device_peak_bytes", "tokens_per_s")
    return {name: measured[name] for name in (*names, "train_loss", "val_loss")}


def _run(command: Sequence[str]) -> None:
    if code := subprocess.run(command, check=False).returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {code}")


def _bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Returns the bars on memory and speed; a CPU reports no peak."""
    by_name = {row["training"]: row for row in rows}
    bars = []
    if peak := by_name["all, coat"]["device_peak_bytes"]:
        distance = abs(by_name["all, coat"]["step_bytes"] / peak - 1)
        name = "all, coat: compiled memory next to the peak, relative"
        bars.append(Bar.of(name, "<=", _PEAK, distance))
    small = by_name["adapters, coat_max"]
    if small["device_peak_bytes"]:
        name = "adapters, coat_max: peak, GiB"
        bars.append(Bar.of(name, "<=", _LORA_GIB, small["device_peak_bytes"] / _GIB))
    base = by_name["adapters, bf16"]["tokens_per_s"]
    for recipe in ("coat", "coat_max"):
        ratio = by_name[f"adapters, {recipe}"]["tokens_per_s"] / base
        name = f"adapters, {recipe}: tokens/s next to bf16"
        bars.append(Bar.of(name, ">=", _LORA_SPEED, ratio))
    return bars


if __name__ == "__main__":
    sys.exit(main())
