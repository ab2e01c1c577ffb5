"""Conversations: read from .jsonl files, written as text, and encoded as tokens.

A conversation is written with the roles as words, so that a model of plain text needs
no tokens of its own:

    User: What is 7 + 5?
    Assistant: 12<|document|>

The separator of documents, which pretraining has taught the model, ends each answer of
the assistant. A message of the role "system" is a line without a role. The loss counts
the assistant's answers and their separators. A question is encoded without the space
before its answer, which belongs to the answer, as BPEs have it.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from experiments.finetune.tasks import Problem
from experiments.training import files
from experiments.training.text import TextCodec

ROLES = ("system", "user", "assistant")
_ASKED = "Assistant:"
_STEPS = "####"
Messages = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages of which the last is the assistant's.

    Attributes:
      messages: The role and the content of each message.
      family: The kind of question, for results by kind.
      place: Its file and line, for messages about it.
    """

    messages: Messages
    family: str = "all"
    place: str = "a conversation"

    @classmethod
    def of(cls, problem: Problem) -> "Conversation":
        """Returns a generated problem as a conversation."""
        messages = ("user", problem.question), ("assistant", problem.answer)
        return cls(messages=messages, family=problem.family, place=problem.question)

    @property
    def answer(self) -> str:
        """The last answer, of which only the part after "####" counts, if any."""
        return result_of(self.messages[-1][1])


class Example(NamedTuple):
    """A conversation as tokens.

    Attributes:
      tokens: The tokens.
      answers: True for the tokens of the assistant's answers.
    """

    tokens: Int32[np.ndarray, " n"]
    answers: Bool[np.ndarray, " n"]


def result_of(answer: str) -> str:
    """Returns the compared part of an answer: the text after the last "####"."""
    return answer.rpartition(_STEPS)[2].strip()


def encode(conversation: Conversation, codec: TextCodec) -> Example:
    """Returns a conversation as tokens."""
    tokens, answers = [], []
    for text, is_answer in _pieces(conversation.messages):
        piece = codec.encode(text)
        if is_answer:
            piece = np.append(piece, codec.separator)
        tokens.append(piece)
        answers.append(np.full(piece.size, is_answer))
    return Example(np.concatenate(tokens).astype(np.int32), np.concatenate(answers))


def encode_question(conversation: Conversation, codec: TextCodec) -> list[int]:
    """Returns the tokens up to the last answer, which is to be generated."""
    tokens, answers = encode(conversation, codec)
    last = tokens.size - int(np.argmin(answers[::-1]))
    return tokens[:last].tolist()


def _pieces(messages: Messages) -> Iterator[tuple[str, bool]]:
    """Yields pieces of text, and whether each is an answer."""
    prompt = ""
    for role, content in messages:
        if role == "assistant":
            yield prompt + _ASKED, False
            yield f" {content}", True
            prompt = ""
        else:
            prompt += f"User: {content}\n" if role == "user" else f"{content}\n"


def read_conversations(paths: Sequence[Path]) -> list[Conversation]:
    """Reads one conversation per line of .jsonl files, or of folders of them.

    A line is {"question": ..., "answer": ...} or {"messages": [{"role": ...,
    "content": ...}, ...]}, and may have a "family".

    Raises:
      FileNotFoundError: If there is no file at a path.
      ValueError: If a file is no .jsonl, or a line is no conversation. The message
        names the file and the line.
    """
    paths_of_files = files.find_files(paths)
    for path in paths_of_files:
        if path.suffix.lower() != ".jsonl":
            raise ValueError(f"conversations must be .jsonl files, got {path}")
    files.check_texts(paths_of_files)
    conversations = [each for path in paths_of_files for each in _read(path)]
    if not conversations:
        raise ValueError(f"there is no conversation in {', '.join(map(str, paths))}")
    return conversations


def _read(path: Path) -> Iterator[Conversation]:
    with files.named(path), path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            location = f"{path}, line {number}"
            try:
                yield _conversation(json.loads(line, parse_int=float), location)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{location}: a line must be a question with its answer, or "
                    f"messages: {error!s:.200}"
                ) from None


def _conversation(record: Any, location: str) -> Conversation:
    """Returns the conversation in a JSON value; raises ValueError if there is none."""
    if not isinstance(record, dict):
        raise ValueError(f"it is no object, got {record!r:.60}")
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError(f'"messages" must be a list of some, got {messages!r:.60}')
        pairs = [_message(each) for each in messages]
    else:
        pairs = [
            ("user", _string(record, "question")),
            ("assistant", _string(record, "answer")),
        ]
    roles = [role for role, _ in pairs]
    if roles[-1] != "assistant":
        raise ValueError(f"the last message must be the assistant's, got {roles[-1]!r}")
    family = _string(record, "family") if "family" in record else "all"
    return Conversation(messages=tuple(pairs), family=family, place=location)


def _message(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, got {message!r:.60}")
    role = _string(message, "role")
    if role not in ROLES:
        raise ValueError(f"roles are {', '.join(ROLES)}; got {role!r:.60}")
    return role, _string(message, "content")


def _string(record: dict, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f'"{name}" must be a string that is not blank, got {value!r:.60}'
        )
    value.encode()  # JSON can name halves of letters, which are no Unicode.
    return value
