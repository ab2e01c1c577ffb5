"""The forward kernel of attention.

A thread block has a tile of queries of one head, and goes over the tiles of keys and
values that it attends to. Its two warpgroups have half of the queries each. While one
computes probabilities, the tensor cores multiply for the other. The first warpgroup
also starts the copies of keys and values to shared memory: as in the FP8 matmul, there
is no warpgroup for loading alone. FlashAttention-3 has the same scheme
(arXiv 2407.08608, section 3.1).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.ops.attention.plan import (
    LOG2_E,
    WARPGROUPS,
    Scoring,
    Tiles,
    spans_of_keys,
)
from pallas_kernels.ops.attention.ring import (
    QueryTile,
    Ring,
    accumulated,
    accumulator,
    filled,
    resident,
    ring_barriers,
    settings,
    swizzled,
)
from pallas_kernels.ops.attention.scores import Masks, scores_of

_LEAST = -1e30  # Less than any score, and finite: its difference to itself is 0.


@functools.partial(jax.jit, static_argnames=("scoring", "tiles"))
def run(
    q: Array,
    k: Array,
    v: Array,
    window: Array,
    segment_ids: Array | None,
    *,
    scoring: Scoring,
    tiles: Tiles,
) -> tuple[Array, Array]:
    """Computes attention of q [b, s, n, d] to k and v [b, s, m, d].

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      window: The window, int32 [1]; not read if `scoring` has no window.
      segment_ids: The segments, int32 [b, s], or None.
      scoring: How scores follow from q and k.
      tiles: The tiles of the kernel.

    Returns:
      The output, [b, s, n, d], and the log-sum-exp, float32 [b, n, s].
    """
    b, s, n, d = q.shape
    spans = spans_of_keys(scoring, s, tiles, window, segment_ids)
    if segment_ids is None:
        segment_ids = jnp.zeros((1, 1), jnp.int32)
    return mosaic.kernel(
        functools.partial(_kernel, scoring, tiles),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((b, n, s), jnp.float32),
        ),
        scratch_types={
            "q_smem": swizzled(WARPGROUPS, tiles.queries // WARPGROUPS, d),
            "k_smem": swizzled(tiles.stages, tiles.keys, d),
            "v_smem": swizzled(tiles.more_stages, tiles.keys, d),
            "q_filled": plgpu.Barrier(num_barriers=WARPGROUPS),
            "k_barriers": ring_barriers(tiles.stages),
            "v_barriers": ring_barriers(tiles.more_stages),
        },
        kernel_name="attention",
        **settings(b * n * (s // tiles.queries)),
    )(q, k, v, window, segment_ids, spans)


def _kernel(
    scoring: Scoring, tiles: Tiles, q, k, v, window, segment_ids, spans, out, lse,
    q_smem, k_smem, v_smem, q_filled, k_barriers, v_barriers,
) -> None:  # fmt: skip
    tile = QueryTile.of(q, k, spans, tiles)
    warpgroup = tile.warpgroup
    staged = q_smem.at[warpgroup]
    plgpu.copy_gmem_to_smem(q.at[tile.rows], staged, q_filled.at[warpgroup])
    keys = tile.ring(k, k_smem, k_barriers)
    values = tile.ring(v, v_smem, v_barriers)
    keys.fill()
    values.fill()
    masks = Masks(
        scoring=scoring,
        window=window,
        segment_ids=segment_ids.at[tile.batch] if scoring.segmented else None,
        query_axis=0,
    )
    plgpu.barrier_wait(q_filled.at[warpgroup])
    numbers = tile.row, tile.first
    softmax = _Softmax(scoring, masks, q_smem, warpgroup, keys, values, *numbers)
    acc, logs, total = softmax.bounded() if scoring.largest else softmax.online()
    # Queries that attend to nothing have the output 0.
    root = jnp.where(total > 0, lax.rsqrt(total), 0.0)
    acc = acc * lax.broadcast_in_dim(root * root, acc.shape, (0,))
    staged[...] = acc.astype(q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, out.at[tile.rows])
    logs = logs * (1 / LOG2_E) + jnp.log(total)
    mosaic.store(lse.at[tile.statistics], logs)
    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Softmax:
    """The sums of a warpgroup's queries over all keys that they attend to.

    Attributes:
      scoring: How scores follow from products.
      masks: The masks of scores.
      q: The queries in shared memory, [warpgroups, height, d].
      warpgroup: The number of the warpgroup.
      keys: The tiles of keys.
      values: The tiles of values.
      row: The position of the first query.
      first: The number of the first tile of keys.
    """

    scoring: Scoring
    masks: Masks
    q: Any
    warpgroup: Array
    keys: Ring
    values: Ring
    row: Array
    first: Array

    def bounded(self) -> tuple[Array, Array, Array]:
        """Sums exp2(scores - c) with one constant c for all queries.

        The products with values run while the next scores are computed.

        Returns:
          The sums of values weighted by exp2(scores - c); c for each query, in units of
          log 2; and the sums of exp2(scores - c).
        """
        _, height, d = self.q.shape
        of_rows = plgpu.Layout.WGMMA.reduce(1)

        def go(acc):
            def step(j, total):
                # The products of the tile before are complete when the scores are.
                x = self._scores(j)
                pl.when(j > 0)(lambda: self.values.release(j - 1))
                p = jnp.exp2(x - self.scoring.largest)
                total = total + jnp.sum(p, axis=1)
                self.keys.refill(j)
                pl.when(j > 0)(lambda: self.values.refill(j - 1))
                self.values.wait(j)
                plgpu.wgmma(acc, p.astype(self.q.dtype), self.values.at(j))
                return total

            total = filled((height,), 0, of_rows)
            total = lax.fori_loop(0, self.keys.count, step, total)
            return acc[...], total

        acc, total = pl.run_scoped(go, accumulator(height, d))
        self._end(release=True)
        return acc, filled((height,), self.scoring.largest, of_rows), total

    def online(self) -> tuple[Array, Array, Array]:
        """Sums exp2(scores - c), where c is each query's largest score so far.

        Returns:
          The same as `bounded`; c is the largest score of each query.
        """
        _, height, d = self.q.shape
        of_rows = plgpu.Layout.WGMMA.reduce(1)

        def step(j, carry):
            acc, largest, total = carry
            x = self._scores(j)
            higher = jnp.maximum(largest, jnp.max(x, axis=1))
            shrink = jnp.exp2(largest - higher)
            p = jnp.exp2(x - lax.broadcast_in_dim(higher, x.shape, (0,)))
            total = total * shrink + jnp.sum(p, axis=1)
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, (0,))
            p = p.astype(self.q.dtype)
            self.keys.refill(j)
            pl.when(j > 0)(lambda: self.values.refill(j - 1))
            self.values.wait(j)

            def add(acc):
                plgpu.wgmma(acc, p, self.values.at(j))

            acc = accumulated(acc, add)
            self.values.release(j)
            return acc, higher, total

        sums = (
            filled((height, d), 0, plgpu.Layout.WGMMA),
            filled((height,), _LEAST, of_rows),
            filled((height,), 0, of_rows),
        )
        sums = lax.fori_loop(0, self.keys.count, step, sums)
        self._end(release=False)
        return sums

    def _scores(self, j: Array) -> Array:
        """Returns the scores of tile `j` of keys, in units of log 2."""
        self.keys.wait(j)

        def products(acc):
            q = resident(self.q, self.warpgroup, j)
            plgpu.wgmma(acc, q, self.keys.at(j).T)
            return acc[...]

        height, size = self.q.shape[1], self.keys.smem.shape[1]
        x = pl.run_scoped(products, accumulator(height, size))
        self.keys.release(j)
        x = scores_of(self.scoring, x)
        return self.masks.masked(x, self.row, (self.first + j) * size, -jnp.inf)

    def _end(self, release: bool) -> None:
        """Waits until both warpgroups have read the last tile of values."""
        last = self.values.count - 1

        @pl.when(last >= 0)
        def _():
            if release:
                self.values.release(last)
            self.values.refill(last)
