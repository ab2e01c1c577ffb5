"""The loads of experts, as entries of a step's row."""

import numpy as np

from coat_jax.layers.experts.routing import Routing


def loads(routing: Routing | None) -> dict[str, float]:
    """Returns the entries of a step's row for its experts; none without experts.

    Loads are relative to equal ones: an expert with twice the mean has 2.

    Returns:
      The largest and the smallest load of an expert in any layer, the number of experts
      of all layers without tokens, and both auxiliary losses. The row's loss includes
      these losses, times their weights.
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
