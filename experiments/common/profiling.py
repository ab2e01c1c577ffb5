"""Profiles of the time that a compiled function spends in each GPU kernel."""

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


class KernelRun(NamedTuple):
    """A run of a kernel on a GPU.

    Attributes:
      name: The name of the kernel on the GPU.
      start_ms: The time at which it started, in milliseconds.
      end_ms: The time at which it ended, in milliseconds.
    """

    name: str
    start_ms: float
    end_ms: float


def kernel_ms(
    function: Callable[[], Any],
    *,
    calls: int = 20,
    rest_s: float = 0.0,
    named: bool = False,
) -> dict[str, float]:
    """Returns the milliseconds per call of each kind of kernel, and of the gaps.

    Kinds are in descending order of time; the last entry, "gaps", is the time in which
    no kernel runs.

    Args:
      function: The function to call.
      calls: The number of calls.
      rest_s: The seconds that the chip rests before each call. A rested chip is limited
        by its clocks, a busy chip by its power limit.
      named: Whether each kernel is listed alone, by its name on the GPU.

    Raises:
      ValueError: If no kernel ran on a GPU.
    """
    for _ in range(calls):  # These calls warm the chip, which is faster when cool.
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
    kinds = by_name(kernels) if named else by_part(kernels)
    return {kind: ms / calls for kind, ms in kinds.items()}


def _kernels(data: Any) -> Iterator[KernelRun]:
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    times = (event.start_ns, event.start_ns + event.duration_ns)
                    yield KernelRun(event.name, *(ns / 1e6 for ns in times))


def by_part(kernels: Iterable[KernelRun]) -> dict[str, float]:
    """Returns the milliseconds of each kind of kernel in descending order, and gaps.

    The entry "gaps" is the time between kernels. The kinds are "products" (matmuls of
    vendor libraries), "attention", each Pallas kernel, and "XLA".
    """
    return _summed(kernels, _part, {"products": 0.0, "attention": 0.0})


def by_name(kernels: Iterable[KernelRun]) -> dict[str, float]:
    """Returns the milliseconds of each kernel name in descending order, and gaps.

    The entry "gaps" is the time between kernels.
    """
    return _summed(kernels, lambda name: name, {})


def _summed(
    kernels: Iterable[KernelRun], kind: Callable[[str], str], start: dict[str, float]
) -> dict[str, float]:
    totals = collections.Counter(start)
    gaps, last = 0.0, None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ms):
        totals[kind(kernel.name)] += kernel.end_ms - kernel.start_ms
        last = kernel.start_ms if last is None else last
        gaps += max(kernel.start_ms - last, 0.0)
        last = max(kernel.end_ms, last)
    return dict(totals.most_common()) | {"gaps": gaps}


def _part(kernel: str) -> str:
    if _ATTENTION.search(kernel):
        return "attention"
    if _PRODUCTS.search(kernel):
        return "products"
    ours = _PALLAS.match(kernel)
    return f"Pallas: {ours.group(1)}" if ours else "XLA"
