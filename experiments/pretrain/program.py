"""The main job: trains one Llama with several recipes and compares their cost.

    uv run python -m experiments.pretrain

The command trains a small byte-level model twice on the source of Python's standard
library: in BF16 with float32 moments (`bf16`), and with COAT's FP8 (`coat`). Both start
from one initialization and read the data in one order. `--help` lists the recipes,
presets and other flags. The run's folder holds metrics.jsonl, summary.json, loss.png
and checkpoints. For recipes with FP8 moments it also holds moments.jsonl and
moments.png, the statistics of these moments; with --health-every also health.jsonl
and health.png. `--mesh` and `--processes` spread it over devices and hosts. Ctrl-C
saves a checkpoint, and `--resume` continues from it with the same results as an
uninterrupted run. A resumed run may train longer (`--steps`), and `--bad-step` says
what follows a NaN.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh
from rich.console import RenderableType

from experiments.pretrain import (
    arguments,
    data,
    interrupts,
)
from experiments.pretrain.interrupts import Interrupts
from experiments.pretrain.runs import Run
from experiments.pretrain.settings import Recipe, Settings, model_config
from experiments.pretrain.training import Trainer, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data that every recipe of a run reads, and where it goes.

    Attributes:
      windows: Sequences to train on.
      validation: Batches to validate on.
      vocab_size: Number of distinct tokens.
      token: The unit of the tokens: "byte" or "token".
      mesh: The mesh that trainings are spread over; None means the first device.
    """

    windows: data.Windows
    validation: list[np.ndarray]
    vocab_size: int
    token: str
    mesh: Mesh | None = None

    def trainer(self, settings: Settings, recipe: Recipe, steps: int) -> Trainer:
        """Returns a recipe's trainer for these inputs, not yet compiled."""
        config = model_config(settings, recipe, self.vocab_size)
        return Trainer(config, settings, steps=steps, mesh=self.mesh)

    def measure(self, trainer: Trainer, state: TrainState) -> dict[str, float]:
        """Validates a state; returns entries of a step's row."""
        return {"val_loss": trainer.evaluate(state, self.validation)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    return interrupts.run(lambda stop: run_program(argv, stop))


def run_program(argv: Sequence[str] | None, stop: Interrupts) -> int:
    """Does what `main` does, and ends as `stop` says."""
    return run_job(PRETRAINING, argv, stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A program that trains with several recipes, one after the other, in a folder.

    Attributes:
      module: The program's module, as `python -m` takes it.
      parse: A function that parses a command line.
      prepare: A function that opens or creates the run and its data.
      report: A function that writes the results of a finished run to its folder;
        returns a table of them for a terminal.
    """

    module: str
    parse: Callable[[Sequence[str] | None], arguments.Arguments]
    prepare: Callable[[arguments.Arguments, Interrupts], tuple[Run, Inputs]]
    report: Callable[[Run, Inputs], RenderableType]

    PRETRAINING = Job(
        module="experiments.pretrain",
        parse=arguments.parse,
        prepare=prepare,
        report=write_report,
    )


if __name__ == "__main__":
    sys.exit(main())
