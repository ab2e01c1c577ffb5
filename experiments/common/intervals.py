"""95% intervals of shares and means."""

import math

import numpy as np
from jaxtyping import Float

_NORMAL = 1.959964  # The 97.5% quantile of the standard normal distribution.


def wilson(hits: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95% interval of a share, from `hits` of `count` trials.

    Hits may be means over seeds, which are no integers.

    Raises:
      ValueError: If there are no trials, or more hits than trials.

    Example:
      >>> [round(end, 3) for end in wilson(5, 10)]
      [0.237, 0.763]
    """
    if not 0 <= hits <= count or count < 1:
        raise ValueError(
            f"hits must be 0 to count, and count positive: {hits}, {count}"
        )
    share, square = hits / count, _NORMAL**2 / count
    middle = share + square / 2
    half = math.sqrt(square * (share * (1 - share) + square / 4))
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    return max(low, 0.0), min(high, 1.0)


def mean_and_half(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Returns a mean and half of its 95% interval, infinite for a single value.

    Of paired differences it is the interval of the mean difference.
    """
    mean = float(values.mean())
    if len(values) < 2:
        return mean, math.inf
    return mean, _NORMAL * float(values.std(ddof=1)) / math.sqrt(len(values))
