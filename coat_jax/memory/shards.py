"""The parts of a batch, of parameters and of layers that a mesh gives each GPU."""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from coat_jax.models import llama
from pallas_kernels.dispatch.array_types import axis_names, parts_of

_AXES = (
    "data",  # Splits the batch.
    "fsdp",  # Splits the batch and the parameters.
    "expert",  # Splits the batch, the experts and the other parameters.
    "context",  # Splits sequences and the parameters.
    "tensor",  # Splits heads and the MLP's hidden layer.
)
_SHARDS = ("fsdp", "expert", "context")
# The axis "tensor" splits the inputs of these weights, and the outputs of the others.
_SPLIT_BY_INPUTS = ("out", "down")
# The weights of experts in stacks of layers, and their numbers of axes.
_OF_EXPERTS = (("gate_up", 5), ("down", 4))


def axis_sizes(mesh: Mesh | AbstractMesh | None) -> dict[str, int]:
    """Returns the size of each mesh axis by name; without a mesh, an empty dict."""
    if mesh is None:
        return {}
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    if unknown := [name for name in mesh.axis_names if name not in _AXES]:
        raise ValueError(
            f"axes of the mesh must be among {', '.join(_AXES)}, got {unknown[0]!r}"
        )
    return dict(mesh.shape)


def batch_parts(sizes: dict[str, int]) -> int:
    """Returns the number of parts that the mesh splits the batch into."""
    return math.prod(sizes.get(name, 1) for name in ("data", "fsdp", "expert"))


def local_batch_of(batch: int, sizes: dict[str, int]) -> int:
    """Returns the number of sequences that one GPU has of a batch.

    Raises:
      ValueError: If the mesh does not divide the batch.
    """
    if batch % (parts := batch_parts(sizes)):
        raise ValueError(
            f"batch must be a multiple of {parts}, the size of the axes data, fsdp and "
            f"expert together, got {batch}"
        )
    return batch // parts


