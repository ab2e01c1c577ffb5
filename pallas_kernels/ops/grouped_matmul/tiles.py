"""The tiles of grouped rows, and rows that are padded so that groups begin at tiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.numerics import on_last_axes

ROWS = 8  # Rows that the copy engine swizzles together.
_LANES = 128  # Tiles that a thread block of the kernel lists.
BLOCK = 128  # Padded groups begin at multiples of this many rows.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupTiles:
    """The tiles of rows that are sorted by group, as `group_tiles` lists them.

    All arrays are int32. Arrays with an element for each tile are padded with zeros, to
    a multiple of 128 elements.

    Attributes:
      group: The group of a tile.
      row: The first row that a tile reads, a multiple of 8.
      first: The first row that a tile writes.
      end: One more than the last row of the tile's group.
      totals: The number of tiles, and the number of rows in all groups.
      height: The number of rows of a tile.
    """

    group: Int[Array, " tiles"]
    row: Int[Array, " tiles"]
    first: Int[Array, " tiles"]
    end: Int[Array, " tiles"]
    totals: Int[Array, "2"]
    height: int = dataclasses.field(metadata={"static": True})


def most_tiles(rows: int, groups: int, height: int, align: int = ROWS) -> int:
    """Returns an upper bound of the number of tiles, for groups of any sizes.

    The arguments are as in `listed_tiles`.
    """
    return (rows + (align - 1) * groups) // height + groups


def listed_tiles(rows: int, groups: int, height: int, align: int = ROWS) -> int:
    """Returns the length of the arrays of `GroupTiles`, a multiple of 128.

    Args:
      rows: The number of rows in all groups.
      groups: The number of groups.
      height: The number of rows of a tile.
      align: First rows of groups are rounded down to multiples of this number.
    """
    return -(-most_tiles(rows, groups, height, align) // _LANES) * _LANES


def tiles_in_jnp(
    group_sizes: Int[Array, " groups"], *, rows: int, height: int, align: int = ROWS
) -> GroupTiles:
    """Lists the tiles of grouped rows in jnp.

    Each group is tiled from its own first row, rounded down to a multiple of `align`.
    The last tile may read rows that the previous tile reads, too. No two tiles write
    the same row.
    """
    sums = _sums(group_sizes)
    starts = jnp.minimum(sums - group_sizes, rows)
    ends = jnp.minimum(sums, rows)
    bases = starts // align * align
    counts = jnp.where(ends > starts, -((bases - ends) // height), 0)
    after = _sums(counts)
    index = jnp.arange(listed_tiles(rows, len(group_sizes), height, align))
    index = index.astype(jnp.int32)[:, None]
    begin = (after - counts)[None]
    is_of = (index < after[None]) & (index >= begin)
    row = bases[None] + (index - begin) * height

    def of_tile(x: Any) -> Array:
        x = on_last_axes(x, is_of.ndim)
        return jnp.sum(jnp.where(is_of, x, 0), axis=1, dtype=jnp.int32)

    return GroupTiles(
        group=of_tile(jnp.arange(len(group_sizes), dtype=jnp.int32)),
        row=of_tile(jnp.clip(row, 0, rows - height)),
        first=of_tile(jnp.maximum(starts[None], row)),
        end=of_tile(ends),
        totals=jnp.stack([after[-1], ends[-1]]),
        height=height,
    )


def _sums(x: Int[Array, " n"]) -> Int[Array, " n"]:
    """Returns the cumulative sum of a short array, as a reduction that XLA fuses."""
    index = jnp.arange(len(x))
    comes_first = index[None] <= index[:, None]
    return jnp.sum(jnp.where(comes_first, x[None], 0), axis=1, dtype=jnp.int32)


def padded_rows(rows: int, groups: int) -> int:
    """Returns a number of padded rows that suffices for `rows` rows in `groups` groups.

    Each group begins at the first multiple of 128 rows after the previous group.

    Examples:
      >>> from pallas_kernels import padded_rows
      >>> padded_rows(1000, 8)
      1920
    """
    return (rows + (BLOCK - 1) * groups) // BLOCK * BLOCK


def padded_starts(group_sizes: Int[Array, " groups"]) -> Int[Array, " groups"]:
    """Returns the first row of each group in padded rows."""
    sizes = -(-group_sizes // BLOCK) * BLOCK
    return _sums(sizes) - sizes
