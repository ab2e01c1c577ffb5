"""Codes and numbers of a strip of elements, in the registers of a warpgroup."""

import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.numerics import (
    TINY,
    Groups,
    code_max,
    largest_scale,
    magnitude_bits,
    normal,
    reciprocal,
)

LANES = 128  # Of a warpgroup.


def strip_layout(shape: tuple[int, ...]) -> plgpu.Layout:
    """A lane has neighbours, the next lane the next ones, or those of the next row."""
    vector = math.prod(shape) // LANES
    warp = (shape[0] // 4, *shape[1:])
    if shape[-1] == vector and len(shape) == 2:
        return plgpu.Layout.TCGEN05_TMEM_NATIVE(vector)
    lanes_of_group = shape[-1] > vector  # Layouts name no axis of one.
    if warp[0] == 1:
        return plgpu.Layout.TILED(
            plgpu.Tiling((shape, (vector,))),
            warp_dims=(-3,),
            lane_dims=(-2,),
            vector_dim=-1,
        )
    axes = 2 * len(shape) + lanes_of_group
    return plgpu.Layout.TILED(
        plgpu.Tiling((shape, warp, *[(vector,)] * lanes_of_group)),
        warp_dims=(-axes,),
        lane_dims=tuple(range(-len(shape) - lanes_of_group, -1)),
        vector_dim=-1,
    )


def decode(x: Array | Groups) -> Array:
    """A strip in float32."""
    if not isinstance(x, Groups):
        return x.astype(jnp.float32)
    codes = x.codes.astype(jnp.float32)
    return codes * _spread(x.scale.astype(jnp.float32), codes)


def encode(x: Array, scale: Array, dtype: DTypeLike) -> Array:
    """Codes of x / scale, rounded to nearest even, and saturated."""
    x = x * reciprocal(jnp.broadcast_to(scale, x.shape))
    if not _saturates():
        x = jnp.clip(x, -code_max(dtype), code_max(dtype))
    return x.astype(dtype)


def _saturates() -> bool:
    """Whether conversions to codes saturate: on GPUs, not where CPUs interpret them."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device or jax.devices()[0]).platform == "gpu"


def encode_groups(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Codes of groups, the last axis, and their scales."""
    scale = group_scale(x, dtype)
    # Nothing to saturate: at most a percent is beyond the largest code.
    codes = normal(x) * _spread(reciprocal(scale), x)
    return codes.astype(dtype), scale.astype(jnp.bfloat16)


def group_scale(x: Array, dtype: DTypeLike) -> Array:
    """The reference's scales of groups, the last axis."""
    return scale_of_bits(jnp.max(magnitude_bits(x), axis=x.ndim - 1), dtype)


def scale_of_bits(bits: Array, dtype: DTypeLike) -> Array:
    """The scales of the largest magnitudes, given as bits, from what Mosaic has."""
    largest = floats(bits)
    scale = _bits(largest * (1 / code_max(dtype)))
    scale = jnp.clip(floats(rounded(scale)), TINY, largest_scale(code_max(dtype)))
    return scale + largest * 0.0  # NaN where that is not finite.


def rounded(bits: Array) -> Array:
    """The bits of numbers, not NaN, rounded to nearest even."""
    even = (bits >> jnp.uint32(16)) & jnp.uint32(1)
    return (bits + (jnp.uint32(0x7FFF) + even)) & jnp.uint32(0xFFFF0000)


def total_max(x: Array) -> Array:
    """The maximum of all, a scalar."""
    return functools.reduce(lambda x, _: jnp.max(x, axis=x.ndim - 1), x.shape, x)


def largest_of(arrays: Iterable[Array], dtype: DTypeLike) -> Array:
    """The largest magnitude in float32, a scalar, of numbers rounded to `dtype`."""
    bits = functools.reduce(jnp.maximum, (total_max(magnitude_bits(x)) for x in arrays))
    if dtype == jnp.bfloat16:
        bits = rounded(jnp.minimum(bits, jnp.uint32(0x7FC00000)))  # Or NaN.
    return floats(bits)


def _spread(x: Array, like: Array) -> Array:
    """One number a group to its elements."""
    wide = lax.broadcast_in_dim(x, like.shape, tuple(range(x.ndim)))
    return plgpu.layout_cast(wide, strip_layout(like.shape))


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def floats(x: Array) -> Array:
    """Bits as float32."""
    return lax.bitcast_convert_type(x, jnp.float32)
