"""The command line of `experiments.finetune`."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from experiments.common.programs import new_parser
from experiments.finetune import settings
from experiments.training import arguments
from experiments.training.settings import RECIPES

_RUNS = Path("runs/finetune")
_EXAMPLES = """\
examples:
  uv run python -m experiments.finetune
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
    """Returns the parser; flags for settings have no default here."""
    top = new_parser(
        "experiments.finetune",
        "Fine-tunes one base with several recipes on conversations, and compares their "
        "exact match.",
        argument_default=argparse.SUPPRESS,
        epilog=_EXAMPLES,
    )
    add = top.add_argument_group("the base").add_argument
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
    arguments.add_comparison(top)
    arguments.add_folder(top, "runs/finetune/PRESET-TIME")
    return top


def add_questions(top: argparse.ArgumentParser) -> None:
    """Adds the flags of the data and of the questions that are asked."""
    add = top.add_argument_group("the data").add_argument
    for name, help_text in (
        ("--data", "to train on; generated problems if not given"),
        ("--test", "whose last answers are generated"),
    ):
        add(
            name,
            type=arguments.path_name,
            nargs="+",
            action="extend",
            metavar="PATH",
            help=f".jsonl files of conversations {help_text}",
        )
    add("--largest", type=int, help="number in a generated question (99)")
    add("--problems", type=int, help="generated problems to train on (20000)")
    add("--families", type=_names, help="of generated problems (all)", metavar="A,B")
    add("--eval-questions", type=int, help="test questions a validation (64)")
    add("--test-questions", type=int, help="test questions at the end (2000)")
    arguments.add_batches(add)


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))
