"""Reads or generates the records of a run, splits them, and packs them into windows."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.finetune import tasks
from experiments.finetune.conversations import Conversation, Example, Passage, Record
from experiments.finetune.encoding import Encoder
from experiments.finetune.packing import PackedWindows
from experiments.finetune.records import read_records
from experiments.finetune.settings import FinetuneSettings
from experiments.training.text import VALIDATION_SHARE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """A part of the records, as windows and as questions.

    Attributes:
      windows: The windows.
      questions: The records that have a question and were not cut.
      described: A text with the numbers of all records, of cut and of skipped ones.
    """

    windows: PackedWindows
    questions: list[Conversation | Passage]
    described: str


def read_splits(settings: FinetuneSettings) -> tuple[list[Record], list[Record]]:
    """Returns the records to train on and the records to validate on.

    Raises:
      FileNotFoundError: If there is no file at a path.
      ValueError: If a file is invalid; see `read_records`.
    """
    if settings.data:
        train = read_records([Path(path) for path in settings.data])
        if settings.test:
            return train, read_records([Path(path) for path in settings.test])
        return split(train)
    options = {"families": settings.families, "largest": settings.largest}
    train = tasks.problems("train", settings.problems, seed=settings.seed, **options)
    # All seeds have the same test, so that answers can be compared one by one.
    test = tasks.problems("test", settings.test_questions, **options)
    return [*map(Conversation.of, train)], [*map(Conversation.of, test)]


def split(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Returns records to train on, and about a twentieth to validate on.

    A hash of a record's content decides its split, so that equal records are in the
    same split.

    Raises:
      ValueError: If all records have the same content.
    """
    train, test = [], []
    hashes = [_hash(record) for record in records]
    bound = VALIDATION_SHARE * 2**64
    if min(hashes) >= bound:
        bound = min(hashes) + 1
    for record, number in zip(records, hashes, strict=True):
        (test if number < bound else train).append(record)
    if not train:
        raise ValueError(
            f"all {len(records)} records are alike, so that none is left to validate "
            "on; --test names others"
        )
    return train, test


def _hash(record: Record) -> int:
    """Returns a hash of a record's content, which excludes place, fields and family."""
    values = dataclasses.asdict(record)
    for name in ("place", "fields", "family"):
        del values[name]
    if not values.get("thoughts"):  # A record without thoughts keeps its split.
        values.pop("thoughts", None)
    digest = hashlib.blake2b(repr(values).encode("utf-8", "replace"), digest_size=8)
    return int.from_bytes(digest.digest())


def fitted(
    records: Sequence[Record], encoder: Encoder, settings: FinetuneSettings
) -> Split:
    """Encodes records and packs them into windows.

    `settings.long` determines the treatment of records that are longer than a window.

    Raises:
      ValueError: If a record is longer than a window and is refused, or has no token to
        learn, or if no record is left. The error names the record.
    """
    room = settings.seq_len + 1
    examples, questions, cut, skipped = [], [], 0, 0
    for record in records:
        example = encoder.encode(record, settings.loss)
        if not example.answers.any():
            raise ValueError(f"{record.place}: no token of it would be learned")
        if example.tokens.size <= room:
            examples.append(example)
            if isinstance(record, Conversation) or (
                isinstance(record, Passage) and record.prompt
            ):
                questions.append(record)
            continue
        if settings.long == "refuse":
            raise ValueError(
                f"{record.place}: a record must fit into --seq-len "
                f"{settings.seq_len}, but it has {example.tokens.size} tokens; "
                "--long cut or skip takes longer ones"
            )
        pieces = _cut(record, example, room) if settings.long == "cut" else []
        examples += pieces
        cut, skipped = cut + bool(pieces), skipped + (not pieces)
    if not examples:
        raise ValueError(
            f"no record of {len(records)} fits into --seq-len {settings.seq_len}"
        )
    described = f"{len(records):,} records"
    described += f", {cut:,} of them cut" if cut else ""
    described += f", {skipped:,} of them skipped" if skipped else ""
    windows = PackedWindows(examples, settings.seq_len)
    return Split(windows=windows, questions=questions, described=described)


def _cut(record: Record, example: Example, room: int) -> list[Example]:
    """Returns the pieces of a long record that have tokens to learn.

    Text without a prompt is cut into several pieces, which overlap by one token. For
    other records only the first tokens are used, because an answer needs its question.
    """
    is_text = isinstance(record, Passage) and not record.prompt
    starts = range(0, example.tokens.size - 1, room - 1) if is_text else [0]
    pieces = []
    for start in starts:
        tokens = example.tokens[start : start + room]
        learned = example.answers[start : start + room].copy()
        learned[:1] = False
        pieces.append(Example(tokens, learned))
    return [piece for piece in pieces if np.any(piece.answers)]
