"""Time budgets: measures the time of a step, and computes how many steps fit."""

import time

import jax
import numpy as np

from experiments.training import data
from experiments.training.settings import Settings
from experiments.training.trainer import Trainer

_WARM_STEPS, _TIMED_STEPS = 1, 3
TRIAL_STEPS = _WARM_STEPS + _TIMED_STEPS


def steps_within_budget(
    settings: Settings, compile_seconds: float, seconds_per_step: float
) -> int:
    """Returns the number of steps that fit in `settings.minutes`, at least one.

    Args:
      settings: The settings, with the largest number of steps.
      compile_seconds: The compile time, which counts as a part of the minutes.
      seconds_per_step: The time of a step, with its share of the validations.
    """
    budget = 60 * settings.minutes - compile_seconds
    return max(1, min(settings.steps, int(budget / seconds_per_step)))


def seconds_per_step(
    trainer: Trainer,
    settings: Settings,
    batches: data.Batches,
    validation: list[np.ndarray],
) -> float:
    """Measures the seconds of a step, with its share of the time of validations.

    Steps are timed on a state that is discarded, because the learning rate schedule,
    and so every step, may depend on the result.
    """
    state, seconds = trainer.init(), []
    for _ in range(TRIAL_STEPS):
        started = time.perf_counter()
        state, metrics = trainer.step(state, next(batches))
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - started)
    trainer.evaluate(state, validation)
    started = time.perf_counter()
    trainer.evaluate(state, validation)
    share = (time.perf_counter() - started) / settings.eval_every
    return float(np.median(seconds[_WARM_STEPS:])) + share
