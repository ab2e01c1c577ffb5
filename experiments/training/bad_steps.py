"""Rules for bad steps: the loss above which a step is a spike, and error messages."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.training.state import Metrics

MOST_ROLLBACKS = 3  # Rollbacks to one checkpoint; then a bad step stops the training.
LOSSES = 50  # Number of earlier losses that a loss is compared with.
_NAMED = 3


class BadStep(Exception):
    """Raised when a training stops at a bad step; the message describes the step."""


def recent_losses(rows: Iterable[Mapping[str, Any]]) -> deque[float]:
    """Returns the losses with which the next loss is compared, oldest first.

    Args:
      rows: Rows of one recipe. The losses of skipped steps are ignored.
    """
    return deque((r["loss"] for r in rows if not r.get("skipped")), maxlen=LOSSES)


def loss_limit(losses: Sequence[float], spike: float | None) -> float:
    """Returns the largest loss that is not a spike.

    The limit is `spike` times the median of `losses`. If `spike` is None or there are
    no losses, the limit is infinite.
    """
    if spike is None or not losses:
        return float("inf")
    return spike * statistics.median(losses)


def description(measured: Metrics, names: Sequence[str], limit: float) -> str:
    """Returns a message about a bad step: its loss, and the gradients that caused it.

    The message names the first parameters with gradients that are not finite. If all
    gradients are finite, it names the parameter with the largest gradient norm.

    Args:
      measured: The step's metrics.
      names: The names of the parameters.
      limit: The limit of the step's loss.
    """
    loss, norms = float(measured.loss), np.asarray(measured.grad_norms)
    text = f"loss {loss:.4g}"
    if loss > limit:
        text += f" is above {limit:.4g}"
    if not norms.size:  # A step with `release="once"` computes no norms.
        return text
    wrong = [name for name, n in zip(names, norms, strict=True) if not np.isfinite(n)]
    if not wrong:
        return f"{text}, the largest gradient is that of {names[norms.argmax()]}"
    more = len(wrong) - _NAMED
    text += f", the gradient is not finite in {', '.join(wrong[:_NAMED])}"
    return text + (f" and {more} more" if more > 0 else "")
