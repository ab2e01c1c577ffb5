"""Saves checkpoints in forked processes, one for each request on standard input.

A request is a line of JSON: [folder, step, kill]. A forked process opens the folder's
`Checkpoints` and saves the state of that step, and dies in the file-system call number
`kill` (0: in none). The answer is a line of JSON: [wait status, calls]. The imports
take seconds, which forking saves. The process that forks never starts JAX's backend,
because a fork would lose its threads. `faults.so` has to be preloaded.
"""

import ctypes
import json
import logging
import os
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments.training.checkpoints import Checkpoints, Progress
from experiments.training.state import TrainState

KEEP = 2


def state(step: int) -> TrainState:
    """Returns a small state that differs from any other step's."""
    rng = np.random.default_rng(step)
    codes = rng.integers(0, 127, (64, 48)).astype(np.uint8)
    return TrainState(
        params={"w": jnp.asarray(rng.normal(size=(64, 48)), jnp.bfloat16)},
        opt_state={
            "codes": jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)),
            "scales": jnp.asarray(rng.normal(size=(64, 3)), jnp.float32),
        },
        seed=jnp.int32(step),
    )


def save(folder: Path, step: int) -> None:
    """Opens the checkpoints in a folder and saves the state of a step."""
    with Checkpoints(folder, KEEP) as checkpoints:
        checkpoints.save(state(step), Progress(step=step))


def main() -> None:
    """Serves requests until standard input ends."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    faults = ctypes.CDLL(None)
    faults.faults_calls.restype = ctypes.c_long
    for line in sys.stdin:
        folder, step, kill = json.loads(line)
        readable, writable = os.pipe()
        if not (child := os.fork()):
            root = str(Path(folder).parent).encode()
            faults.faults_restart(ctypes.c_char_p(root), ctypes.c_long(kill))
            save(Path(folder), step)
            os.write(writable, str(faults.faults_calls()).encode())
            os._exit(0)
        os.close(writable)
        _, status = os.waitpid(child, 0)
        with os.fdopen(readable) as pipe:
            print(json.dumps([status, int(pipe.read() or 0)]), flush=True)


if __name__ == "__main__":
    main()
