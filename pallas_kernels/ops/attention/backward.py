"""The backward kernels of attention.

One kernel computes the gradients of queries: a thread block has a tile of queries, and
goes over keys and values. Another one computes the gradients of keys and values: a
thread block has a tile of keys and values of one head, and goes over the queries of all
heads that share them. Both compute the probabilities again, from the log-sum-exp. So no
gradient is a sum over several thread blocks, and all sums have a fixed order. The
equations are in FlashAttention-2 (arXiv 2307.08691, algorithm 2), except for the
derivative of the soft cap.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.ops.attention.plan import (
    LOG2_E,
    ROWS,
    WARPGROUPS,
    Scoring,
    Tiles,
    Tuning,
    spans_of_keys,
    spans_of_queries,
)
from pallas_kernels.ops.attention.ring import (
    QueryTile,
    Ring,
    accumulator,
    place,
    resident,
    ring_barriers,
    settings,
    swizzled,
    zero_of,
)
from pallas_kernels.ops.attention.scores import Masks, scores_of, times_derivative

_HANDED = 2  # Tiles that one warpgroup can hand to the other ahead of time.


@functools.partial(jax.jit, static_argnames=("scoring", "tuning"))
def run(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    window: Array,
    segment_ids: Array | None,
    *,
    scoring: Scoring,
    tuning: Tuning,
) -> tuple[Array, Array, Array]:
    """Computes the gradients of q, k and v.

    `out` and `lse` are the results of `forward.run`, and `do` is the gradient of `out`.
    The other arguments are as in `forward.run`, except for `tuning`, the tiles of all
    kernels.
    """
    delta = jnp.einsum("bsnd,bsnd->bns", out, do, preferred_element_type=jnp.float32)
    # The probabilities of queries that attend to nothing are exp2(-inf).
    logs = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    arrays = q, k, v, do, logs, delta, window, segment_ids
    dq = _queries(*arrays, scoring=scoring, tiles=tuning.queries)
    dk, dv = _keys(*arrays, scoring=scoring, tiles=tuning.keys)
    return dq, dk, dv


def _queries(
    q, k, v, do, logs, delta, window, segment_ids, *, scoring: Scoring, tiles: Tiles
) -> Array:
    b, s, n, d = q.shape
    spans = spans_of_keys(scoring, s, tiles, window, segment_ids)
    height = tiles.queries // WARPGROUPS
    return mosaic.kernel(
        functools.partial(_query_kernel, scoring, tiles),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types={
            "q_smem": swizzled(WARPGROUPS, height, d),
            "do_smem": swizzled(WARPGROUPS, height, d),
            "k_smem": swizzled(tiles.stages, tiles.keys, d),
            "v_smem": swizzled(tiles.more_stages, tiles.keys, d),
            "rows_filled": plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            "k_barriers": ring_barriers(tiles.stages),
            "v_barriers": ring_barriers(tiles.more_stages),
        },
        kernel_name="attention_grad_queries",
        **settings(b * n * (s // tiles.queries)),
    )(q, k, v, do, logs, delta, window, _or_nothing(segment_ids), spans)


def _or_nothing(segment_ids: Array | None) -> Array:
    return jnp.zeros((1, 1), jnp.int32) if segment_ids is None else segment_ids


def _query_kernel(
    scoring: Scoring, tiles: Tiles, q, k, v, do, logs, delta, window, segment_ids,
    spans, dq, q_smem, do_smem, k_smem, v_smem, rows_filled, k_barriers, v_barriers,
) -> None:  # fmt: skip
    tile = QueryTile.of(q, k, spans, tiles)
    warpgroup = tile.warpgroup
    q_own, do_own = q_smem.at[warpgroup], do_smem.at[warpgroup]
    arrived = rows_filled.at[warpgroup]
    plgpu.copy_gmem_to_smem(q.at[tile.rows], q_own, arrived)
    plgpu.copy_gmem_to_smem(do.at[tile.rows], do_own, arrived)
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

    def of_rows(x):
        numbers = x.at[tile.statistics]
        layout = plgpu.Layout.WGMMA.reduce(1)
        loaded = plgpu.load(numbers, layout=layout, optimized=False)
        return lambda shape: lax.broadcast_in_dim(loaded, shape, (0,))

    logs_of, delta_of = of_rows(logs), of_rows(delta)
    plgpu.barrier_wait(arrived)

    of_tile = accumulator(tile.height, tile.keys)

    def go(acc):
        @pl.loop(0, tile.count)
        def _(j):
            keys.wait(j)
            values.wait(j)

            def products(scores):
                operand = resident(q_smem, warpgroup, j)
                plgpu.wgmma(scores, operand, keys.at(j).T)
                return scores[...]

            def of_outputs(grads):
                operand = resident(do_smem, warpgroup, j)
                plgpu.wgmma(grads, operand, values.at(j).T)
                return grads[...]

            # The products of the tile before are complete as soon as the scores are.
            x = pl.run_scoped(products, of_tile)
            pl.when(j > 0)(lambda: keys.release(j - 1))
            x = scores_of(scoring, x)
            p = jnp.exp2(x - logs_of(x.shape))
            p = times_derivative(scoring, p, x)
            p = masks.masked(p, tile.row, (tile.first + j) * tiles.keys, 0.0)
            dp = pl.run_scoped(of_outputs, of_tile)
            values.release(j)
            ds = (p * (dp - delta_of(dp.shape))).astype(q.dtype)
            values.refill(j)
            pl.when(j > 0)(lambda: keys.refill(j - 1))
            plgpu.wgmma(acc, ds, keys.at(j))

        return acc[...]

    acc = pl.run_scoped(go, accumulator(tile.height, q.shape[3]))

    @pl.when(tile.count > 0)
    def _():
        keys.release(tile.count - 1)
        keys.refill(tile.count - 1)

    q_own[...] = (acc * scoring.scale).astype(q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_own, dq.at[tile.rows])
    plgpu.wait_smem_to_gmem(0)


def _keys(
    q, k, v, do, logs, delta, window, segment_ids, *, scoring: Scoring, tiles: Tiles
) -> tuple[Array, Array]:
    b, s, m, d = k.shape
    spans = spans_of_queries(scoring, s, tiles, window, segment_ids)
    shape = jax.ShapeDtypeStruct(k.shape, k.dtype)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    handed = plgpu.SMEM(
        (_HANDED, tiles.keys, tiles.queries), q.dtype, transforms=transforms
    )
    return mosaic.kernel(
        functools.partial(_key_kernel, scoring, tiles),
        out_type=(shape, shape),
        scratch_types={
            "k_smem": swizzled(1, tiles.keys, d),
            "v_smem": swizzled(1, tiles.keys, d),
            "q_smem": swizzled(tiles.stages, tiles.queries, d),
            "do_smem": swizzled(tiles.more_stages, tiles.queries, d),
            "handed": handed,
            "kv_filled": plgpu.Barrier(num_barriers=2),
            "q_barriers": ring_barriers(tiles.stages),
            "do_barriers": ring_barriers(tiles.more_stages),
            "handed_filled": plgpu.Barrier(num_barriers=_HANDED),
            "handed_free": plgpu.Barrier(num_barriers=_HANDED),
        },
        kernel_name="attention_grad_keys",
        **settings(b * m * (s // tiles.keys)),
    )(q, k, v, do, logs, delta, window, _or_nothing(segment_ids), spans)


def _key_kernel(
    scoring: Scoring, tiles: Tiles, q, k, v, do, logs, delta, window, segment_ids,
    spans, dk, dv, k_smem, v_smem, q_smem, do_smem, handed, kv_filled, q_barriers,
    do_barriers, handed_filled, handed_free,
) -> None:  # fmt: skip
    b, _, m, d = k.shape
    shared_by = q.shape[2] // m
    warpgroup = lax.axis_index("warpgroup")
    block, batch, key_head = place(b, m)
    row = block * tiles.keys
    span = spans.at[0 if spans.shape[0] == 1 else batch, block]
    first, blocks = span[0], span[1] - span[0]

    def at(j):
        """Returns the head of a step and the position of its first query."""
        head, index = _divided(j, blocks, shared_by)
        return key_head * shared_by + head, (first + index) * tiles.queries

    def tile(x):
        def source(j):
            head, position = at(j)
            return x.at[batch, pl.ds(position, tiles.queries), head]

        return source

    count = blocks * shared_by
    # The second warpgroup reads tiles last, and does not wait for the first one.
    queries = Ring(q_smem, source=tile(q), count=count, loader=1, **q_barriers)
    grads = Ring(do_smem, source=tile(do), count=count, loader=1, **do_barriers)
    queries.fill()
    grads.fill()
    rows = batch, pl.ds(row, tiles.keys), key_head

    def of_columns(x, j):
        head, position = at(j)
        numbers = x.at[batch, head, pl.ds(position, tiles.queries)]
        layout = plgpu.Layout.WGMMA.reduce(0)
        loaded = plgpu.load(numbers, layout=layout, optimized=False)
        return lax.broadcast_in_dim(loaded, (ROWS, tiles.queries), (1,))

    def store(accs, smem, to):
        for piece, acc in zip(pieces, accs, strict=True):
            smem[piece] = acc.astype(k.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, to.at[rows])
        plgpu.wait_smem_to_gmem(0)

    pieces = [pl.ds(i, ROWS) for i in range(0, tiles.keys, ROWS)]
    sums = [accumulator(ROWS, d) for _ in pieces]
    of_piece = accumulator(ROWS, tiles.queries)

    @pl.when(warpgroup == 0)
    def _():
        """Computes probabilities, and the gradients of values."""
        operand = k_smem.at[0]
        plgpu.copy_gmem_to_smem(k.at[rows], operand, kv_filled.at[0])
        plgpu.barrier_wait(kv_filled.at[0])
        masks = Masks(
            scoring=scoring,
            window=window,
            segment_ids=segment_ids.at[batch] if scoring.segmented else None,
            query_axis=1,
        )

        def go(*accs):
            @pl.loop(0, count)
            def _(j):
                queries.wait(j)
                slot = lax.rem(j, _HANDED)
                pl.when(j >= _HANDED)(lambda: plgpu.barrier_wait(handed_free.at[slot]))
                for i, piece in enumerate(pieces):
                    logs_of = of_columns(logs, j)

                    def products(scores, i=i, piece=piece):
                        operand = resident(k_smem, 0, j)
                        plgpu.wgmma(scores, operand.at[piece], queries.at(j, i).T)
                        return scores[...]

                    x = pl.run_scoped(products, of_piece)
                    if i == 0:
                        # The products of the step before are complete, too.
                        pl.when(j > 0)(lambda: grads.release(j - 1))
                        grads.wait(j)
                    x = scores_of(scoring, x)
                    p = jnp.exp2(x - logs_of)
                    key = row + piece.start + zero_of(j, i)
                    p = masks.masked(p, at(j)[1], key, 0.0)
                    w = times_derivative(scoring, p, x)
                    handed[slot, piece] = w.astype(q.dtype)
                    plgpu.wgmma(accs[i], p.astype(q.dtype), grads.at(j, i))
                plgpu.barrier_arrive(handed_filled.at[slot])
                queries.release(j)

            return [acc[...] for acc in accs]

        accs = pl.run_scoped(go, *sums)
        pl.when(count > 0)(lambda: grads.release(count - 1))
        for j in range(_HANDED):
            slot = lax.rem(count + j, _HANDED)
            pl.when(count + j >= _HANDED)(
                lambda slot=slot: plgpu.barrier_wait(handed_free.at[slot])
            )
        store(accs, operand, dv)

    @pl.when(warpgroup == 1)
    def _():
        """Computes the gradients of keys."""
        operand = v_smem.at[0]
        plgpu.copy_gmem_to_smem(v.at[rows], operand, kv_filled.at[1])
        plgpu.barrier_wait(kv_filled.at[1])

        def go(*accs):
            @pl.loop(0, count)
            def _(j):
                slot = lax.rem(j, _HANDED)
                grads.wait(j)
                for i, piece in enumerate(pieces):
                    delta_of = of_columns(delta, j)

                    def products(dp, i=i, piece=piece):
                        operand = resident(v_smem, 0, j)
                        plgpu.wgmma(dp, operand.at[piece], grads.at(j, i).T)
                        return dp[...]

                    dp = pl.run_scoped(products, of_piece)
                    if i == 0:
                        # The products of the step before are complete, too.
                        pl.when(j > 0)(lambda: queries.release(j - 1))
                        plgpu.barrier_wait(handed_filled.at[slot])
                        queries.wait(j)
                    numbers = handed.at[slot, piece]
                    w = plgpu.load(numbers, layout=plgpu.Layout.WGMMA)
                    ds = w.astype(jnp.float32) * (dp - delta_of)
                    plgpu.wgmma(accs[i], ds.astype(q.dtype), queries.at(j, i))
                plgpu.barrier_arrive(handed_free.at[slot])
                grads.release(j)
                pl.when(j > 0)(lambda: queries.refill(j - 1))
                grads.refill(j)

            return [acc[...] for acc in accs]

        accs = pl.run_scoped(go, *sums)

        @pl.when(count > 0)
        def _():
            queries.release(count - 1)
            queries.refill(count - 1)

        store([acc * scoring.scale for acc in accs], operand, dk)


def _divided(j: Array, by: Array, most: int) -> tuple[Array, Array]:
    """Returns the quotient and the remainder of j / by; the quotient is below `most`.

    The compiler calls a function to divide by a variable, and with a call only one
    wgmma runs at a time.
    """
    quotient = jnp.int32(0)
    for i in range(1, most):
        quotient += (j >= i * by).astype(jnp.int32)
    return quotient, j - quotient * by
