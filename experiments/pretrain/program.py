"""The main job: trains one Llama with several recipes and compares their cost.

    uv run python -m experiments.pretrain

The command trains a small byte-level model twice on the source of Python's standard
library: in BF16 with float32 moments (`bf16`), and with COAT's FP8 (`coat`). Both start
from one initialization and read the data in one order. `--help` lists the recipes,
presets and other flags. The run's folder holds metrics.jsonl, summary.json, loss.png
and checkpoints. For recipes with FP8 moments it also holds moments.jsonl and
moments.png, the statistics of these moments; with --health-every also health.jsonl
and health.png. Ctrl-C saves a checkpoint, and `--resume`
continues from it with the same results as an uninterrupted run. A resumed run may train
longer (`--steps`), and `--bad-step` says what follows a NaN.
"""

import dataclasses
import logging
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from experiments.common.programs import one_line
from experiments.pretrain import arguments, data, interrupts, report
from experiments.pretrain.bad_steps import BadStep
from experiments.pretrain.checkpoints import Checkpoints, Progress
from experiments.pretrain.health_plots import plot_health
from experiments.pretrain.interrupts import STOPPED, Interrupts
from experiments.pretrain.loop import Loop, device_peak_bytes
from experiments.pretrain.moment_plots import plot_moments
from experiments.pretrain.plots import plot_losses
from experiments.pretrain.runs import Run
from experiments.pretrain.settings import PRESETS, Recipe, Settings, model_config
from experiments.pretrain.training import Trainer, TrainState, tree_bytes

_WARM_STEPS, _TIMED_STEPS = 1, 3


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
    prepare: Callable[[arguments.Arguments, Interrupts], tuple[Run, "Inputs"]]
    report: Callable[[Run, "Inputs"], RenderableType]

    def resume_command(self, folder: Path) -> str:
        """Returns the command that continues the run in `folder`."""
        return f"uv run python -m {self.module} --resume {shlex.quote(str(folder))}"


def run_job(job: Job, argv: Sequence[str] | None, stop: Interrupts) -> int:
    """Runs a job, and ends as `stop` says; returns an exit code."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Errors are raised, too.
    args = job.parse(argv)
    try:
        run, inputs = job.prepare(args, stop)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"{run.folder}: {', '.join(run.settings.recipes)}", flush=True)
    resume = job.resume_command(run.folder)
    try:
        for recipe in run.settings.recipes:
            train(run, recipe, inputs, stop)
            if stop.made:
                print(f"saved; to go on:\n  {resume}")
                return STOPPED
        table = job.report(run, inputs)
    except BadStep as error:
        print(f"error: {error}; to leave it out: {resume} --bad-step skip")
        return 1
    except OSError as error:  # The disk may be full.
        print(f"\nerror: {error}; to go on from the last checkpoint: {resume}")
        return 1
    Console().print(table)
    print(f"summary.json, metrics.jsonl and plots are in {run.folder}")
    return 0


def write_report(run: Run, inputs: "Inputs") -> Table:
    """Writes summary.json and the plots of a finished run; returns its table."""
    summary = report.summarize(run, inputs.token)
    plot_losses(run, inputs.token)
    plot_moments(run)
    plot_health(run)
    return report.table(summary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data that every recipe of a run reads.

    Attributes:
      windows: Sequences to train on.
      validation: Batches to validate on.
      vocab_size: Number of distinct tokens.
      token: The unit of the tokens: "byte" or "token".
    """

    windows: data.Windows
    validation: list[np.ndarray]
    vocab_size: int
    token: str

    def trainer(self, settings: Settings, recipe: Recipe, steps: int) -> Trainer:
        """Returns a recipe's trainer for these inputs."""
        config = model_config(settings, recipe, self.vocab_size)
        return Trainer(config, settings, steps=steps)

    def measure(self, trainer: Trainer, state: TrainState) -> dict[str, float]:
        """Validates a state; returns entries of a step's row."""
        return {"val_loss": trainer.evaluate(state, self.validation)}


def prepare(args: arguments.Arguments, stop: Interrupts) -> tuple[Run, Inputs]:
    """Opens or creates the run and its data.

    Invalid settings or data raise before run.json is written.
    """
    if args.resume:
        run = Run.resume(args.folder, args.given)
        corpus = load_corpus(run.settings, args.folder)
        run.check_data(corpus.fingerprint())
        inputs = select_inputs(corpus, run.settings)
        run.record_changes()
        return run, inputs
    settings = args.settings()
    with stop.temporary_folder() as scratch:
        corpus = load_corpus(settings, scratch)
        inputs = select_inputs(corpus, settings)
        files = list(scratch.iterdir())
        return Run.create(args.folder, settings, corpus.fingerprint(), files), inputs


def load_corpus(settings: Settings, folder: Path) -> data.Corpus:
    """Loads the run's corpus; a BPE for it is trained once and saved in `folder`."""
    corpus = data.load_corpus(
        [Path(path) for path in settings.data],
        tokenizer=settings.tokenizer,
        vocab_size=settings.text_vocab_size,
        token_dtype=settings.token_dtype,
        cache=folder,
    )
    if settings.vocab_size and corpus.token == "byte":
        raise ValueError(
            "--vocab-size is for --tokenizer bpe and for token files; bytes have a "
            f"vocabulary of {corpus.vocab_size}, got {settings.vocab_size}"
        )
    return corpus


