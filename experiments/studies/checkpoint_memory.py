"""Measures time and host memory to load a Hugging Face checkpoint onto a device.

    uv run --extra cuda13 python -m experiments.studies.checkpoint_memory

The command writes a checkpoint of the shape of Llama-3-8B in BF16, 16 GB of random
bits, to a temporary folder, and loads it twice. On a GPU the host's memory grows by
what the loader holds; on a CPU the model itself is in it. It reads Linux's counters.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from coat_jax.models import hf, llama
from coat_jax.models.hf import config as configs
from coat_jax.models.hf import layout, safetensors
from experiments.common.programs import new_parser
from experiments.common.results import default_path, write_results

_BF16 = np.dtype(ml_dtypes.bfloat16)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        size, largest = write(Path(scratch), llama.CONFIGS[args.preset])
        rows = [
            {"preset": args.preset, "file_gib": size / 2**30, **measured(Path(scratch))}
            for _ in range(2)
        ]
    for row in rows:
        row["largest_tensor_gib"] = largest / 2**30
        print(row)
    write_results(args.out, rows=rows)
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    found = new_parser("experiments.studies.checkpoint_memory", __doc__)
    found.add_argument("--preset", choices=sorted(llama.CONFIGS), default="llama3-8b")
    found.add_argument("--scratch", type=Path, help="folder for the checkpoint")
    found.add_argument("--out", type=Path, default=default_path("hf", "loading"))
    return found


def write(folder: Path, config: llama.LlamaConfig) -> tuple[int, int]:
    """Writes random bits; returns the bytes of all tensors and of the largest."""
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
            bits = rng.integers(0x3000, 0x3F00, shape, np.uint16)
            yield name, bits.view(dtype)

    safetensors.write(folder / "model.safetensors", kinds, arrays())
    sizes = [int(np.prod(shape)) * dtype.itemsize for dtype, shape in kinds.values()]
    return sum(sizes), max(sizes)


def measured(folder: Path) -> dict[str, Any]:
    """Loads a checkpoint; returns the seconds and the growth of the host's memory."""
    jax.block_until_ready(jax.numpy.zeros(1))  # The device's runtime takes memory, too.
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before, start = _memory_gib("VmRSS"), time.perf_counter()
    model = hf.load(folder)
    jax.block_until_ready(nnx.state(model))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "host_growth_gib": _memory_gib("VmHWM") - before}


def _memory_gib(field: str) -> float:
    """Returns the memory of this process now (VmRSS) or at most so far (VmHWM)."""
    status = Path("/proc/self/status").read_text().splitlines()
    kib = next(line.split()[1] for line in status if line.startswith(field))
    return int(kib) / 2**20


if __name__ == "__main__":
    sys.exit(main())
