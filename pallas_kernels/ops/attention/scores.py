"""Scores and probabilities of a tile, in the registers of a warpgroup.

A tile has queries along its rows and keys along its columns, or keys along its rows and
queries along its columns. Scores are in units of log 2, so that probabilities need no
factor.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.ops.attention.plan import LOG2_E, Scoring


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masks:
    """The masks of a tile's scores.

    Attributes:
      scoring: The kinds of masks.
      window: The number of positions that a query attends to, including its own, in
        global memory, [1].
      segment_ids: The segments of all positions of a sequence, in global memory, [s];
        not read without segments.
      query_axis: The axis of a tile along which queries are.
    """

    scoring: Scoring
    window: Any
    segment_ids: Any
    query_axis: int

    def masked(self, scores: Array, query: Array, key: Array, instead: float) -> Array:
        """Returns scores or probabilities of a tile, with masked ones replaced.

        Only tiles at an edge of the masks are compared element by element.

        Args:
          scores: The scores, or probabilities.
          query: The position of the tile's first query.
          key: The position of the tile's first key.
          instead: The number in place of masked scores.
        """
        if self.scoring.segmented:
            scores = self._in_segments(scores, query, key, instead)
        if not (self.scoring.causal or self.scoring.windowed):
            return scores
        queries, keys = scores.shape[:: 1 if self.query_axis == 0 else -1]
        # The distance of a query to a key is between these two.
        least, most = query - (key + keys - 1), query + queries - 1 - key
        at_edge = jnp.bool_(False)
        if self.scoring.causal:
            at_edge = least < 0
        if self.scoring.windowed:
            window = self.window[0]
            at_edge |= most >= window
            if not self.scoring.causal:
                at_edge |= least <= -window
        return lax.cond(
            at_edge,
            lambda scores: self._near(scores, query, key, instead),
            lambda scores: scores,
            scores,
        )

    def _near(self, scores: Array, query: Array, key: Array, instead: float) -> Array:
        """Masks scores by the positions of queries and keys; see `masked`."""

        def positions(start, axis):
            layout = plgpu.Layout.WGMMA
            return start + plgpu.broadcasted_iota(
                jnp.int32, scores.shape, axis, layout=layout
            )

        queries = positions(query, self.query_axis)
        keys = positions(key, 1 - self.query_axis)
        if self.scoring.causal:
            scores = jnp.where(queries >= keys, scores, instead)
        if self.scoring.windowed:
            window = self.window[0]
            scores = jnp.where(queries < keys + window, scores, instead)
            if not self.scoring.causal:
                scores = jnp.where(keys < queries + window, scores, instead)
        return scores

    def _in_segments(
        self, scores: Array, query: Array, key: Array, instead: float
    ) -> Array:
        starts = (query, key) if self.query_axis == 0 else (key, query)

        def ids(axis):
            size = scores.shape[axis]
            layout = plgpu.Layout.WGMMA.reduce(1 - axis)
            numbers = self.segment_ids.at[pl.ds(starts[axis], size)]
            loaded = plgpu.load(numbers, layout=layout, optimized=False)
            return lax.broadcast_in_dim(loaded, scores.shape, (axis,))

        return jnp.where(ids(0) == ids(1), scores, instead)


def scores_of(scoring: Scoring, products: Array) -> Array:
    """Returns the scores, in units of log 2, of products of queries and keys.

    The soft cap needs tanh(x) = 1 - 2 / (exp(2 x) + 1). The reciprocal is the square of
    a reciprocal square root, for which the special-function unit takes one step.
    """
    if scoring.softcap is None:
        return products * (scoring.scale * LOG2_E)
    cap = scoring.softcap * LOG2_E
    power = jnp.exp2(products * (2 * scoring.scale / scoring.softcap * LOG2_E))
    root = lax.rsqrt(power + 1)
    return cap - (2 * cap) * (root * root)


def times_derivative(scoring: Scoring, p: Array, scores: Array) -> Array:
    """Returns `p` times the derivative of the soft cap, 1 - (score / cap)**2.

    Without a soft cap it returns `p`.
    """
    if scoring.softcap is None:
        return p
    share = scores * (1 / (scoring.softcap * LOG2_E))
    return p * (1 - share * share)