def select_inputs(corpus: data.Corpus, settings: Settings) -> Inputs:
    """Returns the corpus as training windows and validation batches.

    Token files do not state their vocabulary size. The settings or the preset give it.
    """
    vocab_size = corpus.vocab_size or settings.vocab_size
    vocab_size = vocab_size or PRESETS[settings.preset].model.vocab_size
    if corpus.vocab_size is None:  # The tokens come from files.
        data.check_tokens(corpus, vocab_size)
    held_out, windows = (
        data.Windows(arrays, settings.seq_len, corpus.source)
        for arrays in (corpus.validation, corpus.train)
    )
    return Inputs(
        windows=windows,
        validation=data.validation_batches(
            held_out, batch_size=settings.batch_size, count=settings.eval_batches
        ),
        vocab_size=vocab_size,
        token=corpus.token,
    )


def train(run: Run, recipe: Recipe, inputs: Inputs, stop: Interrupts) -> None:
    """Trains a recipe from its latest checkpoint to the last step, or until a stop.

    Raises:
      BadStep: If a step is bad and is neither skipped nor rolled back.
    """
    with (
        run.checkpoints(recipe) as checkpoints,
        run.append_metrics(recipe) as metrics,
        run.append_moments(recipe) as moments,
        run.append_health(recipe) as health,
    ):
        progress = checkpoints.progress()
        if progress.step == run.steps:
            return
        peak_before = device_peak_bytes()
        trainer = compile_trainer(run, recipe, inputs, progress.step)
        state, batches = first_state(run, trainer, inputs, checkpoints, progress)
        loop = Loop(
            run=run,
            recipe=recipe,
            trainer=trainer,
            measure=inputs.measure,
            checkpoints=checkpoints,
            metrics=metrics,
            moments=moments,
            health=health,
            progress=progress,
            state=state,
            batches=batches,
            peak_before=peak_before,
        )
        loop.finish(stop)


def compile_trainer(run: Run, recipe: Recipe, inputs: Inputs, done: int) -> Trainer:
    """Returns the recipe's compiled trainer; the first recipe settles the steps.

    It says what is compiled, how long it took, and about how long the steps after the
    first `done` ones will take.
    """
    settings = run.settings
    steps = run.schedule_steps or settings.steps
    trainer = inputs.trainer(settings, recipe, steps)
    print(
        f"{recipe}: compiling a step of {trainer.parameters:,} parameters on "
        f"{settings.tokens_per_step:,} tokens for {jax.devices()[0].device_kind}",
        flush=True,
    )
    compile_seconds = trainer.compiled[1]
    seconds = seconds_per_step(trainer, settings, inputs)
    if run.steps is None:
        run.fix_steps(steps_within_budget(settings, compile_seconds, seconds))
        if run.steps != settings.steps:
            # The schedule, and so the compiled step, depends on the number of steps.
            trainer = inputs.trainer(settings, recipe, run.steps)
            compile_seconds += trainer.compiled[1]
    left = run.steps - done
    about = left * seconds
    time_left = f"{about:.0f} s" if about < 100 else f"{about / 60:.1f} min"
    print(
        f"{recipe}: compiled in {compile_seconds:.1f} s; {left:,} steps take about "
        f"{time_left}",
        flush=True,
    )
    return trainer


def steps_within_budget(
    settings: Settings, compile_seconds: float, seconds_per_step: float
) -> int:
    """Returns how many steps fit in `settings.minutes`, of which compiling takes some.

    Args:
      settings: The settings, with the largest number of steps.
      compile_seconds: The compile time.
      seconds_per_step: The time of a step, with its share of the validations.
    """
    budget = 60 * settings.minutes - compile_seconds
    return max(1, min(settings.steps, int(budget / seconds_per_step)))


def seconds_per_step(trainer: Trainer, settings: Settings, inputs: Inputs) -> float:
    """Returns the time of a step, with a step's share of the validations.

    Steps are timed on a state that is thrown away, because the learning rate schedule,
    and so every step, may depend on the answer.
    """
    state, batches = trainer.init(), train_batches(inputs, settings)
    seconds = []
    for _ in range(_WARM_STEPS + _TIMED_STEPS):
        started = time.perf_counter()
        state, metrics = trainer.step(state, next(batches))
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - started)
    trainer.evaluate(state, inputs.validation)
    started = time.perf_counter()
    trainer.evaluate(state, inputs.validation)
    validation = time.perf_counter() - started
    return float(np.median(seconds[_WARM_STEPS:])) + validation / settings.eval_every


def first_state(
    run: Run,
    trainer: Trainer,
    inputs: Inputs,
    checkpoints: Checkpoints,
    progress: Progress,
) -> tuple[TrainState, data.Batches]:
    """Returns the state and the batches to start from: a checkpoint's or new ones."""
    batches = train_batches(inputs, run.settings)
    if progress.step:
        batches.set_state(progress.batches)
        return checkpoints.state(trainer.abstract_state()), batches
    state = trainer.init()
    progress.measured = {
        "parameters": trainer.parameters,
        "optimizer_bytes_per_param": tree_bytes(state.opt_state) / trainer.parameters,
        "saved_activation_bytes": trainer.saved_activation_bytes(),
        "step_bytes": trainer.step_bytes(),
        "compile_seconds": trainer.compiled[1],
    }
    return state, batches


def train_batches(inputs: Inputs, settings: Settings) -> data.Batches:
    """Returns the training batches, in the order that all recipes share."""
    return data.train_batches(
        inputs.windows, batch_size=settings.batch_size, seed=settings.seed
    )


PRETRAINING = Job(
    module="experiments.pretrain",
    parse=arguments.parse,
    prepare=prepare,
    report=write_report,
)


if __name__ == "__main__":
    sys.exit(main())
