"""Values for the tensors of tiny checkpoints, made without JAX and torch."""

import zlib

import ml_dtypes
import numpy as np


def values_of(tensor: str, shape: tuple[int, ...], case: str) -> np.ndarray:
    """Returns a tensor's float32 values, which are exact in BF16.

    The names of tensor and case are the seed.
    """
    seed = zlib.crc32(f"{case} {tensor}".encode())
    values = np.random.default_rng(seed).random(tuple(shape)) - 0.5
    if "norm" in tensor:
        # Gemma adds 1 to these weights.
        values += 0.0 if case.startswith("gemma") else 1.0
    else:
        values *= 4 / np.sqrt(shape[-1]) if len(shape) > 1 else 2.0
    rounded = values.astype(np.float32).astype(ml_dtypes.bfloat16)
    return rounded.astype(np.float32)
