r"""Writes data to fine-tune a chat model: word problems and dialogues.

    uv run --with reasoning-gym --with chatterbot-corpus \
        python -m experiments.studies.finetune_data FOLDER

The folder gets train.jsonl and test.jsonl. Word problems come from reasoning-gym
("gsm_symbolic", like GSM8K, Apache-2.0) and from `experiments.finetune.tasks`.
Dialogues are the English dialogues of chatterbot-corpus (BSD). The packages download no
data. No question is in both files.
"""

import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.common.programs import new_parser
from experiments.finetune import tasks

PROBLEMS, DIALOGUES = "gsm_symbolic", "dialogues"
_TRAIN, _TEST = 4000, 1000  # Word problems of each source.
_TEST_SHARE = 0.1


def records() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the records to train on, and the records to test on.

    Raises:
      ImportError: If a package is missing.
    """
    train, test = [], []
    for record in [*_symbolic(_TRAIN + _TEST), *_dialogues()]:
        (test if _is_test(record["question"]) else train).append(record)
    for name, records, count in (("train", train, _TRAIN), ("test", test, _TEST)):
        families = ("stories", "reading", "steps")
        for problem in tasks.problems(name, count, families=families):
            fields = {"question": problem.question, "answer": problem.answer}
            records.append(fields | {"family": problem.family})
    return train, test


def _is_test(question: str) -> bool:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < _TEST_SHARE * 2**64


def _symbolic(count: int) -> Iterator[dict[str, Any]]:
    """Yields distinct word problems, each with a number as its answer.

    `count` problems are drawn.
    """
    reasoning_gym = importlib.import_module("reasoning_gym")
    questions = set()
    for entry in reasoning_gym.create_dataset(PROBLEMS, size=count, seed=0):
        question = entry["question"].strip()
        if question not in questions:
            questions.add(question)
            answer = str(entry["answer"])
            yield {"question": question, "answer": answer, "family": PROBLEMS}


def _dialogues() -> Iterator[dict[str, Any]]:
    """Yields the first question and answer of each dialogue."""
    yaml = importlib.import_module("yaml")
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or spec.origin is None:
        raise ImportError("chatterbot-corpus is not installed")
    questions = set()
    for path in sorted((Path(spec.origin).parent / "data/english").glob("*.yml")):
        for turns in yaml.safe_load(path.read_text())["conversations"]:
            texts = [turn for turn in turns if isinstance(turn, str) and turn.strip()]
            if len(texts) > 1 and texts[0] not in questions:
                questions.add(texts[0])
                fields = {"question": texts[0], "answer": texts[1]}
                yield fields | {"family": DIALOGUES}


def write(folder: Path) -> None:
    """Writes train.jsonl and test.jsonl to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, of_part in zip(("train", "test"), records(), strict=True):
        lines = (json.dumps(record, ensure_ascii=False) for record in of_part)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{folder / name}.jsonl: {len(of_part):,} records")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files to the folder on the command line; returns an exit code."""
    parser = new_parser("experiments.studies.finetune_data", __doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args(argv).folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
