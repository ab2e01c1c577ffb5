"""Programs that train with several recipes, one after another, in a run's folder."""

import contextlib
import dataclasses
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console, RenderableType

from experiments.common import meshes
from experiments.common.memory import device_peak_bytes, is_out_of_memory
from experiments.common.programs import one_line
from experiments.training import arguments, data, memory, processes, report, tensorboard
from experiments.training.bad_steps import BadStep
from experiments.training.budgets import (
    TRIAL_STEPS,
    seconds_per_step,
    steps_within_budget,
)
from experiments.training.checkpoints import Checkpoints, Progress
from experiments.training.interrupts import STOPPED, Interrupts
from experiments.training.loop import Loop
from experiments.training.runs import Log, Run
from experiments.training.settings import Recipe, Settings, model_config
from experiments.training.state import TrainState
from experiments.training.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data that every recipe of a run reads, and the mesh of the trainings.

    Attributes:
      windows: The sequences to train on.
      validation: The batches to validate on.
      vocab_size: The size of the vocabulary.
      token: The unit of the tokens: "byte" or "token".
      mesh: The mesh that trainings are sharded over; None means the first device.
    """

    windows: data.Windows
    validation: list[np.ndarray]
    vocab_size: int
    token: str
    mesh: Mesh | None = None

    def trainer(self, settings: Settings, recipe: Recipe, steps: int) -> Trainer:
        """Returns a recipe's trainer for `steps` steps, not yet compiled."""
        config = model_config(settings, recipe, self.vocab_size)
        return Trainer(config, settings, steps=steps, mesh=self.mesh)

    def measure(self, trainer: Trainer, state: TrainState) -> dict[str, float]:
        """Validates a state, and returns the results as entries of a step's row."""
        return {"val_loss": trainer.evaluate(state, self.validation)}


