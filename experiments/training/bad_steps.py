"""Bad steps: which losses are spikes, and a line about a step that is bad."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.training.state import Metrics

MOST_ROLLBACKS = 3  # Returns to one checkpoint; a further bad step stops the training.
LOSSES = 50  # Losses that a next one is compared with.
_NAMED = 3


class BadStep(Exception):
    """A bad step at which a training stops; the message describes it."""


def recent_losses(rows: Iterable[Mapping[str, Any]]) -> deque[float]:
    """Returns the losses with which the next loss is compared, oldest first.

    Args:
      rows: Rows of one recipe. Rows of skipped steps do not count.
    """
    return deque((r["loss"] for r in rows if not r.get("skipped")), maxlen=LOSSES)


def loss_limit(losses: Sequence[float], spike: float | None) -> float:
    """Returns the largest loss that is no spike: `spike` times the median of `losses`.

    Without `spike` or losses every finite loss is within the limit.
    """
    if spike is None or not losses:
        return float("inf")
    return spike * statistics.median(losses)


def description(measured: Metrics, names: Sequence[str], limit: float) -> str:
    """Returns a step's loss, and the parameters with the gradients to blame for it.

    These are the parameters with gradients that are not finite, or else the one with
    the largest gradient.

    Args:
      measured: The step's metrics.
      names: The names of the parameters.
      limit: The limit of the step's loss.
    """
    loss, norms = float(measured.loss), np.asarray(measured.grad_norms)
    text = f"loss {loss:.4g}"
    if loss > limit:
        text += f" is above {limit:.4g}"
    if not norms.size:  # A step with `release="once"` does not know them.
        return text
    wrong = [name for name, n in zip(names, norms, strict=True) if not np.isfinite(n)]
    if not wrong:
        return f"{text}, the largest gradient is that of {names[norms.argmax()]}"
    more = len(wrong) - _NAMED
    text += f", the gradient is not finite in {', '.join(wrong[:_NAMED])}"
    return text + (f" and {more} more" if more > 0 else "")
