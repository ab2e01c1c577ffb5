"""Right and wrong answers of trainings to the same questions, as rows of results."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from experiments.common.intervals import mean_and_half, wilson

ALL = "all"  # The kind of all questions together.


def written(right: Iterable[Any]) -> str:
    """Returns answers as a string of 1 for right and 0 for wrong ones.

    Examples:
      >>> written([True, False])
      '10'
    """
    return "".join("01"[int(x)] for x in right)


def right_answers(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Bool[np.ndarray, "seeds questions"]]:
    """Returns whether each answer is right, by recipe.

    Only the seeds that all recipes have count. Without such seeds no recipe is
    returned.

    Args:
      rows: Rows with "recipe", "seed" and "right", a string that `written` returned.
    """
    by_run = {(row["recipe"], row["seed"]): row["right"] for row in rows}
    recipes = dict.fromkeys(recipe for recipe, _ in by_run)
    seeds = sorted(
        {s for _, s in by_run if all((name, s) in by_run for name in recipes)}
    )
    return {
        name: np.array([[c == "1" for c in by_run[name, seed]] for seed in seeds])
        for name in (recipes if seeds else ())
    }


def percents(right: Float[np.ndarray, "seeds questions"]) -> tuple[float, float, float]:
    """Returns the percentage of right answers, and the ends of its 95% interval.

    The interval is over questions. An answer counts as the mean over seeds.
    """
    share, count = float(right.mean()), right.shape[1]
    low, high = wilson(share * count, count)
    return 100 * share, 100 * low, 100 * high


def points(
    right: Float[np.ndarray, "seeds questions"],
    reference: Float[np.ndarray, "seeds questions"],
) -> tuple[float, float]:
    """Returns the points above `reference`, and half of their 95% interval.

    Both are about the same questions. The standard error belongs to the mean of the
    questions' differences.
    """
    return mean_and_half(100 * (right.mean(axis=0) - reference.mean(axis=0)))
