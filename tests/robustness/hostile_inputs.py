"""A table of inputs that a user might give to --data by mistake, or be sent.

Each entry says what the training program does with it: it refuses it in one line that
names the file and the rule, or it reads just the tokens or the text that are in it.
"""

import dataclasses
import gzip
import io
import json
import os
import pickle
import socket
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Content = bytes | Callable[[Path], None]
_BYTES = b"The quick brown fox jumps over the lazy dog. " * 8
_TEXT = _BYTES.decode()
_TOKENS = np.arange(400, dtype=np.uint16) % 251
_BPE = ("--tokenizer", "bpe", "--vocab-size", "300")
_SHORT = "needs 5 tokens"
_LINE = 'must be an object with a string "text"'
_RANGE = "at least 0 and below the vocabulary's size 257, got "
_WHOLE = "is no whole .npy file: "


@dataclasses.dataclass(frozen=True)
class Input:
    """An input, and what the training program must do with it.

    Attributes:
      file: The name of the file or folder that --data gets.
      content: The bytes of the file, or a function that makes it at a path.
      expected: The rule in the error message, if the input must be refused. Otherwise
        the text or the tokens that must be read.
      flags: Further flags of the command line.
      named: The part of the file's name that the error message must have; None means
        the complete name.
    """

    file: str
    content: Content
    expected: str | bytes | np.ndarray
    flags: tuple[str, ...] = ()
    named: str | None = None


INPUTS: dict[str, Input] = {}


def _add(label: str, *args: Any, **options: Any) -> None:
    if label in INPUTS:
        raise ValueError(f"there are two inputs {label!r}")
    INPUTS[label] = Input(*args, **options)


def _npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(array), **options)
    return file.getvalue()


def _header(text: str | bytes, data: bytes = _TOKENS.tobytes(), version=1) -> bytes:
    """Returns an .npy file with any text for a header."""
    text = text if isinstance(text, bytes) else text.encode("latin-1")
    size = struct.pack("<H" if version == 1 else "<I", len(text) + 1)
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + b"\n" + data