def validation_batches(
    windows: Any, settings: Settings, mesh: Mesh | None
) -> list[np.ndarray]:
    """Returns the batches to validate on, each as large as a microbatch."""
    parts = settings.accumulate
    return data.validation_batches(
        windows,
        batch_size=settings.batch_size // parts,
        count=settings.eval_batches * parts,
        multiple=meshes.batch_parts(mesh),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A program that trains with several recipes, one after another, in a folder.

    Attributes:
      module: The program's module, as `python -m` takes it.
      parse: A function that parses a command line.
      kind: The class of the program's runs.
      opened: A function that opens or creates a run and its inputs. If settings or data
        are invalid, it raises an error before it writes run.json.
      inputs: A function that returns the inputs of a run that has begun earlier. It
        raises ValueError if the data has changed since then.
      report: A function that writes the results of a finished run to its folder, and
        returns a table of the results for a terminal.
    """

    module: str
    parse: Callable[[Sequence[str] | None], arguments.Arguments]
    kind: type[Run]
    opened: Callable[[Any, Mesh | None, Interrupts], tuple[Run, Inputs]]
    inputs: Callable[[Any, Mesh | None], Inputs]
    report: Callable[[Any, Any], RenderableType]

    def resume_command(self, folder: Path, mesh: Mesh | None = None) -> str:
        """Returns the command that continues the run in `folder`, on the same mesh."""
        command = f"uv run python -m {self.module} --resume {shlex.quote(str(folder))}"
        return command if mesh is None else f"{command} --mesh {meshes.name_of(mesh)}"


def prepared(
    job: Job, args: arguments.Arguments, stop: Interrupts
) -> tuple[Run, Inputs]:
    """Opens or creates a run and its inputs, in the main process before the others.

    Raises:
      OSError: If any process raised OSError.
      ValueError: If any process raised ValueError.
    """
    mesh = meshes.make(args.mesh)
    opened: list[tuple[Run, Inputs]] = []

    def open_once() -> tuple[str, dict[str, Any]]:
        opened.append(job.opened(args, mesh, stop))
        run, _ = opened[0]
        return str(run.folder.absolute()), run.record

    folder, record = processes.on_main(open_once)
    with processes.together():
        if opened:
            return opened[0]
        run = job.kind(Path(folder), record)
        return run, job.inputs(run, mesh)


def run_job(job: Job, argv: Sequence[str] | None, stop: Interrupts) -> int:
    """Runs a job until it is finished or `stop` has a signal; returns an exit code."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Errors are raised, too.
    args = job.parse(argv)
    try:
        if args.cluster:
            args.cluster.join()
        if args.tensorboard:
            tensorboard.check_installed()
        run, inputs = prepared(job, args, stop)
    except (ImportError, OSError, ValueError) as error:
        if processes.is_main():
            print(f"error: {one_line(error)}", file=sys.stderr)
        processes.leave()
        return 2
    code = _trained(job, run, inputs, args, stop)
    processes.leave()
    return code


def _trained(
    job: Job, run: Run, inputs: Inputs, args: arguments.Arguments, stop: Interrupts
) -> int:
    """Trains with all recipes and reports the results; returns an exit code."""
    print(f"{run.folder}: {', '.join(run.settings.recipes)}", flush=True)
    batch_size, count = run.settings.batch_size, len(inputs.windows)
    if batch_size > count:
        print(
            f"--batch-size {batch_size} repeats sequences in each batch: the data has "
            f"{count} of --seq-len {run.settings.seq_len}",
            flush=True,
        )
    resume = job.resume_command(run.folder, inputs.mesh)
    try:
        for recipe in run.settings.recipes:
            profile = run.folder / "profile" / recipe if args.profile else None
            board = run.folder / "tensorboard" / recipe if args.tensorboard else None
            train(run, recipe, inputs, stop, profile=profile, board=board)
            if processes.anywhere(stop.made):
                print(f"saved; to go on:\n  {resume}")
                return STOPPED
        table = job.report(run, inputs)
    except memory.OutOfMemory as error:
        print(f"error: {error}; to go on from the last checkpoint: {resume}")
        return 1
    except BadStep as error:
        print(f"error: {error}; to leave it out: {resume} --bad-step skip")
        return 1
    except OSError as error:  # The disk may be full.
        print(f"\nerror: {error}; to go on from the last checkpoint: {resume}")
        return 1
    Console().print(table)
    print(f"summary.json, metrics.jsonl and plots are in {run.folder}")
    return 0


def train(
    run: Run,
    recipe: Recipe,
    inputs: Inputs,
    stop: Interrupts,
    *,
    profile: Path | None = None,
    board: Path | None = None,
) -> None:
    """Trains with a recipe, from its latest checkpoint to the last step or a stop.

    Args:
      run: The run.
      recipe: The recipe.
      inputs: The data.
      stop: The signals that end the training.
      profile: The folder for a profile; None means no profile.
      board: The folder for events of TensorBoard; None means no events.

    Raises:
      BadStep: If a step is bad and is neither skipped nor rolled back.
      OutOfMemory: If a device's memory does not suffice.
    """
    try:
        _train(run, recipe, inputs, stop, profile, board)
        return
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
    done = sum(row["recipe"] == recipe for row in run.rows("metrics"))
    if run.steps is not None and done >= run.early_steps(recipe):
        trainer = _trainer(run, run.settings.last_recipe(recipe), inputs)
    else:
        trainer = _trainer(run, recipe, inputs)
    line = memory.description(trainer, run.settings)
    raise memory.OutOfMemory(f"{recipe}: {line}")


def _train(
    run: Run,
    recipe: Recipe,
    inputs: Inputs,
    stop: Interrupts,
    profile: Path | None,
    board: Path | None,
) -> None:
    with contextlib.ExitStack() as stack:
        with processes.together():
            checkpoints = stack.enter_context(run.checkpoints(recipe))
            logs = {
                n: stack.enter_context(run.append(n, recipe)) for n in get_args(Log)
            }
        progress_fields = processes.on_main(
            lambda: dataclasses.asdict(checkpoints.progress())
        )
        progress = Progress(**progress_fields)
        if progress.step == run.steps:
            return
        peak_before = device_peak_bytes()
        trainer = compile_trainer(run, recipe, inputs, progress.step)
        state, batches = first_state(run, trainer, inputs, checkpoints, progress)
        if board is not None and processes.is_main():
            events = stack.enter_context(tensorboard.Board(board, progress.step))
        else:
            events = None
        loop = Loop(
            run=run,
            recipe=recipe,
            trainer=trainer,
            late_trainer=_late_trainer(run, recipe, inputs),
            measure=inputs.measure,
            checkpoints=checkpoints,
            logs=logs,
            progress=progress,
            state=state,
            batches=batches,
            peak_before=peak_before,
            profile=profile if processes.is_main() else None,
            board=events,
        )
        loop.finish(stop)


def compile_trainer(
    run: Run, recipe: Recipe, inputs: Inputs, first_step: int
) -> Trainer:
    """Compiles and returns the trainer of a recipe.

    If the number of steps depends on a time budget, the first recipe's trainer sets it.
    The function prints what is compiled, the compile time, and about how long the steps
    after `first_step` will take.
    """
    settings, trainer = run.settings, _trainer(run, recipe, inputs)
    where = jax.devices()[0].device_kind
    if inputs.mesh is not None:
        where = f"{inputs.mesh.size} x {where} as {meshes.name_of(inputs.mesh)}"
    print(
        f"{recipe}: compiling a step of {trainer.parameters:,} parameters on "
        f"{settings.tokens_per_step:,} tokens for {where}",
        flush=True,
    )
    compile_seconds = trainer.compiled[1]
    print(
        f"{recipe}: compiled in {compile_seconds:.1f} s; timing {TRIAL_STEPS} steps, "
        "which do not count",
        flush=True,
    )
    batches = train_batches(inputs, settings)
    seconds = seconds_per_step(trainer, settings, batches, inputs.validation)
    if run.steps is None:
        fitting = steps_within_budget(settings, compile_seconds, seconds)
        run.fix_steps(processes.on_main(lambda: fitting))
        if run.steps != settings.steps:
            # The schedule, and so the compiled step, depends on the number of steps.
            trainer = _trainer(run, recipe, inputs)
            _ = trainer.compiled
    steps = run.steps - first_step
    about = steps * seconds
    time_left = f"{about:.0f} s" if about < 100 else f"{about / 60:.1f} min"
    print(f"{recipe}: {steps:,} steps take about {time_left}", flush=True)
    return trainer


def _trainer(run: Run, recipe: Recipe, inputs: Inputs) -> Trainer:
    """Returns the recipe's trainer, not yet compiled."""
    steps = run.schedule_steps or run.settings.steps
    return inputs.trainer(run.settings, recipe, steps)


def _late_trainer(run: Run, recipe: Recipe, inputs: Inputs) -> Trainer | None:
    """Returns the trainer of the steps of `bf16_last`, not yet compiled, or None."""
    last = run.settings.last_recipe(recipe)
    return None if last == recipe else _trainer(run, last, inputs)


def first_state(
    run: Run,
    trainer: Trainer,
    inputs: Inputs,
    checkpoints: Checkpoints,
    progress: Progress,
) -> tuple[TrainState, data.Batches]:
    """Returns the state and the batches to start from: a checkpoint's or new ones.

    The trainer's measurements are stored in `progress`. On another mesh, or with
    another number of microbatches, the measured times start again from zero.
    """
    batches = train_batches(inputs, run.settings)
    current = report.measured(trainer, run.settings)
    # Runs had one device before there were meshes.
    recorded = {"mesh": meshes.name_of(None), "microbatches": 1} | progress.measured
    if any(current[name] != recorded[name] for name in ("mesh", "microbatches")):
        # Speeds of several meshes have no common mean.
        progress.seconds, progress.timed_steps, recorded = 0.0, 0, {}
    progress.measured = current | recorded
    if progress.step:
        batches.set_state(progress.batches)
        return checkpoints.state(trainer.abstract_state()), batches
    return trainer.init(), batches


def train_batches(inputs: Inputs, settings: Settings) -> data.Batches:
    """Returns an iterator of training batches, in the order that all recipes share."""
    return data.train_batches(
        inputs.windows,
        batch_size=settings.batch_size,
        seed=settings.seed,
        rows=meshes.own_rows(settings.batch_size, inputs.mesh),
    )
