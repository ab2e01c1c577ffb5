"""Adam's moments and gradients, captured while the main job's model trains.

Arrays here are groups, [groups, 128]: 128 neighbours on a parameter's last axis, as
`coat.fp8_adamw` groups them. A short last group is padded with zeros. No study counts
elements whose second moment is zero, which excludes the padding.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32
from tqdm import tqdm

import coat_jax as coat
from experiments.pretrain import program as pretrain
from experiments.pretrain.settings import Settings
from experiments.pretrain.trained import trainer_and_inputs
from experiments.pretrain.training import TrainState

GROUP = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments:
    """Adam's state after a step, for a sample of groups.

    Attributes:
      step: Number of steps done.
      loss: Training loss of the last of these steps, in nats per token.
      mu: First moments.
      nu: Second moments.
    """

    step: int
    loss: float
    mu: Float32[np.ndarray, "groups 128"]
    nu: Float32[np.ndarray, "groups 128"]

    def sample(self, groups: int) -> "Moments":
        """Returns a random sample of `groups` groups, or all if there are no more."""
        chosen = _choose(len(self.mu), groups)
        return dataclasses.replace(self, mu=self.mu[chosen], nu=self.nu[chosen])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capture:
    """Data of a run, captured for the studies of quantization error.

    Attributes:
      moments: Adam's state after each captured step.
      start: Adam's state before `gradients`, for the same groups.
      gradients: Gradients of consecutive steps, as the optimizer saw them: clipped.
      b1: Decay rate of the first moment.
      parameters: Number of parameters from which the groups were drawn. These are the
        parameters whose moments `coat.fp8_adamw` quantizes.
    """

    moments: tuple[Moments, ...]
    start: Moments
    gradients: Float32[np.ndarray, "steps groups 128"]
    b1: float
    parameters: int


def capture(
    settings: Settings, *, at: Sequence[int], window: int, groups: int, sample: int
) -> Capture:
    """Trains with the `bf16` recipe and float32 moments, and captures samples of them.

    Args:
      settings: Settings of the main job.
      at: The steps, counted from 1, after which moments are captured.
      window: Number of gradients to capture. They follow the latest step of `at` that
        leaves `window` steps in the run.
      groups: Largest number of groups of which moments are captured.
      sample: Largest number of groups of which gradients are captured.

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
    found, means = [], []
    last = max(*at, first + window)
    steps = itertools.islice(trained, last)
    bar = tqdm(steps, "bf16", total=last, unit="step", disable=None)
    for step, (state, loss) in enumerate(bar, start=1):
        if step in at:
            found.append(every.moments(state, step, loss))
        if step == first:
            start = few.moments(state, step, loss)
        if first <= step <= first + window:
            means.append(few(optax.tree.get(state.opt_state, "mu")))
    gradients = [_gradient(*pair, settings.b1) for pair in itertools.pairwise(means)]
    return Capture(
        moments=tuple(found),
        start=start,
        gradients=np.stack(gradients),
        b1=settings.b1,
        parameters=every.parameters,
    )


def window_start(steps: int, at: Sequence[int], window: int) -> int:
    """Returns the latest step of `at` that at least `window` of `steps` steps follow.

    Raises:
      ValueError: If a step is outside the run, or none leaves `window` steps.
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
    """Trains with the `bf16` recipe; yields the initial state, then that of each step.

    Yields:
      A state and the loss of the step that led to it, NaN for the initial state. Asking
      for the next state donates the current one.
    """
    trainer, _, inputs = trainer_and_inputs(settings, "bf16")
    state, loss = trainer.init(), float("nan")
    batches = pretrain.train_batches(inputs, settings)
    for _ in range(settings.steps):
        yield state, loss
        state, metrics = trainer.step(state, next(batches))
        loss = float(metrics.loss)
    yield state, loss


class Sampler:
    """Draws the same random groups from any tree that is shaped like the parameters.

    Only parameters whose moments `coat.fp8_adamw` quantizes are drawn from.

    Attributes:
      parameters: Number of parameters from which the groups are drawn.
    """

    def __init__(self, params: Any, groups: int) -> None:
        state = jax.eval_shape(coat.scale_by_fp8_adam().init, params)
        moments = jax.tree.leaves(state.mu, is_leaf=_is_quantized)
        self._quantized = [_is_quantized(moment) for moment in moments]
        shapes = [m.shape for m in moments if _is_quantized(m)]
        self.parameters = sum(int(np.prod(shape)) for shape in shapes)
        counts = [int(np.prod(s[:-1])) * -(-s[-1] // GROUP) for s in shapes]
        chosen = _choose(sum(counts), groups)
        ends = np.cumsum(counts)
        parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        starts = ends - np.array(counts)
        self._rows = [rows - start for rows, start in zip(parts, starts, strict=True)]
        self._draw = jax.jit(self._concatenated)

    def __call__(self, tree: Any) -> Float32[np.ndarray, "groups 128"]:
        """Returns the sampled groups of `tree`, whose leaves have parameter shapes."""
        leaves = zip(jax.tree.leaves(tree), self._quantized, strict=True)
        return np.asarray(self._draw([leaf for leaf, quantized in leaves if quantized]))

    def moments(self, state: TrainState, step: int, loss: float) -> Moments:
        """Returns the sampled groups of the moments in a training state."""
        mu, nu = (optax.tree.get(state.opt_state, name) for name in ("mu", "nu"))
        return Moments(step=step, loss=loss, mu=self(mu), nu=self(nu))

    def _concatenated(self, leaves: list[Array]) -> Float32[Array, "groups 128"]:
        pairs = zip(leaves, self._rows, strict=True)
        return jnp.concatenate([_groups(leaf)[rows] for leaf, rows in pairs])


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, coat.QuantizedArray)


def _groups(x: Float32[Array, "..."]) -> Float32[Array, "groups 128"]:
    """Splits the last axis into groups of 128, padded with zeros."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % GROUP)]
    return jnp.pad(x, padding).reshape(-1, GROUP)


def _choose(count: int, wanted: int) -> np.ndarray:
    """Draws `wanted` of `count` indices, ascending; all if there are no more."""
    if wanted >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, wanted, replace=False))


def _gradient(before: np.ndarray, after: np.ndarray, b1: float) -> np.ndarray:
    """Computes g = (after - b1 before) / (1 - b1) from two consecutive first moments.

    This is the gradient that the optimizer saw, after clipping, up to the rounding of
    the moments.
    """
    gradient = (after.astype(np.float64) - b1 * before.astype(np.float64)) / (1 - b1)
    return gradient.astype(np.float32)
