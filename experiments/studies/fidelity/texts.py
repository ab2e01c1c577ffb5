"""Token windows for both regimes of `training`, from installed Python files.

The text is the standard library, as in `experiments.pretrain` without `--data`, and
then as much of the installed packages as is needed: some systems install only a small
part of the standard library. A token is a byte. No text is downloaded.
"""

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt16

from experiments.training import text

# Longer files are tables of numbers and generated code.
_LONGEST = 2**18


class Windows(NamedTuple):
    """Token windows of one length, with a hash.

    Attributes:
      train: The windows to train on; each has `length` tokens to predict.
      test: The windows to measure losses on, from other documents than `train`, unless
        the training memorizes a set of windows.
      fingerprint: A hash of both arrays.
    """

    train: UInt16[np.ndarray, "n length+1"]
    test: UInt16[np.ndarray, "m length+1"]
    fingerprint: str


def python_files() -> Iterator[bytes]:
    """Yields the standard library's files, then installed packages' files, sorted.

    Files above 256 KiB are left out.
    """
    packages = sysconfig.get_path("purelib")
    for document in itertools.chain(text.standard_library(), _files(packages)):
        if len(document) <= _LONGEST:
            yield document


def _files(top: str) -> Iterator[bytes]:
    for folder, subfolders, names in os.walk(top):
        subfolders.sort()  # `os.walk` visits the folders in this order.
        for path in (Path(folder, name) for name in sorted(names)):
            if path.suffix == ".py" and path.is_file():  # Links may be broken.
                yield path.read_bytes()


def windows(
    documents: Iterable[bytes], *, train: int, test: int, length: int
) -> Windows:
    """Cuts documents into windows to train and to test on.

    Distinct documents are read until there are enough, and are sorted by their hashes.
    The first documents are for tests, the others for training.

    Args:
      documents: The documents.
      train: The number of windows to train on.
      test: The number of windows to test on.
      length: The number of tokens to predict in a window.

    Raises:
      ValueError: If there are too few documents.
    """
    needed = (train + test) * length + 2 * _LONGEST
    by_hash: dict[bytes, bytes] = {}
    size = 0
    for document in documents:
        digest = hashlib.blake2b(document, digest_size=16).digest()
        if digest not in by_hash:
            by_hash[digest] = document
            size += len(document) + 1
        if size >= needed:
            break
    ordered = [by_hash[digest] for digest in sorted(by_hash)]
    ends = np.cumsum([len(document) + 1 for document in ordered])
    count = int(np.searchsorted(ends, test * length + 1)) + 1
    pieces = [
        _cut(text.encode_bytes(part), size, length)
        for part, size in ((ordered[count:], train), (ordered[:count], test))
    ]
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        digest.update(piece)
    return Windows(*pieces, digest.hexdigest())


def _cut(
    tokens: UInt16[np.ndarray, " tokens"], count: int, length: int
) -> UInt16[np.ndarray, "count length+1"]:
    """Returns `count` adjacent windows, which overlap by one token.

    The tokens that they predict do not overlap.

    Raises:
      ValueError: If there are too few tokens.
    """
    if tokens.size < count * length + 1:
        raise ValueError(
            f"{count} windows of {length} tokens need {count * length + 1} in all, but "
            f"the Python files of this machine have {tokens.size}; take fewer --steps"
        )
    every = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
    return np.ascontiguousarray(every[::length][:count])


def order(seed: int, *, windows: int, count: int) -> Int32[np.ndarray, " count"]:
    """Returns the indices of the windows that a training reads, in reading order.

    Each pass over the windows has a different random order.

    Args:
      seed: The seed of the orders.
      windows: The number of windows.
      count: The number of indices to return.
    """
    rng = np.random.default_rng(seed)
    passes = [rng.permutation(windows) for _ in range(-(-count // windows))]
    return np.concatenate(passes)[:count].astype(np.int32)
