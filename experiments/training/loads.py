"""The loads of experts as entries of a step's row."""

import numpy as np

from coat_jax.layers.experts.routing import Routing


def loads(routing: Routing | None) -> dict[str, float]:
    """Returns the entries of a step's row about experts; empty without experts.

    Loads are relative to the mean: an expert with twice the mean load has 2.

    Returns:
      The largest and the smallest load of an expert in any layer, the number of experts
      without tokens over all layers, and the balance and z losses. The row's loss
      includes these losses, times their weights.
    """
    if routing is None:
        return {}
    relative = np.asarray(routing.load) * routing.load.shape[-1]
    return {
        "largest_load": float(relative.max()),
        "smallest_load": float(relative.min()),
        "idle_experts": int((relative == 0).sum()),
        "balance_loss": float(routing.balance),
        "z_loss": float(routing.z),
    }
