"""Where a compiled function's time goes on a GPU, kernel by kernel."""

import collections
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

_ATTENTION = re.compile(r"cudnn|fmha|flash", re.IGNORECASE)
_PRODUCTS = re.compile(r"nvjet|cublas|cutlass|gemm|xmma|^matmul", re.IGNORECASE)
_PALLAS = re.compile(r"(\w+?)_mosaic_gpu_kernel")


class Kernel(NamedTuple):
    """A kernel that ran.

    Attributes:
      name: As the GPU has it.
      start_ms: When it began.
      end_ms: When it had ended.
    """

    name: str
    start_ms: float
    end_ms: float


def kernel_ms(
    function: Callable[[], Any], *, calls: int = 20, rest_s: float = 0.0
) -> dict[str, float]:
    """Milliseconds of a call by kind of kernel, largest first, and of gaps between.

    Args:
      function: What is called.
      calls: How many times.
      rest_s: Seconds before each call in which the chip rests; after some it is as fast
        as its clocks, and not as what it may draw for long.

    Raises:
      ValueError: If no kernel ran on a GPU.
    """
    for _ in range(calls):  # A cool chip is faster.
        result = jax.block_until_ready(function())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                if rest_s:
                    jax.block_until_ready(result)
                    time.sleep(rest_s)
                result = function()
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
                    times = (event.start_ns, event.start_ns + event.duration_ns)
                    yield Kernel(event.name, *(ns / 1e6 for ns in times))


def by_part(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds by kind of kernel, largest first, and when none of them ran."""
    found = collections.Counter({"products": 0.0, "attention": 0.0})
    gaps, last = 0.0, None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ms):
        found[_part(kernel.name)] += kernel.end_ms - kernel.start_ms
        last = kernel.start_ms if last is None else last
        gaps += max(kernel.start_ms - last, 0.0)
        last = max(kernel.end_ms, last)
    return dict(found.most_common()) | {"gaps": gaps}


def _part(kernel: str) -> str:
    if _ATTENTION.search(kernel):
        return "attention"
    if _PRODUCTS.search(kernel):
        return "products"
    ours = _PALLAS.match(kernel)
    return f"Pallas: {ours.group(1)}" if ours else "XLA"
