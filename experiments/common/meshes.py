"""Meshes of devices: their names on a command line, and how a training is sharded.

A mesh has five axes. A batch is sharded over `data`, `fsdp` and `expert`, sequences
over `context`, and parameters with their moments over all axes except `data`. Sharding
is defined by the arrays' shardings alone: XLA and the library's kernels follow them.
Each axis in the second column of the table is also sharded over `context`.

| weight     | axis sharded over fsdp, expert  | axis sharded over tensor |
|------------|---------------------------------|--------------------------|
| `qkv`      | outputs                         | outputs                  |
| `gate_up`  | outputs                         | outputs                  |
| `out`      | outputs                         | inputs                   |
| `down`     | outputs                         | inputs                   |
| embedding  | vocabulary                      | vocabulary               |
| `head`     | inputs                          | inputs                   |

In weights of experts the axis of the experts is sharded over `expert`, and each part of
it over `fsdp`. Layers gather the parts that are sharded over `fsdp`, and send tokens
along `expert` to the devices of their experts.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32, Int64

import coat_jax as coat
from coat_jax.layers.context import ContextParallel
from coat_jax.models import llama

AXES = ("data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")
_REFUSED = {
    "sequence": "the axis that splits sequences is context",
    "pipeline": "pipelines of layers are not supported",
    "stage": "pipelines of layers are not supported",
}
# The first axis of stacked weights is the layer; the next axis of gate_up has length 2.
_SPECS = {
    "embedding": P(("fsdp", "expert", "tensor")),
    "head": P(("fsdp", "expert", "tensor")),
    "qkv": P(None, ("tensor", "fsdp", "expert")),
    "out": P(None, ("fsdp", "expert"), "tensor"),
    "gate_up": P(None, None, ("tensor", "fsdp", "expert")),
    "down": P(None, ("fsdp", "expert"), "tensor"),
    "router": P(),
}
# Weights of experts, by name and rank; they have one axis more than an MLP's weights.
_SPECS_OF_EXPERTS = {
    ("gate_up", 5): P(None, ("expert", "fsdp"), None, "tensor"),
    ("down", 4): P(None, ("expert", "fsdp"), None, "tensor"),
}


def parse(text: str) -> dict[str, int]:
    """Returns the sizes of mesh axes in the value of `--mesh`, such as "fsdp=8".

    Raises:
      ValueError: If an axis is unknown, is not supported, is given twice, or has no
        positive size, or if `expert` and one of `tensor` and `context` exceed 1.

    Examples:
      >>> parse("data=2,fsdp=4")
      {'data': 2, 'fsdp': 4}
    """
    sizes: dict[str, int] = {}
    for axis_text in text.split(","):
        name, _, number = (word.strip() for word in axis_text.partition("="))
        if name in _REFUSED:
            raise ValueError(f"--mesh {text}: {_REFUSED[name]}; axes are {_names()}")
        if name not in AXES:
            raise ValueError(f"--mesh takes the axes {_names()}, got {name!r}")
        if name in sizes:
            raise ValueError(f"--mesh takes each axis once, got {text!r}")
        if not number.isdecimal() or int(number) < 1:
            raise ValueError(
                f"--mesh takes {name}=N with N of 1 or more, got {axis_text!r}"
            )
        sizes[name] = int(number)
    for other in ("tensor", "context"):
        if sizes.get("expert", 1) > 1 and sizes.get(other, 1) > 1:
            raise ValueError(f"--mesh takes expert or {other}, not both, got {text!r}")
    return sizes


def make(sizes: Mapping[str, int] | None, *, devices: int | None = None) -> Mesh | None:
    """Returns the mesh that a training is sharded over, or None for one device.

    Args:
      sizes: The size of each axis that is not 1. None means all devices along `fsdp`,
        but one device for a single process on a CPU, where further devices would be
        virtual.
      devices: The number of devices to use, the first ones; None means all.

    Raises:
      ValueError: If the product of the sizes is not the number of devices.
    """
    count, devices = devices, _devices()
    devices = devices[:count]
    if sizes is None:
        alone = devices[0].platform == "cpu" and jax.process_count() == 1
        sizes = {"fsdp": 1 if alone else len(devices)}
    elif (size := math.prod(sizes.values())) != len(devices):
        raise ValueError(
            f"--mesh {_describe(sizes)} needs {_counted(size)}, got "
            f"{_counted(len(devices))} of {devices[0].device_kind}"
        )
    shape = tuple(sizes.get(name, 1) for name in AXES)
    if (size := math.prod(shape)) == 1:
        return None
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices[:size])


def _describe(sizes: Mapping[str, int]) -> str:
    """Returns the sizes as `--mesh` takes them, without axes of size 1."""
    shown = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    return ",".join(shown) or "fsdp=1"


def check_experts(config: llama.LlamaConfig, mesh: Mesh | None) -> None:
    """Raises ValueError if experts are sharded, but the model has no experts."""
    size = 1 if mesh is None else mesh.shape["expert"]
    if size > 1 and config.experts is None:
        raise ValueError(
            f"the mesh {name_of(mesh)} splits experts, and the model has none"
        )


def check_batch(name: str, batch_size: int, mesh: Mesh | None, parts: int = 1) -> None:
    """Raises ValueError if a batch cannot be split evenly.

    The mesh shards the batch over devices, and each part is split into microbatches.

    Args:
      name: The name of the batch size in the message.
      batch_size: The number of sequences.
      mesh: The mesh; None means one device.
      parts: The number of microbatches of the batch.
    """
    over = batch_parts(mesh)
    if batch_size % (over * parts):
        rules = [] if mesh is None else [f"the mesh {name_of(mesh)}"]
        rules += [f"--accumulate {parts}"] if parts > 1 else []
        raise ValueError(
            f"{name} must be a multiple of {over * parts}, for {' and '.join(rules)}; "
            f"got {batch_size}"
        )


def check_length(name: str, length: int, mesh: Mesh | None) -> None:
    """Raises ValueError if the mesh cannot shard sequences of `length` tokens evenly.

    `name` is the name of the length in the message.
    """
    parts = 1 if mesh is None else mesh.shape["context"]
    if length % parts:
        raise ValueError(
            f"{name} must be a multiple of {parts}, for the mesh {name_of(mesh)}; "
            f"got {length}"
        )


def context_of(mesh: Mesh) -> ContextParallel | None:
    """Returns how the mesh shards sequences, or None if it does not shard them."""
    if mesh.shape["context"] == 1:
        return None
    head_axes = "tensor" if mesh.shape["tensor"] > 1 else None
    return ContextParallel(mesh=mesh, batch_axes=BATCH_AXES, head_axes=head_axes)


def devices(mesh: Mesh | None) -> int:
    """Returns the number of devices of a mesh."""
    return 1 if mesh is None else mesh.size


def name_of(mesh: Mesh | None) -> str:
    """Returns the sizes of a mesh as `--mesh` takes them, without axes of size 1."""
    return _describe({} if mesh is None else mesh.shape)


def batch_parts(mesh: Mesh | None) -> int:
    """Returns the number of parts that a batch is sharded into."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in BATCH_AXES)


