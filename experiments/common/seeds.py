"""Means over trainings that differ in their seed."""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.common.tables import grouped

_MEANS = "train_loss", "val_loss", "val_gap_percent", "tokens_per_s"


def mean_and_error(
    x: Float[np.ndarray, "seed *rest"],
) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"] | None]:
    """Returns the mean over seeds and its standard error, or None for a single seed."""
    if len(x) == 1:
        return x[0], None
    return x.mean(axis=0), x.std(axis=0, ddof=1) / np.sqrt(len(x))


def over_seeds(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns a row for each recipe, with losses, gaps and speeds as means over seeds.

    The rows have "recipe" and the entries of a summary of `experiments.pretrain`. All
    other entries are the first seed's; sizes in bytes do not depend on the seed.
    """
    return {
        recipe: {
            **runs[0],
            "seeds": len(runs),
            **{
                key: fmean(row[key] for row in runs) for key in _MEANS if key in runs[0]
            },
        }
        for recipe, runs in grouped(rows, itemgetter("recipe")).items()
    }
