"""Grouped matmuls in jnp: their definitions, for any device."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import array_types, devices
from pallas_kernels.ops.grouped_matmul.tiles import BLOCK, padded_starts, tiles_in_jnp

_NT = (((1,), (1,)), ((), ()))


def grouped_in_jnp(
    a: Float[Array, "rows k"],
    b: Float[Array, "groups n k"],
    a_scale: Float[Array, "..."],
    b_scale: Float[Array, "..."],
    group_sizes: Int[Array, " groups"],
    *,
    out_dtype: DTypeLike,
) -> Float[Array, "rows n"]:
    """Computes `pallas_kernels.grouped_matmul` in jnp, tile by tile."""
    rows, height = len(a), min(BLOCK, len(a))
    y = jnp.zeros((rows, b.shape[1]), out_dtype)
    if not y.size:
        return y
    tiles = tiles_in_jnp(group_sizes, rows=rows, height=height, align=1)
    a_scale = jnp.broadcast_to(a_scale, rows)
    b_scale = _for_groups(b_scale, b.shape[:2])
    y = array_types.varying_alike(y, (a, b, a_scale, b_scale, group_sizes))

    def add(index: Array, y: Array) -> Array:
        group, row = tiles.group[index], tiles.row[index]

        def of_tile(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, row, height)

        value = _product(of_tile(a), b[group]) * b_scale[group][None]
        value = (value * of_tile(a_scale)[:, None]).astype(out_dtype)
        at = row + jnp.arange(height)
        is_of_group = (at >= tiles.first[index]) & (at < tiles.end[index])
        value = jnp.where(is_of_group[:, None], value, of_tile(y))
        return lax.dynamic_update_slice_in_dim(y, value, row, 0)

    return lax.fori_loop(0, tiles.totals[0], add, y)


def weight_gradient_in_jnp(
    a_t: Float[Array, "n padded"],
    b_t: Float[Array, "k padded"],
    scale: Float[Array, "..."],
    group_sizes: Int[Array, " groups"],
    *,
    out_dtype: DTypeLike,
) -> Float[Array, "groups n k"]:
    """Computes `pallas_kernels.grouped_weight_gradient` in jnp, block by block of rows.

    `scale` is the product of both scales, a scalar or one for each group.
    """
    groups, group_sizes = len(group_sizes), jnp.asarray(group_sizes)
    blocks = -(-group_sizes // BLOCK)
    starts = padded_starts(group_sizes) // BLOCK

    def add(index: Array, sums: Array) -> Array:
        group = jnp.sum(starts + blocks <= index)

        def of_block(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, index * BLOCK, BLOCK, axis=1)

        return sums.at[group].add(_product(of_block(a_t), of_block(b_t)))

    sums = jnp.zeros((groups, len(a_t), len(b_t)), jnp.float32)
    sums = array_types.varying_alike(sums, (a_t, b_t, group_sizes))
    sums = lax.fori_loop(0, jnp.sum(blocks), add, sums)
    return (sums * jnp.broadcast_to(scale, groups)[:, None, None]).astype(out_dtype)


def _product(a: Float[Array, "m k"], b: Float[Array, "n k"]) -> Float[Array, "m n"]:
    """Computes a @ b.T in float32; bfloat16 holds all FP8 numbers."""
    # XLA does not support all bfloat16 products on CPUs.
    wide = jnp.float32 if devices.target_platform() == "cpu" else jnp.bfloat16
    a, b = (x.astype(wide) for x in (a, b))
    return lax.dot_general(a, b, _NT, preferred_element_type=jnp.float32)


def _for_groups(scale: Array, shape: tuple[int, int]) -> Float[Array, "groups n"]:
    """Returns a scale for each group and column."""
    return jnp.broadcast_to(scale[:, None] if scale.ndim == 1 else scale, shape)
