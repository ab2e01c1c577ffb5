"""Corpora as token arrays, and batches of them in a fixed, resumable order.

A corpus is either text (see `experiments.pretrain.text`) or token arrays that are
memory-mapped from disk, such as OLMo's preprocessed data. grain shuffles windows of the
corpus and remembers where it stopped.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import grain
import numpy as np
from jaxtyping import Int32

from experiments.pretrain import text

TEXT_SUFFIXES = (".txt", ".py", ".jsonl")
TOKEN_SUFFIXES = (".npy", ".bin")
Batches = grain.DatasetIterator[Int32[np.ndarray, "batch length+1"]]
Tokenizer = Literal["bytes", "bpe"]
TokenDtype = Literal["uint16", "uint32"]
_CHUNK, _CHUNKS = 2**15, 2**12
_SCANNED = 2**26  # Tokens that are read at a time to check them.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens to train on and tokens to validate on.

    Attributes:
      train: One-dimensional arrays of uint16 or uint32, in memory or memory-mapped.
      validation: The same kind of arrays, disjoint from `train`.
      vocab_size: Number of distinct tokens; None for token arrays, which do not state
        it.
      token: The unit of the tokens: "byte" or "token".
    """

    train: Sequence[np.ndarray]
    validation: Sequence[np.ndarray]
    vocab_size: int | None
    token: Literal["byte", "token"]

    def fingerprint(self) -> str:
        """Returns a hash of the tokens.

        All tokens of an array enter the hash up to 2**27 tokens (256 MiB of uint16),
        and a sample of chunks of a longer array.
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
      tokenizer: "bytes", or "bpe" to train a BPE on the training text.
      vocab_size: Vocabulary size of the BPE.
      token_dtype: Dtype of token files without a NumPy header.
      cache: Folder that stores the trained BPE as tokenizer.json; needed for "bpe".

    Raises:
      FileNotFoundError: If there is no file at a path.
      ValueError: If a file is of another kind, or text and tokens are mixed.

    Example:
      >>> corpus = load_corpus()
      >>> corpus.vocab_size, corpus.train[0].dtype
      (257, dtype('uint16'))
    """
    files = _find_files(paths)
    if any(path.suffix in TOKEN_SUFFIXES for path in files):
        if tokenizer != "bytes":
            raise ValueError(f"tokenizer={tokenizer!r} takes text, got token files")
        return _token_corpus(files, token_dtype)
    documents = text.read_documents(files) if files else text.standard_library()
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
    )


class Windows:
    """Token arrays as a random-access sequence of windows of `length + 1` tokens.

    Neighbouring windows share one token, so that every token of the windows except an
    array's first is predicted exactly once. No window crosses from one array into
    another.
    """

    def __init__(self, arrays: Sequence[np.ndarray], length: int) -> None:
        self._arrays = arrays
        self._length = length
        counts = [max(array.size - 1, 0) // length for array in arrays]
        self._ends = np.cumsum(counts)
        if sum(counts) == 0:
            longest = max((array.size for array in arrays), default=0)
            raise ValueError(
                f"a sequence length of {length} needs {length + 1} tokens in a row for "
                f"training and for validation each, but the data has {longest}"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length+1"]:
        """Returns window `index` as int32."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[which - 1]) if which else 0
        start = (index - before) * self._length
        window = self._arrays[which][start : start + self._length + 1]
        return window.astype(np.int32)


def check_tokens(corpus: Corpus, vocab_size: int) -> None:
    """Raises ValueError, naming the file, if a token is outside the vocabulary."""
    for array in (*corpus.train, *corpus.validation):
        for start in range(0, array.size, _SCANNED):
            part = array[start : start + _SCANNED]
            if (largest := int(part.max())) < vocab_size:
                continue
            where = start + int(part.argmax())
            raise ValueError(
                f"tokens must be below the vocabulary's size {vocab_size}, got "
                f"{largest} at {where} of a part of "
                f"{getattr(array, 'filename', 'the data')}; --vocab-size sets the size"
            )


def train_batches(windows: Windows, *, batch_size: int, seed: int) -> Batches:
    """Returns an endless iterator of batches; `seed` decides the order of each epoch.

    The iterator's `get_state()` is a small dictionary; `set_state` continues from it.
    """
    dataset = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    return iter(dataset.batch(batch_size).to_iter_dataset())


def validation_batches(
    windows: Windows, *, batch_size: int, count: int
) -> list[Int32[np.ndarray, "batch length+1"]]:
    """Returns the same `count` batches for every run, drawn from the whole array.

    With too few windows there are fewer batches. With fewer windows than `batch_size`
    there is one smaller batch.
    """
    batch_size = min(batch_size, len(windows))
    count = min(count, len(windows) // batch_size)
    dataset = grain.MapDataset.source(windows).shuffle(seed=0)
    return list(dataset.batch(batch_size)[:count])


def _find_files(paths: Sequence[Path]) -> list[Path]:
    known = (*TEXT_SUFFIXES, *TOKEN_SUFFIXES)
    files = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no file or folder at {path}")
        found = [path]
        if path.is_dir():
            of_kind = (p for p in path.rglob("*") if p.suffix in known)
            found = sorted(p for p in of_kind if p.is_file())
        if not found or any(p.suffix not in known for p in found):
            raise ValueError(f"data must be {', '.join(known)} files, got {path}")
        files += found
    kinds = {path.suffix in TOKEN_SUFFIXES for path in files}
    if len(kinds) > 1:
        raise ValueError(f"data must be all text or all tokens, got both in {paths}")
    return files


def _token_corpus(files: Sequence[Path], dtype: TokenDtype) -> Corpus:
    """Memory-maps token files; the last twentieth of each is for validation."""
    arrays = [_map_tokens(path, dtype) for path in files]
    cuts = [int(array.size * (1 - text.VALIDATION_SHARE)) for array in arrays]
    return Corpus(
        train=[array[:cut] for array, cut in zip(arrays, cuts, strict=True)],
        validation=[array[cut:] for array, cut in zip(arrays, cuts, strict=True)],
        vocab_size=None,
        token="token",
    )


def _map_tokens(path: Path, dtype: TokenDtype) -> np.ndarray:
    """Memory-maps a token file; .npy files may or may not have NumPy's header."""
    with path.open("rb") as file:
        has_header = file.read(6) == b"\x93NUMPY"
    if not has_header:
        if path.stat().st_size % np.dtype(dtype).itemsize or not path.stat().st_size:
            size = path.stat().st_size
            raise ValueError(f"{path} of {size} bytes is no array of {dtype}")
        return np.memmap(path, dtype, mode="r")
    try:
        with np.errstate(over="ignore"):
            array = np.load(path, mmap_mode="r")
    except (OSError, OverflowError, ValueError, SyntaxError) as error:
        raise ValueError(f"{path} is no whole .npy file: {error}") from None
    if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32):
        raise ValueError(
            f"a token array must be one-dimensional and uint16 or uint32, got "
            f"{array.ndim} axes of {array.dtype} in {path}"
        )
    return array
