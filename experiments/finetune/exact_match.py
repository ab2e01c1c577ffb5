"""Exact match: generated answers compared with the right ones, with intervals."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

import coat_jax as coat
from coat_jax.models.llama import Llama
from experiments.common.intervals import wilson
from experiments.finetune.conversations import (
    Conversation,
    encode,
    encode_question,
    result_of,
)
from experiments.training.text import TextCodec

_BATCH = 128
_BUCKET = 64  # Prompts are padded to a multiple of this, so that programs are few.
_SPARE = 8  # Tokens that an answer may have more than the longest right one.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A generated answer.

    Attributes:
      family: The kind of question.
      question: The last question, as the user asked it.
      expected: The right result.
      given: The generated answer.
      exact: Whether the result in it is the right one.
    """

    family: str
    question: str
    expected: str
    given: str
    exact: bool


class Exam:
    """Questions to ask a model.

    Args:
      conversations: The questions with their answers.
      codec: The tokenizer.
    """

    def __init__(self, conversations: Sequence[Conversation], codec: TextCodec) -> None:
        self._conversations = conversations
        self._codec = codec
        self._prompts = [encode_question(each, codec) for each in conversations]
        self._room = _SPARE + max(
            encode(each, codec).tokens.size - len(prompt)
            for each, prompt in zip(conversations, self._prompts, strict=True)
        )

    def first(self, count: int) -> "Exam":
        """Returns an exam of the first `count` questions."""
        return Exam(self._conversations[:count], self._codec)

    def ask(self, model: Llama, name: str | None = None) -> list[Answer]:
        """Returns the greedy answers of a model, in the order of the questions.

        Args:
          model: The model.
          name: The label of a progress bar; None means no bar.
        """
        texts: dict[int, str] = {}
        with tqdm(total=len(self._prompts), desc=name, disable=name is None) as bar:
            for batch in self._batches():
                texts |= self._generated(model, batch)
                bar.update(len(batch))
        return [
            self._answer(conversation, texts[n])
            for n, conversation in enumerate(self._conversations)
        ]

    def _batches(self) -> Iterator[list[int]]:
        """Yields the numbers of the questions of each batch, short prompts first."""
        order = sorted(range(len(self._prompts)), key=lambda n: len(self._prompts[n]))
        for start in range(0, len(order), _BATCH):
            yield order[start : start + _BATCH]

    def _generated(self, model: Llama, batch: list[int]) -> dict[int, str]:
        prompts = [self._prompts[n] for n in batch]
        size = min(_BATCH, len(self._prompts))
        prompts += [prompts[-1]] * (size - len(prompts))  # All batches are one program.
        longest = max(map(len, prompts))
        output = coat.generate(
            model,
            prompts,
            max_new_tokens=self._room,
            stop_tokens=[self._codec.separator],
            prompt_length=-(-longest // _BUCKET) * _BUCKET,
        )
        tokens, lengths = np.asarray(output.tokens), np.asarray(output.lengths)
        rows = zip(batch, tokens, lengths, strict=False)
        return {n: self._codec.decode(row[:end].tolist()) for n, row, end in rows}

    def _answer(self, conversation: Conversation, text: str) -> Answer:
        return Answer(
            family=conversation.family,
            question=_last_question(conversation),
            expected=conversation.answer,
            given=text.strip(),
            exact=result_of(text) == conversation.answer,
        )


def _last_question(conversation: Conversation) -> str:
    questions = [text for role, text in conversation.messages if role == "user"]
    return questions[-1] if questions else ""


def percent(answers: Sequence[Answer]) -> float:
    """Returns the share of exact answers, in percent."""
    return 100 * sum(record.exact for record in answers) / len(answers)


def rows(recipe: str, answers: Sequence[Answer]) -> Iterable[dict[str, Any]]:
    """Yields the exact match of each family and of all, with 95% intervals."""
    families = list(dict.fromkeys(record.family for record in answers))
    for family in [*families, "all"] if families != ["all"] else families:
        of_family = [a for a in answers if family in ("all", a.family)]
        low, high = wilson(sum(a.exact for a in of_family), len(of_family))
        yield {
            "recipe": recipe,
            "family": family,
            "questions": len(of_family),
            "exact_match_percent": percent(of_family),
            "low_percent": 100 * low,
            "high_percent": 100 * high,
        }
