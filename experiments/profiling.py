"""Where a compiled function's time goes on a GPU, kernel by kernel.

JAX's profiler says how long each kernel ran and which instruction of the compiled
program it was; the program says what that instruction is. Of a Pallas kernel it names
the Python functions that called it, of which the outermost in `pallas_kernels` is the
operation.
"""

import collections
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.timing import OPTIONS

# Kernels in one graph of the driver's would come without their instruction.
_OPTIONS = OPTIONS | {"xla_gpu_enable_command_buffer": ""}
_ATTENTION = re.compile(r"cudnn|fmha|flash", re.IGNORECASE)
_PRODUCTS = re.compile(r"nvjet|cublas|cutlass|gemm|xmma", re.IGNORECASE)
_FOLDER = "/pallas_kernels/"


class Kernel(NamedTuple):
    """A kernel that ran.

    Attributes:
      name: As the GPU has it.
      instruction: Of the compiled program; empty where the profiler does not say.
      ms: How long it ran.
    """

    name: str
    instruction: str
    ms: float


def kernel_ms(
    function: Callable, arguments: tuple, *, calls: int = 5
) -> dict[str, float]:
    """Milliseconds of a call by kind of kernel, largest first; gaps left out.

    Raises:
      ValueError: If no kernel ran on a GPU.
    """
    compiled = jax.jit(function).lower(*arguments).compile(_OPTIONS)
    for _ in range(3):
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
    found = by_part(kernels, custom_calls(compiled.as_text()))
    return {part: ms / calls for part, ms in found.items()}


def _kernels(data: Any) -> Iterator[Kernel]:
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    instruction = str(dict(event.stats).get("hlo_op", ""))
                    yield Kernel(event.name, instruction, event.duration_ns / 1e6)


def by_part(kernels: Iterable[Kernel], parts: dict[str, str]) -> dict[str, float]:
    """Milliseconds by kind of kernel, largest first.

    Args:
      kernels: What ran.
      parts: The kinds of instructions, as far as the program says; see `custom_calls`.
    """
    found = collections.Counter({"products": 0.0, "attention": 0.0})
    for kernel in kernels:
        found[parts.get(kernel.instruction) or _by_name(kernel.name)] += kernel.ms
    return dict(found.most_common())


def _by_name(kernel: str) -> str:
    if "mosaic" in kernel:
        return "Pallas: unknown"
    if _ATTENTION.search(kernel):
        return "attention"
    return "products" if _PRODUCTS.search(kernel) else "XLA"


def custom_calls(hlo: str) -> dict[str, str]:
    """What those instructions of a compiled program are that XLA did not write."""
    stacks = _Stacks(hlo)
    found = {}
    for line in hlo.splitlines():
        call = re.search(r'%([\w.\-]+) = .*custom_call_target="([^"]*)"', line)
        if call:
            name, target = call.groups()
            frame = re.search(r"stack_frame_id=(\d+)", line)
            operation = stacks.operation(int(frame.group(1)) if frame else 0)
            is_product = "cublas" in target or "matmul" in operation
            if "mosaic" in target and not is_product:
                found[name] = f"Pallas: {operation}"
            elif is_product:
                found[name] = "products"
            elif "fmha" in target:
                found[name] = "attention"
    return found


class _Stacks:
    """Who called what, as tables at the head of a compiled program have it."""

    def __init__(self, hlo: str) -> None:
        self._names = _strings("FunctionNames", hlo)
        self._files = _strings("FileNames", hlo)
        self._locations = _records("FileLocations", hlo)
        self._frames = _records("StackFrames", hlo)
        # The first frame has no caller: what it names stands for none.
        self._none = self._frames.get(1, {}).get("parent_frame_id", 0)

    def operation(self, frame: int) -> str:
        """The outermost function of `pallas_kernels` on the way to a frame."""
        operation = "unknown"
        while frame in self._frames:
            location = self._locations[self._frames[frame]["file_location_id"]]
            if _FOLDER in self._files[location["file_name_id"]]:
                operation = self._names[location["function_name_id"]]
            parent = self._frames[frame].get("parent_frame_id", self._none)
            frame = parent - self._none
        return operation


def _strings(section: str, hlo: str) -> dict[int, str]:
    found = re.findall(r'(\d+) "([^"]*)"', _section(section, hlo))
    return {int(number): value for number, value in found}


def _records(section: str, hlo: str) -> dict[int, dict[str, int]]:
    return {
        int(number): {k: int(value) for k, value in re.findall(r"(\w+)=(\d+)", body)}
        for number, body in re.findall(r"(\d+) \{([^}]*)\}", _section(section, hlo))
    }


def _section(name: str, hlo: str) -> str:
    """A table at the head of a program's text: lines until an empty one."""
    match = re.search(rf"^{name}\n((?:.+\n)*)", hlo, re.MULTILINE)
    return match.group(1) if match else ""
