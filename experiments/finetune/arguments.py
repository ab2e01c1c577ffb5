"""The command line of `experiments.finetune`."""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path

from experiments.common.programs import new_parser
from experiments.finetune import settings
from experiments.finetune.checkers import CHECKERS
from experiments.finetune.encoding import Loss, Markup
from experiments.training import arguments
from experiments.training.settings import RECIPES

_RUNS = Path("runs/finetune")
_EXAMPLES = """\
examples:
  uv run python -m experiments.finetune
  uv run python -m experiments.finetune --model FOLDER --data chat.jsonl --recipe coat
  uv run python -m experiments.finetune --model FOLDER --data chat.parquet --lora 16
  uv run python -m experiments.finetune --base runs/124m-20260101-120000
  uv run python -m experiments.finetune --base DIR --data train.jsonl --test test.jsonl
  uv run python -m experiments.finetune --resume
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneArguments(arguments.Arguments):
    """A parsed command line of a fine-tuning."""

    def settings(self) -> settings.FinetuneSettings:
        """Returns the defaults, overridden by the given settings."""
        return settings.settings(self.given)


def parse(argv: Sequence[str] | None = None) -> FinetuneArguments:
    """Parses a command line; exits with a message if it is invalid."""
    return arguments.parse_as(FinetuneArguments, parser(), argv, _RUNS)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line.

    Arguments that are not given are missing from its result.
    """
    top = new_parser(
        "experiments.finetune",
        "Fine-tunes one base with several recipes on conversations, and compares their "
        "exact match.",
        argument_default=argparse.SUPPRESS,
        epilog=_EXAMPLES,
    )
    add = top.add_argument_group("the base").add_argument
    add(
        "--model",
        type=arguments.path_name,
        metavar="DIR",
        help="Hugging Face folder with config.json, safetensors and tokenizer.json",
    )
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="trains adapters of this rank over frozen weights, which are FP8 with "
        "coat and coat_max; every parameter is trained without it",
    )
    add("--lora-alpha", type=float, help="factor of adapters, times the rank (2 RANK)")
    add(
        "--base",
        type=arguments.path_name,
        metavar="DIR",
        help="folder of a run of experiments.pretrain on text; random parameters "
        "without it",
    )
    add("--base-recipe", choices=RECIPES, help="recipe of the base (bf16)")
    arguments.add_training(top)
    add_questions(top)
    arguments.add_comparison(
        top,
        recipes="coat with --model, else bf16,coat",
        rounding="of BF16 parameters (stochastic; nearest with --lora)",
    )
    arguments.add_devices(top)
    arguments.add_folder(top, "runs/finetune/PRESET-TIME")
    return top


def add_questions(top: argparse.ArgumentParser) -> None:
    """Adds the options for the data and the test questions to a parser."""
    add = top.add_argument_group("the data").add_argument
    for name, help_text in (
        ("--data", "to train on; generated problems if not given"),
        (
            "--test",
            "to validate on, with last answers to generate; a twentieth of the "
            "data if not given",
        ),
    ):
        add(
            name,
            type=arguments.path_name,
            nargs="+",
            action="extend",
            metavar="PATH",
            help=f".jsonl or .parquet files of records {help_text}",
        )
    add("--loss", choices=typing.get_args(Loss), help="tokens that it counts (answers)")
    add(
        "--markup",
        choices=typing.get_args(Markup),
        help="what is done with special tokens that a text, prompt or completion "
        "spells: refuse, plain for characters, read for tokens (refuse)",
    )
    add(
        "--long",
        choices=typing.get_args(settings.Long),
        help="what is done with records that are longer than a sequence (refuse)",
    )
    add(
        "--checker",
        metavar="NAME",
        help=f"of generated answers: {', '.join(CHECKERS)}, or MODULE:FUNCTION (exact)",
    )
    add(
        "--save-format",
        choices=typing.get_args(settings.SaveFormat),
        help="FP8 format of a second folder with the trained model",
    )
    add(
        "--largest",
        type=int,
        help="number in a generated question (99), without --data",
    )
    add(
        "--problems",
        type=int,
        help="generated problems to train on (20000), without --data",
    )
    add(
        "--families",
        type=_names,
        help="of generated problems (all), without --data",
        metavar="A,B",
    )
    add(
        "--eval-questions",
        type=int,
        help="test questions a validation (64; 0 asks none)",
    )
    add(
        "--test-questions",
        type=int,
        help="test questions at the end (2000; 0 asks none)",
    )
    arguments.add_batches(add)


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))
