"""Measures time and host memory to load a Hugging Face checkpoint onto a device.

    uv run --extra cuda13 python -m experiments.studies.checkpoint_memory

The command writes a checkpoint of the shape of Llama-3-8B in BF16, 16 GB of random
bits, to a temporary folder. It reads the file's bytes, then loads the checkpoint twice,
each time in a new process and after Linux has dropped the file from its cache. A last
load finds the file in the cache. On a GPU only the loader's buffers add to the host's
memory; on a CPU the model does, too. Memory is read from Linux's counters.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from rich.console import Console

from coat_jax.models import hf, llama
from coat_jax.models.hf import config as configs
from coat_jax.models.hf import layout, safetensors
from experiments.bench.model_step import GIB, take_memory
from experiments.common.programs import new_parser, results_path
from experiments.common.results import Bar, default_path, write_results
from experiments.common.tables import bars as bars_table

_BF16 = np.dtype(ml_dtypes.bfloat16)
_FILE = "model.safetensors"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    args = parser().parse_args(argv)
    take_memory(at_once=False)  # The processes that load need the device's memory.
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        size, largest = write(folder, llama.CONFIGS[args.preset])
        sizes = {"preset": args.preset, "file_gib": size / GIB}
        sizes["largest_tensor_gib"] = largest / GIB
        for case in ("read", "load", "load", "load from the cache"):
            row = sizes | {"case": case} | _alone(case, folder / _FILE)
            row["gib_per_s"] = row["file_gib"] / row["seconds"]
            print(row, flush=True)
            rows.append(row)
            write_results(args.out, rows=rows, bars=bars(rows))
    Console().print(bars_table(bars(rows)))
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    found = new_parser("experiments.studies.checkpoint_memory", __doc__)
    found.add_argument("--preset", choices=sorted(llama.CONFIGS), default="llama3-8b")
    found.add_argument("--scratch", type=Path, help="folder for the checkpoint")
    found.add_argument(
        "--out", type=results_path, default=default_path("hf", "loading")
    )
    return found


def write(folder: Path, config: llama.LlamaConfig) -> tuple[int, int]:
    """Writes a random checkpoint to a folder.

    Returns:
      The bytes of all tensors, and the bytes of the largest tensor.
    """
    everything = layout.parameters(config)
    kinds = {
        parameter.name(tensor, layer): (_BF16, shape)
        for parameter in everything
        for layer in range(config.num_layers if parameter.of_layers else 1)
        for tensor, shape in parameter.tensors()
    }
    values = configs.written(config, {}) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values))

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        for name, (dtype, shape) in kinds.items():
            count = math.prod(shape)
            words = rng.integers(0, 2**64, -(-count // 4), np.uint64)
            # Without the exponent's highest bit every number is finite.
            bits = words.view(np.uint16)[:count] & 0xBFFF
            yield name, bits.view(dtype).reshape(shape)

    safetensors.write(folder / _FILE, kinds, arrays())
    sizes = [int(np.prod(shape)) * dtype.itemsize for dtype, shape in kinds.values()]
    return sum(sizes), max(sizes)


def _alone(case: str, file: Path) -> dict[str, Any]:
    """Measures a case in a new process, so that its memory is the case's alone.

    Returns the entries of the case's row.
    """
    if case != "load from the cache":
        drop_from_cache(file)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        run = partial(read, file) if case == "read" else partial(measured, file.parent)
        return pool.submit(run).result()


def drop_from_cache(file: Path) -> None:
    """Writes a file to its disk and drops it from the host's cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read(file: Path) -> dict[str, Any]:
    """Reads a file from beginning to end, and returns the seconds as a row's entry."""
    buffer = memoryview(bytearray(2**24))
    start = time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
    return {"seconds": time.perf_counter() - start}


def measured(folder: Path) -> dict[str, Any]:
    """Loads a checkpoint; returns the seconds and the growth of the host's memory."""
    jax.block_until_ready(jax.numpy.zeros(1))  # The device's runtime takes memory, too.
    before, start = _memory_gib("VmRSS"), time.perf_counter()
    model = hf.load(folder)
    jax.block_until_ready(nnx.state(model))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "host_growth_gib": _memory_gib("VmHWM") - before}


def bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Returns the targets for host memory and loading speed, or none without a GPU."""
    loads = [row for row in rows if row["case"] == "load"]
    if not loads or jax.default_backend() != "gpu":
        return []
    growth = max(row["host_growth_gib"] for row in loads) - 1
    tensors = growth / loads[0]["largest_tensor_gib"]
    name = "host memory beyond 1 GiB / largest tensor"
    targets = [Bar.of(name, "<=", 1.2, tensors)]
    disk = [row["gib_per_s"] for row in rows if row["case"] == "read"]
    if disk:
        rate = max(row["gib_per_s"] for row in loads) / disk[0]
        targets.append(Bar.of("GiB/s of loading / of reading", ">=", 0.9, rate))
    return targets


def _memory_gib(field: str) -> float:
    """Returns this process's memory in GiB: now (VmRSS), or the peak (VmHWM)."""
    status = Path("/proc/self/status").read_text().splitlines()
    kib = next(line.split()[1] for line in status if line.startswith(field))
    return int(kib) / 2**20


if __name__ == "__main__":
    sys.exit(main())
