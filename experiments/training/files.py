"""Finds the files of a corpus, and checks whether their content fits their names.

Files may come from anywhere. A file is opened only after it is known to be a regular
file. Its first bytes show whether it is text, tokens, or something else.
"""

import codecs
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

TEXT_SUFFIXES = (".txt", ".py", ".jsonl")
TOKEN_SUFFIXES = (".npy", ".bin")
_HINTS = {
    ".npz": "save one array of it with np.save",
    ".json": "a .jsonl file has one object a line",
    ".parquet": 'write its texts as lines {"text": ...} of a .jsonl file',
} | dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"), "unpack it first")
_HEAD = 2**13  # Bytes at a file's start that are searched for signs of its kind.
# The start and the end of files that are neither text nor tokens. A pickle's start
# alone might be a token, and the letters PAR1 alone might be text.
_SIGNATURES = (
    (rb"\x1f\x8b\x08", b"", "gzip"),
    (rb"PK\x03\x04", b"", "zip or .npz"),
    (rb"BZh[1-9]1AY&SY", b"", "bzip2"),
    (rb"\xfd7zXZ\0", b"", "xz"),
    (rb"\x28\xb5\x2f\xfd", b"", "Zstandard"),
    (rb"\x89PNG\r\n", b"", "PNG"),
    (rb"\xff\xd8\xff", b"", "JPEG"),
    (rb"%PDF-", b"", "PDF"),
    (rb"\x7fELF", b"", "ELF"),
    (rb"\x89HDF\r\n", b"", "HDF5"),
    (rb"ARROW1\0\0", b"", "Arrow"),
    (rb"PAR1", b"PAR1", "Parquet"),
    (rb"\x80[\x02-\x05]", b".", "pickle"),
)
_ENCODINGS = ((codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"))
NUMPY = b"\x93NUMPY"


def find_files(
    paths: Sequence[Path], suffixes: Sequence[str] = (*TEXT_SUFFIXES, *TOKEN_SUFFIXES)
) -> list[Path]:
    """Returns the files at `paths`, and in folders the files with one of `suffixes`.

    Links are followed, and each folder is visited once. The case of suffixes does not
    matter.

    Raises:
      FileNotFoundError: If there is nothing at a path.
      ValueError: If there is no file of a known suffix at a path, if such a file is not
        a regular file, or if text and tokens are mixed.
    """

    def known(path: Path) -> bool:
        return path.suffix.lower() in suffixes

    files = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no file or folder at {path}")
        files_of_path = sorted(filter(known, _walk(path))) if path.is_dir() else [path]
        if not files_of_path or not all(map(known, files_of_path)):
            hint = _HINTS.get(path.suffix.lower())
            raise ValueError(
                f"data must be {', '.join(suffixes)} files, "
                f"got {path}" + (f"; {hint}" if hint else "")
            )
        files += files_of_path
    for path in files:
        if not path.is_file():
            raise ValueError(f"data must be regular files, but {path} is not one")
    mixed = {is_tokens(path): path for path in files}
    if len(mixed) > 1:
        raise ValueError(
            f"data must be all text or all tokens, got both {mixed[False]} and "
            f"{mixed[True]}"
        )
    return files


def check_once(
    paths: Sequence[Path], suffixes: Sequence[str] = (*TEXT_SUFFIXES, *TOKEN_SUFFIXES)
) -> None:
    """Raises ValueError if `find_files` would return a file twice.

    This happens if a path is named twice, or a folder and a file or folder in it. Links
    of different names are different files.
    """
    places = set()
    for path in find_files(paths, suffixes):
        place = os.path.join(os.path.realpath(path.parent), path.name)
        if place in places:
            raise ValueError(f"data must name each file once, got {path} twice")
        places.add(place)


def is_tokens(path: Path) -> bool:
    """Returns whether a file has the name of a token array."""
    return path.suffix.lower() in TOKEN_SUFFIXES


def check_texts(files: Iterable[Path]) -> None:
    """Raises ValueError, with the file's name, unless files are text and fit in memory.

    Text of any encoding without NUL bytes is accepted; UTF-16 is not.
    """
    total, memory = 0, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in files:
        head, tail = _ends(path)
        kind = "NumPy" if head.startswith(NUMPY) else _signature(head, tail)
        for mark, encoding in _ENCODINGS:
            kind = kind or (encoding if head.startswith(mark) else None)
        if kind or b"\0" in head:
            raise ValueError(
                f"{path} must be text, such as UTF-8, but its content is "
                f"{kind or 'binary'}"
            )
        if (total := total + path.stat().st_size) > memory:
            raise ValueError(
                f"text must fit into the memory of {memory:,} bytes, but the files up "
                f"to {path} have {total:,}; token files are read from disk"
            )


def check_raw_tokens(path: Path) -> None:
    """Raises ValueError, with the file's name, if it cannot be a raw token array."""
    head, tail = _ends(path)
    if kind := _signature(head, tail) or ("text" if _is_text(head) else None):
        raise ValueError(f"{path} must be a token array, but its content is {kind}")


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Adds the file's name to OSErrors of reads in this context."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _walk(folder: Path) -> Iterator[Path]:
    visited = set()
    for parent, subfolders, names in os.walk(folder, onerror=_raise, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in visited:
            subfolders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        subfolders.sort()
        yield from (Path(parent, name) for name in names)


def _raise(error: OSError) -> NoReturn:
    raise error


def _ends(path: Path) -> tuple[bytes, bytes]:
    """Returns the first 8 KiB and the last four bytes of a file."""
    with named(path), path.open("rb") as file:
        head = file.read(_HEAD)
        file.seek(max(path.stat().st_size - 4, 0))
        return head, file.read(4)


def _signature(head: bytes, tail: bytes) -> str | None:
    for start, end, kind in _SIGNATURES:
        match = re.match(start, head)
        if match and tail.endswith(end) and len(head) >= match.end() + len(end):
            return kind
    return None


def _is_text(head: bytes) -> bool:
    """Returns whether bytes are UTF-8 without control characters.

    The bytes of nearly all token arrays contain zeros or other control characters.
    """
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return bool(head) and not re.search(r"[\x00-\x08\x0e-\x1f\x7f]", text)
