"""Reads the parameters of a decoder from the tensors of a folder."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from coat_jax.models.hf.folder import Folder
from coat_jax.models.hf.layout import EMBEDDING, HEAD, Parameter, parameters
from coat_jax.models.hf.quantized import Scheme
from coat_jax.models.hf.safetensors import Tensor, shown
from coat_jax.models.llama import LlamaConfig

_WIDE = {jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16)}
_CODES = jnp.dtype(jnp.float8_e4m3fn)
# Tables that early checkpoints of Llama hold and nothing reads.
_UNREAD = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# The bytes that are compared at a time.
_COMPARED = 2**26
# The bytes, in the widest dtype, that are converted or dequantized at a time.
_CONVERTED = 2**21
_WIDEST = 4


class Weights:
    """The parameters of a decoder in a folder of tensors.

    All tensors are checked: their names, shapes and dtypes.

    Args:
      folder: The open folder.
      config: The configuration of the decoder.
      scheme: The scheme of codes; None if the folder has no codes.
      dtype: The dtype of dequantized codes.

    Raises:
      ValueError: If a tensor is missing, unknown, or of another shape or dtype.
    """

    def __init__(
        self,
        folder: Folder,
        config: LlamaConfig,
        scheme: Scheme | None,
        dtype: jnp.dtype,
    ):
        self._folder, self._scheme, self._dtype = folder, scheme, dtype
        self.parameters = {p.path: p for p in parameters(config)}
        self.num_layers = config.num_layers
        self.dtypes: dict[str, jnp.dtype] = {}
        names = set()
        for parameter in self.parameters.values():
            names.update(self._checked(parameter))
        self._check_unknown(names, config)

    def read(
        self, parameter: Parameter, layer: int, index: Sequence[range], out: np.ndarray
    ) -> None:
        """Reads a part of a parameter into `out`, converted to the dtype of `out`.

        Args:
          parameter: The parameter to read.
          layer: The layer; ignored for parameters outside of layers.
          index: The range of entries to read along each axis of `parameter.stored`.
          out: Contiguous memory for the part, with the lengths of `index` as its shape,
            and the dtype to convert to.
        """
        axes = len(index) - len(parameter.columns)
        *outer, rows = index[:axes]
        *sizes, height = parameter.stored[:axes]
        parts = out.reshape(-1, *out.shape[len(outer) :])
        for values, i in zip(parts, _numbers(outer, sizes), strict=True):
            of_part = range(i * height + rows.start, i * height + rows.stop)
            self._read_rows(parameter, layer, of_part, index[axes:], values)

    def _read_rows(
        self,
        parameter: Parameter,
        layer: int,
        rows: range,
        columns: Sequence[range],
        out: np.ndarray,
    ) -> None:
        """Reads some rows and columns of a parameter from its tensors into `out`."""
        first = 0
        for piece in parameter.rows:
            start = max(rows.start - first, 0)
            stop = min(rows.stop - first, piece.count)
            if start < stop:
                name = parameter.name(piece.tensor, layer)
                of_tensor = range(piece.start + start, piece.start + stop)
                offset = first + start - rows.start
                values = out[offset : offset + stop - start]
                self._read_tensor(name, of_tensor, columns, values)
            first += piece.count

    def _read_tensor(
        self, name: str, rows: range, columns: Sequence[range], out: np.ndarray
    ) -> None:
        """Reads some rows and columns of a tensor into `out`, converted to its dtype.

        If no conversion is needed, they are read directly into `out`.
        """
        entry = self._folder.tensors[name]
        whole = entry.shape[1:] == tuple(map(len, columns))
        if whole and entry.dtype == out.dtype and entry.dtype in _WIDE:
            self._folder.read(name, slice(rows.start, rows.stop), out)
            return
        row_bytes = math.prod(entry.shape[1:]) * _WIDEST
        step = max(_CONVERTED // max(row_bytes, 1), 1)
        within = tuple(slice(c.start, c.stop) for c in columns)
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            values = self._values(name, slice(start, stop))
            out[start - rows.start : stop - rows.start] = values[:, *within]

    def _values(self, name: str, rows: slice) -> np.ndarray:
        """Returns rows of a tensor, dequantized if they are codes."""
        array = self._folder.read(name, rows)
        if array.dtype != _CODES or self._scheme is None:
            return array
        height = self._scheme.block[0]
        blocks, start = slice(None), rows.start
        if height is not None:
            blocks = slice(rows.start // height, -(-rows.stop // height))
            start = rows.start % height
        scales = self._folder.read(name + self._scheme.suffix, blocks)
        values = self._scheme.dequantized(array, scales, start)
        return values.astype(self._dtype, copy=False)

    def _checked(self, parameter: Parameter) -> Iterator[str]:
        """Yields the names of a parameter's tensors; checks their shapes and dtypes."""
        layers = range(self.num_layers if parameter.of_layers else 1)
        for layer in layers:
            for tensor, shape in parameter.tensors():
                name = parameter.name(tensor, layer)
                entry = self._found(name, shape)
                yield name
                dtype = entry.dtype
                if dtype == _CODES and self._scheme is not None and parameter.quantized:
                    yield self._check_scales(name, shape)
                    dtype = self._dtype
                if dtype not in _WIDE:
                    raise _error(name, "float32, bfloat16 or float16", entry.dtype.name)
                expected = self.dtypes.setdefault(parameter.path, dtype)
                if dtype != expected:
                    rule = f"{expected.name} like the others of {parameter.path}"
                    raise _error(name, rule, dtype.name)

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> str:
        scales = name + self._scheme.suffix
        entry = self._found(scales, self._scheme.scales(shape))
        if entry.dtype not in _WIDE:
            raise _error(scales, "float32, bfloat16 or float16", entry.dtype.name)
        return scales

    def _found(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._folder.tensors:
            raise ValueError(f"the checkpoint must have the tensor {name}")
        entry = self._folder.tensors[name]
        if entry.shape != shape:
            raise _error(name, f"of the shape {list(shape)}", list(entry.shape))
        return entry

    def _check_unknown(self, names: set[str], config: LlamaConfig) -> None:
        for name in self._folder.tensors.keys() - names:
            if _UNREAD.fullmatch(name):
                continue
            if name == HEAD and config.tie_embeddings and self._is_embedding(name):
                continue
            raise ValueError(
                f"the checkpoint must not have the tensor {shown(name)}, which the "
                "decoder that config.json describes has not"
            )

    def _is_embedding(self, name: str) -> bool:
        """Returns whether a tensor has the same bits as the embedding."""
        entries = [self._folder.tensors[n] for n in (name, EMBEDDING)]
        if entries[0].shape != entries[1].shape or entries[0].dtype != entries[1].dtype:
            return False
        row_bytes = math.prod(entries[0].shape[1:]) * entries[0].dtype.itemsize
        step = max(_COMPARED // max(row_bytes, 1), 1)
        for start in range(0, entries[0].shape[0], step):
            rows = slice(start, start + step)
            a, b = (
                self._folder.read(n, rows).view(np.uint8) for n in (name, EMBEDDING)
            )
            if not np.array_equal(a, b):
                return False
        return True


def _numbers(ranges: Sequence[range], sizes: Sequence[int]) -> Iterator[int]:
    """Yields the row-major index of each entry in `ranges`, for axes of `sizes`.

    Without axes it yields 0.
    """
    for index in itertools.product(*ranges):
        yield int(np.ravel_multi_index(index, sizes)) if index else 0


def _error(name: str, rule: str, value: object) -> ValueError:
    return ValueError(f"the tensor {name} must be {rule}, got {shown(value)}")
