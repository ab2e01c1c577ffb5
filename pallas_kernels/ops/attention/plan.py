"""The scores that a call of attention computes, and the tiles of its kernels."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Int

LOG2_E = math.log2(math.e)
ROWS = 64  # The rows of an accumulator that a warpgroup multiplies at a time.
WARPGROUPS = 2
HEAD_DIMS = (64, 128, 256)
# The exponents of probabilities, before division by their sum, are between these two if
# there is a soft cap.
_LOWEST, _HIGHEST = -100.0, 64.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """The formula of scores, and the kinds of masks.

    Attributes:
      scale: The factor on products of queries and keys.
      softcap: The bound of scores; None means no bound.
      causal: Whether later positions are masked.
      windowed: Whether positions outside of a window are masked.
      segmented: Whether positions of other segments are masked.
    """

    scale: float
    softcap: float | None
    causal: bool
    windowed: bool
    segmented: bool

    @property
    def largest(self) -> float | None:
        """The number that softmax subtracts from all scores, in units of log 2.

        A soft cap bounds scores, so that a constant serves all rows. None means that
        the rows' maxima must be found: there is no cap, or one of more than 56.
        """
        if self.softcap is None:
            return None
        bound = self.softcap * LOG2_E
        largest = min(bound, -bound - _LOWEST)
        return largest if bound - largest <= _HIGHEST else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """The sizes of a kernel's tiles, and its stages in shared memory.

    Attributes:
      queries: The number of queries of a tile.
      keys: The number of keys of a tile.
      stages: The number of tiles in shared memory of the first array that the kernel
        goes over: keys, or queries in the kernel of the gradients of keys and values.
      more_stages: The same for the second array: values, or gradients of the output.
    """

    queries: int
    keys: int
    stages: int = 2
    more_stages: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """The tiles of the three kernels.

    Attributes:
      forward: The tiles of the forward kernel.
      queries: The tiles of the kernel of the gradients of queries.
      keys: The tiles of the kernel of the gradients of keys and values.
    """

    forward: Tiles
    queries: Tiles
    keys: Tiles

    @classmethod
    def of(cls, head_dim: int) -> "Tuning":
        """Returns the default tiles for heads of `head_dim` columns."""
        return _TUNED[head_dim]

    @property
    def step(self) -> int:
        """The number that must divide the length of sequences."""
        tiles = self.forward, self.queries, self.keys
        return math.lcm(*(size for t in tiles for size in (t.queries, t.keys)))


_TUNED = {
    64: Tuning(
        forward=Tiles(queries=128, keys=128),
        queries=Tiles(queries=128, keys=64),
        keys=Tiles(queries=64, keys=128),
    ),
    128: Tuning(
        forward=Tiles(queries=128, keys=128),
        queries=Tiles(queries=128, keys=64),
        keys=Tiles(queries=64, keys=128),
    ),
    256: Tuning(
        forward=Tiles(queries=128, keys=64),
        queries=Tiles(queries=128, keys=64, more_stages=1),
        keys=Tiles(queries=64, keys=64),
    ),
}


def spans_of_keys(
    scoring: Scoring,
    length: int,
    tiles: Tiles,
    window: Int[Array, "1"],
    segment_ids: Int[Array, "b s"] | None,
) -> Int[Array, "#b blocks 2"]:
    """Returns the span of tiles of keys that each tile of queries attends to.

    A span is a pair of tile numbers: the first tile, and the last tile plus 1. All
    elements of tiles outside of the span are masked.
    """
    backward = window - 1 if scoring.windowed else None
    forward = 0 if scoring.causal else backward
    sizes = tiles.queries, tiles.keys
    return _spans(length, sizes, backward, forward, segment_ids)


def spans_of_queries(
    scoring: Scoring,
    length: int,
    tiles: Tiles,
    window: Int[Array, "1"],
    segment_ids: Int[Array, "b s"] | None,
) -> Int[Array, "#b blocks 2"]:
    """Returns the span of tiles of queries that attend to each tile of keys.

    A span is a pair of tile numbers: the first tile, and the last tile plus 1. All
    elements of tiles outside of the span are masked.
    """
    forward = window - 1 if scoring.windowed else None
    backward = 0 if scoring.causal else forward
    sizes = tiles.keys, tiles.queries
    return _spans(length, sizes, backward, forward, segment_ids)


def _spans(
    length: int,
    sizes: tuple[int, int],
    backward: Int[Array, "1"] | int | None,
    forward: Int[Array, "1"] | int | None,
    segment_ids: Int[Array, "b s"] | None,
) -> Int[Array, "#b blocks 2"]:
    """Returns the span of tiles that the positions of each tile reach.

    Args:
      length: The number of positions.
      sizes: The size of each tile that has a span, and the size of the tiles in spans.
      backward: The number of earlier positions that a position reaches; None means all.
      forward: The number of later positions that a position reaches; None means all.
      segment_ids: The number of each position's segment, or None.
    """
    size, other = sizes
    start = jnp.arange(0, length, size)
    first = jnp.zeros_like(start)
    end = jnp.full_like(start, length // other)
    if backward is not None:
        first = jnp.maximum(start - backward, 0) // other
    if forward is not None:
        end = jnp.minimum((start + size - 1 + forward) // other + 1, end)
    return _with_segments(first[None], end[None], segment_ids, sizes)


def _with_segments(first, end, segment_ids, sizes):
    """Returns spans [b, tiles, 2], shortened by the tiles that share no segment.

    Each span belongs to a tile. Another tile may share a segment with this tile if the
    ranges of both tiles' ids overlap, so that ids need not be sorted. Tiles without a
    shared segment are removed at both ends of the span.

    Args:
      first: The first tile of each span, [1, tiles].
      end: The last tile plus 1 of each span, [1, tiles].
      segment_ids: The number of each position's segment, or None.
      sizes: The size of each tile that has a span, and the size of the tiles in spans.
    """
    if segment_ids is not None:
        b = segment_ids.shape[0]
        (low, high), (other_low, other_high) = (
            [f(segment_ids.reshape(b, -1, size), axis=2) for f in (jnp.min, jnp.max)]
            for size in sizes
        )
        shared = (low[:, :, None] <= other_high[:, None]) & (
            other_low[:, None] <= high[:, :, None]
        )
        count = shared.shape[2]
        first = jnp.maximum(first, jnp.argmax(shared, axis=2))
        end = jnp.minimum(end, count - jnp.argmax(shared[:, :, ::-1], axis=2))
        end = jnp.maximum(first, end)
    return jnp.stack([first, end], axis=-1).astype(jnp.int32)
