"""Operations that sum over devices of a mesh, or wait until an array is computed."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch.array_types import mesh_of
from pallas_kernels.dispatch.axes import Axes, as_it_is, tokens
from pallas_kernels.dispatch.placement import on_parts
from pallas_kernels.numerics import behind


def total(x: Array) -> Array:
    """Adds up an array [n, ...] along its first axis, in float32.

    On a mesh each device adds up its own part. These sums are added in the dtype of
    `x`, and each device gets only its part of the result.
    """
    operation = _Total()
    return operation.reference(x) if mesh_of(x) is None else on_parts(operation, x)


def ready(number: Array, x: Array) -> Array:
    """Returns `number`, but only after `x` has been computed.

    On a mesh each device waits for its own part of `x`. Both arrays may have any shape.
    """
    operation = _Ready()
    if mesh_of((number, x)) is None:
        return operation.reference(number, x)
    return on_parts(operation, number, x)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """The operation that `ready` runs on each device's own part of arrays."""

    name: ClassVar[str] = "ready"

    def reference(self, number: Array, x: Array) -> Array:
        return behind(number, x)

    kernel = __call__ = reference

    def obstacle(self, number: Array, x: Array) -> None:
        return None

    def axes(self, number: Array, x: Array) -> tuple:
        own = Axes(tokens(number.ndim))
        return (own, as_it_is(x)), own


@dataclasses.dataclass(frozen=True)
class _Total:
    """The operation that `total` runs: devices add up their parts, then their sums."""

    name: ClassVar[str] = "total"

    def reference(self, x: Array) -> Array:
        return x[0] if len(x) == 1 else jnp.sum(x, 0, jnp.float32).astype(x.dtype)

    kernel = __call__ = reference

    def obstacle(self, x: Array) -> None:
        return None

    def axes(self, x: Array) -> tuple:
        rest = tokens(x.ndim - 1)
        return (Axes(f"parts {rest}"),), Axes(rest, reduced="sum")
