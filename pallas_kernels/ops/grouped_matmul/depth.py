"""The kernel of matmuls that are grouped along k, for Hopper GPUs.

It is the dense matmul's kernel with another tile scheduler. The number of tiles is
known when the kernel is compiled. The number of steps along k of a tile depends on its
group, and is known on the device only:

- XLA adds up the steps of each thread block's tiles (`_schedule`). The sums give
  the stage of a step, and the tile of the step that is next in a stage. Copies
  therefore run ahead over several tiles, as in the dense matmul.
- Each group begins at a multiple of 128 rows, with zeros between groups, so that no
  step has rows of two groups.
- A group without rows has one step, and its sum is dropped. So no tile needs a branch.
"""

import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.ops.grouped_matmul.tiles import padded_starts
from pallas_kernels.ops.matmul import kernel as matmul_kernel
from pallas_kernels.ops.matmul.plan import Product, Tuning, tile_k
from pallas_kernels.ops.matmul.tile import Tile
from pallas_kernels.ops.matmul.walk import Place, Stages, Visit, Walk

_NEVER = 2**30


# `jit` traces the kernel once for all calls with the same shapes.
@functools.partial(jax.jit, static_argnames=("product", "tuning", "sms"))
def run(
    product: Product,
    a: Array,
    b: Array,
    scale: Array | None,
    group_sizes: Array,
    tuning: Tuning,
    sms: int,
) -> Array:
    """Computes the products a @ b.T of each group's columns, [groups, n, k].

    a is [n, padded rows], b is [k, padded rows], and the scale [groups], [1] or None.
    """
    (n, rows), (k, _), groups = a.shape, b.shape, len(group_sizes)
    walk = DepthWalk(tuning, (n, k, rows), tile_k(a.dtype), groups)
    settings = matmul_kernel.settings(tuning, walk.total, sms)
    (blocks,) = settings["grid"]
    first = padded_starts(group_sizes) // walk.tile_k
    sums = _schedule(walk, group_sizes, blocks)
    return mosaic.kernel(
        functools.partial(_kernel, product, walk),
        out_type=jax.ShapeDtypeStruct((groups * n, k), product.out_dtype),
        scratch_types=matmul_kernel.scratch(product, tuning, a.dtype, b.dtype),
        kernel_name="grouped_weight_gradient",
        **settings,
    )(a, b, scale, group_sizes, first, sums).reshape(groups, n, k)


