"""Who computes what of a matrix product when, and what is in shared memory then."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.ops.matmul.plan import TILE_K, Tuning


class Walk:
    """The tiles of an output that a thread block computes, and steps along k."""

    def __init__(self, tuning: Tuning, shape: tuple[int, int, int]) -> None:
        m, n, k = shape
        self.tuning = tuning
        self.steps = k // TILE_K
        self.shape = m, n
        self.grid = (-(-m // tuning.span[0]), -(-n // tuning.span[1]))
        self.total = self.grid[0] * self.grid[1]

    def tiles(self, body: Callable) -> None:
        """Calls `body` with a tile's number, rows and columns.

        The last tiles overlap with others: what they share is computed and written
        twice, alike.
        """
        t, (m, n) = self.tuning, self.shape

        @plgpu.nd_loop((self.total,), collective_axes="sm")
        def _(info):
            at = list(plgpu.planar_snake(info.index[0], self.grid, 0, t.width))
            if t.cluster:
                axis = "mn".index(t.cluster)
                at[axis] = 2 * at[axis] + lax.axis_index("pair")
            rows = lax.min(at[0] * t.tile_m, m - t.tile_m)
            columns = lax.min(at[1] * t.tile_n, n - t.tile_n)
            rows, columns = pl.ds(rows, t.tile_m), pl.ds(columns, t.tile_n)
            body(info.local_index, rows, columns)

    def all_steps(self) -> Array:
        """Steps along k of all tiles that this thread block computes."""
        blocks = lax.axis_size("sm")
        mine = lax.div(self.total - lax.axis_index("sm") + blocks - 1, blocks)
        return mine * self.steps


@dataclasses.dataclass(frozen=True)
class Stages:
    """Shared memory, which steps along k of one tile after another pass through.

    Attributes:
      walk: These tiles.
      a: Rows of a for each stage.
      b: Rows of b.
      filled: Barriers that complete when a step is there.
      free: Barriers that complete when nobody reads a stage any longer.
      scales: With blocks, those of a's rows and of b's blocks.
    """

    walk: Walk
    a: Any
    b: Any
    filled: Any
    free: Any
    scales: tuple[Any, Any] | None

    def fill(self, number: Array, step: Array, copies: Callable) -> None:
        """Calls `copies` with the stage and its barrier, once it is free."""
        position = number * self.walk.steps + step
        stage = self.at(number, step)

        @pl.when(position >= self.walk.tuning.stages)
        def _():
            plgpu.barrier_wait(self.free.at[stage])

        copies(stage, self._filled(number, stage))

    def wait(self, number: Array, step: Array) -> None:
        """Waits until a step of a tile is there."""
        plgpu.barrier_wait(self._filled(number, self.at(number, step)))

    def release(self, number: Array, step: Array) -> None:
        """Says that this warpgroup has read it."""
        plgpu.barrier_arrive(self.free.at[self.at(number, step)])

    def drain(self) -> None:
        """Waits until all that was filled is free."""
        stages = self.walk.tuning.stages

        @pl.loop(0, stages)
        def _(j):
            position = self.walk.all_steps() - 1 - j

            @pl.when(position >= 0)
            def _():
                plgpu.barrier_wait(self.free.at[lax.rem(position, stages)])

    def at(self, number: Array, step: Array) -> Array:
        """The stage of a step of a tile."""
        return lax.rem(number * self.walk.steps + step, self.walk.tuning.stages)

    def _filled(self, number: Array, stage: Array) -> Any:
        """The barrier of a stage.

        Warpgroups that take turns have barriers of their own: who does not wait for a
        barrier each time it completes cannot tell whether it did.
        """
        tuning = self.walk.tuning
        turn = 0 if tuning.together else lax.rem(number, tuning.warpgroups)
        return self.filled.at[turn * tuning.stages + stage]
