"""Loads a checkpoint into a decoder, tensor by tensor onto its devices."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from coat_jax.layers import recipes
from coat_jax.memory.shards import default_shardings
from coat_jax.models.hf import config as configs
from coat_jax.models.hf.folder import Folder, passed_names
from coat_jax.models.hf.pieces import Pieces, filled
from coat_jax.models.hf.quantized import scheme_in
from coat_jax.models.hf.weights import Weights
from coat_jax.models.llama import Llama, LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The folder that a model was loaded from, for `save`.

    Attributes:
      path: The path of the folder.
      config: The text of its config.json, with keys in order.
      files: The names of its other files that `save` copies.
    """

    path: str
    config: str
    files: tuple[str, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", passed_names(Path(self.path)))


def load(
    path: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    recipe: recipes.RecipeName = "coat",
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
) -> Llama:
    """Loads a Hugging Face checkpoint from a folder.

    The supported architectures are Llama 2 and 3, Mistral, Mixtral, Qwen2, Qwen3 and
    Qwen3-MoE, Gemma 2 and 3 (text) and OLMo 2. The folder has config.json and
    safetensors, one file or several with an index. FP8 checkpoints with scales of
    blocks or of rows are dequantized. Nothing is downloaded, unpickled or executed, and
    a link out of the folder is an error.

    Each process reads the shards of its devices, in pieces of at most 32 MiB, or of one
    row. The host's memory holds at most ten pieces at once.

    Args:
      path: The path of the folder.
      mesh: The devices to put the model on, with any of the axes "data", "fsdp",
        "expert", "context" and "tensor"; see `coat.estimate_memory`. A mesh axis that
        does not divide the length of an array's axis does not split it. None means the
        default device.
      recipe: The precision recipe of the layers.
      dtype: The dtype of the computation; None means the dtype that config.json names,
        or else the embedding's, with bfloat16 in place of float16.
      param_dtype: The dtype of the parameters; None means each tensor's dtype.

    Raises:
      ValueError: If the architecture is unknown, a value of config.json is not
        supported, a tensor is missing, unknown, or of another shape or dtype, a file
        breaks a rule of its format, or a link leads out of the folder.

    Examples:
      >>> import pathlib, tempfile
      >>> from coat_jax.models import hf, llama
      >>> from flax import nnx
      >>> config = llama.LlamaConfig(
      ...     vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
      ...     num_heads=4, num_kv_heads=2)
      >>> folder = pathlib.Path(tempfile.mkdtemp()) / "model"
      >>> hf.save(llama.Llama(config, rngs=nnx.Rngs(0)), folder)
      >>> hf.load(folder, recipe="bf16").config.num_layers
      2
    """
    if not isinstance(mesh, Mesh | None):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    with Folder(path) as folder:
        values = folder.config()
        shape = configs.read(values)
        named = configs.dtype_of(values)
        dequantized = named or jnp.dtype(jnp.bfloat16)
        weights = Weights(folder, shape, scheme_in(values), dequantized)
        computed = _computed(dtype, named or weights.dtypes["embedding"])
        config = dataclasses.replace(
            shape,
            recipe=recipe,
            dtype=computed,
            param_dtype=param_dtype or weights.dtypes["embedding"],
        )
        model = _filled(config, weights, mesh, param_dtype)
    model.origin = Origin(path=os.path.abspath(path), config=json.dumps(values))
    return model


def _computed(dtype: DTypeLike | None, stored: jnp.dtype) -> DTypeLike:
    if dtype is not None:
        return dtype
    return stored if stored == jnp.float32 else jnp.dtype(jnp.bfloat16)


def _filled(
    config: LlamaConfig, weights: Weights, mesh: Mesh | None, dtype: DTypeLike | None
) -> Llama:
    """Returns a model of this configuration with the parameters in `weights`.

    None for `dtype` keeps the dtypes of the tensors.
    """
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    graph, params, buffers = nnx.split(abstract, nnx.Param, ...)
    shardings = _shardings(params, mesh)
    parameters: dict[str, Pieces] = {}

    def named(path: Any, param: Any, sharding: Sharding) -> str:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        name = name.removesuffix("/value")
        target = jax.ShapeDtypeStruct(param.shape, dtype or weights.dtypes[name])
        parameters[name] = Pieces(
            parameter=weights.parameters[name], target=target, sharding=sharding
        )
        return name

    names = jax.tree_util.tree_map_with_path(named, params, shardings)
    arrays = filled(weights, parameters)
    params = jax.tree.map(arrays.__getitem__, names)
    kinds = jnp.array(config.local_layers or ())
    if mesh is not None:
        kinds = jax.device_put(kinds, NamedSharding(mesh, P()))
    buffers = jax.tree.map(lambda _: kinds, buffers)
    return nnx.merge(graph, params, buffers)


def _shardings(params: nnx.State, mesh: Mesh | None) -> Any:
    if mesh is None:
        device = jax.config.jax_default_device
        if not isinstance(device, jax.Device):  # It may be the name of a platform.
            device = jax.local_devices(backend=device)[0]
        return jax.tree.map(lambda _: SingleDeviceSharding(device), params)
    return default_shardings(params, mesh)
