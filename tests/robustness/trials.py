"""Small runs of `experiments.pretrain`, and whether two ended with the same bits."""

import argparse
import contextlib
import dataclasses
import functools
import io
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.common.programs import new_parser
from experiments.common.results import Bar, default_path, write_results
from experiments.common.tables import new_table
from experiments.pretrain import program
from experiments.training.runs import Run
from experiments.training.settings import Recipe, Settings, model_config
from experiments.training.state import TrainState
from experiments.training.text import BYTES_VOCAB_SIZE
from experiments.training.trainer import Trainer

# A run of a few seconds, with a checkpoint every third step.
SMALL = ("--preset", "tiny", "--batch-size", "2", "--steps", "12", "--save-every", "3")
SMALL += ("--eval-every", "6", "--eval-batches", "1")
_TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process, or a call of the program, that ended.

    Attributes:
      code: The exit code; minus the number of a signal that killed it.
      said: The text it printed, errors included.
    """

    code: int
    said: str

    def in_one_line(self) -> bool:
        """Returns whether it failed with one line "error: ..." and no traceback."""
        errors = [x for x in self.said.splitlines() if x.startswith("error: ")]
        return self.code > 0 and len(errors) == 1 and "Traceback" not in self.said


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The contents that a run ended with.

    Attributes:
      metrics: The bytes of metrics.jsonl.
      moments: The bytes of moments.jsonl.
      states: The last step and the bits of each recipe's last state.
    """

    metrics: bytes
    moments: bytes
    states: Mapping[Recipe, tuple[int, list[tuple[str, bytes]]]]

    def difference(self, other: "Outcome") -> str | None:
        """Returns the name of the first field that differs, or None."""
        names = [field.name for field in dataclasses.fields(self)]
        different = (n for n in names if getattr(self, n) != getattr(other, n))
        return next(different, None)


def write_corpus(folder: Path) -> Path:
    """Writes a text of random words and returns its path."""
    rng = np.random.default_rng(0)
    letters = [rng.integers(97, 123, rng.integers(2, 9)) for _ in range(200)]
    words = [bytes(word.astype(np.uint8)) for word in letters]
    path = folder / "words.txt"
    path.write_bytes(b" ".join(rng.choice(words, 8000)))
    return path


def share_compilations(folder: Path) -> None:
    """Makes this process and its child processes share a cache of compiled programs.

    They are compiled without LLVM's optimizations, which would take most of the time. A
    cache that the environment names stays in use.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder / "bytecode"))
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    options = {
        "jax_compilation_cache_dir": str(folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def start(*argv: object, **environment: str) -> subprocess.Popen[str]:
    """Starts the program in a process, with `environment` as further variables."""
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.pretrain", *map(str, argv)],
        env=os.environ | environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait(process: subprocess.Popen[str]) -> Ended:
    """Blocks until a process ends, and returns how it ended."""
    try:
        output, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Ended(process.returncode, output)


def call(*argv: object) -> Ended:
    """Calls the program within this process, and returns how it ended."""
    with captured() as output:
        try:
            code = program.main(list(map(str, argv)))
        except SystemExit as stop:
            code = stop.code
    return Ended(code, output.getvalue())


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """Captures what this process prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output


def go_on(folder: Path, arguments: tuple[object, ...]) -> tuple[object, ...]:
    """Returns the arguments that continue a run, or start it if run.json is missing."""
    if (folder / "run.json").exists():
        return "--resume", folder
    return *arguments, "--out", folder


def outcome(folder: Path) -> Outcome:
    """Returns the contents that a finished run has."""
    run = Run.resume(folder, {})
    states = {}
    for recipe in run.settings.recipes:
        with run.checkpoints(recipe) as checkpoints:
            state = checkpoints.state(_abstract(run.settings, recipe, run.steps))
            states[recipe] = checkpoints.progress().step, bits(state)
    metrics, moments = (
        (folder / name).read_bytes() for name in ("metrics.jsonl", "moments.jsonl")
    )
    return Outcome(metrics, moments, states)


def bits(tree: Any) -> list[tuple[str, bytes]]:
    """Returns the dtype and the bytes of each array of a tree."""
    return [(str(x.dtype), np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


@functools.cache
def _abstract(settings: Settings, recipe: Recipe, steps: int) -> TrainState:
    vocab_size = settings.vocab_size or BYTES_VOCAB_SIZE
    config = model_config(settings, recipe, vocab_size)
    return Trainer(config, settings, steps=steps).abstract_state()


def conclude(
    rows: Sequence[Mapping[str, Any]],
    counts: Mapping[str, tuple[int, int]],
    out: Path,
    title: str,
) -> int:
    """Writes a results file, prints the counts and returns an exit code.

    Args:
      rows: One record per trial.
      counts: By name, how many trials held and how many there were.
      out: The path of the results file.
      title: The title of the printed table.
    """
    table = new_table(title, "", "held", "of")
    for name, (total, all_) in counts.items():
        table.add_row(name, f"{total:,}", f"{all_:,}")
    Console().print(table)
    bars = [Bar.of(name, ">=", all_, total) for name, (total, all_) in counts.items()]
    write_results(out, rows=rows, bars=bars)
    print(out)
    return 0 if all(bar.holds for bar in bars) else 1


def new_program(name: str, doc: str) -> argparse.ArgumentParser:
    """Returns the parser of a program of this package, with --seed and --out."""
    top = new_parser(f"tests.robustness.{name}", doc)
    top.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    top.add_argument("--out", type=Path, default=default_path("robustness", name))
    return top


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Makes a folder for runs, where compilations are shared, and deletes it."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        share_compilations(folder)
        yield folder
