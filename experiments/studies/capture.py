"""Captures Adam's moments and gradients during trainings of `experiments.pretrain`."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import optax
from tqdm import tqdm

from experiments.optimizer.moments import Capture, Sampler
from experiments.studies.trained import trainer_and_inputs
from experiments.training.job import train_batches
from experiments.training.settings import Settings
from experiments.training.state import TrainState


def capture(
    settings: Settings, *, at: Sequence[int], window: int, groups: int, sample: int
) -> Capture:
    """Trains with the recipe `bf16`, and captures float32 moments and gradients.

    Args:
      settings: The settings of `experiments.pretrain`.
      at: The steps, counted from 1, after which moments are captured.
      window: The number of gradients to capture. They follow the latest step of `at`
        that leaves `window` steps in the run.
      groups: The largest number of groups with captured moments.
      sample: The largest number of groups with captured gradients.

    Raises:
      ValueError: If a number is not positive, a step is outside the run, or no step of
        `at` leaves `window` steps.
    """
    for name, value in (("window", window), ("groups", groups), ("sample", sample)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    first = window_start(settings.steps, at, window)
    trained = train(settings)
    params = next(trained)[0].params
    every, few = Sampler(params, groups), Sampler(params, sample)
    samples, means = [], []
    last = max(*at, first + window)
    steps = itertools.islice(trained, last)
    bar = tqdm(steps, "bf16", total=last, unit="step", disable=None)
    for step, (state, loss) in enumerate(bar, start=1):
        if step in at:
            samples.append(every.moments(state.opt_state, step, loss))
        if step == first:
            start = few.moments(state.opt_state, step, loss)
        if first <= step <= first + window:
            means.append(few(optax.tree.get(state.opt_state, "mu")))
    gradients = [_gradient(*pair, settings.b1) for pair in itertools.pairwise(means)]
    return Capture(
        moments=tuple(samples),
        start=start,
        gradients=np.stack(gradients),
        b1=settings.b1,
        parameters=every.parameters,
    )


def window_start(steps: int, at: Sequence[int], window: int) -> int:
    """Returns the latest step of `at` that leaves `window` or more steps of the run.

    Raises:
      ValueError: If a step is outside the run of `steps` steps, or none leaves `window`
        steps.
    """
    for step in at:
        if not 1 <= step <= steps:
            raise ValueError(f"a step must be from 1 to the run's {steps}, got {step}")
    fitting = [step for step in at if step + window <= steps]
    if not fitting:
        raise ValueError(
            f"a window of {window} steps must follow one of the steps {list(at)} "
            f"within the run's {steps}"
        )
    return max(fitting)


def train(settings: Settings) -> Iterator[tuple[TrainState, float]]:
    """Trains with the recipe `bf16`, and yields the state before and after each step.

    Yields:
      A state, and the loss of the step that computed the state, or NaN for the initial
      state. Asking for the next state donates the current one.
    """
    trainer, _, inputs = trainer_and_inputs(settings, "bf16")
    state, loss = trainer.init(), float("nan")
    batches = train_batches(inputs, settings)
    for _ in range(settings.steps):
        yield state, loss
        state, metrics = trainer.step(state, next(batches))
        loss = float(metrics.loss)
    yield state, loss


def _gradient(previous: np.ndarray, after: np.ndarray, b1: float) -> np.ndarray:
    """Computes (after - b1 previous) / (1 - b1) from two consecutive first moments.

    The result is the gradient that the optimizer received, after clipping, except for
    the rounding of the moments.
    """
    gradient = (after.astype(np.float64) - b1 * previous.astype(np.float64)) / (1 - b1)
    return gradient.astype(np.float32)