def _described(shape: str, descr: str = "'<u2'", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def _lines(*records: Any, end: str = "\n") -> bytes:
    return "".join(json.dumps(record) + end for record in records).encode()


def _zip(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def _png() -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + checksum.to_bytes(4)

    size = struct.pack(">IIBBBBB", 16, 16, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(range(16)) for _ in range(16)))
    parts = chunk(b"IHDR", size) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


# Files with content that is not what the name says.
_FOREIGN = {
    "gzip": gzip.compress(_BYTES),
    "zip": _zip("tokens.npy", _npy(_TOKENS)),
    "PNG": _png(),
    "PDF": b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n%%EOF\n",
    "pickle": pickle.dumps({"text": _TEXT}),
    "Parquet": b"PAR1" + _BYTES + struct.pack("<I", len(_BYTES)) + b"PAR1",
    "ELF": Path(sys.executable).resolve().read_bytes()[:4096],
    "JPEG": b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(500),
    "xz": b"\xfd7zXZ\0" + bytes(500),
    "Zstandard": b"\x28\xb5\x2f\xfd" + bytes(500),
}
for _kind, _content in _FOREIGN.items():
    for _suffix in ("txt", "jsonl", "bin", "npy"):
        _add(f"{_kind} in .{_suffix}", f"a.{_suffix}", _content, f"content is {_kind}")
for _suffix in ("txt", "jsonl", "py"):
    _add(f"NumPy in .{_suffix}", f"a.{_suffix}", _npy(_TOKENS), "content is NumPy")
_add(
    "bytecode in .py", "a.py", b"\xcb\r\r\n" + bytes(12) + b"\xe3", "content is binary"
)
_add("text in .bin", "a.bin", _BYTES, "content is text")
_add("text in .npy", "a.npy", _BYTES, "content is text")
_add("Cyrillic text in .bin", "a.bin", "пример ".encode() * 99, "content is text")
_add("NumPy in .bin", "a.bin", _npy(_TOKENS), _TOKENS)

# Names that no loader has.
for _file, _rule in {
    "a.txt.gz": "unpack it first",
    "a.npz": "save one array of it with np.save",
    "a.zip": "unpack it first",
    "a.json": "a .jsonl file has one object a line",
    "a.parquet": "of a .jsonl file",
    "a.csv": "data must be .txt",
    "a.png": "data must be .txt",
    "data": "data must be .txt",
    ".txt": "data must be .txt",
    "a.txt~": "data must be .txt",
}.items():
    _add(f"the name {_file}", _file, _BYTES, _rule)
_add("the name a.TXT", "a.TXT", _BYTES, _BYTES)
_add("the name a.Jsonl", "a.Jsonl", _lines({"text": _TEXT}), _BYTES)
_add("the name a.NPY", "a.NPY", _npy(_TOKENS), _TOKENS)

# Token arrays with a header.
for _dtype in ("int8", "uint8", "int16", "uint32", "int32", "int64", "uint64"):
    _small = (_TOKENS % 100).astype(_dtype)
    _add(f"{_dtype} tokens", "a.npy", _npy(_small), _small)
for _dtype in (">u2", ">i8"):
    _add(f"{_dtype} tokens", "a.npy", _npy(_TOKENS.astype(_dtype)), _TOKENS)
for _dtype in ("bool", "float32", "float64", "complex64", "M8[s]", "m8[s]", "V2"):
    _array = np.zeros(400, _dtype)
    _add(f"{_dtype} tokens", "a.npy", _npy(_array), "one-dimensional and of integers")
_pairs = np.zeros(400, [("token", "<u2"), ("mask", "?")])
_add("structured tokens", "a.npy", _npy(_pairs), "one-dimensional and of integers")
_add("strings", "a.npy", _npy(np.full(9, "abc")), "one-dimensional and of integers")
_add("a number", "a.npy", _npy(np.uint16(3)), "got 0 axes of uint16")
_add("a matrix", "a.npy", _npy(_TOKENS.reshape(4, 100)), "got 2 axes of uint16")
_objects = np.array([{"a": 1}], object)
_add("objects", "a.npy", _npy(_objects, allow_pickle=True), _WHOLE)
for _place, _wrong in ((0, 257), (200, -1), (399, 2**40), (200, 2**16 + 5)):
    _array = _TOKENS.astype(np.int64)
    _array[_place] = _wrong
    _add(f"the token {_wrong}", "a.npy", _npy(_array), f"{_RANGE}{_wrong} at")
for _version in (2, 3):
    _content = _npy(_TOKENS, version=(_version, 0))
    _add(f"version {_version} of .npy", "a.npy", _content, _TOKENS)
_content = _npy(_TOKENS).replace(b"\1", b"\7", 1)
_add("an unknown version of .npy", "a.npy", _content, _WHOLE)
for _label, _text in {
    "too many tokens": _described("(401,)"),
    "2**62 tokens": _described(f"({2**62},)"),
    "10**400 tokens": _described(f"({10**400},)"),
    "a negative number of tokens": _described("(-400,)"),
    "half a token": _described("(0.5,)"),
    "a shape that is a number": _described("400"),
    "a type of no name": _described("(400,)", "'<q9'"),
    "a type that is a list": _described("(400,)", "['<u2']"),
    "a type that is None": _described("(400,)", "[None]"),
    "an order that is a string": _described("(400,)", fortran="'no'"),
    "no type": "{'fortran_order': False, 'shape': (400,)}",
    "a further key": _described("(400,), 'more': 1"),
    "a list": "[1, 2]",
    "code": "__import__('os').abort()",
    "a cut dictionary": "{'descr': '<u2',",
    "deep brackets": "(" * 9000,
    "many minus signs": "-" * 9000 + "1",
    "an unclosed string": "{'descr': '''<u2",
    "no text": "\xff\xfe\x00",
    "64 KB": _described("(400,)").ljust(2**16 - 2),
    "an unhashable key": "{[]: 1}",
}.items():
    _add(f"a header of {_label}", "a.npy", _header(_text), _WHOLE)
_content = _header(_described("(399,)"))
_add("a header of too few tokens", "a.npy", _content, "2 bytes follow")
_content = _npy(_TOKENS) * 2
_add("two arrays in one file", "a.npy", _content, "must end with its array")
_add("a cut array", "a.npy", _npy(_TOKENS)[:-1], _WHOLE)
_add("only a header's first bytes", "a.npy", b"\x93NUMPY", _WHOLE)
_content = struct.pack("<6sBBI", b"\x93NUMPY", 2, 0, 2**32 - 1) + bytes(100)
_add("a header of 4 GiB", "a.npy", _content, _WHOLE)
_add("an empty array", "a.npy", _npy(_TOKENS[:0]), "a.npy")
_content = _header(_described("(400,)", fortran="True"))
_add("Fortran order", "a.npy", _content, _TOKENS)
_add("a header of Python 2", "a.npy", _header(_described("(400L,)")), _TOKENS)

# Token arrays without a header.
_add("raw tokens in .npy", "a.npy", _TOKENS.tobytes(), _TOKENS)
_add("three bytes", "a.bin", b"\0\1\2", "of 3 bytes is no array of uint16")
_add("one byte of tokens", "a.bin", b"\0", "of 1 bytes is no array of uint16")
_add("no tokens", "a.bin", b"", "of 0 bytes is no array of uint16")
_wide = ("--token-dtype", "uint32")
_add("half of a uint32", "a.bin", bytes(402), "is no array of uint32", _wide)
_content = _TOKENS.astype(np.uint32)
_add("uint32 tokens in .bin", "a.bin", _content.tobytes(), _content, _wide)
for _dtype in ("uint32", "int64"):
    _content = _TOKENS.astype(_dtype).tobytes()
    _add(f"{_dtype} tokens read as uint16", "a.bin", _content, "are of more bytes")
_add("uint16 tokens read as uint32", "a.bin", _TOKENS.tobytes(), _RANGE, _wide)
_add("four tokens", "a.bin", bytes(8), _SHORT)
_add("four tokens to validate on", "a.bin", _TOKENS[:80].tobytes(), _SHORT)
_add("five tokens to validate on", "a.bin", _TOKENS[:100].tobytes(), _TOKENS[:100])
for _place, _part in ((0, "0 of the training"), (379, "379 of the training")):
    _array = _TOKENS.copy()
    _array[_place] = 257
    _add(f"a large token at {_place}", "a.bin", _array.tobytes(), f"257 at {_part}")
for _place, _part in ((380, "0 of the validation"), (399, "19 of the validation")):
    _array = _TOKENS.copy()
    _array[_place] = 65535
    _add(f"a large token at {_place}", "a.bin", _array.tobytes(), f"65535 at {_part}")
_content = np.where(_TOKENS == 250, 256, _TOKENS).astype(np.uint16)
_add("the largest token", "a.bin", _content.tobytes(), _content)
_add(
    "tokens for a BPE", "a.bin", _TOKENS.tobytes(), "takes text, got token files", _BPE
)

# Text.
_add("no text", "a.txt", b"", _SHORT)
_add("one byte of text", "a.txt", b"a", _SHORT)
_add("blank lines in .txt", "a.txt", b"\n" * 200, b"\n" * 200)
_add("line ends of Windows", "a.txt", b"a line\r\n" * 40, b"a line\r\n" * 40)
_add("no line end", "a.txt", b"a" * 999, b"a" * 999)
_add("a byte order mark", "a.txt", b"\xef\xbb\xbf" + _BYTES, _BYTES)
_add("only a byte order mark", "a.txt", b"\xef\xbb\xbf", _SHORT)
_latin = "naïve café ".encode("latin-1") * 20
_add("Latin-1", "a.txt", _latin, _latin)
_add("Latin-1 for a BPE", "a.txt", _latin, "got 0xef at byte 2", _BPE)
_add("cut UTF-8 for a BPE", "a.txt", _BYTES + "é".encode()[:1], "0xc3 at byte", _BPE)
_add("overlong UTF-8", "a.txt", _BYTES + b"\xc0\xaf", _BYTES + b"\xc0\xaf")
_add("overlong UTF-8 for a BPE", "a.txt", _BYTES + b"\xc0\xaf", "got 0xc0", _BPE)
for _encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
    _add(f"{_encoding} text", "a.txt", _TEXT.encode(_encoding), "must be text")
_add("a NUL byte", "a.txt", b"a\0" + _BYTES, "content is binary")
_add("control characters", "a.txt", b"\x1b[2J\a\b" * 60, b"\x1b[2J\a\b" * 60)
_forged = b"a <|document|> b " * 20
_add("the separator's name", "a.txt", _forged, _forged)
_add("the separator's name for a BPE", "a.txt", _forged, _forged, _BPE)
_wild = "\u202e\u2028👩‍👩‍👧 ﷽ z̷̛͜a ".encode() * 20
_add("unusual characters for a BPE", "a.txt", _wild, _wild, _BPE)
_add("the letters of Parquet", "a.txt", b"PAR1" * 50, "content is Parquet")
_letters = b"PAR1 is a gene. " * 20
_add("a text that begins like Parquet", "a.txt", _letters, _letters)
_letters = pickle.dumps([_TEXT] * 2, protocol=0)
_add("a pickle of letters", "a.txt", _letters, _letters)

# Lines of JSON.
for _label, _line in {
    "a number": b'{"text": 3}',
    "null": b'{"text": null}',
    "true": b'{"text": true}',
    "NaN": b'{"text": NaN}',
    "a list": b'{"text": ["a"]}',
    "an object": b'{"text": {"text": "a"}}',
    "another key": b'{"body": "a"}',
    "a key of capitals": b'{"TEXT": "a"}',
    "no object": b'["text", "a"]',
    "only a string": b'"text"',
    "no JSON": b"text",
    "a cut string": b'{"text": "b',
    "quotes of Python": b"{'text': 'a'}",
    "a comma too many": b'{"text": "a",}',
    "a comment": b'// {"text": "a"}',
    "two objects": b'{"text": "a"} {"text": "b"}',
    "line ends of old Macs": b'{"text": "a"}\r{"text": "b"}',
    "100,000 brackets": b'{"text": ' + b"[" * 100_000,
    "100,000 objects": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    "a tab in a string": b'{"text": "a\tb"}',
    "a wrong escape": b'{"text": "\\x41"}',
    "Latin-1": '{"text": "café"}'.encode("latin-1"),
    "every byte": bytes(range(1, 10)) + bytes(range(11, 256)),
}.items():
    _content = _lines({"text": _TEXT}) + _line + b"\n"
    _add(
        f"JSON with {_label}", "a.jsonl", _content, f"line 2: a line of .jsonl {_LINE}"
    )
_add("JSON over several lines", "a.jsonl", b'[\n{"text": "a"}\n]\n', "line 1: a line")
_content = _lines({"text": "a"}).decode().encode("utf-16")
_add("JSON in UTF-16", "a.jsonl", _content, "UTF-16")
_add("a NUL byte in JSON", "a.jsonl", b'{"text": "a\0b"}\n', "content is binary")
_add("blank lines of JSON", "a.jsonl", b"\n \n\t\n" * 99, _SHORT)
_add("empty texts", "a.jsonl", _lines(*[{"text": ""}] * 99), _SHORT)
_add("no lines", "a.jsonl", b"", _SHORT)
_one = _lines({"text": _TEXT})
for _label, _content in {
    "no line end": _one.rstrip(),
    "blank lines": b"\n\n" + _one + b"\n \n",
    "line ends of Windows": _lines({"text": _TEXT}, end="\r\n"),
    "a byte order mark": b"\xef\xbb\xbf" + _one,
    "two texts": b'{"text": "first", ' + _one[1:],
    "NaN beside": b'{"a": NaN, "b": -Infinity, ' + _one[1:],
    "10,000 digits beside": b'{"a": ' + b"9" * 10_000 + b", " + _one[1:],
    "a huge exponent beside": b'{"a": 1e999999, ' + _one[1:],
    "an empty line of text": _lines({"text": ""}) + _one,
    "an escaped key": _one.replace(b"text", b"t\\u0065xt", 1),
}.items():
    _add(f"JSON and {_label}", "a.jsonl", _content, _BYTES)
_content = "a\0b\u2028c\x85d\r\ne" * 20
_add("escaped characters", "a.jsonl", _lines({"text": _content}), _content.encode())
_raw = json.dumps({"text": _content.replace("\0", "")}, ensure_ascii=False).encode()
_raw = _raw.replace(b"\\u0085", "\x85".encode())
_add("line ends of Unicode", "a.jsonl", _raw, _content.replace("\0", "").encode())
_add("a pair of surrogates", "a.jsonl", _lines({"text": "😀" * 50}), "😀".encode() * 50)
_lone = b'{"text": "' + b"\\ud800" * 50 + b'"}'
_add("lone surrogates", "a.jsonl", _lone, b"\xed\xa0\x80" * 50)
_add("lone surrogates for a BPE", "a.jsonl", _lone, "line 1: a BPE is of UTF-8", _BPE)
_long = b"a" * 50_000_000
_add("a line of 50 MB", "a.jsonl", b'{"text": "' + _long + b'"}', _long)
_add("100,000 lines", "a.jsonl", _lines({"text": "x"}) * 100_000, b"x" * 100_000)


# Files that are none, and folders.
def _folder(**files: Content) -> Callable[[Path], None]:
    """Returns a function that makes a folder of files.

    In the names of files "__" stands for "/", and "_" for ".".
    """

    def make(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            below = path / name.replace("__", "/").replace("_", ".")
            below.parent.mkdir(parents=True, exist_ok=True)
            write(below, content)

    return make


def write(path: Path, content: Content) -> None:
    """Makes an input at a path."""
    path.write_bytes(content) if isinstance(content, bytes) else content(path)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _socket(path: Path) -> None:
    """Makes a socket; its address must be short, so it is relative."""
    initial = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(initial)


def _sparse(path: Path) -> None:
    path.write_bytes(_BYTES * 99)
    os.truncate(path, 2**42)


def _linked_file(path: Path) -> None:
    path.with_name("5e8a").write_bytes(_BYTES)
    path.symlink_to("5e8a")


def _linked_folder(path: Path) -> None:
    _folder(a_txt=_BYTES)(path.with_name("elsewhere"))
    _folder(b=_link("../elsewhere"))(path)


def _below(path: Path) -> None:
    path.parent.write_bytes(_BYTES)


def _nothing(path: Path) -> None:
    """Makes no file."""


_REGULAR = "must be regular files"
for _suffix in ("txt", "jsonl", "bin", "npy"):
    _add(f"a FIFO named .{_suffix}", f"a.{_suffix}", os.mkfifo, _REGULAR)
    _add(f"a device named .{_suffix}", f"a.{_suffix}", _link("/dev/zero"), _REGULAR)
_add("a terminal", "a.txt", _link("/dev/ptmx"), _REGULAR)
_add("the null device", "a.txt", _link("/dev/null"), _REGULAR)
_add("a socket", "a.txt", _socket, _REGULAR)
_add("a process's memory", "a.txt", _link("/proc/self/mem"), "Input/output error")
_add("text of 4 TiB", "a.txt", _sparse, "must fit into the memory")
_add("no file", "a.txt", _nothing, "no file or folder at")
_add("a file below a file", "a.txt/b.txt", _below, "no file or folder at")
_add("a dangling link", "a.txt", _link("nothing"), "no file or folder at")
_add("a link to itself", "a.txt", _link("a.txt"), "no file or folder at")
_add("a link to a name without a suffix", "a.txt", _linked_file, _BYTES)
_add("a link to a folder", "folder", _linked_folder, _BYTES)
_add("a name that is too long", "a" * 300 + ".txt", _nothing, "name too long")
_add("an empty folder", "folder", _folder(), "data must be .txt")
_add("an empty folder named .txt", "a.txt", _folder(), "data must be .txt")
_add("a folder named .py", "a.py", _folder(b_txt=_BYTES), _BYTES)
_add("a folder in a folder named .py", "a", _folder(b_py__c_txt=_BYTES), _BYTES)
_others = _folder(b_csv=b"1,2", c_gz=b"")
_add("a folder of other files", "a", _others, "data must be .txt")
_add("a folder with other files", "a", _folder(b_csv=b"1,2", c_txt=_BYTES), _BYTES)
_mixed = _folder(b_bin=_TOKENS.tobytes(), c_txt=_BYTES)
_add("text and tokens", "a", _mixed, "got both", named="c.txt")
_fifo = _folder(b_txt=_BYTES, c_txt=os.mkfifo)
_add("a FIFO in a folder", "a", _fifo, _REGULAR, named="c.txt")
_dangling = _folder(b_txt=_BYTES, c_txt=_link("nothing"))
_add("a dangling link in a folder", "a", _dangling, _REGULAR, named="c.txt")
_add("a loop of folders", "a", _folder(b_txt=_BYTES, c__d=_link("..")), _BYTES)
_foreign = _folder(a_txt=_BYTES, b__c_txt=_png())
_add("a foreign file in a folder", "a", _foreign, "content is PNG", named="c.txt")
_add("an empty file in a folder", "a", _folder(b_txt=b"", c_txt=_BYTES), _BYTES)
for _label, _file, _shown in (
    ("a line end", "a\nerror: no.txt", "a\\nerror: no.txt"),
    ("a carriage return", "a\rb.txt", "a\\rb.txt"),
    ("a terminal's escape", "\x1b[31ma.txt", "\\x1b[31ma.txt"),
    ("bytes that are no UTF-8", os.fsdecode(b"\xff.txt"), ".txt"),
    ("a right-to-left mark", "a\u202etxt.txt", "a\\u202etxt.txt"),
    ("quotes", "a'\"$(b).txt", "a'\"$(b).txt"),
    ("a leading dash", "--out.txt", "--out.txt"),
    ("only spaces", " .txt", " .txt"),
    ("braces", "{0}%s.txt", "{0}%s.txt"),
):
    _add(f"a name with {_label}", _file, _BYTES, _BYTES)
    _add(
        f"a PNG, its name with {_label}", _file, _png(), "content is PNG", named=_shown
    )
