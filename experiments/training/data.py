"""Corpora as token arrays, and batches of them in a fixed, resumable order.

A corpus is either text (see `experiments.training.text`) or token arrays that are
memory-mapped from disk, such as OLMo's preprocessed data. grain shuffles windows of the
corpus and remembers where it stopped.
"""

import dataclasses
import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import grain
import numpy as np
from jaxtyping import Int32, Int64

from experiments.training import files, text

Batches = grain.DatasetIterator[Int32[np.ndarray, "batch length+1"]]
Tokenizer = Literal["bytes", "bpe"]
TokenDtype = Literal["uint16", "uint32"]
_CHUNK, _CHUNKS = 2**15, 2**12
_SCANNED = 2**26  # Tokens that are read at a time to check them.
_ENDLESS = 2**62  # More windows than any training reads.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens to train on and tokens to validate on.

    Attributes:
      train: One-dimensional arrays of integers, in memory or memory-mapped.
      validation: The same kind of arrays, disjoint from `train`.
      vocab_size: The size of the vocabulary; None for token files, which do not state
        it.
      token: The unit of the tokens: "byte" or "token".
      source: The name of the data in messages.
    """

    train: Sequence[np.ndarray]
    validation: Sequence[np.ndarray]
    vocab_size: int | None
    token: Literal["byte", "token"]
    source: str = "the data"

    def fingerprint(self) -> str:
        """Returns a hash of the tokens.

        Arrays of up to 2**27 tokens (256 MiB of uint16) are hashed completely. For
        longer arrays only a sample of chunks is hashed.
        """
        digest = hashlib.blake2b(digest_size=16)
        for array in (*self.train, *self.validation):
            digest.update(f"{array.dtype} {array.size}\n".encode())
            starts = np.linspace(0, max(array.size - _CHUNK, 0), _CHUNKS, dtype=int)
            if array.size <= _CHUNK * _CHUNKS:
                starts = range(0, array.size, _CHUNK)
            for start in starts:
                digest.update(np.ascontiguousarray(array[start : start + _CHUNK]))
        return digest.hexdigest()


def load_corpus(
    paths: Sequence[Path] = (),
    *,
    tokenizer: Tokenizer = "bytes",
    vocab_size: int | None = None,
    token_dtype: TokenDtype = "uint16",
    cache: Path | None = None,
) -> Corpus:
    """Reads a corpus and splits it into training and validation tokens.

    Args:
      paths: Files, or folders that are searched for files: either .txt, .py and .jsonl,
        or .npy and .bin. Empty means the source of Python's standard library.
      tokenizer: "bytes", or "bpe" to train a BPE tokenizer on the training text.
      vocab_size: The vocabulary size of the BPE tokenizer.
      token_dtype: The dtype of token files without a NumPy header.
      cache: The folder that stores the trained tokenizer as tokenizer.json; needed for
        "bpe".

    Raises:
      FileNotFoundError: If there is no file at a path.
      ValueError: If a file is of another kind, or its content is not what its name
        says, or text and tokens are mixed. With "bpe" also if a text is not UTF-8, if
        files hold tokens, or if `vocab_size` or `cache` is missing; and with another
        `token_dtype` than "uint16" if files hold text.

    Examples:
      >>> corpus = load_corpus()
      >>> corpus.vocab_size, corpus.train[0].dtype
      (257, dtype('uint16'))
    """
    paths_of_files = files.find_files(paths)
    source = _name(paths)
    if any(map(files.is_tokens, paths_of_files)):
        if tokenizer != "bytes":
            raise ValueError(
                f"tokenizer={tokenizer!r} takes text, got token files: {source}"
            )
        return _token_corpus(paths_of_files, token_dtype, source)
    if token_dtype != "uint16":
        raise ValueError(
            f"token_dtype={token_dtype!r} takes token files, got text: {source}"
        )
    files.check_texts(paths_of_files)
    documents = (
        text.read_documents(paths_of_files, utf_8=tokenizer == "bpe")
        if paths_of_files
        else text.standard_library()
    )
    train, validation = text.split_documents(documents)
    if tokenizer == "bytes":
        encode, vocab_size, token = text.encode_bytes, text.BYTES_VOCAB_SIZE, "byte"
    elif cache is None or vocab_size is None:
        raise ValueError("tokenizer='bpe' needs a vocab_size and a cache folder")
    else:
        cache.mkdir(parents=True, exist_ok=True)
        file = cache / "tokenizer.json"
        encode, token = text.bpe_encoder(train, vocab_size, file), "token"
    return Corpus(
        train=[encode(train)],
        validation=[encode(validation)],
        vocab_size=vocab_size,
        token=token,
        source=source,
    )


class Windows:
    """Token arrays as a random-access sequence of windows of `length + 1` tokens.

    Neighbouring windows share one token, so that every token of the windows except an
    array's first is predicted exactly once. No window crosses from one array into
    another.

    Args:
      arrays: The arrays of tokens.
      length: The number of tokens to predict in a window.
      source: The name of the data in messages.

    Raises:
      ValueError: If no array is long enough for a window.
    """

    def __init__(
        self, arrays: Sequence[np.ndarray], length: int, source: str = "the data"
    ) -> None:
        self._arrays = arrays
        self._length = length
        counts = [max(array.size - 1, 0) // length for array in arrays]
        self._ends = np.cumsum(counts)
        if sum(counts) == 0:
            longest = max((array.size for array in arrays), default=0)
            raise ValueError(
                f"a sequence length of {length} needs {length + 1} tokens in a row for "
                f"training and for validation each, but {source} has {longest}"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length+1"]:
        """Returns window `index` as int32."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        preceding = int(self._ends[which - 1]) if which else 0
        start = (index - preceding) * self._length
        window = self._arrays[which][start : start + self._length + 1]
        return window.astype(np.int32)


