"""Saves a decoder as a Hugging Face checkpoint, tensor by tensor."""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from coat_jax.models.hf import config as configs
from coat_jax.models.hf import quantized as fp8
from coat_jax.models.hf import safetensors
from coat_jax.models.hf.folder import CONFIG, INDEX, WEIGHTS, passed_files
from coat_jax.models.hf.layout import Parameter, parameters
from coat_jax.models.llama import Llama
from coat_jax.models.lora import is_adapted

_INCOMPLETE = ".incomplete"  # The suffix of a folder's name while it is written.

# The most bytes of a file, unless one tensor has more; the default of transformers.
FILE_BYTES = 5_000_000_000


def save(
    model: Llama, path: str | os.PathLike, *, format: fp8.FP8Format | None = None
) -> None:
    """Saves a model as a Hugging Face checkpoint.

    Without `format`, tensors have the dtypes of the parameters and the same bits. A
    model from `load` keeps the other keys of its config.json, its tokenizer's files,
    its chat templates and its generation settings, which are copied from the folder
    that it was loaded from. This folder must still have them. The new folder appears
    when all of its files are written; if it existed before, config.json appears in it
    last. All processes must call `save`, and the first one writes.

    Args:
      model: The model.
      path: The path of the folder, or of a link to it. The folder must be empty or not
        exist.
      format: None for parameters as they are; "fp8-block" for E4M3 codes with scales of
        128 x 128 blocks; "fp8-channel" for E4M3 codes with scales of rows in the layout
        of compressed-tensors. Embeddings, the head, norms, biases and routers are not
        quantized.

    Raises:
      ValueError: If `format` is unknown, the folder is not empty, a matrix to quantize
        is not finite, the model has adapters, no architecture of Hugging Face has the
        model's configuration, or the folder that the model was loaded from lacks a
        file that it had.

    Examples:
      >>> import pathlib, tempfile
      >>> from coat_jax.models import hf, llama
      >>> from flax import nnx
      >>> config = llama.LlamaConfig(
      ...     vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
      ...     num_heads=4, num_kv_heads=2)
      >>> model = llama.Llama(config, rngs=nnx.Rngs(0))
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> hf.save(model, folder / "model", format="fp8-block")
      >>> sorted(file.name for file in (folder / "model").iterdir())
      ['config.json', 'model.safetensors']
    """
    if not isinstance(model, Llama):
        raise TypeError(f"model must be a Llama, got {type(model).__name__}")
    fp8.check_format(format)
    if is_adapted(model):
        raise ValueError("a model with adapters is saved as the sum of lora.merged")
    # If the target of a link does not exist, the folder is created there.
    target = Path(os.path.realpath(path) if os.path.islink(path) else path)
    if target.is_symlink():
        raise ValueError(f"the folder to save to is a link to itself, got {path}")
    if target.exists() and not (target.is_dir() and _is_empty(target)):
        raise ValueError(f"the folder to save to must be empty, got {path}")
    origin, passed = {}, {}
    if model.origin is not None:
        origin = json.loads(model.origin.config)
        passed = passed_files(Path(model.origin.path), model.origin.files)
    params = _params(model)
    values = configs.written(model.config, origin)
    tensors = list(_tensors(model, params, format))
    values = _with_dtype(values, params["embedding"].dtype)
    for key in ("quantization_config", "compression_config"):
        values.pop(key, None)
    if format is not None:
        values["quantization_config"] = fp8.settings(format, _unquantized(model))
    if jax.process_index():
        for tensor in tensors:  # Devices of all processes take part in each.
            tensor.arrays()
    else:
        _write(target, values, tensors, passed)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("a checkpoint is saved")


def _unquantized(model: Llama) -> list[str]:
    """Returns the names of linear layers without codes: the head, and routers."""
    names = ["lm_head"]
    for parameter in parameters(model.config):
        if parameter.path == "layers/router":
            ((tensor, _),) = parameter.tensors()
            layers = range(model.config.num_layers)
            names += [parameter.name(tensor, i) for i in layers]
    return [name.removesuffix(".weight") for name in names]


def _is_empty(folder: Path) -> bool:
    """Returns whether a folder is empty, except for files of an interrupted `save`."""
    return all(path.name == _INCOMPLETE for path in folder.iterdir())


def _write(
    target: Path,
    values: dict[str, Any],
    tensors: "list[_Tensor]",
    passed: dict[str, bytes],
) -> None:
    """Writes a folder under another name, and renames it when all files are in it.

    A folder that exists stays, since it may be a mount point or the current folder. The
    files are moved to it when all are written, and config.json is the last.
    """
    exists = target.exists()
    name = _INCOMPLETE if exists else f"{target.name}{_INCOMPLETE}"
    incomplete = target / name if exists else target.with_name(name)
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    _write_tensors(incomplete, tensors)
    for name, content in passed.items():
        (incomplete / name).parent.mkdir(exist_ok=True)
        (incomplete / name).write_bytes(content)
    _write_json(incomplete / CONFIG, values)
    if not exists:
        incomplete.replace(target)
        return
    for file in sorted(incomplete.iterdir(), key=lambda file: file.name == CONFIG):
        file.replace(target / file.name)
    incomplete.rmdir()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor to write, with its scales if it is quantized.

    Attributes:
      name: The tensor's name in the file.
      kinds: The dtypes and shapes of the tensor and its scales, by name.
      fetch: The function that returns the tensor's values.
      format: The format of codes, or None.
    """

    name: str
    kinds: dict[str, tuple[np.dtype, tuple[int, ...]]]
    fetch: Callable[[], np.ndarray]
    format: fp8.FP8Format | None

    @property
    def nbytes(self) -> int:
        return sum(math.prod(s) * d.itemsize for d, s in self.kinds.values())

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Returns the arrays of all `kinds`, on the host."""
        values = self.fetch()
        if self.format is None:
            return (values,)
        try:
            return fp8.quantized(jnp.asarray(values), self.format)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None


