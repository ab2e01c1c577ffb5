"""The main job: trains one Llama with several recipes and compares their cost.

    uv run python -m experiments.pretrain

The command trains a small byte-level model twice on the source of Python's standard
library: in BF16 with float32 moments (`bf16`), and with COAT's FP8 (`coat`). Both start
from one initialization and read the data in one order. `--help` lists the recipes,
presets and other flags. The run's folder holds metrics.jsonl, summary.json, loss.png
and checkpoints. For recipes with FP8 moments it also holds moments.jsonl and
moments.png, the statistics of these moments. Ctrl-C saves a checkpoint, and `--resume`
continues from it with the same results as an uninterrupted run.
"""

import dataclasses
import logging
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from tqdm import tqdm

from experiments.common.programs import one_line
from experiments.pretrain import arguments, data, report
from experiments.pretrain.moment_plots import plot_moments
from experiments.pretrain.plots import plot_losses
from experiments.pretrain.runs import Checkpoints, Progress, Run, StopRequest
from experiments.pretrain.settings import PRESETS, Recipe, Settings, model_config
from experiments.pretrain.training import Trainer, TrainState, tree_bytes

STOPPED = 130  # The exit code of a process that Ctrl-C ended.
_BPE_VOCAB_SIZE = 16_384
_WARM_STEPS, _TIMED_STEPS = 1, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Errors are raised, too.
    args = arguments.parse(argv)
    try:
        run, inputs = prepare(args)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"{run.folder}: {', '.join(run.settings.recipes)}")
    try:
        with StopRequest() as stop:
            for recipe in run.settings.recipes:
                train(run, recipe, inputs, stop)
                if stop.made:
                    print(f"saved; to go on:\n  {resume_command(run.folder)}")
                    return STOPPED
        summary = report.summarize(run, inputs.token)
        plot_losses(run, inputs.token)
        plot_moments(run)
    except OSError as error:  # The disk may be full.
        print(f"\nerror: {error}; to go on from the last checkpoint:", end=" ")
        print(resume_command(run.folder))
        return 1
    Console().print(report.table(summary))
    print(f"summary.json, metrics.jsonl and plots are in {run.folder}")
    return 0


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


def prepare(args: arguments.Arguments) -> tuple[Run, Inputs]:
    """Opens or creates the run and its data.

    Invalid settings or data raise before run.json is written.
    """
    if args.resume:
        run = Run.resume(args.folder, args.given)
        corpus = load_corpus(run.settings, args.folder)
        run.check_data(corpus.fingerprint())
        return run, select_inputs(corpus, run.settings)
    settings = args.settings()
    with tempfile.TemporaryDirectory() as scratch:
        corpus = load_corpus(settings, Path(scratch))
        inputs = select_inputs(corpus, settings)
        files = list(Path(scratch).iterdir())
        return Run.create(args.folder, settings, corpus.fingerprint(), files), inputs


def load_corpus(settings: Settings, folder: Path) -> data.Corpus:
    """Loads the run's corpus; a BPE for it is trained once and saved in `folder`."""
    vocab_size = settings.vocab_size
    if settings.tokenizer == "bpe":
        vocab_size = vocab_size or _BPE_VOCAB_SIZE
    corpus = data.load_corpus(
        [Path(path) for path in settings.data],
        tokenizer=settings.tokenizer,
        vocab_size=vocab_size,
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


def train(run: Run, recipe: Recipe, inputs: Inputs, stop: StopRequest) -> None:
    """Trains a recipe from its latest checkpoint to the last step, or until a stop.

    Every stop and every `save_every` steps write a checkpoint.
    """
    settings = run.settings
    with (
        run.checkpoints(recipe) as checkpoints,
        run.append_metrics(recipe) as metrics,
        run.append_moments(recipe) as moments,
    ):
        progress = checkpoints.progress()
        if progress.step == run.steps:
            return
        peak_before = device_peak_bytes()
        trainer = compile_trainer(run, recipe, inputs)
        announce(trainer, run, recipe, inputs, run.steps - progress.step)
        state, batches = first_state(run, trainer, inputs, checkpoints, progress)
        first = progress.step + 1
        bar = tqdm(desc=recipe, total=run.steps, initial=progress.step, unit="step")
        for step in range(first, run.steps + 1):
            started = time.perf_counter()
            state, measured = trainer.step(state, next(batches))
            row = {"recipe": recipe, "step": step, "lr": trainer.learning_rate(step)}
            row |= {name: float(value) for name, value in measured._asdict().items()}
            if step > first:
                progress.seconds += time.perf_counter() - started
                progress.timed_steps += 1
            stopping, last = stop.made, step == run.steps
            if last or step % settings.eval_every == 0:
                row["val_loss"] = trainer.evaluate(state, inputs.validation)
                for found in trainer.moment_rows(state):
                    moments.write({"recipe": recipe, "step": step} | found)
            metrics.write(row)
            show(bar, row, settings, progress)
            if last or stopping or step % settings.save_every == 0:
                progress.rows = {log.name: log.sync() for log in (metrics, moments)}
                progress.step, progress.batches = step, batches.get_state()
                progress.note_peak(peak_before, device_peak_bytes())
                checkpoints.save(state, progress)
            if stopping:
                break
        bar.close()


def compile_trainer(run: Run, recipe: Recipe, inputs: Inputs) -> Trainer:
    """Returns the recipe's trainer; the first recipe settles the number of steps."""
    config = model_config(run.settings, recipe, inputs.vocab_size)
    if run.steps is None:
        trainer = Trainer(config, run.settings, steps=run.settings.steps)
        run.fix_steps(steps_within_budget(trainer, run.settings, inputs))
    return Trainer(config, run.settings, steps=run.steps)


def announce(
    trainer: Trainer, run: Run, recipe: Recipe, inputs: Inputs, steps: int
) -> None:
    """Says what is compiled, how long it took, and about how long `steps` will take."""
    tokens = run.settings.tokens_per_step
    print(
        f"{recipe}: compiling a step of {trainer.parameters:,} parameters on "
        f"{tokens:,} tokens for {jax.devices()[0].device_kind}",
        flush=True,
    )
    compile_seconds = trainer.compiled[1]
    seconds = steps * seconds_per_step(trainer, run.settings, inputs)
    about = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
    print(
        f"{recipe}: compiled in {compile_seconds:.1f} s; {steps:,} steps take about "
        f"{about}",
        flush=True,
    )


def steps_within_budget(trainer: Trainer, settings: Settings, inputs: Inputs) -> int:
    """Returns how many steps, with validations, fit in `settings.minutes`.

    The budget includes the compile time.
    """
    budget = 60 * settings.minutes - trainer.compiled[1]
    step = seconds_per_step(trainer, settings, inputs)
    return max(1, min(settings.steps, int(budget / step)))


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


def show(bar: tqdm, row: dict, settings: Settings, progress: Progress) -> None:
    """Advances the progress bar by one step."""
    shown = {"loss": f"{row['loss']:.3f}", "lr": f"{row['lr']:.1e}"}
    if speed := progress.tokens_per_s(settings):
        shown["tokens/s"] = f"{speed:,.0f}"
    bar.set_postfix(shown, refresh=False)
    bar.update()


def device_peak_bytes() -> int | None:
    """Returns this process's peak device memory, or None if the device reports none."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def resume_command(folder: Path) -> str:
    """Returns the command that continues the run in `folder`."""
    return f"uv run python -m experiments.pretrain --resume {shlex.quote(str(folder))}"


if __name__ == "__main__":
    sys.exit(main())
