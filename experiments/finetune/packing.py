"""Packs conversations into windows of one length without cutting them."""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from experiments.finetune.conversations import Example

# The number of latest windows to which conversations are added. With more windows,
# fewer positions remain empty.
_OPEN = 64


class PackedWindows:
    """Windows of conversations, as a random-access sequence.

    A window is an array [3, length + 1] of int32. Its rows are the tokens, the number
    of each token's conversation (from 1; 0 is padding), and 1 for tokens of answers,
    else 0.

    Args:
      examples: The conversations, none longer than `length + 1`. They are packed in
        this order, each into the first of the latest windows that has room for it.
      length: The number of tokens to predict in a window.
    """

    def __init__(self, examples: Sequence[Example], length: int) -> None:
        self._examples = examples
        self._length = length
        self._windows = _packed(
            [example.tokens.size for example in examples], length + 1
        )

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Int32[np.ndarray, "3 length+1"]:
        """Returns window `index`."""
        window = np.zeros((3, self._length + 1), np.int32)
        end = 0
        for number, which in enumerate(self._windows[index], 1):
            tokens, answers = self._examples[which]
            span = slice(end, end + tokens.size)
            window[:, span] = tokens, np.full(tokens.size, number), answers
            end = span.stop
        return window

    @property
    def filled(self) -> float:
        """The share of the windows' positions that hold tokens."""
        tokens = sum(example.tokens.size for example in self._examples)
        return tokens / (len(self) * (self._length + 1))

    def fingerprint(self) -> str:
        """Returns a hash of all windows."""
        digest = hashlib.blake2b(digest_size=16)
        for index in range(len(self)):
            digest.update(self[index])
        return digest.hexdigest()


def _packed(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Returns the indices of the items in each window, packed by first fit.

    `sizes` are the items' sizes, and `room` is the size of a window.

    Raises:
      ValueError: If an item is larger than a window.
    """
    windows: list[list[int]] = []
    free: list[int] = []
    for which, size in enumerate(sizes):
        if size > room:
            raise ValueError(f"item {which} of {size} tokens does not fit into {room}")
        first = max(len(windows) - _OPEN, 0)
        fits = (n for n in range(first, len(windows)) if free[n] >= size)
        if (at := next(fits, None)) is None:
            at = len(windows)
            windows.append([])
            free.append(room)
        windows[at].append(which)
        free[at] -= size
    return windows
