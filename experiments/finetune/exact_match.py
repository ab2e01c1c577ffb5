"""Exact match: asks models questions, and counts how many answers are right."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

import coat_jax as coat
from coat_jax.models.llama import Llama, LlamaConfig
from experiments.common.intervals import wilson
from experiments.finetune.checkers import Checker, exact
from experiments.finetune.conversations import Conversation, Passage
from experiments.finetune.encoding import Encoder

_BATCH = 128
_CACHE_BYTES = 2**31  # Largest KV cache of a batch.
_BUCKET = 64  # Prompts are padded to multiples, so that few programs are compiled.
_SPARE = 8  # Tokens that an answer may have more than the longest right one.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A generated answer.

    Attributes:
      family: The kind of question.
      question: The last question, as the user asked it.
      expected: The right result.
      given: The generated answer.
      exact: Whether the checker accepts the answer.
    """

    family: str
    question: str
    expected: str
    given: str
    exact: bool


class Exam:
    """Questions to ask a model, with their right answers.

    Args:
      records: The questions with their answers.
      encoder: The encoder of the model.
      checker: The function that decides whether an answer is right.
      config: The model's shape, which bounds batches by the memory of the KV cache;
        None means no bound by memory.
    """

    def __init__(
        self,
        records: Sequence[Conversation | Passage],
        encoder: Encoder,
        checker: Checker = exact,
        config: LlamaConfig | None = None,
    ) -> None:
        self._records = records
        self._encoder, self._checker, self._config = encoder, checker, config
        self._prompts = [encoder.question(record) for record in records]
        room = [
            encoder.encode(record).tokens.size - len(prompt)
            for record, prompt in zip(records, self._prompts, strict=True)
        ]
        self._room = _SPARE + max(room, default=0)
        self._size = min(_BATCH, len(records), self._fitting())

    def _fitting(self) -> int:
        """Returns the number of questions in a batch that the KV cache has room for."""
        if self._config is None or not self._prompts:
            return _BATCH
        c, longest = self._config, max(map(len, self._prompts))
        head = c.size_of_heads
        token = 4 * c.num_layers * c.num_kv_heads * head  # BF16 keys and values.
        return max(1, _CACHE_BYTES // (token * (longest + _BUCKET + self._room)))

    def __len__(self) -> int:
        return len(self._records)

    def first(self, count: int) -> "Exam":
        """Returns an exam of the first `count` questions."""
        options = self._encoder, self._checker, self._config
        return Exam(self._records[:count], *options)

    def ask(self, model: Llama, name: str | None = None) -> list[Answer]:
        """Returns the greedy answers of a model, in the order of the questions.

        `name` is shown next to a progress bar; None means no progress bar.
        """
        texts: dict[int, str] = {}
        with tqdm(total=len(self._prompts), desc=name, disable=name is None) as bar:
            for batch in self._batches():
                texts |= self._generated(model, batch)
                bar.update(len(batch))
        return [
            self._answer(record, texts[n]) for n, record in enumerate(self._records)
        ]

    def _batches(self) -> Iterator[list[int]]:
        """Yields the indices of the questions of each batch, shortest prompts first."""
        order = sorted(range(len(self._prompts)), key=lambda n: len(self._prompts[n]))
        for start in range(0, len(order), self._size or 1):
            yield order[start : start + self._size]

    def _generated(self, model: Llama, batch: list[int]) -> dict[int, str]:
        prompts = [self._prompts[n] for n in batch]
        # All batches have the same size, so that programs are reused.
        prompts += [prompts[-1]] * (self._size - len(prompts))
        longest = max(map(len, prompts))
        output = coat.generate(
            model,
            prompts,
            max_new_tokens=self._room,
            stop_tokens=list(self._encoder.stop_tokens),
            prompt_length=-(-longest // _BUCKET) * _BUCKET,
        )
        tokens, lengths = np.asarray(output.tokens), np.asarray(output.lengths)
        rows = zip(batch, tokens, lengths, strict=False)
        return {
            n: self._encoder.answer(self._records[n], row[:end].tolist())
            for n, row, end in rows
        }

    def _answer(self, record: Conversation | Passage, text: str) -> Answer:
        expected = self._encoder.expected(record)
        score = self._checker(text.strip(), expected, record.fields)
        return Answer(
            family=record.family,
            question=record.question,
            expected=expected,
            given=text.strip(),
            exact=bool(score >= 1),
        )


def percent(answers: Sequence[Answer]) -> float:
    """Returns the share of exact answers, in percent."""
    return 100 * sum(record.exact for record in answers) / len(answers)


def rows(recipe: str, answers: Sequence[Answer]) -> Iterable[dict[str, Any]]:
    """Yields a row for each family and for "all": exact match and 95% intervals."""
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
