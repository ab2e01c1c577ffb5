"""Loads a checkpoint into a decoder, tensor by tensor onto its devices."""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array

from coat_jax.layers import recipes
from coat_jax.memory.shards import default_shardings
from coat_jax.models.hf import config as configs
from coat_jax.models.hf.folder import Folder
from coat_jax.models.hf.layout import Parameter
from coat_jax.models.hf.quantized import scheme_in
from coat_jax.models.hf.weights import Weights
from coat_jax.models.llama import Llama, LlamaConfig

# Parameters of more bytes are read layer by layer, and transposed on their devices.
LARGE = 2**26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The folder that a model was loaded from, for `save`.

    Attributes:
      path: The path of the folder.
      config: The text of its config.json, with keys in order.
    """

    path: str
    config: str


def load(
    path: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    recipe: recipes.RecipeName = "coat",
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
) -> Llama:
    """Loads a Hugging Face checkpoint from a folder.

    Llama 2 and 3, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE, Gemma 2 and 3 (text)
    and OLMo 2 are known.
    The folder has config.json and safetensors, one file or several with an index. FP8
    checkpoints with scales of blocks or of rows are dequantized. Nothing is downloaded,
    unpickled or executed, and a link out of the folder is refused.

    Each process reads what its devices hold, a layer at a time, so that little of it is
    in the host's memory at once.

    Args:
      path: The path of the folder.
      mesh: The devices to put the model on, with axes "data", "fsdp" and "tensor", any
        of them; see `coat.estimate_memory`. An axis does not split what it does not
        divide. None is the default device.
      recipe: The precision recipe of the layers.
      dtype: The dtype of the computation; None means the dtype that config.json names,
        or bfloat16 if that is float16.
      param_dtype: The dtype of the parameters; None means each tensor's dtype.

    Raises:
      ValueError: If the architecture is unknown, a value of config.json is not one that
        the decoder computes, a tensor is missing, unknown, or of another shape or
        dtype, a file breaks a rule of its format, or a link leads out of the folder.

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
    """Returns a model with the parameters of a folder."""
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    graph, params, buffers = nnx.split(abstract, nnx.Param, ...)
    shardings = _shardings(params, mesh)

    def filled(path: Any, param: Any, sharding: Sharding) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        name = name.removesuffix("/value")
        target = jax.ShapeDtypeStruct(param.shape, dtype or weights.dtypes[name])
        return _array(weights, weights.parameters[name], target, sharding)

    params = jax.tree_util.tree_map_with_path(filled, params, shardings)
    kinds = jnp.array(config.local_layers or ())
    if mesh is not None:
        kinds = jax.device_put(kinds, NamedSharding(mesh, P()))
    buffers = jax.tree.map(lambda _: kinds, buffers)
    return nnx.merge(graph, params, buffers)


def _shardings(params: nnx.State, mesh: Mesh | None) -> Any:
    if mesh is None:
        device = jax.config.jax_default_device or jax.local_devices()[0]
        return jax.tree.map(lambda _: SingleDeviceSharding(device), params)
    return default_shardings(params, mesh)


def _array(
    weights: Weights,
    parameter: Parameter,
    target: jax.ShapeDtypeStruct,
    sharding: Sharding,
) -> Array:
    """Reads a parameter onto its devices."""

    def read_rows(layer: int, index: tuple[slice, ...]) -> np.ndarray:
        return weights.read(parameter, layer, index).astype(target.dtype)

    small = math.prod(target.shape) * target.dtype.itemsize <= LARGE
    if not parameter.of_layers:
        if parameter.transposed and not small:
            return _transposed(read_rows, target, sharding)
        return jax.make_array_from_callback(
            target.shape, sharding, partial(read_rows, 0)
        )
    if small or _splits_layers(sharding):
        return jax.make_array_from_callback(
            target.shape, sharding, partial(_stacked, read_rows, target.shape[0])
        )
    return _by_layers(read_rows, target, sharding)


def _stacked(read_rows: Callable, count: int, index: tuple[slice, ...]) -> np.ndarray:
    layers = range(*index[0].indices(count))
    return np.stack([read_rows(layer, index[1:]) for layer in layers])


def _splits_layers(sharding: Sharding) -> bool:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    return bool(spec) and spec[0] is not None


def _of_layer(sharding: Sharding) -> Sharding:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    return sharding


def _by_layers(
    read_rows: Callable, target: jax.ShapeDtypeStruct, sharding: Sharding
) -> Array:
    """Reads a parameter of layers one layer after another, in place on its devices."""

    @partial(jax.jit, donate_argnums=0, out_shardings=sharding)
    def put(stack, layer, index):
        return lax.dynamic_update_index_in_dim(stack, layer, index, 0)

    zeros = partial(jnp.zeros, target.shape, target.dtype)
    stack = jax.jit(zeros, out_shardings=sharding)()
    for i in range(target.shape[0]):
        layer = jax.make_array_from_callback(
            target.shape[1:], _of_layer(sharding), partial(read_rows, i)
        )
        # The host's copy of a layer goes before the next one comes.
        stack = jax.block_until_ready(put(stack, layer, jnp.int32(i)))
    return stack


def _transposed(
    read_rows: Callable, target: jax.ShapeDtypeStruct, sharding: Sharding
) -> Array:
    """Reads the transpose of a parameter, and transposes it on its devices."""
    swapped = sharding
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, None, None)[:2]
        swapped = NamedSharding(sharding.mesh, P(*spec[::-1]))
    swapped_array = jax.make_array_from_callback(
        target.shape[::-1], swapped, lambda index: read_rows(0, index[::-1]).T
    )
    return jax.jit(jnp.transpose, out_shardings=sharding)(swapped_array)
