"""Fine-tunes a model of Llama-3-8B's shape with random weights on one GPU.

    uv run --extra cuda13 python -m experiments.studies.finetune_large

The program measures memory and speed. Each training is a process of
`experiments.finetune`. One trains every parameter in `coat` with the optimizer inside
the backward pass; it is interrupted half way, as by Ctrl-C, and then resumed. The
others train adapters over FP8 (`coat`, `coat_max`) and over BF16 (`bf16`). The same
command continues where an earlier one ended. Several processes may share the folder of
runs, each with other `--trainings`. With `--join` the program trains nothing, and joins
the finished trainings. A smaller preset tests the program on a CPU.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from coat_jax.models import llama
from experiments.common.programs import new_parser, positive_int, results_path
from experiments.common.results import Bar, default_path, write_results
from experiments.common.tables import bars as bars_table
from experiments.finetune.settings import FinetuneRun
from experiments.training.interrupts import STOPPED
from experiments.training.report import recipe_summaries

_GIB = 2**30
_PEAK, _LORA_GIB, _LORA_SPEED = 0.03, 16.0, 1.2
# The flags of each training.
_TRAININGS: dict[str, list[str]] = {
    "all-coat": ["--recipes", "coat", "--release", "once"],
    "adapters-coat_max": ["--recipes", "coat_max", "--lora", "16"],
    "adapters-coat": ["--recipes", "coat", "--lora", "16"],
    "adapters-bf16": ["--recipes", "bf16", "--lora", "16"],
}
_INTERRUPTED = "all-coat"
_POLL = 0.2  # Seconds.
_PYTHON = [sys.executable, "-m"]
_MADE_UP = [*_PYTHON, "experiments.studies.made_up"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    top = new_parser("experiments.studies.finetune_large", __doc__)
    add = top.add_argument
    add(
        "--preset", choices=llama.CONFIGS, default="llama3-8b", help="shape (llama3-8b)"
    )
    add("--steps", type=positive_int, default=100)
    add("--seq-len", type=positive_int, default=4096)
    add(
        "--trainings",
        nargs="+",
        choices=_TRAININGS,
        default=list(_TRAININGS),
        metavar="NAME",
        help=f"({' '.join(_TRAININGS)})",
    )
    add("--runs", type=Path, default=Path("runs/finetune-large"))
    add("--join", action="store_true", help="trains nothing, joins what is done")
    add(
        "--out",
        type=results_path,
        default=default_path("finetune_real", "finetune_large"),
    )
    args = top.parse_args(argv)
    folders = {name: args.runs / name for name in args.trainings}
    if args.join:
        folders = {k: v for k, v in folders.items() if _is_trained(v, args.steps)}
        if not folders:
            top.error(f"no training in {args.runs} is done")
    else:
        model = args.runs / args.preset
        flags = ["--model", str(model), "--seq-len", str(args.seq_len)]
        # No array of this process may take the memory that is measured.
        if not (model / "config.json").exists():
            _run([*_MADE_UP, str(model), "--preset", args.preset])
        for name, folder in folders.items():
            _train(folder, [*flags, *_TRAININGS[name]], args.steps)
    rows = [{"training": name} | _measured(folder) for name, folder in folders.items()]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_results(args.out, rows=rows, bars=_bars(rows))
    Console().print(bars_table(_bars(rows)))
    return 0


def _train(folder: Path, flags: Sequence[str], steps: int) -> None:
    """Runs a training, or continues it where an earlier process ended.

    Raises:
      RuntimeError: If a process fails, or ends before it is interrupted.
    """
    command = [*_PYTHON, "experiments.finetune"]
    resume = [*command, "--resume", str(folder)]
    half = str(max(1, steps // 2))
    options = ["--batch-size", "1", "--eval-batches", "2", "--test-questions", "8"]
    options += ["--eval-questions", "0", "--steps", str(steps), "--eval-every", half]
    options += ["--save-every", str(steps), "--keep", "1", "--out", str(folder)]
    if (folder / "summary.json").exists():
        return
    if (folder / "run.json").exists():
        _run(resume)
    elif folder.name == _INTERRUPTED:
        _run([*command, *flags, *options], folder / "metrics.jsonl", int(half))
        _run(resume)
    else:
        _run([*command, *flags, *options])


def _run(command: Sequence[str], rows: Path | None = None, most: int = 0) -> None:
    """Runs a process, and interrupts it once the file `rows` has `most` lines.

    Without a file the process is not interrupted.

    Raises:
      RuntimeError: If the process ends with an unexpected exit code.
    """
    with subprocess.Popen(command) as process:
        while rows is not None and process.poll() is None:
            if rows.exists() and rows.read_bytes().count(b"\n") >= most:
                process.send_signal(signal.SIGINT)
                break
            time.sleep(_POLL)
    expected = 0 if rows is None else STOPPED
    if process.returncode != expected:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")


def _is_trained(folder: Path, steps: int) -> bool:
    """Returns whether the last of `steps` steps of a run is done and saved."""
    if not (folder / "run.json").exists():
        return False
    run = FinetuneRun.open(folder, {})
    with run.checkpoints(run.settings.recipes[0]) as checkpoints:
        return checkpoints.progress().step >= steps


def _measured(folder: Path) -> dict[str, Any]:
    """Returns the memory, speed and losses of a training, without its summary.json."""
    run = FinetuneRun.open(folder, {})
    (measured,) = recipe_summaries(run).values()
    names = ("parameters", "step_bytes", "device_peak_bytes", "tokens_per_s")
    row = {name: measured[name] for name in (*names, "train_loss", "val_loss")}
    return {"steps": run.steps, "seq_len": run.settings.seq_len} | row


def _bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Returns the targets for memory and speed; on a CPU only for speed."""
    by_name = {row["training"]: row for row in rows}
    peaks = {name: row["device_peak_bytes"] for name, row in by_name.items()}
    bars = []
    if peak := peaks.get("all-coat"):
        distance = abs(by_name["all-coat"]["step_bytes"] / peak - 1)
        name = "all-coat: compiled memory next to the peak, relative"
        bars.append(Bar.of(name, "<=", _PEAK, distance))
    if peak := peaks.get("adapters-coat_max"):
        bars.append(
            Bar.of("adapters-coat_max: peak, GiB", "<=", _LORA_GIB, peak / _GIB)
        )
    if "adapters-bf16" not in by_name:
        return bars
    base = by_name["adapters-bf16"]["tokens_per_s"]
    for name in ("adapters-coat", "adapters-coat_max"):
        if name in by_name:
            ratio = by_name[name]["tokens_per_s"] / base
            label = f"{name}: tokens/s next to adapters-bf16"
            bars.append(Bar.of(label, ">=", _LORA_SPEED, ratio))
    return bars


if __name__ == "__main__":
    sys.exit(main())
