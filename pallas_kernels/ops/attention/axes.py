"""The axes of attention's arrays, over which the devices of a mesh may split them."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array

from pallas_kernels.dispatch.axes import Axes


class HeadAxes(NamedTuple):
    """The axes of the arrays of one call.

    A mesh may split the axis of sequences and one axis of heads: the axis of key heads,
    or the axis of query heads if there is one key head. Positions and features are
    gathered.

    Attributes:
      queries: The axes of queries and outputs [b, s, m, g, d], g for each key head.
      keys: The axes of keys and values [b, t, m, d].
      statistics: The axes of the log-sum-exp [b, m, g, s].
      heads: The axis names of key heads, and of the query heads of each key head.
    """

    queries: Axes
    keys: Axes
    statistics: Axes
    heads: tuple[str, str]

    @classmethod
    def of(cls, q: Array) -> "HeadAxes":
        """Returns the axes for queries [b, s, m, g, d]."""
        m, g = heads = ("_", "h") if q.shape[2] == 1 else ("h", "_")
        queries, keys = Axes(f"b _ {m} {g} _"), Axes(f"b _ {m} _")
        return cls(queries, keys, Axes(f"b {m} {g} _"), heads)

    @property
    def key_gradients(self) -> Axes:
        """The axes of gradients of keys and values, which devices may have to sum."""
        return dataclasses.replace(self.keys, reduced="sum")


def grouped(x: Array, k: Array) -> Array:
    """Reshapes heads [b, s, n, d] to [b, s, m, n / m, d], where `k` has m heads."""
    b, s, n, d = x.shape
    return x.reshape(b, s, k.shape[2], n // k.shape[2], d)
