"""95% confidence intervals of proportions and means."""

import math

import numpy as np
from jaxtyping import Float

_NORMAL = 1.959964  # The 97.5% quantile of the standard normal distribution.
# The same quantile of Student's t distribution with 1, 2, ... degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def wilson(hits: float, count: int) -> tuple[float, float]:
    """Returns both ends of Wilson's 95% interval of the proportion `hits / count`.

    `hits` may be a mean over seeds, so it need not be an integer.

    Raises:
      ValueError: If `count` is below 1, or `hits` is not between 0 and `count`.

    Examples:
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
    """Returns the mean of values and half the width of its 95% interval.

    The half-width is infinite for one value. For paired data, pass the differences of
    pairs.
    """
    mean = float(values.mean())
    if len(values) < 2:
        return mean, math.inf
    return mean, _NORMAL * float(values.std(ddof=1)) / math.sqrt(len(values))


def half_of_few(error: float, count: int) -> float:
    """Returns half the width of the 95% interval of a mean over few values.

    The interval follows Student's t distribution, because the standard error is itself
    an estimate.

    Args:
      error: The standard error of the mean.
      count: The number of values, at least 2.

    Examples:
      >>> half_of_few(0.1, 3)
      0.4303
    """
    # The table ends at 10: intervals of more values are slightly wider than needed.
    return _STUDENT[min(count - 1, len(_STUDENT)) - 1] * error