def local_length_of(sequence: int, sizes: dict[str, int]) -> int:
    """Returns the number of tokens that one GPU has of a sequence.

    Raises:
      ValueError: If the mesh does not divide the sequence.
    """
    if sequence % (parts := sizes.get("context", 1)):
        raise ValueError(
            f"sequence must be a multiple of {parts}, the size of the axis context, "
            f"got {sequence}"
        )
    return sequence // parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LocalContext:
    """A stand-in for `ContextParallel`, to trace the step of one of its GPUs alone.

    Where GPUs would exchange arrays, it reshapes one GPU's array to the shape that the
    exchange returns. Only shapes count when memory is estimated.

    Attributes:
      parts: The number of GPUs that share a sequence.
    """

    parts: int
    batch_axes = row_axes = axis = None

    def check(self, num_heads: int) -> None:
        if num_heads % self.parts:
            raise ValueError(
                f"the axis context must divide num_heads {num_heads} of a GPU, got "
                f"{self.parts}"
            )

    def enter(self, x: Array) -> Array:
        return x

    leave = enter

    def starts(self, rows: int, length: int) -> Array:
        return jnp.zeros(rows, jnp.int32)

    def attend(self, attention: Any, q: Array, k: Array, v: Array, *more: Any) -> Array:
        repeats = math.lcm(k.shape[2], self.parts) // k.shape[2]
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
        return attention(*map(self.to_heads, (q, k, v)), *more)

    def to_heads(self, x: Array) -> Array:
        b, s, n, d = x.shape
        x = x.reshape(b, s, self.parts, -1, d).swapaxes(1, 2)
        return x.reshape(b, self.parts * s, n // self.parts, d)

    def to_rows(self, o: Array) -> Array:
        b, s, n, d = o.shape
        o = o.reshape(b, self.parts, -1, n, d).swapaxes(1, 2)
        return o.reshape(b, s // self.parts, self.parts * n, d)


def local_config(config: llama.LlamaConfig, sizes: dict[str, int]) -> llama.LlamaConfig:
    """Returns the configuration of one GPU's part of each layer."""
    parts = sizes.get("tensor", 1)
    split = ("num_heads", "num_kv_heads", "intermediate_size")
    for name in split:
        if getattr(config, name) % parts:
            raise ValueError(
                f"the axis tensor must divide {name} {getattr(config, name)}, got "
                f"{parts}"
            )
    _check_experts(config, sizes)
    local = {name: getattr(config, name) // parts for name in split}
    head_dim = config.size_of_heads
    context = sizes.get("context", 1)
    local["context"] = None if context == 1 else _LocalContext(parts=context)
    return dataclasses.replace(config, head_dim=head_dim, batch_axes=None, **local)


def _check_experts(config: llama.LlamaConfig, sizes: dict[str, int]) -> None:
    parts, experts = sizes.get("expert", 1), config.experts
    if parts == 1:
        return
    if experts is None:
        raise ValueError("the axis expert needs a model with experts, got None")
    if experts.num_experts % parts:
        raise ValueError(
            f"the axis expert must divide num_experts {experts.num_experts}, got "
            f"{parts}"
        )
    for other in ("tensor", "context"):
        if sizes.get(other, 1) > 1:
            raise ValueError(
                f"a mesh has the axis expert or {other}, not both, got {sizes}"
            )


def with_local_experts(
    params: nnx.State, config: llama.LlamaConfig, sizes: dict[str, int]
) -> nnx.State:
    """Returns the parameters' shapes, with only one GPU's experts in each layer."""
    parts, experts = sizes.get("expert", 1), config.experts
    if parts == 1 or experts is None:
        return params
    count = experts.num_experts // parts + experts.num_shared

    def local(path: Any, param: Any) -> Any:
        if not _is_of_experts(_names(path), param):
            return param
        shape = len(param), count, *param.shape[2:]
        return jax.ShapeDtypeStruct(shape, param.dtype)

    return jax.tree_util.tree_map_with_path(local, params)


def checked_shardings(
    shardings: Any, params: nnx.State, mesh: Mesh | AbstractMesh
) -> Any:
    """Returns the shardings after checks; the default shardings if they are None."""
    if shardings is None:
        return jax.tree_util.tree_map_with_path(
            lambda path, p: NamedSharding(mesh, _spec(path, p, mesh)), params
        )
    if (structure := jax.tree.structure(shardings)) != jax.tree.structure(params):
        raise ValueError(
            f"shardings must have the structure of params, got {structure}"
        )
    for sharding in jax.tree.leaves(shardings):
        if not isinstance(sharding, NamedSharding):
            raise ValueError(f"shardings must be NamedSharding, got {sharding!r}")
    return shardings


def default_shardings(params: nnx.State, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the parameters' default shardings, as in fully sharded data parallelism.

    "fsdp", "expert" and "context" split the second-to-last axis of every matrix, or the
    axis of experts, and "tensor" splits heads and the MLP's hidden layer. If the mesh
    axes for an axis of a parameter do not divide its length, the last of them are left
    out.
    """

    def sharding(path: Any, param: Any) -> NamedSharding:
        spec = _spec(path, param, mesh)
        parts = map(partial(_dividing, mesh), spec, param.shape)
        return NamedSharding(mesh, P(*parts))

    return jax.tree_util.tree_map_with_path(sharding, params)


def _dividing(mesh: Mesh | AbstractMesh, names: Any, size: int) -> Any:
    """Returns the longest prefix of the mesh axes that together divide `size`."""
    names = axis_names(names)
    while names and size % _size(names, mesh):
        names = names[:-1]
    return names if len(names) > 1 else next(iter(names), None)


def _size(names: Any, mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parts into which mesh axes split an array's axis."""
    return parts_of(mesh, axis_names(names))


def _spec(path: Any, param: Any, mesh: Mesh | AbstractMesh) -> P:
    """Returns the spec of a parameter over "tensor" and the axes that split parameters.

    In the weights of experts, "expert", "fsdp" and "context" split the axis of experts,
    so that each expert is quantized where its weights are. The codes are gathered over
    "fsdp" and "context".
    """
    names, tensor = _names(path), "tensor" in mesh.axis_names
    in_layer = "layers" in names
    vector = "norm" in "/".join(names) or "qkv_bias" in names
    if vector or param.ndim < 2:
        return P()
    spec: list[Any] = [None] * param.ndim
    shards = tuple(name for name in _SHARDS if name in mesh.axis_names)
    outputs = shards
    if tensor and in_layer:
        if any(name in names for name in _SPLIT_BY_INPUTS):
            spec[-1] = "tensor"
        else:
            outputs = (*outputs, "tensor")
    if in_layer and shards and _is_of_experts(names, param):
        # The sort is stable: the axis of experts is first.
        spec[1] = tuple(sorted(shards, key=lambda name: name != "expert"))
        outputs = outputs[len(shards) :]
    spec[-2] = outputs or None
    return P(*spec)


def _names(path: Any) -> list[str]:
    return jax.tree_util.keystr(path, simple=True, separator="/").split("/")


def _is_of_experts(names: list[str], param: Any) -> bool:
    """Returns whether a parameter is a stack of the weights of experts."""
    return any(param.ndim == ndim for name, ndim in _OF_EXPERTS if name in names)


def shard_bytes(tree: Any, shardings: Any) -> Iterator[int]:
    """Yields the bytes of each array's part on one GPU."""
    arrays, places = jax.tree.leaves(tree), jax.tree.leaves(shardings)
    for x, sharding in zip(arrays, places, strict=True):
        try:
            shape = sharding.shard_shape(x.shape)
        except ValueError as error:
            raise ValueError(
                f"{sharding.spec} must divide a parameter of shape {x.shape}"
            ) from error
        yield math.prod(shape) * x.dtype.itemsize


def head_bytes(params: nnx.State, places: Any) -> int:
    """Returns the bytes of the head that the loss gathers, 0 if it is not split."""
    name = "embedding" if params.get("head") is None else "head"
    [param], [sharding] = (jax.tree.leaves(tree[name]) for tree in (params, places))
    return 0 if sharding.is_fully_replicated else nbytes(param)


def nbytes(x: Any) -> int:
    """Returns the bytes of an array, or of a shape and dtype."""
    return x.size * x.dtype.itemsize


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays of a tree."""
    return sum(map(nbytes, jax.tree.leaves(tree)))