def _schedule(
    walk: "DepthWalk", group_sizes: Int[Array, " groups"], blocks: int
) -> Int[Array, " sums"]:
    """Returns the number of steps before each tile, for one thread block after another.

    Each thread block has `walk.entries` of these numbers.
    """
    steps = jnp.maximum(-(-group_sizes // walk.tile_k), 1)
    entries = walk.entries(blocks) - walk.tuning.stages - 1
    index = jnp.arange(blocks)[:, None] + jnp.arange(entries)[None] * blocks
    group = jnp.minimum(index // walk.of_group, len(group_sizes) - 1)
    steps = jnp.where(index < walk.total, steps[group], 0)
    # After a thread block's last tile stands the sum of all its steps.
    sums = jnp.pad(jnp.cumsum(steps, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    after = ((0, 0), (0, walk.tuning.stages))
    return jnp.pad(sums, after, constant_values=_NEVER).reshape(-1)


def _kernel(
    product: Product, walk: "DepthWalk", a, b, scale, group_sizes, first, sums, out,
    a_smem, b_smem, out_smem, filled, free,
) -> None:  # fmt: skip
    t, warpgroup = walk.tuning, lax.axis_index("warpgroup")
    walk = walk.on_device(first, sums)

    def copies(step, place, stage, filled):
        of_step = pl.ds((place.first + step) * walk.tile_k, walk.tile_k)
        parts = a.at[place.rows, of_step], b.at[place.columns, of_step]
        stage = a_smem.at[stage], b_smem.at[stage]
        matmul_kernel.copy_operands(t, parts, stage, filled)

    stages = Stages(walk, a_smem, b_smem, filled, free, None, copies)
    stages.fill()
    scales = scale, group_sizes
    tile = DepthTile(product, t, stages, *scales, (), (out,), None, out_smem)
    matmul_kernel.compute_tiles(walk, tile, warpgroup)


@dataclasses.dataclass(frozen=True)
class DepthPlace(Place):
    """The place of a group's tile.

    Attributes:
      group: The tile's group.
      first: The number of steps along all rows before the group's first row.
    """

    group: Any
    first: Any


@dataclasses.dataclass(frozen=True)
class DepthVisit(Visit):
    """A tile with as many steps as its group has.

    Attributes:
      before: The number of steps of the thread block's earlier tiles.
    """

    before: Any

    def position(self, step: Array) -> Array:
        """Returns the number of steps before a step, in all tiles of the block."""
        return self.before + step


class DepthWalk(Walk):
    """A tile scheduler for tiles with different numbers of steps."""

    def __init__(
        self, tuning: Tuning, shape: tuple[int, int, int], tile_k: int, groups: int
    ) -> None:
        super().__init__(tuning, shape, tile_k)
        self.of_group = self.total
        self.total = groups * self.of_group

    def entries(self, blocks: int) -> int:
        """Returns the number of sums of each of `blocks` thread blocks.

        There is a sum before each tile, one after the last tile, and one more for each
        stage, so that `step_at` may look ahead.
        """
        return -(-self.total // blocks) + 1 + self.tuning.stages

    def on_device(self, first: Any, sums: Any) -> "DepthWalk":
        """Returns the scheduler for a kernel, with refs to the arrays that it reads."""
        walk = copy.copy(self)
        walk._first, walk._sums = first, sums
        walk._own = lax.axis_index("sm") * self.entries(lax.axis_size("sm"))
        walk._all_steps = walk._before(walk.count())
        return walk

    def _before(self, number: Array) -> Array:
        """Returns the number of steps of this thread block before a tile."""
        return self._sums[self._own + number]

    def all_steps(self) -> Array:
        """Returns the number of steps along k in all tiles of this thread block."""
        return self._all_steps

    def visit(self, number: Array) -> DepthVisit:
        """Returns the visit of a tile of this thread block."""
        steps_before = self._before(number)
        steps = self._before(number + 1) - steps_before
        return DepthVisit(number, self.place(number), steps, steps_before)

    def place(self, number: Array) -> DepthPlace:
        """Returns the place of a tile of this thread block."""
        index = lax.axis_index("sm") + number * lax.axis_size("sm")
        group, within = lax.div(index, self.of_group), lax.rem(index, self.of_group)
        rows, columns = self.parts(within)
        # The step of a group without rows may be after all rows.
        first = lax.min(self._first[group], self.steps - 1)
        return DepthPlace(rows, columns, group, first)

    def step_at(self, position: Array, number: Array | int) -> tuple[Array, Array]:
        """Returns the tile and the step at a position among the steps of all tiles."""
        # Every tile has a step, so the tile is at most `stages` tiles after `number`.
        number = jnp.asarray(number, jnp.int32)
        tile, steps_before = number, self._before(number)
        for ahead in range(1, self.tuning.stages + 1):
            sum_before = self._before(number + ahead)
            tile = tile + (sum_before <= position).astype(jnp.int32)
            steps_before = lax.select(sum_before <= position, sum_before, steps_before)
        return tile, position - steps_before


@dataclasses.dataclass(frozen=True)
class DepthTile(Tile):
    """The work of a warpgroup on its rows of a group's tile.

    The field `a_scale` holds the scales, and `b_scale` the sizes of groups.
    """

    def _scaling(self, place: DepthPlace, band):
        """Returns a function that scales the subtile at row i, column j of the tile."""
        has_rows = self.b_scale[place.group] > 0
        scale = None
        if self.a_scale is not None:
            of_group = 0 if self.a_scale.shape == (1,) else place.group
            scale = self.a_scale[of_group]

        def scaled(value, i, j):
            value = value if scale is None else value * scale
            is_sum = jnp.broadcast_to(has_rows, value.shape)
            return jnp.where(is_sum, value, jnp.zeros(value.shape, value.dtype))

        return scaled

    def _store(self, pieces, addends, place: DepthPlace, band) -> None:
        """Stores the epilogue subtiles in the group's part of the result."""
        n, _ = self.stages.walk.shape
        row = place.group * n + place.rows.start
        of_group = dataclasses.replace(place, rows=pl.ds(row, self.tuning.tile_m))
        super()._store(pieces, addends, of_group, band)
