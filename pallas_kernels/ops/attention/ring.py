"""Tiles of an array that pass through a ring of stages in shared memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.ops.attention.plan import WARPGROUPS, Tiles


@dataclasses.dataclass(frozen=True)
class Ring:
    """Tiles of an array that pass through a ring of stages in shared memory.

    The argument `step` of methods is the number of a tile.

    Attributes:
      smem: The stages, [stages, rows, d].
      filled: Barriers that complete when a tile has arrived in its stage.
      free: Barriers that complete when no warpgroup reads a stage any longer.
      source: A function from a tile's number to the tile in global memory.
      count: The number of tiles.
      loader: The warpgroup that starts the copies.
    """

    smem: Any
    filled: Any
    free: Any
    source: Callable[[Array], Any]
    count: Array
    loader: int = 0

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.smem.shape[0]

    def fill(self) -> None:
        """Starts the copies of the first tiles, which fill all stages."""

        @pl.when(lax.axis_index("warpgroup") == self.loader)
        def _():
            for step in range(self.stages):
                pl.when(step < self.count)(lambda step=step: self._copy(step))

    def at(self, step: Array, use: int = 0) -> Any:
        """Returns the stage of a tile, for one of its uses; see `zero_of`."""
        return resident(self.smem, self._index(step), step, use)

    def wait(self, step: Array) -> None:
        """Waits until a tile has arrived in its stage."""
        plgpu.barrier_wait(self.filled.at[self._index(step)])

    def release(self, step: Array) -> None:
        """Signals that this warpgroup has read a tile."""
        plgpu.barrier_arrive(self.free.at[self._index(step)])

    def refill(self, step: Array) -> None:
        """Fills the stage of a tile that this warpgroup has released.

        The loader waits for the other warpgroup, and starts the copy of the tile that
        is next in this stage. It waits even if there is no such tile: a thread block
        must not end before the last arrival at its barriers.
        """

        @pl.when(lax.axis_index("warpgroup") == self.loader)
        def _():
            plgpu.barrier_wait(self.free.at[self._index(step)])
            following = step + self.stages
            pl.when(following < self.count)(lambda: self._copy(following))

    def _index(self, step: Array | int) -> Array | int:
        return 0 if self.stages == 1 else lax.rem(step, self.stages)

    def _copy(self, step: Array | int) -> None:
        index = step % self.stages if isinstance(step, int) else self._index(step)
        to = self.smem.at[index]
        plgpu.copy_gmem_to_smem(self.source(step), to, self.filled.at[index])


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """The queries of a warpgroup, and the tiles of keys that they attend to.

    Attributes:
      warpgroup: The number of the warpgroup.
      batch: The number of the sequence.
      head: The number of the head.
      key_head: The number of the head of keys and values.
      row: The position of the first query.
      height: The number of queries.
      first: The number of the first tile of keys.
      count: The number of tiles of keys.
      keys: The number of keys in a tile.
    """

    warpgroup: Array
    batch: Array
    head: Array
    key_head: Array
    row: Array
    height: int
    first: Array
    count: Array
    keys: int

    @classmethod
    def of(cls, q: Any, k: Any, spans: Any, tiles: Tiles) -> "QueryTile":
        """Returns the queries of this warpgroup.

        Args:
          q: Queries [b, s, n, d] in global memory.
          k: Keys [b, s, m, d].
          spans: The result of `plan.spans_of_keys`.
          tiles: The sizes of tiles.
        """
        b, s, n, _ = q.shape
        warpgroup = lax.axis_index("warpgroup")
        height = tiles.queries // WARPGROUPS
        # The last tiles of queries take longest, and come first.
        block, batch, head = place(b, n)
        block = s // tiles.queries - 1 - block
        row = block * tiles.queries + warpgroup * height
        span = spans.at[0 if spans.shape[0] == 1 else batch, block]
        first, count = span[0], span[1] - span[0]
        key_head = lax.div(head, n // k.shape[2])
        return cls(
            warpgroup=warpgroup,
            batch=batch,
            head=head,
            key_head=key_head,
            row=row,
            height=height,
            first=first,
            count=count,
            keys=tiles.keys,
        )

    @property
    def rows(self) -> tuple[Any, ...]:
        """The index of the queries in arrays [b, s, n, d]."""
        return self.batch, pl.ds(self.row, self.height), self.head

    @property
    def statistics(self) -> tuple[Any, ...]:
        """The index of the queries in arrays [b, n, s]."""
        return self.batch, self.head, pl.ds(self.row, self.height)

    def ring(self, x: Any, smem: Any, barriers: dict[str, Any]) -> Ring:
        """Returns the tiles of keys or values that the queries attend to."""

        def source(j):
            start = (self.first + j) * self.keys
            return x.at[self.batch, pl.ds(start, self.keys), self.key_head]

        return Ring(smem, source=source, count=self.count, **barriers)


def ring_barriers(stages: int) -> dict[str, Any]:
    """Returns the barriers of a ring, by their names in `Ring`."""
    return {
        "filled": plgpu.Barrier(num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    }


def swizzled(count: int, rows: int, columns: int) -> Any:
    """Returns `count` BF16 tiles in shared memory, as the tensor cores read them."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((count, rows, columns), jnp.bfloat16, transforms=transforms)


def place(batch: int, heads: int) -> tuple[Array, Array, Array]:
    """Returns the tile, the sequence and the head of this thread block.

    Consecutive thread blocks have the same tile of different heads.
    """
    index = lax.axis_index("cta")
    block, within = lax.div(index, batch * heads), lax.rem(index, batch * heads)
    return block, lax.div(within, heads), lax.rem(within, heads)


def settings(ctas: int) -> dict[str, Any]:
    """Returns the launch settings of a kernel with `ctas` thread blocks."""
    return dict(
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
    )


def accumulated(acc: Array, multiply: Callable[[Any], None]) -> Array:
    """Returns an accumulator after `multiply` has added products to a ref to it."""
    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def accumulator(rows: int, columns: int) -> Any:
    """Returns an accumulator of the tensor cores, with zeros."""
    return plgpu.ACC((rows, columns), jnp.float32)


def filled(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    """Returns an array in registers with the same number everywhere."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def resident(smem: Any, index: Array | int, step: Array, use: int = 0) -> Any:
    """Returns a ref to a tile in shared memory, for a use in a step of a loop.

    Its address is computed in this step; see `zero_of`.
    """
    return smem.at[index + zero_of(step, use)]


def zero_of(step: Array, use: int = 0) -> Array:
    """Returns the number 0, computed from the numbers of a step and of a use in it.

    The compiler does not know that it is 0. Otherwise it would compute numbers that are
    the same in all steps before the loop, and spill them: addresses of all parts of a
    tile, or positions of all columns.
    """
    return lax.shift_right_logical(step + use, 20)
