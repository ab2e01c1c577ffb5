"""The registration of quantized arrays with Flax's serialization, if Flax is there."""

import importlib
import sys


def register() -> None:
    """Lets `flax.serialization` write and read quantized arrays and states.

    It does nothing while no module has imported Flax, because a program without Flax
    should not wait for its import. So whatever makes or reads such an array calls this.
    """
    if "flax.serialization" in sys.modules:
        importlib.import_module("coat_jax.optimizers.state_dicts")
