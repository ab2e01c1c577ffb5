"""What a matrix product computes, and how it is laid over the GPU."""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

PIECE_M = 64  # Rows that are stored at a time.
TILE_K = 128  # Bytes of a swizzled row, and elements of it.
BLOCK = 128  # Of b, that have a scale.
SCALES = 32  # Of blocks, that are loaded together.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a product is laid over the GPU.

    Attributes:
      tile_m: Rows of the output that a thread block computes at a time.
      tile_n: Columns.
      stages: Steps of 128 along k in flight.
      warpgroups: Warpgroups that multiply.
      together: Whether they share a tile's rows, or take turns: then one stores its
        tile while the other multiplies.
      cluster: Two thread blocks load what they share once: tiles that are neighbours
        along `m` share b, along `n` a.
      width: Consecutive tiles that are neighbours along m, before the next columns.
      parts: Parts of `tile_n` that are promoted one by one, which saves registers.
      chunks: Sums that are promoted in a step of the loop along k.
      transposed: Whether tiles are of b @ a.T, with its rows and columns, and are
        transposed when they are stored.
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
        """Stages that a warpgroup holds when it waits for another."""
        if product.promote is None:
            return 2
        return product.promote // TILE_K * min(self.chunks, 2)

    def store_n(self, product: "Product") -> int:
        """Columns that are stored at a time: swizzled rows again, or a part of them."""
        columns = TILE_K // jnp.dtype(product.out_dtype).itemsize
        return math.gcd(self.tile_n, columns)

    @property
    def height(self) -> int:
        """Rows that a warpgroup computes at a time."""
        return self.tile_m // self.warpgroups if self.together else self.tile_m

    @property
    def span(self) -> tuple[int, int]:
        """Rows and columns of what a cluster computes."""
        return (
            self.tile_m * (1 + (self.cluster == "m")),
            self.tile_n * (1 + (self.cluster == "n")),
        )


class Heads(NamedTuple):
    """Columns of attention's heads: for every key head its queries, key and value.

    Attributes:
      size: Columns of a head.
      queries: Query heads for each key head.
    """

    size: int
    queries: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """What is computed, known when the kernel is compiled.

    Attributes:
      out_dtype: Dtype of the result, or of its codes.
      promote: Elements of k after which sums move from the tensor cores, which round
        them to 14 bits or so, to float32; None for never.
      scaling: "tensor": one factor; "rows": one a row of a and one a column of b;
        "blocks": one for 1 x 128 of a, one for 128 x 128 of b.
      accumulate: Whether it is added to an array.
      group: Neighbours of a row that get a scale; None for no quantization.
      maxima: Whether the largest magnitudes of a tile's rows are kept.
      heads: What columns of attention's heads are; None where they are none.
      copies: How often heads are written.
    """

    out_dtype: DTypeLike
    promote: int | None = None
    scaling: Literal["tensor", "rows", "blocks"] = "tensor"
    accumulate: bool = False
    group: int | None = None
    maxima: bool = False
    heads: Heads | None = None
    copies: int = 1

    @property
    def name(self) -> str:
        """The operation's and its kernel's."""
        return f"matmul{'_groups' if self.group else '_heads' if self.heads else ''}"
