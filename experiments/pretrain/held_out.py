"""Held-out texts of other kinds than the training text.

The paper validates on three sets of text that would have to be downloaded. The texts
here are a part of installed packages.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int32

from experiments.training import data, text
from experiments.training.settings import Settings


def source_of_jax() -> Iterator[bytes]:
    """Yields the Python files of JAX, sorted by path."""
    for path in sorted(Path(jax.__file__).parent.rglob("*.py")):
        yield path.read_bytes()


def descriptions() -> Iterator[bytes]:
    """Yields the descriptions of all installed packages: English prose with markup."""
    texts = {each.metadata.json.get("description") for each in metadata.distributions()}
    for description in sorted(filter(None, texts)):
        yield str(description).encode()


def headers_of_numpy() -> Iterator[bytes]:
    """Yields the C headers of NumPy, sorted by path."""
    for path in sorted(Path(np.__file__).parent.rglob("*.h")):
        yield path.read_bytes()


KINDS: dict[str, Callable[[], Iterator[bytes]]] = {
    "Python files of JAX": source_of_jax,
    "prose of packages": descriptions,
    "C headers of NumPy": headers_of_numpy,
}


def documents(trained_on: Iterable[bytes] = ()) -> dict[str, list[bytes]]:
    """Returns the documents of each kind that are not in `trained_on`."""
    excluded = set(trained_on)
    return {
        kind: [each for each in texts() if each not in excluded]
        for kind, texts in KINDS.items()
    }


def batches(
    by_kind: Mapping[str, Sequence[bytes]], settings: Settings
) -> dict[str, list[Int32[np.ndarray, "batch length+1"]]]:
    """Returns at most `settings.eval_batches` batches of each kind of text.

    Args:
      by_kind: The documents of each kind, from `documents`.
      settings: The settings of a training on bytes.
    """
    return {
        kind: data.validation_batches(
            data.Windows([text.encode_bytes(texts)], settings.seq_len, kind),
            batch_size=settings.batch_size,
            count=settings.eval_batches,
        )
        for kind, texts in by_kind.items()
    }
