"""The work of a warpgroup on a tile of a matmul: main loop, scaling, epilogue."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.numerics import floats, magnitude_bits
from pallas_kernels.ops.matmul.plan import (
    BLOCK,
    PIECE_M,
    SCALES,
    TILE_K,
    Product,
    Tuning,
)
from pallas_kernels.ops.matmul.walk import Place, Stages, Visit


@dataclasses.dataclass(frozen=True)
class Tile:
    """The work of a warpgroup on its rows of a tile.

    Attributes:
      product: The options of the matmul.
      tuning: The settings of the kernel.
      stages: The pipeline of stages in shared memory.
      a_scale: The scales of a in global memory.
      b_scale: The scales of b in global memory.
      more: The bias and the array to add, or the cosines and sines of RoPE's angles.
      out: The results in global memory.
      maxima: The amaxes to write in global memory, or None.
      out_smem: The shared memory in which results are staged.
    """

    product: Product
    tuning: Tuning
    stages: Stages
    a_scale: Any
    b_scale: Any
    more: tuple[Any, ...]
    out: tuple[Any, ...]
    maxima: Any
    out_smem: Any

    def compute(self, visit: Visit, part) -> None:
        """Computes and stores the rows of one part of the tile."""
        place, band = visit.place, pl.ds(part * self.tuning.height, self.tuning.height)
        rows, columns = place.rows, place.columns
        # Loads start before the main loop, and overlap with it.
        scaled = self._scaling(place, band)
        addends = self._added(rows, columns, band) if self.product.accumulate else None
        angles = self._angles(rows, band) if self.product.heads else None
        if self.product.promote is None:
            sums = (self._sum(visit, band),)
        else:
            sums = self._promoted_sum(visit, band)
        pieces = self._scaled(sums, scaled)
        if self.product.bias:
            pieces = self._biased(pieces, columns)
        if angles is not None:
            pieces = self._turned(pieces, angles, columns)
        self._store(pieces, addends, place, band)

    def _sum(self, visit: Visit, band):
        """Sums over all of k in the accumulator of the tensor cores."""
        stages, steps = self.stages, visit.steps

        def sum_in(acc):
            @pl.loop(0, steps)
            def _(step):
                stages.wait(visit, step)
                at = stages.at(visit, step)
                plgpu.wgmma(acc, stages.a.at[at, band], stages.b.at[at].T)
                # Only the newest wgmma is still running: the stage before is free.
                plgpu.wgmma_wait(1)

                @pl.when(step > 0)
                def _():
                    stages.release(visit, step - 1)
                    stages.refill(visit, step - 1)

            value = acc[...]
            stages.release(visit, steps - 1)
            stages.refill(visit, steps - 1)
            return value

        shape = (self.tuning.height, self.tuning.tile_n)
        return pl.run_scoped(sum_in, plgpu.ACC(shape, jnp.float32))

    def _promoted_sum(self, visit: Visit, band):
        """Sums `promote` elements of k at a time, and adds up these sums in float32.

        While one sum is promoted, the tensor cores compute the next one, within one
        iteration of the loop.
        """
        t, steps = self.tuning, visit.steps
        every = self.product.promote // TILE_K
        together = every * t.chunks

        def chunks(first, lengths, sums):
            pieces = []
            for length in lengths:
                at = [first + j for j in range(length)]
                pieces += [_Piece(at, part) for part in range(t.parts)]
                first = first + length
            return self._pieces(visit, band, pieces, None, sums)

        # Filling a stage again waits for all warpgroups that read it, while this one
        # does not multiply. An iteration later they have read it.
        behind = 2 if t.stages >= 3 * together else 1

        def refill(j, count=together):
            for step in range(count):
                self.stages.refill(visit, j * together + step)

        def body(j, sums):
            # Here no accumulator is alive. That matters because compilers move
            # additions beyond a branch, so that they need more registers.
            pl.when(j >= behind)(lambda: refill(j - behind))
            return chunks(j * together, [every] * t.chunks, sums)

        shape = (t.height, t.tile_n // t.parts)
        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        whole = steps // together
        sums = lax.fori_loop(0, whole, body, (zero,) * t.parts)
        for j in range(max(whole - behind, 0), whole):
            refill(j)
        # The remaining steps do not fill an iteration of the loop.
        rest = steps % together
        lengths = [every] * (rest // every) + [rest % every] * (rest % every > 0)
        if rest:
            sums = chunks(steps - rest, lengths, sums)
            refill(whole, rest)
        return sums

    def _pieces(self, visit: Visit, band, todo, running, sums):
        """Returns the sums after the pieces of `todo` and the running piece.

        It starts the first piece of `todo`, promotes the running piece, then recurses.
        """
        t, stages = self.tuning, self.stages
        width = t.tile_n // t.parts

        def promoted(waiting):
            piece, acc, scales = running
            value = plgpu.wgmma_accumulator_load(acc, wait_n=waiting)
            if piece.part == t.parts - 1:
                for step in piece.steps:
                    stages.release(visit, step)
            if scales is not None:
                value = value * lax.broadcast_in_dim(scales, value.shape, (0,))
            after = list(sums)
            after[piece.part] = after[piece.part] + value
            return tuple(after)

        if not todo:
            return promoted(0)

        piece, *rest = todo
        if piece.part == 0:
            # Waits before the accumulator exists: with a branch between its zeros and
            # the first wgmma, compilers let no other wgmma run at the same time.
            for step in piece.steps:
                stages.wait(visit, step)

        def start(acc):
            part = pl.ds(piece.part * width, width)
            for step in piece.steps:
                at = stages.at(visit, step)
                plgpu.wgmma(acc, stages.a.at[at, band], stages.b.at[at, part].T)
            # All parts of a step have the same row scales.
            scales = running[2] if piece.part else None
            if self.product.scaling == "blocks" and not piece.part:
                scales = self._block_scales(
                    stages.at(visit, *piece.steps), visit.place, band
                )
            after = promoted(len(piece.steps)) if running else sums
            started = (piece, acc, scales)
            return self._pieces(visit, band, rest, started, after)

        return pl.run_scoped(start, plgpu.ACC((t.height, width), jnp.float32))

    def _block_scales(self, stage, place: Place, band):
        """Returns the scales of a step's sums, a_scale * b_scale, one per row."""
        a_scale, b_scale = self.stages.scales
        block = lax.rem(lax.div(place.columns.start, BLOCK), SCALES)
        return load_rows(a_scale.at[stage, band]) * b_scale[stage, block]

    def _store(self, pieces, addends, place: Place, band) -> None:
        """Stores the subtiles of a finished tile of the result.

        Before that it adds `addends`, and writes the amax of each row of the tile, if
        the product has these options.

        Args:
          pieces: An iterator over (row, column, value) of the subtiles in the tile.
          addends: The subtiles of the array to add, or None.
          place: The rows and columns of the tile in the result.
          band: The rows of this warpgroup in the tile.
        """
        rows, columns = place.rows, place.columns
        largest = None
        transposed = self.tuning.transposed
        out = [
            x.at[:, rows].at[:, band] if transposed else x.at[rows].at[band]
            for x in self.out
        ]
        smem = self.out_smem.at[lax.axis_index("warpgroup")]
        for number, (i, j, value) in enumerate(pieces):
            where = pl.ds(i, PIECE_M), pl.ds(columns.start + j, value.shape[1])
            if addends is not None:
                value = value + next(addends).astype(jnp.float32)
            if self.product.maxima:
                largest = larger(largest, value, j)
                # The amax of a row is complete with its last subtile.
                if j + value.shape[1] == self.tuning.tile_n:
                    tile = pl.cdiv(columns.start, self.tuning.tile_n)
                    to = self.maxima.at[tile, rows].at[band].at[where[0]]
                    mosaic.store(to, row_maxima(largest))
            staged = smem.at[number % smem.shape[0]]
            # The copy engine must have read the previous subtile of this buffer.
            plgpu.wait_smem_to_gmem(smem.shape[0] - 1, wait_read_only=True)
            value = value.astype(self.product.out_dtype)
            if transposed:
                # Subtiles are square here, so that the buffer fits the transpose, too.
                turned = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
                staged.transpose((1, 0))[...] = turned
                where = where[::-1]
            else:
                staged[...] = value
            plgpu.commit_smem()
            self._send(staged, out, *where)

    def _scaled(self, sums, scaled):
        """Yields each subtile as its row and column in the tile, and scaled values."""
        t = self.tuning
        width, store_n = t.tile_n // len(sums), t.store_n(self.product)
        for i in range(0, t.height, PIECE_M):
            for j in range(0, t.tile_n, store_n):
                part, at = divmod(j, width)
                value = sums[part][i : i + PIECE_M, at : at + store_n]
                yield i, j, scaled(value, i, j)

    def _biased(self, pieces, columns):
        """Yields epilogue subtiles with the bias of each column added."""
        bias, *_ = self.more
        for i, j, value in pieces:
            of_columns = load_columns(bias.at[columns].at[pl.ds(j, value.shape[1])])
            yield i, j, value + lax.broadcast_in_dim(of_columns, value.shape, (1,))

    def _turned(self, pieces, angles, columns):
        """Yields epilogue subtiles with RoPE applied to queries and keys."""
        size, _ = self.product.heads
        half, width = size // 2, self._angles_held
        for i, of_rows in itertools.groupby(pieces, key=operator.itemgetter(0)):
            _, starts, values = zip(*of_rows, strict=True)
            row = jnp.concatenate(values, axis=1)
            heads = range(0, row.shape[1], size)
            turned = {}
            # Angles are loaded once, for all heads of the tile.
            for at, angle in zip(range(0, half, width), angles, strict=False):
                for head in heads:
                    x, y = head + at, head + half + at
                    both = row[:, x : x + width], row[:, y : y + width]
                    turned[x], turned[y] = self._turn(columns.start + head, both, angle)
            row = jnp.concatenate([turned[at] for at in sorted(turned)], axis=1)
            for at, value in zip(starts, values, strict=True):
                yield i, at, row[:, at : at + value.shape[1]]

    def _turn(self, column, both, angle):
        """Applies RoPE to a part of both halves of a head; values stay as they are."""

        def turn(x, y, cos, sin):
            return x * cos - y * sin, y * cos + x * sin

        def stay(x, y, *_):
            return x, y

        _, index = self._head(column)
        value = index > self.product.heads.queries
        return lax.cond(value, stay, turn, *both, *angle)

    @property
    def _angles_held(self) -> int:
        """The number of angles per position that are in registers at a time."""
        return math.gcd(self.product.heads.size // 2, 8)

    def _angles(self, rows, band):
        """Returns an iterator over cosines and sines, in the order of their use."""
        t, size, width = self.tuning, self.product.heads.size, self._angles_held

        def load(place):
            i, at = place
            start = lax.rem(rows.start + band.start + i, self.more[0].shape[0])
            where = pl.ds(start, PIECE_M), pl.ds(at, width)
            return [_load_tile(angles.at[where]) for angles in self.more]

        starts = range(0, t.height, PIECE_M), range(0, size // 2, width)
        return _ahead(load, itertools.product(*starts))

    def _head(self, column):
        """Returns the key head that a column belongs to, and the column's head in it.

        The latter counts the key head's queries, then its key, then its value.
        """
        size, queries = self.product.heads
        head = lax.div(column, size)
        return lax.div(head, queries + 2), lax.rem(head, queries + 2)

    def _send(self, staged, out, rows, columns) -> None:
        """Hands a staged subtile to the copy engine.

        `rows` and `columns` are the places of the subtile in the results `out`.
        """
        heads = self.product.heads
        if heads is None:
            plgpu.copy_smem_to_gmem(staged, out[0].at[rows, columns])
            return
        key_head, index = self._head(columns.start)
        within = lax.rem(columns.start, heads.size)

        def send(to, head):
            place = rows, pl.ds(head * heads.size + within, columns.size)
            for copy, ref in enumerate(to, 1):
                # All copies of a subtile form one commit group.
                last = copy == len(to)
                plgpu.copy_smem_to_gmem(staged, ref.at[place], commit_group=last)

        q, k, v = (out[i::3] for i in range(3))
        queries = heads.queries
        pl.when(index < queries)(lambda: send(q, key_head * queries + index))
        pl.when(index == queries)(lambda: send(k, key_head))
        pl.when(index > queries)(lambda: send(v, key_head))

    def _added(self, rows, columns, band):
        """Returns an iterator over subtiles of the array to add to the product."""
        (*_, array), t = self.more, self.tuning
        array = array.at[rows].at[band].at[:, columns]
        store_n = t.store_n(self.product)

        def load(place):
            return _load_tile(
                array.at[pl.ds(place[0], PIECE_M), pl.ds(place[1], store_n)]
            )

        starts = range(0, t.height, PIECE_M), range(0, t.tile_n, store_n)
        return _ahead(load, itertools.product(*starts))

    def _scaling(self, place: Place, band):
        """Returns a function that scales the subtile at row i, column j of the tile."""
        store_n = self.tuning.store_n(self.product)
        shape = (PIECE_M, store_n)
        if self.product.scaling == "tensor":
            factor = self.a_scale[0] * self.b_scale[0]
            return lambda value, i, j: value * factor
        if self.product.scaling == "blocks":
            # Sums are scaled when they are promoted.
            return lambda value, i, j: value

        a_scale = self.a_scale.at[place.rows].at[band]
        starts = range(0, self.tuning.height, PIECE_M)
        of_rows = {i: load_rows(a_scale.at[pl.ds(i, PIECE_M)]) for i in starts}

        def scaled(value, i, j):
            value = value * lax.broadcast_in_dim(of_rows[i], shape, (0,))
            if self.b_scale.shape == (1,):
                return value
            b_scale = load_columns(self.b_scale.at[place.columns].at[pl.ds(j, store_n)])
            return value * lax.broadcast_in_dim(b_scale, shape, (1,))

        return scaled


class _Piece(NamedTuple):
    """A sum over some steps along k, in one part of a tile's columns."""

    steps: list[Array]
    part: int


def _ahead(load: Callable, places: Iterable[Any]) -> Iterator[Any]:
    """Returns an iterator over `load(place)` that loads one place ahead.

    The first place is loaded at once. The loads therefore overlap with other work.
    """
    first, *others = places
    held = load(first)

    def pieces(held):
        for place in others:
            before, held = held, load(place)
            yield before
        yield held

    return pieces(held)


def _load_tile(ref: Any) -> Array:
    """Loads an array in the register layout of the accumulator."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def larger(largest: Array | None, value: Array, column: int) -> Array:
    """Returns the largest magnitudes of a row's subtiles so far, elementwise.

    The subtile at column 0 is the first.
    """
    size = jnp.abs(value)
    return size if column == 0 else jnp.maximum(largest, size)


def row_maxima(magnitudes: Array) -> Array:
    """Returns the largest magnitude of each row of a subtile."""
    return floats(jnp.max(magnitude_bits(magnitudes), axis=1))


def load_rows(ref: Any) -> Array:
    """Loads one number per row, in the layout of the accumulator's rows."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def load_columns(ref: Any) -> Array:
    """Loads one number per column, in the layout of the accumulator's columns."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
