"""The ways in which the residuals of a function are saved."""

import dataclasses
from typing import Any

import jax
from jax.extend import core

from coat_jax.quantization.granularity import PerGroup
from coat_jax.remat.shapes import merged_axes


@dataclasses.dataclass(frozen=True)
class Copy:
    """The decision to save a residual as an FP8 copy.

    Attributes:
      granularity: The groups that share a scale.
      fused: Whether XLA fuses the dequantization into every operation that reads it.
      merged: The lengths of the last axes that the copy merges into one axis; () if
        it has the axes of the array.
      offloaded: Whether the copy is kept in host memory until the backward pass, as the
        policy says.
    """

    granularity: PerGroup
    fused: bool
    merged: tuple[int, ...]
    offloaded: bool = False

    @classmethod
    def of(cls, aval: jax.core.ShapedArray, size: int, fused: bool) -> "Copy":
        """Returns a `Copy` for arrays of a type, in groups of `size`."""
        return cls(PerGroup(size), fused, merged_axes(aval))


@dataclasses.dataclass(frozen=True)
class Wide:
    """The decision to save a residual unquantized.

    Attributes:
      reason: Why the residual is not quantized.
      offloaded: Whether the residual is kept in host memory until the backward pass, as
        the policy says.
    """

    reason: str
    offloaded: bool = False


@dataclasses.dataclass(frozen=True)
class Unread:
    """The decision not to save a residual, because no backward operation reads it.

    Attributes:
      shape: The shape of the residual.
      dtype: The dtype of the residual.
    """

    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Extra:
    """An array that is not a residual, saved to recompute residuals from it.

    Attributes:
      var: The variable of the forward program.
      way: The way in which the array is saved.
      index: The index of one of the residuals that follow from it.
    """

    var: core.Var
    way: Copy | Wide
    index: int
