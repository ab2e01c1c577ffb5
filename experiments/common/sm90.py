"""Compiles kernels for an H200 without a GPU, and reports the resources they take.

This needs packages in addition to the project's: nvidia-cuda-nvcc, nvidia-nvjitlink,
and jax-cuda13-plugin and jax-cuda13-pjrt in JAX's version, installed without their
dependencies. JAX 0.11 compiles with the assembler of nvidia-cuda-nvcc, and JAX 0.12
with nvidia-nvjitlink, which every installation of JAX for GPUs has.
"""

import contextlib
import dataclasses
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    SingleDeviceSharding,
    use_abstract_mesh,
)

# XLA's description of the target device. ACCELERATED_FEATURES, the "a" of 9.0a, enables
# instructions that only Hopper GPUs have.
_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  device_address_bits: 64
  name: "NVIDIA H200"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
_ASSEMBLER = "nvidia-cuda-nvcc"
_LINKER = "nvidia-nvjitlink"
# Environment variables that make Mosaic GPU print the output that `resources` parses.
_REPORTS = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of a function's kernels.

    Attributes:
      kernels: The number of kernels.
      registers: The largest number of registers per thread.
      spill_bytes: The bytes of register spills, stores and loads, summed over all
        kernels.
      losses: The number of times that the assembler warns of a "potential performance
        loss". The usual cause is that wgmma instructions wait for one another.
      shared_bytes: The largest shared memory of a thread block, in bytes.
    """

    kernels: int
    registers: int
    spill_bytes: int
    losses: int
    shared_bytes: int


def missing() -> str | None:
    """Returns the reason why kernels cannot be compiled here; None if they can."""
    for package in (*_PLUGINS, _ASSEMBLER, _LINKER):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed"
        if package in _PLUGINS and version != jax.__version__:
            return f"{package} is of version {version}, and jax of {jax.__version__}"
    return None


def versions() -> dict[str, str]:
    """Returns the versions of JAX and its compilers, which determine registers."""
    compilers = {name: metadata.version(name) for name in (_ASSEMBLER, _LINKER)}
    return {"jax": jax.__version__} | compilers


def mesh_of(
    shape: Sequence[int], names: Sequence[str], axis_type: AxisType = AxisType.Auto
) -> Mesh:
    """Returns a mesh of H200s in one host, for arguments of `compiled_on_mesh`.

    Args:
      shape: The size of each axis.
      names: The names of the axes.
      axis_type: The type of all axes.
    """
    devices = np.array(_devices(math.prod(shape))).reshape(shape)
    return Mesh(devices, names, axis_types=(axis_type,) * len(names))


def compiled_on_mesh(
    fn: Callable,
    *args: Any,
    out_shardings: Any = None,
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles `fn(*args)` for abstract arrays that are sharded over a mesh of H200s.

    Args:
      fn: The function.
      *args: Its abstract arguments, with shardings on a mesh of `mesh_of`.
      out_shardings: The option of `jax.jit`.
      options: Options of the compiler.
    """
    _put_assembler_first()
    jitted = jax.jit(fn, out_shardings=out_shardings)
    return jitted.trace(*args).lower(lowering_platforms=("cuda",)).compile(options)


def compiled(
    fn: Callable, *args: Any, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles `fn(*args)` for abstract arrays on one H200.

    `options` are options of the compiler.
    """
    with targeted():
        return compiled_on_mesh(fn, *on_one_gpu(args), options=options)


def on_one_gpu[Tree](arrays: Tree) -> Tree:
    """Returns abstract arrays of the same shapes and dtypes that are on one H200."""
    sharding = SingleDeviceSharding(*_devices(1))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays
    )


@contextlib.contextmanager
def targeted() -> Iterator[None]:
    """Makes JAX trace, lower and compile for one H200 in this context."""
    _put_assembler_first()
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def _devices(count: int) -> list[Any]:
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"1x1x{count}",
        target_config=_TARGET,
    )
    return topology.devices


def _put_assembler_first() -> None:
    """Puts the assembler of nvidia-cuda-nvcc first on PATH, so that it is used."""
    folder = str(metadata.distribution(_ASSEMBLER).locate_file("nvidia/cu13/bin"))
    path = os.environ.get("PATH", "").split(os.pathsep)
    if path[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, *path])


def resources(fn: Callable, *args: Any) -> Resources:
    """Compiles `fn(*args)` for abstract arrays, and returns its kernels' resources.

    This works once per process for each kernel: the compiler caches kernels, and prints
    nothing about a cached one.

    Raises:
      ValueError: If all kernels were compiled before, or the function has no kernel.
    """
    with _output() as lines:
        compiled(fn, *args)
    text = "".join(lines)
    registers = _numbers(r"Used (\d+) registers", text)
    if not registers:
        raise ValueError(f"no kernel was compiled; the compiler said {text!r}")
    return Resources(
        kernels=len(registers),
        registers=max(registers),
        spill_bytes=sum(_numbers(r"(\d+) bytes spill", text)),
        losses=text.count("Potential Performance Loss"),
        shared_bytes=max(_numbers(r"smem_scratch_bytes=(\d+)", text)),
    )


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, text)]


@contextlib.contextmanager
def _output() -> Iterator[list[str]]:
    """Captures all output of this process, including native code's.

    The context's value is a list. It receives the output as one string when the context
    ends.
    """
    lines: list[str] = []
    os.environ.update(dict.fromkeys(_REPORTS, "1"))
    with tempfile.TemporaryFile("w+") as file:
        # Native code writes to the file descriptors of stdout and stderr directly.
        originals = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield lines
        finally:
            sys.stdout.flush()
            for number, copy in zip((1, 2), originals, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            lines.append(file.read())
