"""Fine-tunes one base with several recipes, and compares their exact match.

    uv run python -m experiments.finetune

Without arguments a small byte-level model with random parameters learns generated
arithmetic and word problems with the recipes `bf16` and `coat`. `--base` names a run of
`experiments.pretrain` to start from. `--data` and `--test` name .jsonl files, with a
question and an answer or with chat messages on each line.

Conversations are packed into windows in which attention does not cross from one to
another, and the loss counts the answers alone. All parameters are BF16 and rounded
stochastically. The run's folder holds metrics.jsonl, summary.json, answers.jsonl,
loss.png, exact_match.png and checkpoints. Ctrl-C saves a checkpoint, and `--resume`
continues from it as in pretraining.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from flax import nnx
from rich.console import RenderableType

from experiments.finetune import exact_match, report, tasks
from experiments.finetune.arguments import FinetuneArguments, parse
from experiments.finetune.base import load_base, params_fingerprint
from experiments.finetune.conversations import (
    Conversation,
    encode,
    read_conversations,
)
from experiments.finetune.exact_match import Answer, Exam
from experiments.finetune.packing import PackedWindows
from experiments.finetune.settings import FinetuneRun, FinetuneSettings
from experiments.finetune.training import AnswerTrainer
from experiments.training import data, interrupts
from experiments.training.interrupts import Interrupts
from experiments.training.job import Inputs, Job, run_job
from experiments.training.moment_plots import plot_moments
from experiments.training.plots import plot_losses
from experiments.training.runs import check_unused
from experiments.training.settings import Recipe, Settings, model_config
from experiments.training.step import TrainState
from experiments.training.text import TextCodec, text_codec
from experiments.training.trainer import Trainer

_TOKENIZER = "tokenizer.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    return interrupts.run(lambda stop: run_program(argv, stop))


def run_program(argv: Sequence[str] | None, stop: Interrupts) -> int:
    """Does what `main` does, and ends as `stop` says."""
    return run_job(FINETUNING, argv, stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionInputs(Inputs):
    """The conversations that every recipe of a run reads.

    Attributes:
      base: The parameters to start from; None means random ones.
      exam: The test questions that are asked at the end.
      short_exam: Those that validations ask.
    """

    base: nnx.State | None
    exam: Exam
    short_exam: Exam

    def trainer(self, settings: Settings, recipe: Recipe, steps: int) -> AnswerTrainer:
        """Returns a recipe's trainer, which starts from the base."""
        config = model_config(settings, recipe, self.vocab_size)
        return AnswerTrainer(config, settings, steps=steps, base=self.base)

    def measure(self, trainer: Trainer, state: TrainState) -> dict[str, float]:
        """Returns the loss of the test answers, and the exact match of some of them."""
        assert isinstance(trainer, AnswerTrainer)
        answers = self.short_exam.ask(trainer.model(state.params))
        share = {"exact_match_percent": exact_match.percent(answers)}
        return super().measure(trainer, state) | share


def prepare(
    args: FinetuneArguments, stop: Interrupts
) -> tuple[FinetuneRun, QuestionInputs]:
    """Opens or creates the run, its base and its data.

    Invalid settings or data raise before run.json is written.
    """
    if args.resume:
        run = FinetuneRun.resume(args.folder, args.given)
        inputs, fingerprint = load_questions(run.settings, args.folder / _TOKENIZER)
        run.check_data(fingerprint)
        run.record_changes()
        return run, inputs
    check_unused(args.folder)
    settings = args.settings()
    tokenizer = Path(settings.base) / _TOKENIZER
    inputs, fingerprint = load_questions(settings, tokenizer)
    files = [tokenizer] if settings.tokenizer == "bpe" else []
    run = FinetuneRun.create(args.folder, settings, fingerprint, files)
    print(_start(settings))
    return run, inputs


