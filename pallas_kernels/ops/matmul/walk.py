"""The tile scheduler of a matmul, and the pipeline of stages in shared memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.ops.matmul.plan import TILE_K, Tuning


class Walk:
    """The tile scheduler: a thread block's output tiles, and their steps along k."""

    def __init__(self, tuning: Tuning, shape: tuple[int, int, int]) -> None:
        m, n, k = shape
        self.tuning = tuning
        self.steps = k // TILE_K
        self.shape = m, n
        self.grid = (-(-m // tuning.span[0]), -(-n // tuning.span[1]))
        self.total = self.grid[0] * self.grid[1]

    def tiles(self, body: Callable) -> None:
        """Calls `body` with the number, rows and columns of each of the tiles.

        The number counts the tiles of this thread block. The last tiles overlap with
        others. Shared elements are computed and written twice, with the same values.
        """
        t, (m, n) = self.tuning, self.shape

        @plgpu.nd_loop((self.total,), collective_axes="sm")
        def _(info):
            at = list(plgpu.planar_snake(info.index[0], self.grid, 0, t.width))
            if t.cluster:
                # The two thread blocks of a cluster have neighbouring tiles.
                axis = "mn".index(t.cluster)
                at[axis] = 2 * at[axis] + lax.axis_index("pair")
            rows = lax.min(at[0] * t.tile_m, m - t.tile_m)
            columns = lax.min(at[1] * t.tile_n, n - t.tile_n)
            rows, columns = pl.ds(rows, t.tile_m), pl.ds(columns, t.tile_n)
            body(info.local_index, rows, columns)

    def all_steps(self) -> Array:
        """Returns the number of steps along k in all tiles of this thread block."""
        blocks = lax.axis_size("sm")
        mine = lax.div(self.total - lax.axis_index("sm") + blocks - 1, blocks)
        return mine * self.steps


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
    """

    walk: Walk
    a: Any
    b: Any
    filled: Any
    free: Any
    scales: tuple[Any, Any] | None

    def fill(self, number: Array, step: Array, copies: Callable) -> None:
        """Waits until the stage is free, and calls `copies` with it and its barrier."""
        position = number * self.walk.steps + step
        stage = self.at(number, step)

        @pl.when(position >= self.walk.tuning.stages)
        def _():
            plgpu.barrier_wait(self.free.at[stage])

        copies(stage, self._filled(number, stage))

    def wait(self, number: Array, step: Array) -> None:
        """Waits until a step of a tile has arrived in its stage."""
        plgpu.barrier_wait(self._filled(number, self.at(number, step)))

    def release(self, number: Array, step: Array) -> None:
        """Signals that this warpgroup has read a step of a tile."""
        plgpu.barrier_arrive(self.free.at[self.at(number, step)])

    def drain(self) -> None:
        """Waits until all filled stages are free."""
        stages = self.walk.tuning.stages

        @pl.loop(0, stages)
        def _(j):
            position = self.walk.all_steps() - 1 - j

            @pl.when(position >= 0)
            def _():
                plgpu.barrier_wait(self.free.at[lax.rem(position, stages)])

    def at(self, number: Array, step: Array) -> Array:
        """Returns the stage of a step of a tile."""
        return lax.rem(number * self.walk.steps + step, self.walk.tuning.stages)

    def _filled(self, number: Array, stage: Array) -> Any:
        """Returns the barrier that completes when a stage is filled.

        Each ping-pong warpgroup has barriers of its own. A warpgroup that does not wait
        for every completion of a barrier cannot tell whether the barrier has completed.
        """
        tuning = self.walk.tuning
        turn = 0 if tuning.together else lax.rem(number, tuning.warpgroups)
        return self.filled.at[turn * tuning.stages + stage]
