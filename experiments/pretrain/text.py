"""Splits text into documents, and documents into tokens.

The default corpus is real text that every machine with Python has: the source of
Python's standard library. A document is a byte string. It is tokenized as bytes or by a
trained BPE, and a separator token follows it.
"""

import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

VALIDATION_SHARE = 0.05
BYTES_VOCAB_SIZE = 257  # 256 bytes and the separator.
_SEPARATOR = "<|document|>"
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}

Encoder = Callable[[Iterable[bytes]], np.ndarray]


def standard_library() -> Iterator[bytes]:
    """Yields the Python files of this interpreter's standard library, sorted by path.

    Installed packages are left out.
    """
    paths = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        yield path.read_bytes()


def read_documents(files: Iterable[Path]) -> Iterator[bytes]:
    """Yields one document per line of .jsonl files, and one per other text file.

    Raises:
      ValueError: If a line of a .jsonl file is no object with a string "text".
    """
    for path in files:
        if path.suffix == ".jsonl":
            yield from _json_lines(path)
        else:
            yield path.read_bytes()


def split_documents(documents: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Returns documents for training and for validation.

    A document's hash decides its side, and about one in twenty is for validation.
    Equal documents are therefore on the same side. If one side would be empty, each
    document is cut instead, and its last twentieth is for validation.
    """
    train, validation = [], []
    for document in filter(None, documents):
        digest = hashlib.blake2b(document, digest_size=8).digest()
        chosen = int.from_bytes(digest) < VALIDATION_SHARE * 2**64
        (validation if chosen else train).append(document)
    if train and validation:
        return train, validation
    cuts = [
        (document, int(len(document) * (1 - VALIDATION_SHARE)))
        for document in train + validation
    ]
    return [d[:cut] for d, cut in cuts], [d[cut:] for d, cut in cuts]


def encode_bytes(texts: Iterable[bytes]) -> np.ndarray:
    """Returns the tokens of `texts` as uint16: the bytes of each, followed by 256."""
    separator = np.array([256], np.uint16)
    pieces = [
        piece
        for text in texts
        for piece in (np.frombuffer(text, np.uint8).astype(np.uint16), separator)
    ]
    return np.concatenate([np.empty(0, np.uint16), *pieces])


def bpe_encoder(texts: Iterable[bytes], vocab_size: int, cache: Path) -> Encoder:
    """Returns the encoder of a byte-level BPE.

    The BPE is read from the file `cache` if it exists. Otherwise it is trained on
    `texts` and saved there.
    """
    # This import takes a second, and only "bpe" needs it.
    import tokenizers

    if cache.exists():
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(cache))
        except Exception as error:  # The package raises no narrower one.
            raise ValueError(f"{cache} is no tokenizer: {error}") from None
    else:
        tokenizer = _train_bpe(tokenizers, texts, vocab_size)
        partial = cache.with_suffix(".partial")
        tokenizer.save(str(partial))
        os.replace(partial, cache)
    separator = tokenizer.token_to_id(_SEPARATOR)
    tokenizer.encode_special_tokens = True  # A text that names the separator is text.
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32

    def encode(texts: Iterable[bytes]) -> np.ndarray:
        tokens = [np.empty(0, dtype)]
        for batch in itertools.batched(texts, 1024):
            for encoding in tokenizer.encode_batch([_decode(text) for text in batch]):
                tokens.append(np.array([*encoding.ids, separator], dtype))
        return np.concatenate(tokens)

    return encode


def _train_bpe(tokenizers, texts: Iterable[bytes], vocab_size: int):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_SEPARATOR],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_decode, texts), trainer)
    return tokenizer


def _json_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            text = _json_text(line)
            if text is None:
                raise ValueError(
                    f"{path}, line {number}: a line of .jsonl must be an object with "
                    f'a string "text", got {line[:60]!r}'
                )
            yield text.encode("utf-8", "surrogatepass")


def _json_text(line: bytes) -> str | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    text = record.get("text") if isinstance(record, dict) else None
    return text if isinstance(text, str) else None


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")
