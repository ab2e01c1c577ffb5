"""Trainers of the main job that the runs of a test process share."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import pytest

from coat_jax.models import llama
from experiments.studies import trained
from experiments.training import job
from experiments.training.settings import Settings
from experiments.training.trainer import Trainer

# Settings that no trainer reads.
_OF_RUNS = {"recipes": ("bf16",), "data": (), "save_every": 1, "keep": 1, "steps": 1}
_OF_RUNS |= {"eval_every": 1, "eval_batches": 1, "spike": None, "minutes": None}
_OF_RUNS |= {"health_every": None, "bf16_last": 0.0}


@functools.cache
def _trainer(config: llama.LlamaConfig, settings: Settings, steps: int) -> Trainer:
    return Trainer(config, settings, steps=steps)


def _trainer_of(config, settings, *, steps, mesh=None):
    if mesh is not None:
        return Trainer(config, settings, steps=steps, mesh=mesh)
    return _trainer(config, dataclasses.replace(settings, **_OF_RUNS), steps)


_saved_bytes = functools.cache(Trainer.saved_activation_bytes)


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Lets runs with equal settings share one trainer, which is compiled once.

    The measured seconds per step are 1.0.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (job, trained):
            patch.setattr(module, "Trainer", _trainer_of)
        patch.setattr(Trainer, "saved_activation_bytes", _saved_bytes)
        patch.setattr(job, "seconds_per_step", lambda *_: 1.0)
        yield
