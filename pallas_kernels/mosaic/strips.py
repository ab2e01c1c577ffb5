"""Division of arrays into strips for thread blocks, and the outputs to write."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from pallas_kernels.mosaic.codec import LANES
from pallas_kernels.numerics import GROUP

_VECTOR = 8  # Neighbours of a strip that a lane has: 16 bytes of bfloat16.
STRIP = LANES * _VECTOR  # Elements of a strip.
_ROW_GROUPS = 8  # Groups of 16 in each row of a strip with several rows.
_ROWS = STRIP // (_ROW_GROUPS * GROUP)  # Rows of a strip with several rows.
_COLUMNS = 64  # The fewest columns of a tile for a transposed copy.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Tile sizes of elementwise kernels.

    Attributes:
      elements: The number of elements of each array that a lane reads before it
        computes.
      columns: The number of columns of a tile of 128 rows, at most 256. It applies
        only to kernels with tiles.
    """

    elements: int = 16
    columns: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """Outputs that a kernel writes for its values, in any combination.

    Attributes:
      wide: The dtype of unquantized values, of 16 or 32 bits.
      groups: The dtype of per-group codes, which have one bfloat16 scale per group.
      row: The dtype of per-tensor codes, quantized with the given scale.
      transposed: The dtype of the transposed copy of per-tensor codes.
      denormals: Whether per-tensor codes keep denormal values; otherwise these are
        flushed to zero.
      maxima: Whether to write the amax of each thread block's values, rounded to
        `wide`.
      tiles: Whether thread blocks handle tiles through shared memory. Always true with
        a transposed copy.
      sums: Whether to write the sums of rows, in float32, and nothing else. Sums need
        tiles.
    """

    wide: DTypeLike | None = None
    groups: DTypeLike | None = None
    row: DTypeLike | None = None
    transposed: DTypeLike | None = None
    denormals: bool = False
    maxima: bool = False
    tiles: bool = False
    sums: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", self.tiles or self.transposed is not None)


class Blocks(NamedTuple):
    """Blocks of 128 rows that begin at any rows; their transposes are side by side.

    Blocks may overlap. What kernels write for a row must not depend on its block.

    Attributes:
      source: The first row of each block. A block may end after the last row of arrays.
      count: The number of rows of each block that its transposed copy has; the rest of
        the copy's 128 columns are zeros. None means all 128 rows.
      index: For each row in the order of blocks, the row of the arrays to read there,
        with 128 more entries at the end. None means that arrays have this order. With
        an index arrays have elements of 8 bits, and only transposed copies are written.
    """

    source: Int[Array, " blocks"]
    count: Int[Array, " blocks"] | None = None
    index: Int[Array, " rows"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """Division of arrays [rows, parts, groups, group] into strips and thread blocks.

    The last thread blocks may overlap with their neighbours, and then write the same
    values there.

    Attributes:
      rows: The number of rows of the arrays.
      groups: The number of groups of a row of the arrays.
      group: The number of elements of a group.
      strip_rows: The number of rows of a strip.
      strip_groups: The number of groups in each row of a strip.
      strips: The number of strips of a thread block, which are side by side.
      blocks: The number of `Blocks` of rows, or None if rows are read in their order.
    """

    rows: int
    groups: int
    group: int
    strip_rows: int
    strip_groups: int
    strips: int
    blocks: int | None = None

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        encoding: Encoding,
        tuning: Tuning,
        blocks: int | None = None,
    ) -> "Walk":
        """Chooses the strips for arrays of `shape`, [rows, parts, groups, group].

        `blocks` is the number of `Blocks`, or None if rows are read in their order.
        """
        rows, parts, groups, group = shape
        strips = max(tuning.elements // _VECTOR, 1)
        strip_rows, strip_groups = _ROWS, _ROW_GROUPS
        if encoding.tiles:
            # A lane has 16 neighbours of one row, so that it can transpose its codes.
            strip_rows, strip_groups = LANES, 1
            columns = tuning.columns if tuning.columns <= groups * group else _COLUMNS
            strips = columns // GROUP
        elif rows == parts == 1:
            strip_rows, strip_groups = 1, STRIP // group
        return cls(
            rows=rows,
            groups=groups,
            group=group,
            strip_rows=strip_rows,
            strip_groups=strip_groups,
            strips=min(strips, max(groups // strip_groups, 1)),
            blocks=blocks,
        )

    @property
    def columns(self) -> int:
        """The number of groups of a row that a thread block handles."""
        return self.strips * self.strip_groups

    @property
    def across(self) -> int:
        """The number of thread blocks that a row's groups are divided among."""
        return -(-self.groups // self.columns)

    @property
    def ctas(self) -> int:
        """The number of thread blocks."""
        blocks = self.blocks
        if blocks is None:
            blocks = -(-self.rows // self.strip_rows)
        return blocks * self.across

    @property
    def transposed_columns(self) -> int:
        """The number of columns of a transposed copy."""
        return self.rows if self.blocks is None else self.blocks * self.strip_rows

    def start(self, cta: Array, blocks: Blocks | None = None) -> tuple[Array, Array]:
        """Returns a thread block's first row and first group."""
        block = lax.div(cta, self.across)
        if blocks is None:
            row = jnp.minimum(block * self.strip_rows, self.rows - self.strip_rows)
        else:
            row = blocks.source[block]
        group = jnp.minimum(
            lax.rem(cta, self.across) * self.columns, self.groups - self.columns
        )
        return row, group

    def column(self, cta: Array) -> Array:
        """Returns a thread block's first column in the transposed copy."""
        if self.blocks is None:
            return self.start(cta)[0]
        return lax.div(cta, self.across) * self.strip_rows

    def indices(self, cta: Array, blocks: Blocks | None = None) -> list[Callable]:
        """Returns a function for each strip that maps a part to the strip's index."""
        row, first = self.start(cta, blocks)

        def place(i, group):
            return _span(row, self.strip_rows), i, _span(group, self.strip_groups)

        starts = [first + j * self.strip_groups for j in range(self.strips)]
        return [functools.partial(place, group=group) for group in starts]


def _span(start: Array, size: int) -> Any:
    return start if size == 1 else pl.ds(start, size)


def obstacle(
    rows: int, parts: int, n: int, *, group: int = GROUP, transposed: bool = False
) -> str | None:
    """Returns why elementwise kernels cannot take a shape, or None if they can.

    Args:
      rows: The number of rows.
      parts: The number of parts of a row that are computed together: 2 for gate and up.
      n: The number of elements of each part.
      group: The number of neighbours that share a scale.
      transposed: Whether a transposed copy is written.
    """
    if group % GROUP or group & (group - 1) or group > 256:
        return f"groups have 16, 32, 64, 128 or 256 elements, got {group}"
    if rows == parts == 1 and n < STRIP:
        return f"it takes {STRIP} elements or more, got {n}"
    if n % group:
        return f"the last axis must be a multiple of {group}, got {n}"
    if transposed:
        if rows < LANES or n < _COLUMNS:
            least = f"{LANES} rows of {_COLUMNS} elements or more"
            return f"a transposed copy takes {least}, got {rows} of {n}"
        if rows % GROUP:
            return f"a transposed copy takes a multiple of {GROUP} rows, got {rows}"
    elif rows * parts > 1 and (rows < _ROWS or n < _ROW_GROUPS * group):
        least = f"{_ROWS} rows of {_ROW_GROUPS * group} elements or more"
        return f"it takes {least}, got {rows} of {n}"
    return None
