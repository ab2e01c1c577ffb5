"""Comparisons of the answers of trained models to the same questions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from experiments.common.intervals import mean_and_half, wilson

ALL = "all"  # The kind of all questions together.


def written(right: Iterable[Any]) -> str:
    """Returns a string with "1" for each right answer and "0" for each wrong one.

    Examples:
      >>> written([True, False])
      '10'
    """
    return "".join("01"[int(x)] for x in right)


def right_answers(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Bool[np.ndarray, "seeds questions"]]:
    """Returns arrays that say which answers are right, by recipe.

    The arrays contain only the seeds that all recipes have. Without any such seed the
    result is an empty dictionary.

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

    The interval treats questions as samples: the value of each question is the mean of
    its answers over seeds.
    """
    share, count = float(right.mean()), right.shape[1]
    low, high = wilson(share * count, count)
    return 100 * share, 100 * low, 100 * high


def points(
    right: Float[np.ndarray, "seeds questions"],
    reference: Float[np.ndarray, "seeds questions"],
) -> tuple[float, float]:
    """Returns the difference to `reference` in percentage points, and a half-width.

    The half-width is half of the 95% interval of the difference, which follows from the
    standard error of the mean of the questions' paired differences. Both arrays are
    about the same questions.
    """
    return mean_and_half(100 * (right.mean(axis=0) - reference.mean(axis=0)))
