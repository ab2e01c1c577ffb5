"""Reads the files of a checkpoint's folder, without trusting their contents."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from coat_jax.models.hf.safetensors import Tensor, TensorFile, parsed, shown

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Files that `save` copies from the folder that a model was loaded from, next to the
# templates in the folder `TEMPLATES`.
PASSED = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
TEMPLATES = "additional_chat_templates"
_LARGEST_CONFIG = 2**20
_LARGEST_INDEX = 2**27
_LARGEST_PASSED = 2**28


class Folder:
    """A checkpoint's folder with its safetensors files open.

    Args:
      path: The path of the folder.

    Attributes:
      path: The path of the folder.
      files: The open files, by name.
      tensors: The tensors of all files, by name.

    Raises:
      ValueError: If a file is missing, leads out of the folder, or breaks a rule of its
        format, or if the index and the files differ.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"a checkpoint must be a folder, got {shown(str(path))}")
        self.files: dict[str, TensorFile] = {}
        self._file_of: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            for name in self._names():
                self.files[name] = stack.enter_context(TensorFile(self.inside(name)))
            self._close = stack.pop_all().close
        try:
            self.tensors: dict[str, Tensor] = dict(self._all_tensors())
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def config(self) -> dict[str, Any]:
        """Returns the contents of config.json."""
        return read_json(self.path, CONFIG, _LARGEST_CONFIG)

    def read(
        self, name: str, rows: slice = slice(None), out: np.ndarray | None = None
    ) -> np.ndarray:
        """Reads some rows of a tensor; see `TensorFile.read`."""
        return self.files[self._file_of[name]].read(name, rows, out)

    def inside(self, name: str) -> Path:
        """Returns the path of a file of the folder; see `inside`."""
        return inside(self.path, name)

    def _names(self) -> list[str]:
        """Returns the names of the safetensors files."""
        if (self.path / WEIGHTS).exists():
            return [WEIGHTS]
        if not (self.path / INDEX).exists():
            raise ValueError(
                f"a checkpoint must have {WEIGHTS} or {INDEX}, got neither in "
                f"{shown(str(self.path))}; files that need unpickling are not read"
            )
        index = read_json(self.path, INDEX, _LARGEST_INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ValueError(f"{INDEX} must have a weight_map")
        for tensor, file in index.items():
            if not isinstance(file, str) or not file.endswith(".safetensors"):
                raise ValueError(f"{INDEX} has {shown(tensor)} in {shown(file)}")
        self._file_of = index
        return sorted(set(index.values()))

    def _all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        indexed = dict(self._file_of)
        for file, opened in self.files.items():
            for name, tensor in opened.tensors.items():
                expected = self._file_of.setdefault(name, file)
                if expected != file or (indexed and name not in indexed):
                    raise ValueError(
                        f"{shown(file)} has tensor {shown(name)}, which {INDEX} does "
                        "not have there"
                    )
                indexed.pop(name, None)
                yield name, tensor
        for name in indexed:
            raise ValueError(
                f"{shown(self._file_of[name])} must have tensor {shown(name)}, as "
                f"{INDEX} says"
            )


def read_json(folder: Path, name: str, limit: int = _LARGEST_CONFIG) -> dict[str, Any]:
    """Returns the JSON object in a file of a folder.

    Raises:
      ValueError: If there is no such file, it has more than `limit` bytes, or it is not
        a JSON object.
    """
    return parsed(read_bytes(folder, name, limit), name)


def read_bytes(folder: Path, name: str, limit: int = _LARGEST_PASSED) -> bytes:
    """Returns the bytes of a file of a folder.

    Raises:
      ValueError: If there is no such file, or it has more than `limit` bytes.
    """
    path = inside(folder, name)
    if (size := path.stat().st_size) > limit:
        raise ValueError(f"{name} must have at most {limit} bytes, got {size}")
    return path.read_bytes()


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a regular file of a folder.

    Raises:
      ValueError: If there is no such file, or the name or a link leads out of the
        folder.
    """
    if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
        raise ValueError(f"a file of a checkpoint has a plain name, got {shown(name)}")
    home = folder.resolve()
    path = (folder / name).resolve()
    if path.parent != home:
        raise ValueError(
            f"{shown(name)} must not be a link out of {shown(str(folder))}; copy the "
            "folder with its links resolved (cp -rL)"
        )
    if not path.is_file():
        raise ValueError(f"{shown(str(folder))} must have the file {shown(name)}")
    return path


def passed_names(folder: Path) -> tuple[str, ...]:
    """Returns the names of the files in a folder that `save` copies.

    Raises:
      ValueError: If the folder of more chat templates is a link.
    """
    templates = folder / TEMPLATES
    if templates.is_symlink():
        raise ValueError(f"{shown(str(templates))} must be a folder, got a link")
    names = [name for name in PASSED if os.path.lexists(folder / name)]
    names += sorted(f"{TEMPLATES}/{path.name}" for path in templates.glob("*.jinja"))
    return tuple(names)


def passed_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Returns the bytes of files by name.

    Args:
      folder: The folder that a model was loaded from.
      names: The names of files that were in the folder when the model was loaded.

    Raises:
      ValueError: If files are missing now, or one is too large or a link out of the
        folder.
    """
    if missing := sorted(set(names) - set(passed_names(folder))):
        raise ValueError(
            f"{shown(str(folder))} must still have the files that it had when it was "
            f"loaded, but it lacks {shown(', '.join(missing))}; nothing is saved"
        )
    paths = {name: (folder / name).parent for name in names}
    return {name: read_bytes(paths[name], os.path.basename(name)) for name in names}
