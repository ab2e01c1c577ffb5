"""The tile scheduler of a matmul, and the pipeline of stages in shared memory."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.ops.matmul.plan import TILE_K, Tuning


@dataclasses.dataclass(frozen=True)
class Place:
    """The rows of a and b from which a tile of the result is computed.

    Attributes:
      rows: The tile's rows of a.
      columns: The tile's rows of b, which are columns of the result.
    """

    rows: Any
    columns: Any


@dataclasses.dataclass(frozen=True)
class Visit:
    """A tile that a thread block computes.

    Attributes:
      number: The number of tiles that the thread block computes before this tile.
      place: The place of the tile.
      steps: The number of the tile's steps along k.
    """

    number: Array
    place: Place
    steps: int | Array

    def position(self, step: Array) -> Array:
        """Returns the number of steps before a step, in all tiles of the block."""
        return self.number * self.steps + step


class Walk:
    """The tile scheduler: a thread block's output tiles, and their steps along k.

    Grouped matmuls have schedulers that inherit from this one.
    """

    def __init__(
        self, tuning: Tuning, shape: tuple[int, int, int], tile_k: int = TILE_K
    ) -> None:
        m, n, k = shape
        self.tuning = tuning
        self.tile_k = tile_k
        self.steps = k // tile_k
        self.shape = m, n
        self.grid = (-(-m // tuning.span[0]), -(-n // tuning.span[1]))
        self.total = self.grid[0] * self.grid[1]

    def tiles(self, body: Callable) -> None:
        """Calls `body` with the `Visit` of each tile of this thread block.

        The last tiles may overlap with others. Shared elements are computed and written
        twice, with the same values.
        """

        @pl.loop(0, self.count())
        def _(number):
            body(self.visit(number))

    def visit(self, number: Array) -> Visit:
        """Returns the `Visit` of a tile, by its number in this thread block."""
        return Visit(number, self.place(number), self.steps)

    def place(self, number: Array) -> Place:
        """Returns the place of a tile, by its number in this thread block."""
        index = lax.axis_index("sm") + number * lax.axis_size("sm")
        return Place(*self.parts(index))

    def parts(self, index: Array) -> tuple[Any, Any]:
        """Returns the rows and columns of a tile, by its number among all tiles."""
        t, (m, n) = self.tuning, self.shape
        at = snake(index, self.grid, t.width)
        if t.cluster:
            # The two thread blocks of a cluster have neighbouring tiles.
            axis = "mn".index(t.cluster)
            at[axis] = 2 * at[axis] + lax.axis_index("pair")
        rows = lax.min(at[0] * t.tile_m, m - t.tile_m)
        columns = lax.min(at[1] * t.tile_n, n - t.tile_n)
        return pl.ds(rows, t.tile_m), pl.ds(columns, t.tile_n)

    def all_steps(self) -> Array:
        """Returns the number of steps along k in all tiles of this thread block."""
        return self.count() * self.steps

    def step_at(self, position: Array, number: Array | int) -> tuple[Array, Array]:
        """Returns the tile and the step at a position among the steps of all tiles.

        `number` is a tile to search from, for tiles with different numbers of steps.
        The position is in this tile, or at most as many steps after it as there are
        stages in the pipeline.
        """
        del number  # All tiles have the same number of steps.
        return lax.div(position, self.steps), lax.rem(position, self.steps)

    def count(self) -> Array:
        """Returns the number of tiles of this thread block."""
        blocks = lax.axis_size("sm")
        return lax.div(self.total - lax.axis_index("sm") + blocks - 1, blocks)


def snake(index: Array, grid: tuple[int, int], width: int) -> list[Array]:
    """Returns the row and column of a tile, by its number in the order of visits.

    The visits go over stripes of `width` rows, and within a stripe column by column,
    backwards in every other stripe. The last stripe can have fewer rows. `index` is
    less than 2**20.
    """
    rows, columns = grid
    full, fewer = divmod(rows, width)
    last = LastStripe(full, fewer, 1 / fewer) if fewer else None
    return in_stripes(index, columns, width, last)


class LastStripe(NamedTuple):
    """The last stripe of tiles, if it has fewer rows than the others.

    Attributes:
      index: The index of the stripe among all stripes.
      rows: The number of its rows.
      share: 1 / rows.
    """

    index: int | Array
    rows: int | Array
    share: float | Array


def in_stripes(
    index: Array, columns: int, width: int, last: LastStripe | None
) -> list[Array]:
    """Returns the row and column of a tile, as `snake` does.

    The number of rows of the grid may be known on the device only. `last` describes the
    last stripe, if it has, or may have, fewer rows than the others.
    """
    stripe, within = (f(index, width * columns) for f in (lax.div, lax.rem))
    column, row = lax.div(within, width), lax.rem(within, width)
    if last is not None:
        # A division by `width` or `last.rows` would become one by a variable. The
        # compiler calls a function for it, and with a call only one wgmma runs at a
        # time.
        share = (within.astype(jnp.float32) + 0.5) * last.share
        column_of_last = share.astype(jnp.int32)
        is_last = stripe == last.index
        column = lax.select(is_last, column_of_last, column)
        row = lax.select(is_last, within - column_of_last * last.rows, row)
    backwards = lax.rem(stripe, 2) == 1
    return [stripe * width + row, lax.select(backwards, columns - 1 - column, column)]


@dataclasses.dataclass(frozen=True)
class Stages:
    """The pipeline of stages in shared memory, for the steps along k of all tiles.

    Attributes:
      walk: The tile scheduler.
      a: The rows of a for each stage, [stages, tile_m, 128].
      b: The rows of b for each stage, [stages, tile_n, 128].
      filled: Barriers that complete when a step has arrived in its stage.
      free: Barriers that complete when no warpgroup reads a stage any longer.
      scales: The scales of a's rows and of b's blocks for each stage; None without
        per-block scales.
      copies: A function of a step, a tile's `Place`, a stage and a barrier. It starts
        the copies of the step into the stage, which arrive at the barrier.
    """

    walk: Walk
    a: Any
    b: Any
    filled: Any
    free: Any
    scales: tuple[Any, Any] | None
    copies: Callable

    def fill(self) -> None:
        """Starts the copies of the first steps, which fill all stages."""

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            @pl.loop(0, lax.min(self.walk.all_steps(), self.walk.tuning.stages))
            def _(position):
                self._load(position, 0)

    def _load(self, position: Array, number: Array | int) -> None:
        """Starts the copies of a step, which is counted over all tiles.

        Tile `number` is the step's tile or an earlier one; see `Walk.step_at`.
        """
        number, step = self.walk.step_at(position, number)
        stage = lax.rem(position, self.walk.tuning.stages)
        barrier = self._own(self.filled, number, stage)
        self.copies(step, self.walk.place(number), stage, barrier)

    def wait(self, visit: Visit, step: Array) -> None:
        """Waits until a step of a tile has arrived in its stage."""
        plgpu.barrier_wait(self._own(self.filled, visit.number, self.at(visit, step)))

    def release(self, visit: Visit, step: Array) -> None:
        """Signals that this warpgroup has read a step of a tile."""
        plgpu.barrier_arrive(self._own(self.free, visit.number, self.at(visit, step)))

    def refill(self, visit: Visit, step: Array) -> None:
        """Fills the stage of a step that this warpgroup has released.

        One of the warpgroups that read the step waits for the others, and starts the
        copies of the step that is next in this stage.
        """
        free = self._own(self.free, visit.number, self.at(visit, step))

        def fill():
            # After the last step, too: a thread block must not end before the last
            # arrival at its barriers.
            plgpu.barrier_wait(free)
            following = visit.position(step) + self.walk.tuning.stages
            pl.when(following < self.walk.all_steps())(
                lambda: self._load(following, visit.number)
            )

        if self.walk.tuning.together:
            pl.when(lax.axis_index("warpgroup") == 0)(fill)
        else:
            fill()

    def at(self, visit: Visit, step: Array) -> Array:
        """Returns the stage of a step of a tile."""
        return lax.rem(visit.position(step), self.walk.tuning.stages)

    def _own(self, barriers: Any, number: Array, stage: Array) -> Any:
        """Returns the barrier of a stage for the warpgroups that compute a tile.

        Each ping-pong warpgroup has barriers of its own. A warpgroup that does not wait
        for every completion of a barrier cannot tell whether the barrier has completed.
        """
        tuning = self.walk.tuning
        turn = 0 if tuning.together else lax.rem(number, tuning.warpgroups)
        return barriers.at[turn * tuning.stages + stage]
