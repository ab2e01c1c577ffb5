"""Quantization and decoding of strips in the registers of a warpgroup.

A strip is the part of an array that the 128 lanes of a warpgroup handle at once.
"""

import functools
import math
from collections.abc import Iterable

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.dispatch.devices import target_platform
from pallas_kernels.numerics import (
    TINY,
    Scaled,
    code_max,
    float_bits,
    floats,
    largest_scale,
    magnitude_bits,
    normal,
    reciprocal,
)

LANES = 128  # Lanes of a warpgroup.


def strip_layout(shape: tuple[int, ...]) -> plgpu.Layout:
    """Returns the register layout of a strip of `shape`.

    Each lane holds a vector of consecutive elements, and the next lane holds the
    elements that follow. If a vector is a whole row, the next lane holds the next row.
    """
    vector = math.prod(shape) // LANES
    warp = (shape[0] // 4, *shape[1:])
    if shape[-1] == vector and len(shape) == 2:
        return plgpu.Layout.TCGEN05_TMEM_NATIVE(vector)
    # The tiling has an axis of lanes within a group only if a group has several.
    lanes_of_group = shape[-1] > vector
    if warp[0] == 1:  # Tilings have no axes of one, and no tile that is one array.
        axes = len(shape) + lanes_of_group
        return plgpu.Layout.TILED(
            plgpu.Tiling((shape, (vector,))),
            warp_dims=(-axes,),
            lane_dims=tuple(range(1 - axes, -1)),
            vector_dim=-1,
        )
    axes = 2 * len(shape) + lanes_of_group
    return plgpu.Layout.TILED(
        plgpu.Tiling((shape, warp, *[(vector,)] * lanes_of_group)),
        warp_dims=(-axes,),
        lane_dims=tuple(range(-len(shape) - lanes_of_group, -1)),
        vector_dim=-1,
    )


def decode(x: Array | Scaled) -> Array:
    """Returns a strip in float32: `x`, or `codes * scale` of groups."""
    if not isinstance(x, Scaled):
        return x.astype(jnp.float32)
    codes = x.codes.astype(jnp.float32)
    return codes * _spread(x.scale.astype(jnp.float32), codes)


def encode(x: Array, scale: Array, dtype: DTypeLike) -> Array:
    """Returns the codes of x / scale, rounded to nearest even and saturated."""
    return saturated(x * reciprocal(jnp.broadcast_to(scale, x.shape)), dtype)


def saturated(x: Array, dtype: DTypeLike) -> Array:
    """Returns `x` rounded to codes, and clipped to the range of codes of `dtype`."""
    if not _saturates():
        x = jnp.clip(x, -code_max(dtype), code_max(dtype))
    return x.astype(dtype)


def _saturates() -> bool:
    """Returns whether casts to FP8 saturate: on GPUs, not in interpret mode on CPUs."""
    return target_platform() == "gpu"


def encode_groups(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Quantizes groups along the last axis.

    Returns the codes of x / scale, and the bfloat16 scales.
    """
    scale = group_scale(x, dtype)
    # Rounding the scale leaves |x| / scale at most a percent above the largest code,
    # and such numbers round to that code. Saturation is not needed.
    codes = normal(x) * _spread(reciprocal(scale), x)
    return codes.astype(dtype), scale.astype(jnp.bfloat16)


def group_scale(x: Array, dtype: DTypeLike) -> Array:
    """Returns the scales of groups on the last axis, as `numerics.group_scale` does."""
    return scale_of_bits(jnp.max(magnitude_bits(x), axis=x.ndim - 1), dtype)


def scale_of_bits(bits: Array, dtype: DTypeLike) -> Array:
    """Returns the scales of groups from the bits of their amax, in float32.

    scale = amax / code_max, rounded to bfloat16. It is clipped so that it and its
    reciprocal are normal and scale * code_max fits bfloat16. The function uses only
    operations that Mosaic has.
    """
    largest = floats(bits)
    scale = float_bits(largest * (1 / code_max(dtype)))
    scale = jnp.clip(floats(rounded(scale)), TINY, largest_scale(code_max(dtype)))
    return scale + largest * 0.0  # NaN where the amax is not finite.


def rounded(bits: Array) -> Array:
    """Rounds float32 numbers, given as bits, to the nearest bfloat16, ties to even.

    Returns the float32 bits of the rounded numbers, which must not be NaN.
    """
    even = (bits >> jnp.uint32(16)) & jnp.uint32(1)
    return (bits + (jnp.uint32(0x7FFF) + even)) & jnp.uint32(0xFFFF0000)


def total_max(x: Array) -> Array:
    """Returns the maximum of all elements, a scalar."""
    return functools.reduce(lambda x, _: jnp.max(x, axis=x.ndim - 1), x.shape, x)


def largest_of(arrays: Iterable[Array], dtype: DTypeLike) -> Array:
    """Returns the amax of arrays, rounded to `dtype`, as a float32 scalar."""
    bits = functools.reduce(jnp.maximum, (total_max(magnitude_bits(x)) for x in arrays))
    if dtype == jnp.bfloat16:
        # The cap is a NaN that `rounded` does not change.
        bits = rounded(jnp.minimum(bits, jnp.uint32(0x7FC00000)))
    return floats(bits)


def _spread(x: Array, like: Array) -> Array:
    """Broadcasts one number per group to the elements of the group."""
    wide = lax.broadcast_in_dim(x, like.shape, tuple(range(x.ndim)))
    return plgpu.layout_cast(wide, strip_layout(like.shape))
