"""Multiple-choice questions about held-out text: which piece follows the context?

A question consists of a context and four pieces of the same document. One piece follows
the context; the other pieces are taken from elsewhere in the document. A model's answer
is the piece with the highest likelihood after the context. These questions replace the
multiple-choice tasks of the paper, such as HellaSwag, which would have to be
downloaded.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

CHOICES = 4
PIECE = 32  # Tokens of a piece.
CONTEXT = 225  # Tokens of a context; a model reads 256 tokens with a piece's first 31.
_BATCH = 64  # Questions that a model reads at once.
_TRIES = 20  # Draws for each question, at most.


class Questions(NamedTuple):
    """Multiple-choice questions as tokens.

    Attributes:
      tokens: The context of each question, followed by each of the pieces.
      right: The index of the piece that follows the context in the document.
    """

    tokens: Int32[np.ndarray, "n choices length"]
    right: Int[np.ndarray, " n"]


class Scorer(Protocol):
    """A function that returns a model's log-likelihoods of the ends of sequences."""

    def __call__(
        self, tokens: Int32[np.ndarray, "b length"]
    ) -> Float[np.ndarray, " b"]:
        """Returns the log-likelihood of the last `PIECE` tokens of each sequence."""


def ask(documents: Sequence[Int[np.ndarray, " _"]], count: int) -> Questions:
    """Draws `count` questions about documents, with a fixed seed.

    Raises:
      ValueError: If no document is long enough for a context and four pieces, or if too
        few draws have four different pieces.

    Examples:
      >>> import numpy as np
      >>> tokens, right = ask([np.arange(1000)], 2)
      >>> tokens.shape
      (2, 4, 257)
      >>> [int(row[n, CONTEXT] - row[n, 0]) for row, n in zip(tokens, right)]
      [225, 225]
    """
    least = CONTEXT + 2 * CHOICES * PIECE
    long = [each for each in documents if each.size >= least]
    if not long:
        raise ValueError(f"questions need a document of at least {least} tokens")
    rng, questions = np.random.default_rng(0), []
    for _ in range(_TRIES * count):
        document = long[rng.integers(len(long))]
        pieces = _pieces(rng, document)
        if len({piece[-PIECE:].tobytes() for piece in pieces}) == CHOICES:
            order = rng.permutation(CHOICES)
            questions.append((pieces[order], order.argmin()))
        if len(questions) == count:
            tokens, right = zip(*questions, strict=True)
            return Questions(np.stack(tokens).astype(np.int32), np.array(right))
    raise ValueError(
        f"{_TRIES * count} draws of {CHOICES} pieces have {len(questions)} with "
        f"different pieces, and {count} are needed"
    )


def _pieces(
    rng: np.random.Generator, document: Int[np.ndarray, " _"]
) -> Int[np.ndarray, "choices length"]:
    """Returns a context followed by each of four pieces, the right piece first."""
    start = rng.integers(document.size - CONTEXT - PIECE + 1)
    end = start + CONTEXT
    places = [end]
    while len(places) < CHOICES:
        start_of_piece = rng.integers(document.size - PIECE + 1)
        if start_of_piece + PIECE <= start or start_of_piece >= end + PIECE:
            places.append(start_of_piece)
    context = document[start:end]
    return np.stack([np.append(context, document[p : p + PIECE]) for p in places])


def answered(questions: Questions, model: Scorer) -> Bool[np.ndarray, " n"]:
    """Returns whether the most likely piece of each question is the right one."""
    right = []
    for first in range(0, len(questions.right), _BATCH):
        tokens = questions.tokens[first : first + _BATCH]
        likely = model(tokens.reshape(-1, tokens.shape[-1])).reshape(-1, CHOICES)
        right.append(likely.argmax(axis=1))
    return np.concatenate(right) == questions.right
