"""The options of a matmul, and the tile sizes and settings of its kernel."""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

PIECE_M = 64  # Rows of an epilogue subtile.
TILE_K = 128  # FP8 elements of a step along k: the 128 bytes of a swizzled row.
BLOCK = 128  # Rows and columns of a block of b, which has one scale.
SCALES = 32  # Block scales of b that are loaded together.


def tile_k(dtype: DTypeLike) -> int:
    """Returns the number of elements of a step along k: 128 bytes."""
    return TILE_K // jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Tile sizes and other settings of the kernel.

    Attributes:
      tile_m: The number of rows of an output tile, which a thread block computes at a
        time.
      tile_n: The number of columns of an output tile.
      stages: The number of steps along k in flight, of 128 elements each.
      warpgroups: The number of warpgroups that multiply.
      together: Whether the warpgroups are cooperative and share a tile's rows.
        Otherwise they are ping-pong and take turns with tiles: one warpgroup stores its
        tile while the other multiplies.
      cluster: The axis along which a cluster of two thread blocks has neighbouring
        tiles. The cluster loads the operand that both share once: b along "m", a along
        "n". None means no clusters.
      width: The number of neighbouring tiles along m that the tile scheduler visits
        before it moves on along n.
      parts: The number of parts of `tile_n` that are promoted one after another, which
        saves registers.
      chunks: The number of sums that are promoted in one iteration of the loop along k.
      transposed: Whether the kernel computes tiles of b @ a.T. Then `tile_m` and
        `tile_n` count rows and columns of b @ a.T, and tiles are transposed when they
        are stored.
    """

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    warpgroups: int = 2
    together: bool = True
    cluster: Literal["m", "n"] | None = None
    width: int = 8
    parts: int = 1
    chunks: int = 1
    transposed: bool = False

    def __str__(self) -> str:
        fields = dataclasses.fields(self)[2:]
        named = [
            f"{f.name} {v}" for f in fields if (v := getattr(self, f.name)) != f.default
        ]
        return ", ".join([f"{self.tile_m} x {self.tile_n}", *named])

    def held(self, product: "Product") -> int:
        """Returns how many stages a warpgroup holds before it releases the first."""
        if product.promote is None:
            return 2
        return product.promote // TILE_K * min(self.chunks, 2)

    def store_n(self, product: "Product") -> int:
        """Returns the number of columns of an epilogue subtile.

        These fill a swizzled row of 128 bytes, or a part of it that divides `tile_n`.
        """
        columns = TILE_K // jnp.dtype(product.out_dtype).itemsize
        return math.gcd(self.tile_n, columns)

    @property
    def height(self) -> int:
        """The number of rows that a warpgroup computes at a time."""
        return self.tile_m // self.warpgroups if self.together else self.tile_m

    @property
    def span(self) -> tuple[int, int]:
        """The rows and columns that a cluster, or a single thread block, computes."""
        return (
            self.tile_m * (1 + (self.cluster == "m")),
            self.tile_n * (1 + (self.cluster == "n")),
        )


class Heads(NamedTuple):
    """The columns of attention heads: for every key head its queries, key and value.

    Attributes:
      size: The number of columns of a head.
      queries: The number of query heads per key head.
    """

    size: int
    queries: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """The options of a matmul, which are known when the kernel is compiled.

    Attributes:
      out_dtype: The dtype of the result.
      promote: The number of elements of k after which sums move from the tensor cores,
        which round them to about 14 bits, to float32; None for never.
      scaling: The kind of scales. "tensor": one factor. "rows": one scale per row of a
        and one per row of b. "blocks": one per 1 x 128 of a and one per 128 x 128 of b.
      accumulate: Whether the result is added to an array.
      bias: Whether a number for each column is added.
      maxima: Whether the kernel also writes the amax of each row of a tile.
      heads: The columns of attention heads; None for a result without heads.
      copies: The number of times that heads are written.
    """

    out_dtype: DTypeLike
    promote: int | None = None
    scaling: Literal["tensor", "rows", "blocks"] = "tensor"
    accumulate: bool = False
    bias: bool = False
    maxima: bool = False
    heads: Heads | None = None
    copies: int = 1

    @property
    def name(self) -> str:
        """The name of the operation and its kernel."""
        return "matmul_heads" if self.heads else "matmul"
