"""Splits text into documents, and documents into tokens.

The default corpus is text that comes with Python: the source of the standard library. A
document is a byte string. It is tokenized as bytes or by a trained BPE tokenizer, and a
separator token follows it.
"""

import codecs
import dataclasses
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.training.files import named

VALIDATION_SHARE = 0.05
BYTES_VOCAB_SIZE = 257  # 256 bytes and the separator.
_SEPARATOR = "<|document|>"
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}

Encoder = Callable[[Iterable[bytes]], np.ndarray]


def standard_library() -> Iterator[bytes]:
    """Yields the Python files of this interpreter's standard library, sorted by path.

    Installed packages are excluded.
    """
    paths = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        yield path.read_bytes()


def read_documents(files: Iterable[Path], *, utf_8: bool) -> Iterator[bytes]:
    """Yields one document per line of .jsonl files, and one per other text file.

    A byte order mark of UTF-8 is not part of a document. If a line of .jsonl has
    several keys "text", the last one counts.

    Args:
      files: The text files.
      utf_8: Whether documents must be UTF-8. If not, their bytes are not checked.

    Raises:
      ValueError: If a line of a .jsonl file is not an object with a string "text", or
        if `utf_8` is true and a document is not UTF-8.
    """
    for path in files:
        lines = path.suffix.lower() == ".jsonl"
        for location, document in _json_lines(path) if lines else _whole(path):
            if utf_8:
                _check_utf_8(document, location)
            yield document


def split_documents(documents: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Returns documents for training and for validation.

    A document's hash determines its split, and about one in twenty is for validation.
    Equal documents are therefore in the same split. If a split would be empty, each
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
    """Returns the tokens of texts as uint16: each text's bytes, followed by 256."""
    separator = np.array([256], np.uint16)
    pieces = [
        piece
        for text in texts
        for piece in (np.frombuffer(text, np.uint8).astype(np.uint16), separator)
    ]
    return np.concatenate([np.empty(0, np.uint16), *pieces])


def split_bytes(tokens: np.ndarray) -> list[np.ndarray]:
    """Splits the result of `encode_bytes` into texts, each with its separator.

    Examples:
      >>> [piece.tolist() for piece in split_bytes(encode_bytes([b"a", b"bc"]))]
      [[97, 256], [98, 99, 256]]
    """
    ends = np.flatnonzero(tokens == 256) + 1
    return np.split(tokens, ends)[:-1]


def decode_bytes(piece: np.ndarray) -> bytes:
    """Returns the bytes of a document's tokens, except for the separator at the end."""
    return piece[:-1].astype(np.uint8).tobytes()


def bpe_encoder(texts: Iterable[bytes], vocab_size: int, cache: Path) -> Encoder:
    """Returns a function that encodes documents with a byte-level BPE tokenizer.

    The tokenizer is read from the file `cache` if this file exists. Otherwise it is
    trained on `texts` and saved as `cache`.

    Raises:
      ValueError: If `vocab_size` is too small for all bytes and the separator, or the
        file is not a byte-level BPE of at most `vocab_size` tokens.
    """
    if vocab_size < BYTES_VOCAB_SIZE:
        raise ValueError(
            f"a BPE has {BYTES_VOCAB_SIZE} tokens or more, for all bytes and the "
            f"separator, got a vocab_size of {vocab_size}"
        )
    # This import takes a second, and only "bpe" needs it.
    import tokenizers

    if cache.exists():
        tokenizer = _read_bpe(tokenizers, cache, vocab_size)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextCodec:
    """The tokenizer of a run: functions from strings to tokens and back.

    Attributes:
      encode: A function that returns the tokens of a string, without a separator.
      decode: A function that returns the string of tokens.
      separator: The token that ends a document.
      vocab_size: The number of distinct tokens.
    """

    encode: Callable[[str], np.ndarray]
    decode: Callable[[Sequence[int]], str]
    separator: int
    vocab_size: int


def text_codec(vocab_size: int | None = None, cache: Path | None = None) -> TextCodec:
    """Returns the codec of bytes, or of the BPE tokenizer in the file `cache`.

    Args:
      vocab_size: The largest number of tokens; needed for BPE.
      cache: The file of a run's tokenizer; None means bytes.

    Raises:
      ValueError: If the file is not a byte-level BPE of at most `vocab_size` tokens, or
        `vocab_size` is missing.
    """
    if cache is None:
        return TextCodec(
            encode=lambda string: encode_bytes([string.encode()])[:-1],
            decode=lambda tokens: bytes(t for t in tokens if t < 256).decode(
                errors="replace"
            ),
            separator=256,
            vocab_size=BYTES_VOCAB_SIZE,
        )
    if vocab_size is None:
        raise ValueError("the codec of a BPE needs a vocab_size")
    import tokenizers

    tokenizer = _read_bpe(tokenizers, cache, vocab_size)
    tokenizer.encode_special_tokens = True
    count = tokenizer.get_vocab_size()
    return TextCodec(
        encode=lambda string: np.array(tokenizer.encode(string).ids, np.int32),
        decode=lambda tokens: tokenizer.decode([t for t in tokens if t < count]),
        separator=tokenizer.token_to_id(_SEPARATOR),
        vocab_size=vocab_size,
    )


def _train_bpe(tokenizers, texts: Iterable[bytes], vocab_size: int):
    tokenizer = _byte_level(tokenizers, tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_SEPARATOR],
        initial_alphabet=tokenizer.pre_tokenizer.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_decode, texts), trainer)
    return tokenizer


