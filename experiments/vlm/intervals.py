"""Accuracies and paired differences of recipes, with 95% intervals over questions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from experiments.common.answers import ALL, percents, points, right_answers
from experiments.vlm.questions import KINDS


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns accuracies and differences to `bf16` by recipe and kind, in percent.

    Answers to a question are averaged over seeds. Intervals are over questions; rows
    also have the smallest and the largest difference of a seed. Questions must
    alternate between `KINDS`, as test questions do.
    """
    answers = right_answers(rows)
    return [
        _summary(recipe, kind, right, answers["bf16"])
        for recipe, right in answers.items()
        for kind in (*KINDS, ALL)
    ]


def _summary(
    recipe: str,
    kind: str,
    right: Bool[np.ndarray, "seeds questions"],
    reference: Bool[np.ndarray, "seeds questions"],
) -> dict[str, Any]:
    if kind != ALL:
        of_kind = slice(KINDS.index(kind), None, len(KINDS))
        right, reference = right[:, of_kind], reference[:, of_kind]
    share, low, high = percents(right)
    mean, half = points(right, reference)
    by_seed = 100 * (right.mean(axis=1) - reference.mean(axis=1))
    return {
        "recipe": recipe,
        "kind": kind,
        "questions": right.shape[1],
        "seeds": len(right),
        "accuracy_percent": share,
        "accuracy_low_percent": low,
        "accuracy_high_percent": high,
        "difference_points": mean,
        "difference_low_points": mean - half,
        "difference_high_points": mean + half,
        "difference_least_seed_points": float(by_seed.min()),
        "difference_most_seed_points": float(by_seed.max()),
    }
