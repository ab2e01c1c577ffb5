"""Encoders, which turn records into tokens, and the encoder that writes roles as words.

The content of a message can never become a role or the end of a document. A special
token in a message is encoded as plain text. If roles are written as words, a message
that contains these words raises an error. `experiments.finetune.folder_encoding` has
the encoder of a Hugging Face folder.
"""

import abc
import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from experiments.finetune.conversations import (
    Conversation,
    Example,
    Passage,
    Record,
    TokenRow,
)
from experiments.training.text import TextCodec

Loss = Literal["answers", "all"]
Markup = Literal["refuse", "plain", "read"]
_WORDS = {"system": "", "user": "User: ", "assistant": "Assistant:"}


class Encoder(abc.ABC):
    """The base class of encoders, which turn records into a model's tokens.

    Attributes:
      vocab_size: The number of distinct tokens.
      stop_tokens: The tokens that end an answer.
    """

    vocab_size: int
    stop_tokens: Sequence[int]

    @abc.abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of an answer's tokens."""

    @abc.abstractmethod
    def question(self, record: Conversation | Passage) -> list[int]:
        """Returns the tokens of a record before its last answer, the model's prompt."""

    def answer(self, record: Conversation | Passage, tokens: Sequence[int]) -> str:
        """Returns the text of a record's answer, as a model generated its tokens."""
        return self.decode(tokens)

    def expected(self, record: Conversation | Passage) -> str:
        """Returns the right result of a record."""
        return record.answer

    @abc.abstractmethod
    def _conversation(self, conversation: Conversation) -> Example: ...

    @abc.abstractmethod
    def _passage(self, passage: Passage) -> Example: ...

    def encode(self, record: Record, loss: Loss = "answers") -> Example:
        """Returns a record's tokens, and whether the loss counts each token.

        The loss counts the answers, or with `loss="all"` every token except the first.

        Raises:
          ValueError: If a message could be read as a role, or tokens are outside the
            vocabulary. The error names the record.
        """
        if loss == "all" and isinstance(record, Conversation):
            # Then the answers need not be located.
            nothing = (False,) * len(record.messages)
            record = dataclasses.replace(record, learned=nothing)
        try:
            example = self._encoded(record)
            self._check_vocabulary(example.tokens)
        except ValueError as error:
            raise ValueError(f"{record.place}: {error}") from None
        learned = (
            example.answers if loss == "answers" else np.ones_like(example.answers)
        )
        learned = learned.copy()
        learned[:1] = False  # No token predicts the first one.
        return Example(example.tokens, learned)

    def _encoded(self, record: Record) -> Example:
        if isinstance(record, Conversation):
            return self._conversation(record)
        if isinstance(record, Passage):
            return self._passage(record)
        assert isinstance(record, TokenRow)
        tokens = np.array(record.tokens, np.int32)
        return Example(tokens, np.array(record.learned))

    def _check_vocabulary(self, tokens: np.ndarray) -> None:
        largest = tokens.max(initial=0)
        if largest >= self.vocab_size:
            raise ValueError(
                f"tokens must be below the vocabulary's size {self.vocab_size}, got "
                f"{largest}"
            )


class WordsEncoder(Encoder):
    """An encoder that writes roles as words, for runs of `experiments.pretrain`.

    A model of plain text then needs no special tokens for roles:

        User: What is 7 + 5?
        Assistant: 12<|document|>

    The separator of documents, which the model knows from pretraining, ends each answer
    of the assistant. A message of the role "system" is a line without a role. The space
    before an answer is encoded together with the answer, as BPE tokenizers expect.

    Args:
      codec: The tokenizer of the run.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.vocab_size = codec.vocab_size
        self.stop_tokens = [codec.separator]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return self._codec.decode(tokens)

    def question(self, record: Conversation | Passage) -> list[int]:
        """Returns the tokens of a record before its last answer."""
        if isinstance(record, Passage):
            return self._codec.encode(record.prompt).tolist()
        return self._joined(self._pieces(record)[:-1]).tokens.tolist()

    def _conversation(self, conversation: Conversation) -> Example:
        return self._joined(self._pieces(conversation))

    def _pieces(self, conversation: Conversation) -> list[tuple[str, bool, bool]]:
        """Returns the pieces of a conversation for `_joined`; the last is an answer."""
        if conversation.thoughts:
            name = min(name for thoughts in conversation.thoughts for name in thoughts)
            raise ValueError(f'a model of --base has no place for "{name}"')
        pieces, prompt = [], ""
        for index, (role, content) in enumerate(conversation.messages):
            for word in filter(None, _WORDS.values()):
                if re.search(rf"^\s*{word.strip()}", content, re.MULTILINE):
                    raise role_error(word.strip(), content)
            if role == "assistant":
                pieces.append((prompt + _WORDS[role], False, False))
                pieces.append((f" {content}", conversation.is_learned(index), True))
                prompt = ""
            else:
                prompt += f"{_WORDS[role]}{content}\n"
        return pieces

    def _passage(self, passage: Passage) -> Example:
        pieces = [(passage.prompt, False, False), (passage.completion, True, True)]
        return self._joined(pieces)

    def _joined(self, pieces: Sequence[tuple[str, bool, bool]]) -> Example:
        """Encodes pieces of text, and concatenates their tokens.

        Args:
          pieces: The pieces: a text, whether the loss counts its tokens, and whether
            the separator of documents follows it.
        """
        tokens, learned = [], []
        for text, is_learned, ends in pieces:
            piece = self._codec.encode(text)
            if ends:
                piece = np.append(piece, self._codec.separator)
            tokens.append(piece)
            learned.append(np.full(piece.size, is_learned))
        return Example(np.concatenate(tokens).astype(np.int32), np.concatenate(learned))


def role_error(word: str, content: str) -> ValueError:
    """Returns the error for a message with a word that the model reads as a role."""
    near = content[max(0, content.find(word) - 10) :]
    return ValueError(
        f"a message must not have the words {word!r}, which the model reads as a role; "
        f"got {near!r:.60}"
    )