def _read_bpe(tokenizers, path: Path, vocab_size: int):
    """Returns the tokenizer with the vocabulary and the merges in a file.

    The file may come from an unknown source, so its other entries are not read: they
    could be regular expressions that run forever, or normalizers that change the text.

    Raises:
      ValueError: If the file is not a byte-level BPE of at most `vocab_size` tokens.
    """
    try:
        model = json.loads(path.read_bytes())["model"]
        vocab, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
        if sorted(vocab.values()) != list(range(len(vocab))):
            raise ValueError("the tokens' numbers must be 0, 1, 2, ...")
        if len(vocab) > vocab_size:
            raise ValueError(f"there must be at most {vocab_size} tokens")
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        if missing := {*alphabet, _SEPARATOR} - vocab.keys():
            raise ValueError(f"there is no token {min(missing)!r}")
        tokenizer = _byte_level(tokenizers, tokenizers.models.BPE(vocab, merges))
        tokenizer.add_special_tokens([_SEPARATOR])
    # The package raises plain exceptions.
    except Exception as error:
        raise ValueError(f"{path} is no tokenizer of a run: {error!r:.200}") from None
    return tokenizer


def _byte_level(tokenizers, model):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _whole(path: Path) -> Iterator[tuple[str, bytes]]:
    with named(path):
        document = path.read_bytes()
    yield str(path), document.removeprefix(codecs.BOM_UTF8)


def _json_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the location and the field "text" of each line that is not blank."""
    with named(path), path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            location = f"{path}, line {number}"
            text = _json_text(line)
            if text is None:
                raise ValueError(
                    f"{location}: a line of .jsonl must be an object with a string "
                    f'"text", got {line[:60]!r}'
                )
            yield location, text.encode("utf-8", "surrogatepass")


def _json_text(line: bytes) -> str | None:
    try:
        # Python refuses to read integers of thousands of digits as int.
        record = json.loads(line, parse_int=float)
    except (ValueError, RecursionError):
        return None
    text = record.get("text") if isinstance(record, dict) else None
    return text if isinstance(text, str) else None


def _check_utf_8(document: bytes, location: str) -> None:
    try:
        document.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{location}: a BPE is of UTF-8 text, got {document[error.start]:#x} at "
            f"byte {error.start}; convert it, or read its bytes without --tokenizer bpe"
        ) from None


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")
