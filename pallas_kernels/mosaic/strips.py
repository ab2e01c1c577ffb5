"""How thread blocks go over arrays in strips, and what they write of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.mosaic.codec import LANES
from pallas_kernels.numerics import GROUP

_VECTOR = 8  # Neighbours of a strip that a lane has: 16 bytes of what is wide.
STRIP = LANES * _VECTOR  # Elements.
_ROW_GROUPS = 8  # Of each row of a strip that has several, in groups of 16.
_ROWS = STRIP // (_ROW_GROUPS * GROUP)  # Of such a strip.
_COLUMNS = 64  # Of a tile for a transposed copy, at least.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How kernels are laid over the GPU.

    Attributes:
      elements: Of each array, what a lane reads before it computes.
      columns: Of a tile of 128 rows, where there are tiles; 64 or 128.
    """

    elements: int = 16
    columns: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """What is written of the values of a kernel; any of these.

    Attributes:
      wide: The values, as a dtype of 16 or 32 bits.
      groups: Codes of this dtype and a bfloat16 scale for each group.
      row: Codes of this dtype, of the given scale.
      transposed: The same, transposed.
      denormals: Whether these codes tell denormal values from zeros.
      maxima: Whether to write the largest magnitude of each thread block's values, as
        `wide` has them.
      tiles: Whether thread blocks handle tiles through shared memory, as they do where
        there is a transposed copy.
    """

    wide: DTypeLike | None = None
    groups: DTypeLike | None = None
    row: DTypeLike | None = None
    transposed: DTypeLike | None = None
    denormals: bool = False
    maxima: bool = False
    tiles: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", self.tiles or self.transposed is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """The strips of arrays [rows, parts, groups, group] that thread blocks handle.

    Thread blocks at the end overlap, and write the same where they do.

    Attributes:
      rows: All rows.
      groups: All groups of a row.
      group: Elements of a group.
      strip_rows: Rows of a strip.
      strip_groups: Groups of each of its rows.
      strips: Strips of a thread block, side by side.
    """

    rows: int
    groups: int
    group: int
    strip_rows: int
    strip_groups: int
    strips: int

    @classmethod
    def of(cls, shape: tuple[int, ...], encoding: Encoding, tuning: Tuning) -> "Walk":
        """How to go over arrays of `shape`, [rows, parts, groups, group]."""
        rows, parts, groups, group = shape
        strips = max(tuning.elements // _VECTOR, 1)
        strip_rows, strip_groups = _ROWS, _ROW_GROUPS
        if encoding.tiles:
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
        )

    @property
    def columns(self) -> int:
        """Groups of a row that a thread block handles."""
        return self.strips * self.strip_groups

    @property
    def ctas(self) -> int:
        """Thread blocks."""
        return -(-self.rows // self.strip_rows) * -(-self.groups // self.columns)

    def start(self, cta: Array) -> tuple[Array, Array]:
        """A thread block's first row and group."""
        across = -(-self.groups // self.columns)
        row = jnp.minimum(
            lax.div(cta, across) * self.strip_rows, self.rows - self.strip_rows
        )
        group = jnp.minimum(
            lax.rem(cta, across) * self.columns, self.groups - self.columns
        )
        return row, group

    def indices(self, cta: Array) -> list[Callable]:
        """For each strip, what takes a part to the strip's place in an array."""
        row, first = self.start(cta)

        def place(part, group):
            return _span(row, self.strip_rows), part, _span(group, self.strip_groups)

        starts = [first + j * self.strip_groups for j in range(self.strips)]
        return [functools.partial(place, group=group) for group in starts]


def _span(start: Array, size: int) -> Any:
    return start if size == 1 else pl.ds(start, size)


def obstacle(
    rows: int, parts: int, n: int, *, group: int = GROUP, transposed: bool = False
) -> str | None:
    """Why arrays [rows, parts, n] in groups are not for the kernels, if so."""
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
