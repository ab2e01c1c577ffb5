"""Granularities: the groups of elements that share a scale."""

import dataclasses

from pallas_kernels.checks import positive_int


@dataclasses.dataclass(frozen=True)
class PerTensor:
    """A scale for the whole array: a power of two, in float32.

    Products of two such scales are exact in any dtype, so that matmuls can apply them
    to a BF16 result. A power of two costs at most one of E4M3's 18 octaves, and no
    precision.
    """

    def block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one group of an array of `shape`."""
        return shape


@dataclasses.dataclass(frozen=True)
class PerGroup:
    """A bfloat16 scale for every `size` neighbours on the last axis."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", positive_int("PerGroup.size", self.size))

    def block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one group of an array of `shape`."""
        return (1,) * (len(shape) - 1) + (self.size,) if shape else ()


@dataclasses.dataclass(frozen=True)
class PerBlock:
    """A bfloat16 scale for every `rows` x `cols` tile of the last two axes."""

    rows: int
    cols: int

    def __post_init__(self) -> None:
        for name in ("rows", "cols"):
            size = positive_int(f"PerBlock.{name}", getattr(self, name))
            object.__setattr__(self, name, size)

    def block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one group of an array of `shape`."""
        if len(shape) < 2:
            raise ValueError(f"{self} needs an array of two axes or more, got {shape}")
        return (1,) * (len(shape) - 2) + (self.rows, self.cols)


Granularity = PerTensor | PerGroup | PerBlock
