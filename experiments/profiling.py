"""Where a compiled function's time goes on a GPU, kernel by kernel."""

import collections
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.timing import OPTIONS

_ATTENTION = re.compile(r"cudnn|fmha|flash", re.IGNORECASE)
_PRODUCTS = re.compile(r"nvjet|cublas|cutlass|gemm|xmma|^matmul", re.IGNORECASE)
_PALLAS = re.compile(r"(\w+?)_mosaic_gpu_kernel")


class Kernel(NamedTuple):
    """A kernel that ran.

    Attributes:
      name: As the GPU has it.
      ms: How long it ran.
    """

    name: str
    ms: float


def kernel_ms(
    function: Callable, arguments: tuple, *, calls: int = 20
) -> dict[str, float]:
    """Milliseconds of a call by kind of kernel, largest first; gaps left out.

    Raises:
      ValueError: If no kernel ran on a GPU.
    """
    compiled = jax.jit(function).lower(*arguments).compile(OPTIONS)
    for _ in range(calls):  # A cool chip is faster.
        jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                result = compiled(*arguments)
            jax.block_until_ready(result)
        (trace,) = Path(folder).rglob("*.xplane.pb")
        kernels = list(_kernels(jax.profiler.ProfileData.from_file(str(trace))))
    if not kernels:
        raise ValueError(f"no kernel ran on a GPU, but on {jax.devices()[0]}")
    return {part: ms / calls for part, ms in by_part(kernels).items()}


def _kernels(data: Any) -> Iterator[Kernel]:
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    yield Kernel(event.name, event.duration_ns / 1e6)


def by_part(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds by kind of kernel, largest first."""
    found = collections.Counter({"products": 0.0, "attention": 0.0})
    for kernel in kernels:
        found[_part(kernel.name)] += kernel.ms
    return dict(found.most_common())


def _part(kernel: str) -> str:
    if _ATTENTION.search(kernel):
        return "attention"
    if _PRODUCTS.search(kernel):
        return "products"
    ours = _PALLAS.match(kernel)
    return f"Pallas: {ours.group(1)}" if ours else "XLA"
