"""Measures one case of `experiments.bench.compile`, in a separate process.

    python -m experiments.bench.compile_case '{"case": "both", "gpus": 1, ...}'

prints a JSON object.
"""

import contextlib
import dataclasses
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from experiments.bench import foreign
from experiments.common import sm90
from experiments.common.layer_cases import Shape
from experiments.common.meshes import placed
from experiments.common.timing import OPTIONS
from pallas_kernels.dispatch import devices

STAGES = ("trace", "lower", "compile")
_matmuls = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_remat = partial(jax.checkpoint, policy=_matmuls)
# Cases by name: a case of `experiments.bench.foreign`, a wrapper of its layer, and an
# optimizer.
CASES: dict[str, tuple[str, Callable, Callable]] = {
    "both": ("both", lambda layer: layer, coat.fp8_adamw),
    "bf16": ("bf16", lambda layer: layer, optax.adamw),
    "bf16, remat": ("bf16", _remat, optax.adamw),
}
# The number of equal layers that are traced after the first one.
_FURTHER = 8
_PACKAGES = ("coat_jax", "pallas_kernels")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the case in the only argument, a JSON object, and prints its row."""
    (text,) = sys.argv[1:] if argv is None else argv
    options = json.loads(text)
    names = (field.name for field in dataclasses.fields(Shape))
    shape = Shape(**{name: options[name] for name in names})
    if options["case"] == "trace":
        row = traces(shape)
    else:
        row = compiled(options["case"], shape, options["gpus"], options["layers"])
    print(json.dumps(row))


@contextlib.contextmanager
def for_hopper() -> Iterator[None]:
    """Makes the library choose kernels as on an H200 in this context, without a GPU."""
    device = SimpleNamespace(
        platform="gpu",
        compute_capability="9.0",
        device_kind="NVIDIA H200",
        core_count=132,
    )
    with mock.patch.object(devices, "default_device", return_value=device):
        yield


def compiled(case: str, shape: Shape, gpus: int, layers: int) -> dict[str, Any]:
    """Compiles a training step, and returns CPU seconds and numbers of kernels."""
    mesh = sm90.mesh_of((gpus,), ("fsdp",)) if gpus > 1 else None
    on_one = sm90.targeted() if mesh is None else contextlib.nullcontext()
    with for_hopper(), on_one:
        function, arguments = step(case, shape, layers, mesh)
        counters = [_cpu_s()]
        traced = jax.jit(function, donate_argnums=(0, 1)).trace(*arguments)
        counters.append(_cpu_s())
        lowered = traced.lower(lowering_platforms=("cuda",))
        counters.append(_cpu_s())
        program = lowered.compile(OPTIONS)
        counters.append(_cpu_s())
    seconds = np.diff(counters)
    row = {f"{stage}_cpu_s": s for stage, s in zip(STAGES, seconds, strict=True)}
    return row | {"cpu_s": counters[-1] - counters[0]} | kernels(program.as_text())


def kernels(text: str) -> dict[str, int]:
    """Returns the numbers of kernel calls and of distinct kernels in a program.

    `text` is the program as text.
    """
    hashes = re.findall(r'"mosaic_gpu_v2".*?kernel_hash = "(.*?)", module', text)
    return {"kernel_calls": len(hashes), "kernels": len(set(hashes))}


def step(
    case: str, shape: Shape, layers: int, mesh: Mesh | None
) -> tuple[Callable, tuple[Any, ...]]:
    """Returns a training step and its abstract arguments, on one GPU or on a mesh.

    Args:
      case: A name in `CASES`.
      shape: The shape of a layer and its input.
      layers: The number of layers.
      mesh: The mesh that parameters and the batch are sharded over; None means one GPU.
    """
    named, wrap, optimizer = CASES[case]
    layer, params = foreign.case_of("llama", named, shape)
    layer, tx = wrap(layer), optimizer(1e-4)
    params = [params] * layers
    state = jax.eval_shape(tx.init, params)
    x = shape.input()

    def loss(params, x):
        for each in params:
            x = layer(each, x)
        return jnp.square(x.astype(jnp.float32)).mean()

    def update(params, state, x):
        grads = jax.grad(loss)(params, x)
        if case == "both":
            return coat.fused_update(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if mesh is None:
        return update, sm90.on_one_gpu((params, state, x))
    shardings = jax.tree.map(lambda p: _split(mesh, p), params)
    states = jax.tree.map(lambda s: _split(mesh, s), state)
    if case == "both":
        states = coat.opt_state_sharding(tx, params, shardings)
    x = jax.ShapeDtypeStruct((mesh.size * x.shape[0], *x.shape[1:]), x.dtype)
    arrays = (params, state, x)
    split = (shardings, states, NamedSharding(mesh, P("fsdp")))
    return update, placed(arrays, split)


def _split(mesh: Mesh, x: Any) -> NamedSharding:
    """Returns a sharding along the longest axis; vectors are replicated."""
    spec = [None] * x.ndim
    if x.ndim > 1:
        spec[int(np.argmax(x.shape))] = "fsdp"
    return NamedSharding(mesh, P(*spec))


def traces(shape: Shape) -> dict[str, Any]:
    """Times the trace of one layer, and the trace of further, equal layers.

    The result also has the number of functions of this library that run while a layer
    is traced. They are counted with another sequence length, because JAX would reuse an
    earlier trace.
    """
    _trace_s("bf16", shape, [1])  # JAX loads what any layer needs.
    first, further = _trace_s("both", shape, [1, _FURTHER])
    with counted() as functions:
        _trace_s("both", dataclasses.replace(shape, seq=shape.seq // 2), [1])
    return {
        "first_trace_s": first,
        "further_trace_s": further / _FURTHER,
        "functions": len(functions),
        "files": len({file for file, _, _ in functions}),
    }


def _trace_s(case: str, shape: Shape, layers: Sequence[int]) -> list[float]:
    """Returns the seconds to trace the gradients of unrolled layers.

    `layers` has the number of layers of each trace.
    """
    layer, params = foreign.case_of("llama", case, shape)
    seconds = []
    for count in layers:

        def unrolled(params, x):
            for each in params:
                x = layer(each, x)
            return x

        step = partial(foreign.forward_backward, unrolled)
        with for_hopper():
            start = time.perf_counter()
            jax.jit(step).trace([params] * count, shape.input(), shape.input())
            seconds.append(time.perf_counter() - start)
    return seconds


@contextlib.contextmanager
def counted() -> Iterator[set[tuple[str, int, str]]]:
    """Yields a set that collects the library's functions that run in this context.

    Each function is given by its file, line and name.
    """
    functions = set()
    folders = tuple(str(Path(sys.modules[n].__file__).parent) for n in _PACKAGES)

    def seen(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folders):
            functions.add((code.co_filename, code.co_firstlineno, code.co_qualname))

    sys.setprofile(seen)
    try:
        yield functions
    finally:
        sys.setprofile(None)


def _cpu_s() -> float:
    """Returns the CPU seconds of this process and of its ended child processes."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
