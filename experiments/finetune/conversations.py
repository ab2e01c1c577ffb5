"""Records of fine-tuning data: conversations, passages of text, and rows of tokens."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from experiments.finetune.tasks import Problem

ROLES = ("system", "user", "assistant")
# The fields of an assistant's message that some chat templates read.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_STEPS = "####"
Messages = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """An item of the data; the base class of the kinds of records.

    Attributes:
      family: The kind of question, for results by kind.
      place: The record's file and line, for error messages.
      fields: The fields of the record in its file, for a checker.
    """

    family: str = "all"
    place: str = "a record"
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation(Record):
    """A list of messages; the last message is the assistant's.

    Attributes:
      messages: The role and the content of each message.
      learned: Whether the loss counts each message; messages of other roles than the
        assistant's never count. Empty means all of the assistant's messages.
      thoughts: The texts of each message that come before its content, by their field
        of `THOUGHTS`. Empty means that no message has any.
    """

    messages: Messages
    learned: tuple[bool, ...] = ()
    thoughts: tuple[Mapping[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_turns([role for role, _ in self.messages])

    @classmethod
    def of(cls, problem: Problem) -> "Conversation":
        """Returns a generated problem as a conversation."""
        messages = ("user", problem.question), ("assistant", problem.answer)
        fields = {"question": problem.question, "answer": problem.answer}
        place = problem.question
        return cls(messages=messages, family=problem.family, place=place, fields=fields)

    @property
    def question(self) -> str:
        """The content of the message before the last answer."""
        return self.messages[-2][1]

    @property
    def answer(self) -> str:
        """The result in the last answer; see `result_of`."""
        return result_of(self.messages[-1][1])

    def is_learned(self, index: int) -> bool:
        """Returns whether the loss counts a message."""
        is_answer = self.messages[index][0] == "assistant"
        return is_answer and (not self.learned or self.learned[index])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage(Record):
    """Text without roles: a prompt, which may be empty, and its completion.

    Attributes:
      prompt: The text that is given.
      completion: The text that is learned; the document ends after it.
    """

    prompt: str = ""
    completion: str

    @property
    def question(self) -> str:
        """The prompt."""
        return self.prompt

    @property
    def answer(self) -> str:
        """The result in the completion; see `result_of`."""
        return result_of(self.completion)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenRow(Record):
    """Tokens that were encoded elsewhere.

    Attributes:
      tokens: The tokens.
      learned: Whether the loss counts each token.
    """

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]


class Example(NamedTuple):
    """A record as tokens.

    Attributes:
      tokens: The tokens.
      answers: Whether the loss counts each token.
    """

    tokens: Int32[np.ndarray, " n"]
    answers: Bool[np.ndarray, " n"]


def result_of(answer: str) -> str:
    """Returns the result in an answer: the text after the last "####", or all of it."""
    return answer.rpartition(_STEPS)[2].strip()


def check_turns(roles: list[str]) -> None:
    """Raises ValueError unless user and assistant alternate, ending with the assistant.

    A system message may come before them.

    Examples:
      >>> check_turns(["system", "user", "assistant"])
    """
    turns = roles[1:] if roles[:1] == ["system"] else roles
    for number, role in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if role != expected:
            raise ValueError(
                "messages are a user's and the assistant's in turns, after a system "
                f"message if there is one; number {number + len(roles) - len(turns)} "
                f"must be the {expected}'s, got {role!r:.60}"
            )
    if len(turns) % 2 or not turns:
        last = roles[-1] if roles else None
        raise ValueError(f"the last message must be the assistant's, got {last!r}")