def load_questions(
    settings: FinetuneSettings, tokenizer: Path
) -> tuple[QuestionInputs, str]:
    """Returns the inputs of a run, and a hash of everything that it reads.

    Args:
      settings: The run's settings.
      tokenizer: The file of the tokenizer, if it is a BPE.
    """
    is_bpe = settings.tokenizer == "bpe"
    codec = text_codec(settings.vocab_size, tokenizer if is_bpe else None)
    base, sources = None, "random"
    if settings.base:
        recipe = settings.base_recipe or "bf16"
        base = load_base(Path(settings.base), recipe, codec.vocab_size)
        sources = params_fingerprint(base)
    train, test = conversations(settings)
    questions_asked = test[: settings.test_questions]
    windows, held_out = (packed(split, codec, settings) for split in (train, test))
    exam = Exam(questions_asked, codec)
    for split in (windows.fingerprint(), held_out.fingerprint()):
        sources += f" {split}"
    questions = QuestionInputs(
        windows=windows,
        validation=data.validation_batches(
            held_out, batch_size=settings.batch_size, count=settings.eval_batches
        ),
        vocab_size=codec.vocab_size,
        token="byte" if settings.tokenizer == "bytes" else "token",
        base=base,
        exam=exam,
        short_exam=exam.first(settings.eval_questions),
    )
    return questions, hashlib.blake2b(sources.encode(), digest_size=16).hexdigest()


def conversations(
    settings: FinetuneSettings,
) -> tuple[list[Conversation], list[Conversation]]:
    """Returns the conversations to train on and those to test."""
    if settings.data:
        train, test = (
            read_conversations([Path(path) for path in paths])
            for paths in (settings.data, settings.test)
        )
        return train, test
    options = {"families": settings.families, "largest": settings.largest}
    train = tasks.problems("train", settings.problems, seed=settings.seed, **options)
    # All seeds have the same test, so that answers can be compared one by one.
    test = tasks.problems("test", settings.test_questions, **options)
    return [*map(Conversation.of, train)], [*map(Conversation.of, test)]


def packed(
    conversations: Sequence[Conversation], codec: TextCodec, settings: FinetuneSettings
) -> PackedWindows:
    """Returns conversations as windows.

    Raises:
      ValueError: If a conversation is longer than a window. The message names it.
    """
    examples = [encode(conversation, codec) for conversation in conversations]
    for conversation, example in zip(conversations, examples, strict=True):
        if example.tokens.size > settings.seq_len + 1:
            raise ValueError(
                f"{conversation.place}: a conversation must fit into --seq-len "
                f"{settings.seq_len}, but it has {example.tokens.size} tokens"
            )
    return PackedWindows(examples, settings.seq_len)


def write_report(run: FinetuneRun, inputs: QuestionInputs) -> RenderableType:
    """Asks all test questions, and writes the results; returns tables of them."""
    by_recipe: dict[str, list[Answer]] = {}
    for recipe in run.settings.recipes:
        trainer = inputs.trainer(run.settings, recipe, run.steps or 1)
        if not by_recipe:
            untrained = trainer.model(trainer.init().params)
            by_recipe["before"] = inputs.exam.ask(untrained, "before, test")
        with run.checkpoints(recipe) as checkpoints:
            state = checkpoints.state(trainer.abstract_state())
        model = trainer.model(state.params)
        by_recipe[recipe] = inputs.exam.ask(model, f"{recipe}, test")
    summary = report.summarize(run, inputs.token, by_recipe)
    plot_losses(run, inputs.token)
    plot_moments(run)
    report.plot_exact_match(run, summary)
    return report.tables(summary)


def _start(settings: FinetuneSettings) -> str:
    """Returns a line about the parameters that the run starts from."""
    if settings.base:
        return f"base: {settings.base_recipe} of {settings.base}"
    return (
        "base: none, the parameters are random; --base names a run of "
        "experiments.pretrain to start from"
    )


FINETUNING = Job(
    module="experiments.finetune",
    parse=parse,
    prepare=prepare,
    report=write_report,
)


if __name__ == "__main__":
    sys.exit(main())