def token_parts(mesh: Mesh | None) -> int:
    """Returns the number of parts that the tokens of a batch are sharded into."""
    return 1 if mesh is None else batch_parts(mesh) * mesh.shape["context"]


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """Returns a tree with the sharding of each parameter of a `Llama`.

    Norms, biases and routers are replicated.

    Raises:
      ValueError: If the mesh cannot shard an axis of a parameter evenly.
    """

    def of(path: Any, param: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        name = name.removesuffix("/value")  # Parameters are Flax's variables.
        last = name.split("/")[-1]
        spec = _SPECS.get(last, P())
        spec = _with_context(_SPECS_OF_EXPERTS.get((last, param.ndim), spec))
        for axis, parts in enumerate(spec):
            size = math.prod(mesh.shape[axis_name] for axis_name in _tuple(parts))
            if param.shape[axis] % size:
                raise ValueError(
                    f"the mesh {name_of(mesh)} splits axis {axis} of {name} "
                    f"into {size} parts, which do not divide {param.shape[axis]}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of, params)


def whole(mesh: Mesh | None) -> Sharding:
    """Returns the sharding of replicated arrays; without a mesh, the first device's."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(mesh, P())


def state_shardings(
    tx: Any, params: Any, opt_state: Any, histories: Any, mesh: Mesh | None
) -> tuple[Any, Any, Any]:
    """Returns the shardings of parameters, of the optimizer's state and of histories.

    Histories are replicated.

    Args:
      tx: The optimizer.
      params: The parameters of a `Llama`, as arrays or abstract arrays.
      opt_state: The optimizer's state, as arrays or abstract arrays.
      histories: The amax histories, as arrays or abstract arrays.
      mesh: The mesh; None means the first device.
    """
    if mesh is None:
        state = params, opt_state, histories
        return jax.tree.map(lambda _: whole(None), state)
    placements = param_shardings(params, mesh)
    moments = coat.opt_state_sharding(tx, params, placements)
    return placements, moments, jax.tree.map(lambda _: whole(mesh), histories)


def placed(arrays: Any, shardings: Any) -> Any:
    """Returns abstract copies of arrays with the given shardings.

    `shardings` is a tree of the same structure as `arrays`.
    """

    def of(x: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(of, arrays, shardings)


def own_rows(batch_size: int, mesh: Mesh | None) -> Int64[np.ndarray, " rows"]:
    """Returns the indices of a batch's rows on this process's devices, in order."""
    rows = np.arange(batch_size)
    if mesh is None:
        return rows
    places = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    return np.unique(np.concatenate([rows[index] for index in places.values()]))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: its first axis is sharded."""
    return NamedSharding(mesh, P(BATCH_AXES))


def spread(
    batch: Int32[np.ndarray, "rows length+1"],
    rows: Int64[np.ndarray, " rows"],
    batch_size: int,
    mesh: Mesh,
) -> Int32[Array, "batch length+1"]:
    """Returns a batch that is sharded over a mesh, from the rows of each process.

    Args:
      batch: The rows of this process.
      rows: The indices of these rows in the batch, in ascending order.
      batch_size: The number of rows of the batch.
      mesh: The mesh.
    """

    def part(index: tuple[slice, ...]) -> np.ndarray:
        return batch[np.searchsorted(rows, np.arange(batch_size)[index[0]])]

    shape = batch_size, *batch.shape[1:]
    return jax.make_array_from_callback(shape, batch_sharding(mesh), part)


def _devices() -> list[jax.Device]:
    return jax.devices()


def _names() -> str:
    return f"{', '.join(AXES[:-1])} and {AXES[-1]}"


def _counted(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"


def _with_context(spec: P) -> P:
    """Returns `spec` with each axis over `fsdp` also sharded over `context`."""
    names = map(_tuple, spec)
    return P(*[(*n, "context") if "fsdp" in n else n or None for n in names])


def _tuple(parts: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return parts if isinstance(parts, tuple) else (parts,) if parts else ()
