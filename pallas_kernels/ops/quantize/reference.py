"""Quantization per group, token and tensor, amax and transposes, in jnp."""

import math

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.numerics import (
    Codes,
    Scaled,
    code_max,
    encode,
    group_scale,
    magnitude,
    magnitude_bits,
    normal,
)


def quantize_groups(
    x: Float[Array, "... n"], *, dtype: DTypeLike, group: int
) -> Scaled:
    """Computes `pallas_kernels.quantize_groups` in jnp."""
    n, count = x.shape[-1], -(-x.shape[-1] // group)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, count * group - n)]
    groups = jnp.pad(x, padding).reshape(*x.shape[:-1], count, group)
    codes, scale = _quantized(groups, dtype)
    codes = codes.reshape(*x.shape[:-1], count * group)[..., :n]
    return Scaled(lax.optimization_barrier(codes), scale.astype(jnp.bfloat16))


def quantize_rows(x: Float[Array, "... n"], *, dtype: DTypeLike) -> Scaled:
    """Computes `pallas_kernels.quantize_rows` in jnp."""
    codes, scale = _quantized(x, dtype)
    return Scaled(lax.optimization_barrier(codes), scale)


def _quantized(x: Float[Array, "... n"], dtype: DTypeLike) -> tuple[Array, Array]:
    """Quantizes with one scale per index of the leading axes.

    Returns the codes and the float32 scales.
    """
    x = normal(x.astype(jnp.float32))
    scale = group_scale(magnitude(x, axis=-1), code_max(dtype))
    return encode(x, scale[..., None], dtype), scale


def dequantize_groups(groups: Scaled, *, dtype: DTypeLike) -> Float[Array, "... n"]:
    """Computes `pallas_kernels.dequantize_groups` in jnp."""
    n, count = groups.codes.shape[-1], groups.scale.shape[-1]
    group = -(-n // max(count, 1))
    # Several group sizes are possible if the last group is short. The size is taken to
    # be a power of two.
    group = group if n % max(count, 1) == 0 else 1 << (group - 1).bit_length()
    scale = jnp.repeat(groups.scale.astype(jnp.float32), group, axis=-1)[..., :n]
    return (groups.codes.astype(jnp.float32) * scale).astype(dtype)


def maxima(*arrays: Float[Array, "..."]) -> Float[Array, " k"]:
    """Computes `pallas_kernels.maxima` in jnp."""
    # Arrays of the same shape are combined first, so that one pass reads all of them.
    alike: dict[tuple[int, ...], Array] = {}
    for x in arrays:
        bits = magnitude_bits(x.astype(jnp.float32))
        before = alike.get(x.shape)
        alike[x.shape] = bits if before is None else jnp.maximum(before, bits)
    largest = [jnp.max(bits, initial=0) for bits in alike.values()]
    return lax.bitcast_convert_type(jnp.stack(largest), jnp.float32)


def quantize_tensor(
    x: Float[Array, "... n"],
    scale: Float[Array, ""],
    *,
    dtype: DTypeLike,
    row: bool,
    transposed: bool,
    keep_maxima: bool = False,
) -> Codes:
    """Computes `pallas_kernels.quantize_tensor` in jnp."""
    x = x.astype(jnp.float32)
    codes = lax.optimization_barrier(encode(normal(x), scale, dtype))
    return Codes(
        codes if row else None,
        transpose(codes) if transposed else None,
        scale,
        maxima(x) if keep_maxima else None,
    )


def transpose(codes: Float[Array, "... n"]) -> Float[Array, "n tokens"]:
    """Computes `pallas_kernels.transpose` in jnp."""
    n = codes.shape[-1]
    return codes.reshape(math.prod(codes.shape[:-1]), n).T