def _params(model: Llama) -> dict[str, Array]:
    """Returns a dict from the paths of parameters to their arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    names = (jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves)
    arrays = (array for _, array in leaves)
    return {
        name.removesuffix("/value"): array
        for name, array in zip(names, arrays, strict=True)
    }


def _tensors(
    model: Llama, params: dict[str, Array], format: fp8.FP8Format | None
) -> Iterator[_Tensor]:
    """Yields all tensors in the order of the files, by layers."""
    everything, latest = parameters(model.config), _Latest()
    outside = [(p, 0) for p in everything if not p.of_layers]
    layers = range(model.config.num_layers)
    inside = [(p, i) for i in layers for p in everything if p.of_layers]
    for parameter, layer in outside + inside:
        array = params[parameter.path]
        fetch = partial(latest.fetch, array, parameter, layer)
        for tensor, shape in parameter.tensors():
            name = parameter.name(tensor, layer)
            codes = format if parameter.quantized else None
            yield _Tensor(
                name=name,
                kinds=_kinds(name, shape, array.dtype, codes),
                fetch=partial(_gathered, fetch, parameter, tensor),
                format=codes,
            )


def _kinds(
    name: str, shape: tuple[int, ...], dtype: Any, format: fp8.FP8Format | None
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    if format is None:
        return {name: (np.dtype(dtype), shape)}
    scheme = fp8.scheme_of(format)
    codes, scales = np.dtype(jnp.float8_e4m3fn), np.dtype(np.float32)
    kinds = {name: (codes, shape)}
    return kinds | {name + scheme.suffix: (scales, scheme.scales(shape))}


class _Latest:
    """A cache of the last parameter on the host, since it may make several tensors."""

    def __init__(self) -> None:
        self._key: tuple[str, int] | None = None
        self._values: np.ndarray | None = None

    def fetch(self, array: Array, parameter: Parameter, layer: int) -> np.ndarray:
        key = parameter.path, layer
        if self._values is None or self._key != key:
            self._values = None
            self._values = _on_host(array, layer if parameter.of_layers else None)
            self._key = key
        return self._values


def _gathered(
    fetch: Callable[[], np.ndarray], parameter: Parameter, tensor: str
) -> np.ndarray:
    """Returns a tensor, gathered from rows of the parameter that `fetch` returns."""
    values = fetch()
    if parameter.transposed:
        return values.T
    rows = values.reshape(-1, *parameter.columns)
    parts, first = [], 0
    for piece in parameter.rows:
        if piece.tensor == tensor:
            parts.append(rows[first : first + piece.count])
        first += piece.count
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _on_host(array: Array, layer: int | None) -> np.ndarray:
    """Returns an array or one layer of it, gathered from all devices and processes."""
    if layer is not None:
        array = _layer(array, layer)
    if not array.is_fully_addressable:
        everywhere = NamedSharding(array.sharding.mesh, P())
        array = jax.jit(lambda x: x, out_shardings=everywhere)(array)
    on_one_device = array.is_fully_replicated
    return np.asarray(array.addressable_data(0) if on_one_device else array)


@jax.jit
def _layer(array: Array, index: int) -> Array:
    return jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False)


def _write_tensors(folder: Path, tensors: list[_Tensor]) -> None:
    """Writes tensors to one file, or to several with an index."""
    files = _files(tensors)
    names = [WEIGHTS]
    if len(files) > 1:
        names = [
            f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
            for i in range(len(files))
        ]
    where = {}
    for name, of_file in zip(names, files, strict=True):
        kinds = {k: kind for tensor in of_file for k, kind in tensor.kinds.items()}
        where |= dict.fromkeys(kinds, name)
        arrays = (
            pair
            for tensor in of_file
            for pair in zip(tensor.kinds, tensor.arrays(), strict=True)
        )
        safetensors.write(folder / name, kinds, arrays)
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(folder / INDEX, index)


def _files(tensors: list[_Tensor]) -> list[list[_Tensor]]:
    """Splits tensors into files of at most `FILE_BYTES`, or of one larger tensor."""
    files: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def _with_dtype(values: dict[str, Any], dtype: Any) -> dict[str, Any]:
    key = "dtype" if "dtype" in values else "torch_dtype"
    return {**values, key: jnp.dtype(dtype).name}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
