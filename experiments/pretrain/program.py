"""The main job: trains one Llama with several recipes and compares their cost.

    uv run python -m experiments.pretrain

The command trains a small byte-level model twice on the source of Python's standard
library: in BF16 with float32 moments (`bf16`), and with COAT's FP8 (`coat`). Both
trainings start from the same initialization and read the data in the same order.
`--help` lists the recipes, presets and other options. The run's folder holds
metrics.jsonl, summary.json, loss.png and checkpoints. For recipes with FP8 moments it
also holds moments.jsonl and moments.png, the statistics of these moments; with
--health-every also health.jsonl and health.png. `--mesh` and `--processes` distribute
the trainings over devices and hosts. Ctrl-C saves a checkpoint, and `--resume`
continues from it with the same results as an uninterrupted run. A resumed run may train
longer (`--steps`), and `--bad-step` selects what happens after a NaN.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from rich.table import Table

from experiments.common import meshes
from experiments.training import arguments, data, files, interrupts, processes, report
from experiments.training.health_plots import plot_health
from experiments.training.interrupts import Interrupts
from experiments.training.job import Inputs, Job, run_job, validation_batches
from experiments.training.moment_plots import plot_moments
from experiments.training.plots import plot_losses
from experiments.training.runs import Run, check_unused
from experiments.training.settings import PRESETS, Settings, model_config
from experiments.training.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    return interrupts.run(lambda stop: run_program(argv, stop))


def run_program(argv: Sequence[str] | None, stop: Interrupts) -> int:
    """Runs the program until `stop` has a signal, and returns an exit code."""
    return run_job(PRETRAINING, argv, stop)


def write_report(run: Run, inputs: Inputs) -> Table:
    """Writes summary.json and the plots of a finished run; returns a summary table."""
    return report.table(processes.on_main(lambda: _reported(run, inputs)))


def _reported(run: Run, inputs: Inputs) -> dict[str, Any]:
    """Writes the summary and the plots, and returns the summary."""
    summary = report.summarize(run, inputs.token)
    plot_losses(run, inputs.token)
    plot_moments(run)
    plot_health(run)
    return summary


def _checked_inputs(run: Run, mesh: Mesh | None) -> Inputs:
    """Returns the inputs of a run that has begun earlier.

    Raises:
      ValueError: If the data has changed since then.
    """
    corpus = load_corpus(run.settings, run.folder)
    run.check_data(corpus.fingerprint())
    return select_inputs(corpus, run.settings, mesh)


def _opened(
    args: arguments.Arguments, mesh: Mesh | None, stop: Interrupts
) -> tuple[Run, Inputs]:
    """Opens or creates the run that the command line names, and loads its inputs."""
    if args.resume:
        run = Run.resume(args.folder, args.given)
        inputs = _checked_inputs(run, mesh)
        run.record_changes()
        return run, inputs
    check_unused(args.folder)
    settings = args.settings()
    files.check_once([Path(path) for path in settings.data])
    with stop.temporary_folder() as scratch:
        corpus = load_corpus(settings, scratch)
        inputs = select_inputs(corpus, settings, mesh)
        run_files = list(scratch.iterdir())
        fingerprint = corpus.fingerprint()
        return Run.create(args.folder, settings, fingerprint, run_files), inputs


def load_corpus(settings: Settings, folder: Path) -> data.Corpus:
    """Loads the corpus of a run; a BPE tokenizer is trained once and saved in `folder`.

    Raises:
      ValueError: If the settings give a vocabulary size for bytes, or the data are
        invalid.
    """
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


def select_inputs(
    corpus: data.Corpus, settings: Settings, mesh: Mesh | None = None
) -> Inputs:
    """Returns the training windows and validation batches of a corpus.

    Token files do not state their vocabulary size, so the settings or the preset give
    it.

    Raises:
      ValueError: If the mesh cannot shard the batch or the model, or a token is outside
        the vocabulary.
    """
    meshes.check_batch("--batch-size", settings.batch_size, mesh, settings.accumulate)
    meshes.check_length("--seq-len", settings.seq_len, mesh)
    vocab_size = corpus.vocab_size or settings.vocab_size
    vocab_size = vocab_size or PRESETS[settings.preset].model.vocab_size
    if corpus.vocab_size is None:  # The tokens come from files.
        data.check_tokens(corpus, vocab_size)
    if mesh is not None:  # A trainer raises if the mesh does not divide the model.
        config = model_config(settings, settings.recipes[0], vocab_size)
        Trainer(config, settings, steps=settings.steps, mesh=mesh)
    held_out, windows = (
        data.Windows(arrays, settings.seq_len, corpus.source)
        for arrays in (corpus.validation, corpus.train)
    )
    return Inputs(
        windows=windows,
        validation=validation_batches(held_out, settings, mesh),
        vocab_size=vocab_size,
        token=corpus.token,
        mesh=mesh,
    )


PRETRAINING = Job(
    module="experiments.pretrain",
    parse=arguments.parse,
    kind=Run,
    opened=_opened,
    inputs=_checked_inputs,
    report=write_report,
)


if __name__ == "__main__":
    sys.exit(main())