def check_tokens(corpus: Corpus, vocab_size: int) -> None:
    """Raises ValueError, with the file's name, if a token is outside the vocabulary."""
    for split in ("training", "validation"):
        for array in corpus.train if split == "training" else corpus.validation:
            for start in range(0, array.size, _SCANNED):
                scanned = array[start : start + _SCANNED]
                if (wrong := _outside(scanned, vocab_size)) is not None:
                    raise ValueError(
                        "tokens must be at least 0 and below the vocabulary's size "
                        f"{vocab_size}, got {scanned[wrong]} at "
                        f"{start + wrong} of the {split} part of "
                        f"{getattr(array, 'filename', corpus.source)}; --vocab-size "
                        "sets the size"
                    )


def _outside(tokens: np.ndarray, vocab_size: int) -> int | None:
    """Returns the index of a token outside the vocabulary, or None if there is none."""
    if int(tokens.max()) >= vocab_size:
        return int(tokens.argmax())
    return int(tokens.argmin()) if int(tokens.min()) < 0 else None


def train_batches(
    windows: Windows,
    *,
    batch_size: int,
    seed: int,
    rows: Int64[np.ndarray, " rows"] | None = None,
) -> Batches:
    """Returns an endless iterator of batches, with another random order in each epoch.

    The iterator's `get_state()` is a small dictionary; `set_state` continues from it.
    The state is the same for all `rows`.

    Args:
      windows: The windows.
      batch_size: The number of windows of a batch.
      seed: The seed of the orders.
      rows: The rows of each batch that are read and returned; None means all.
    """
    # Indices are shuffled, not windows, so that a process reads only its own windows.
    dataset = grain.MapDataset.source(range(len(windows))).seed(seed).shuffle()
    # Grain's own endless repetition overflows for batches of one window.
    dataset = dataset.repeat(max(1, _ENDLESS // len(windows)))
    if rows is None:
        rows = np.arange(batch_size)

    def read(numbers: np.ndarray) -> np.ndarray:
        return np.stack([windows[number] for number in numbers[rows].tolist()])

    # grain reads 500 batches ahead by default, whether they are needed or not.
    ahead = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
    return iter(dataset.batch(batch_size).map(read).to_iter_dataset(ahead))


def validation_batches(
    windows: Windows, *, batch_size: int, count: int, multiple: int = 1
) -> list[Int32[np.ndarray, "batch length+1"]]:
    """Returns `count` batches of randomly chosen windows, the same for every run.

    If there are too few windows, there are fewer batches. If there are fewer windows
    than `batch_size`, there is one smaller batch. Its size is a multiple of `multiple`.

    Raises:
      ValueError: If there are fewer than `multiple` windows.
    """
    if len(windows) < multiple:
        raise ValueError(
            f"the mesh splits batches into {multiple} parts, but there are "
            f"{len(windows)} windows for validation"
        )
    batch_size = min(batch_size, len(windows) // multiple * multiple)
    count = min(count, len(windows) // batch_size)
    dataset = grain.MapDataset.source(windows).shuffle(seed=0)
    return list(dataset.batch(batch_size)[:count])


def _name(paths: Sequence[Path]) -> str:
    """Returns a name of the data at `paths` for messages."""
    if not paths:
        return "Python's standard library"
    return str(paths[0]) + (f" and {len(paths) - 1} more" if paths[1:] else "")


def _token_corpus(paths: Sequence[Path], dtype: TokenDtype, source: str) -> Corpus:
    """Returns a corpus of memory-mapped token files.

    The last twentieth of each file is for validation.
    """
    arrays = [_map_tokens(path, dtype) for path in paths]
    cuts = [int(array.size * (1 - text.VALIDATION_SHARE)) for array in arrays]
    return Corpus(
        train=[array[:cut] for array, cut in zip(arrays, cuts, strict=True)],
        validation=[array[cut:] for array, cut in zip(arrays, cuts, strict=True)],
        vocab_size=None,
        token="token",
        source=source,
    )


def _map_tokens(path: Path, dtype: TokenDtype) -> np.ndarray:
    """Memory-maps a token file, with or without NumPy's header.

    Raises:
      ValueError: If the file's content is not an array of tokens.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        has_header = file.read(len(files.NUMPY)) == files.NUMPY
    if not has_header:
        files.check_raw_tokens(path)
        if size % np.dtype(dtype).itemsize or not size:
            raise ValueError(f"{path} of {size} bytes is no array of {dtype}")
        array = np.memmap(path, dtype, mode="r")
        _check_width(array, path)
        return array
    array = _with_header(path)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"a token array must be one-dimensional and of integers, got {array.ndim} "
            f"axes of {array.dtype} in {path}"
        )
    if (end := array.offset + array.nbytes) != size:
        raise ValueError(
            f"{path} must end with its array, but {size - end} bytes follow"
        )
    return array


def _check_width(array: np.memmap, path: Path) -> None:
    """Raises ValueError if every second number is 0: the dtype is then too narrow."""
    first = array[: 2**12]
    if first.size >= 64 and first.any() and not first[1::2].any():
        raise ValueError(
            f"every second {array.dtype} of {path} is 0, so its tokens are of more "
            "bytes; --token-dtype sets the dtype, and .npy files name theirs"
        )


def _with_header(path: Path) -> np.memmap:
    """Memory-maps an .npy file.

    Raises:
      ValueError: If the file's header is damaged.
    """
    with path.open("rb") as file:
        start = file.read(12)
    size = int.from_bytes(start[8 : 10 if start[6:7] == b"\1" else 12], "little")
    if size > path.stat().st_size:  # NumPy would allocate as many bytes.
        raise ValueError(f"{path} is no whole .npy file: its header has {size} bytes")
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # Headers of Python 2 are read as well.
            return np.load(path, mmap_mode="r", allow_pickle=False)
    # NumPy evaluates the header as a literal, which can fail in any way.
    except Exception as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"{path} is no whole .npy file: {reason}") from None
