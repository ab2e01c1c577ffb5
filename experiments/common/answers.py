"""Right and wrong answers of trainings to the same questions, as rows of results."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

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
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    right_by_run = {(row["recipe"], row["seed"]): row["right"] for row in rows}
    seeds_of_recipe = [
        {seed for recipe, seed in right_by_run if recipe == name} for name in recipes
    ]
    seeds = sorted(set.intersection(*seeds_of_recipe)) if seeds_of_recipe else []
    if not seeds:
        return {}
    return {
        name: np.array([[c == "1" for c in right_by_run[name, seed]] for seed in seeds])
        for name in recipes
    }
