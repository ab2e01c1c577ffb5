"""Reads and writes safetensors files, without trusting the files that it reads.

A file is the length of its header (8 bytes, little-endian), the header, which is JSON,
and the tensors' bytes. The header gives each tensor's dtype, shape and position. The
whole header is checked before memory is allocated for a tensor: tensors must follow one
another without gaps from the first byte to the last, and have the sizes of their dtypes
and shapes. Slices of tensors' rows are read with `os.preadv` into memory of their size.
"""

import dataclasses
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The format's own library has the same limit.
_LONGEST_HEADER = 100_000_000
# The most axes of a tensor; no checkpoint has more, and NumPy has at most 64.
_MOST_AXES = 8
# The most bytes that one call of the operating system reads or writes.
_CHUNK = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """The dtype, shape and position of a tensor in a file.

    Attributes:
      dtype: The dtype.
      shape: The shape.
      offset: The position of the first byte in the file.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file that is open for reading.

    Args:
      path: The path of the file.

    Raises:
      ValueError: If the file is not a regular one, or its header breaks a rule.

    Examples:
      >>> import numpy as np, pathlib, tempfile
      >>> from coat_jax.models.hf import safetensors
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.safetensors"
      >>> array = np.arange(6, dtype=np.float32).reshape(3, 2)
      >>> kinds = {"x": (array.dtype, array.shape)}
      >>> safetensors.write(path, kinds, iter([("x", array)]))
      >>> with safetensors.TensorFile(path) as file:
      ...     file.read("x", slice(1, 3)).tolist()
      [[2.0, 3.0], [4.0, 5.0]]
    """

    def __init__(self, path: Path):
        self.path = path
        # A pipe would block, so the file is opened without waiting.
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise self._error("must be a regular file")
            self.tensors: dict[str, Tensor] = self._header(status.st_size)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def read(
        self, name: str, rows: slice = slice(None), out: np.ndarray | None = None
    ) -> np.ndarray:
        """Reads some rows of a tensor, consecutive entries of its first axis.

        Args:
          name: The tensor.
          rows: The rows; a tensor without axes is read whole.
          out: A contiguous array of the rows' shape and dtype that receives them; None
            allocates one.

        Returns:
          The array that received the rows.

        Raises:
          ValueError: If the file ends before the tensor does, or `out` has another
            shape or dtype or is not contiguous.
        """
        tensor = self.tensors[name]
        offset, shape = tensor.offset, tensor.shape
        if shape:
            start, stop, _ = rows.indices(shape[0])
            offset += start * math.prod(shape[1:]) * tensor.dtype.itemsize
            shape = (max(stop - start, 0), *shape[1:])
        if out is None:
            out = np.empty(shape, tensor.dtype)
        elif (out.shape, out.dtype) != (shape, tensor.dtype):
            raise ValueError(
                f"out must be {tensor.dtype} {list(shape)} for the rows of "
                f"{shown(name)}, got {out.dtype} {list(out.shape)}"
            )
        elif not out.flags.c_contiguous:
            raise ValueError(f"out must be contiguous, got strides {out.strides}")
        return self._read(offset, out)

    def _read(self, offset: int, out: np.ndarray) -> np.ndarray:
        """Fills contiguous memory with the file's bytes from `offset` on."""
        buffer = memoryview(out.reshape(-1).view(np.uint8))
        while buffer:
            count = os.preadv(self._file, [buffer[:_CHUNK]], offset)
            if not count:
                raise self._error("ends before its last tensor")
            buffer, offset = buffer[count:], offset + count
        return out

    def _header(self, size: int) -> dict[str, Tensor]:
        if size < 8:
            raise self._error(f"must have 8 bytes or more, got {size}")
        length = int(self._read(0, np.empty(1, "<u8"))[0])
        if length > min(_LONGEST_HEADER, size - 8):
            raise self._error(
                f"must have a header of at most {min(_LONGEST_HEADER, size - 8)} "
                f"bytes, got {length}"
            )
        text = self._read(8, np.empty(length, np.uint8)).tobytes()
        entries = parsed(text, str(self.path.name))
        entries.pop("__metadata__", None)
        start = 8 + length
        tensors = {
            name: self._tensor(name, entry, start) for name, entry in entries.items()
        }
        self._check_places(tensors, start, size)
        return tensors

    def _tensor(self, name: str, entry: Any, start: int) -> Tensor:
        if not isinstance(entry, dict) or entry.keys() != _FIELDS:
            fields = ", ".join(sorted(_FIELDS))
            raise self._error(f"must give {fields} of tensor {shown(name)}")
        dtype, shape, offsets = (entry[f] for f in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._error(f"has tensor {shown(name)} of dtype {shown(dtype)}")
        if not _naturals(shape) or len(shape) > _MOST_AXES:
            raise self._error(f"has tensor {shown(name)} of shape {shown(shape)}")
        if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._error(f"has tensor {shown(name)} at {shown(offsets)}")
        first, last = offsets
        tensor = Tensor(dtype=DTYPES[dtype], shape=tuple(shape), offset=start + first)
        if tensor.nbytes != last - first:
            raise self._error(
                f"has {last - first} bytes for tensor {shown(name)}, "
                f"{dtype} {shown(shape)}"
            )
        return tensor

    def _check_places(self, tensors: Mapping[str, Tensor], end: int, size: int) -> None:
        places = sorted(tensors.items(), key=lambda t: (t[1].offset, t[1].nbytes))
        for name, tensor in places:
            if tensor.offset != end:
                gap = "a gap before" if tensor.offset > end else "an overlap at"
                raise self._error(f"has {gap} tensor {shown(name)}")
            end += tensor.nbytes
        if end != size:
            raise self._error(f"must have {end} bytes, got {size}")

    def _error(self, rule: str) -> ValueError:
        return ValueError(f"{shown(self.path.name)} {rule}")


_FIELDS = {"dtype", "shape", "data_offsets"}


def parsed(text: bytes, name: str) -> dict[str, Any]:
    """Parses a JSON object from a text that is not trusted.

    Raises:
      ValueError: If the text is not a JSON object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in values if keys.count(key) > 1)
            raise ValueError(f"has {shown(twice)} twice")
        return values

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ValueError(f"{shown(name)} is no JSON: {reason}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{shown(name)} must be an object of JSON, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """Returns a value that is not trusted as short text in one line of ASCII."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def write(
    path: Path,
    kinds: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes a safetensors file, one tensor at a time.

    Args:
      path: The path of the file.
      kinds: The dtype and shape of each tensor, by name, in the order of the file.
      arrays: The names and values of the tensors, in the same order.

    Raises:
      ValueError: If safetensors lacks a dtype, or arrays do not have the names, dtypes
        and shapes in `kinds`.
    """
    with path.open("wb") as file:
        file.write(_header_of(kinds))
        for (name, (dtype, shape)), (actual_name, array) in zip(
            kinds.items(), arrays, strict=True
        ):
            if (actual_name, array.dtype, array.shape) != (name, dtype, tuple(shape)):
                raise ValueError(
                    f"{name} must be {dtype} {shape}, got {actual_name} {array.dtype} "
                    f"{array.shape}"
                )
            for chunk in _bytes_of(array):
                file.write(chunk)


def _header_of(kinds: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    # The library transformers reads only files that name this format.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in kinds.items():
        if np.dtype(dtype) not in _NAMES:
            raise ValueError(f"{name} has a dtype that safetensors lacks: {dtype}")
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {
            "dtype": _NAMES[np.dtype(dtype)],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Tensors begin at a multiple of 8 bytes.
    return len(text).to_bytes(8, "little") + text


def _bytes_of(array: np.ndarray) -> Iterator[memoryview]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, _CHUNK):
        yield memoryview(flat[start : start + _CHUNK])
