"""Registers quantized arrays with Flax's serialization if Flax is imported."""

import importlib
import sys


def register() -> None:
    """Lets `flax.serialization` write and read quantized arrays and states.

    Nothing is done while no module has imported Flax, because a program without Flax
    should not wait for its import. So functions that make quantized arrays or states
    call `register` each time.
    """
    if "flax.serialization" in sys.modules:
        importlib.import_module("coat_jax.optimizers.state_dicts")
