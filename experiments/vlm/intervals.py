"""Accuracies and paired differences of recipes, with 95% intervals over questions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from experiments.common.answers import ALL, right_answers
from experiments.common.intervals import mean_and_half, wilson
from experiments.vlm.questions import KINDS


def paired(
    own: Float[np.ndarray, " questions"], other: Float[np.ndarray, " questions"]
) -> tuple[float, float, float]:
    """Returns the mean difference `own - other` and the ends of its 95% interval.

    Both are about the same questions. The standard error belongs to the mean of the
    differences.
    """
    mean, half = mean_and_half(own - other)
    return mean, mean - half, mean + half


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns accuracies and differences to `bf16` by recipe and kind, in percent.

    An answer counts as the mean over seeds. Intervals are over questions; the spread
    over seeds is given next to them. Kinds of questions follow one another in turns.
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
    share, count = float(right.mean()), right.shape[1]
    low, high = wilson(share * count, count)
    mean, least, most = paired(right.mean(axis=0), reference.mean(axis=0))
    by_seed = 100 * (right.mean(axis=1) - reference.mean(axis=1))
    return {
        "recipe": recipe,
        "kind": kind,
        "questions": count,
        "seeds": len(right),
        "accuracy_percent": 100 * share,
        "accuracy_low_percent": 100 * low,
        "accuracy_high_percent": 100 * high,
        "difference_points": 100 * mean,
        "difference_low_points": 100 * least,
        "difference_high_points": 100 * most,
        "difference_least_seed_points": float(by_seed.min()),
        "difference_most_seed_points": float(by_seed.max()),
    }
