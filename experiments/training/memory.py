"""The error when a training runs out of memory, and its message."""

import math

import jax

from experiments.common import meshes
from experiments.common.memory import device_limit_bytes, shard_bytes, shard_shape
from experiments.training.settings import Settings
from experiments.training.trainer import Trainer

_GIB = 2**30


class OutOfMemory(Exception):
    """Raised when a device's memory runs out; the message lists what uses it."""


def description(trainer: Trainer, settings: Settings) -> str:
    """Returns the message of `OutOfMemory`, with the sizes of a step on each device."""
    state, mesh = trainer.abstract_state(), trainer.mesh
    params, moments = shard_bytes(state.params), shard_bytes(state.opt_state)
    wide = sum(math.prod(shard_shape(x)) * 4 for x in jax.tree.leaves(state.params))
    activations = trainer.saved_activation_bytes() // meshes.token_parts(mesh)
    gradients = params + (wide if settings.accumulate > 1 else 0)
    if settings.release != "no":
        gradients = params - shard_bytes(state.params["layers"])
    parts = {
        "parameters": params,
        "gradients": gradients,
        "the optimizer's state": moments,
        "saved activations": activations,
    }
    largest = max(parts, key=parts.__getitem__)
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    limit = device_limit_bytes()
    of = "" if limit is None else f" of {_gib(limit)}"
    advice = (
        "a smaller --batch-size or a larger --accumulate"
        if largest == "saved activations"
        else "more devices as fsdp, or --param-dtype bfloat16,"
    )
    return (
        f"out of memory on a device{of}: a step has {listed}, and what it computes "
        f"with; {advice} takes less"
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:,.2f} GiB"
