"""`jax.lax.ragged_dot` in FP8: the matmuls of a mixture of experts.

In the forward pass each token has a scale, and so has each output feature of an expert.
The backward pass sums over output features and over tokens, and these scales could not
be factored out of the sums. In the backward pass gradients and tokens have a scale per
tensor, and weights have a scale per expert.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

import pallas_kernels as kernels
from coat_jax.fp8.matmul import (
    dtype_of,
    once,
    quantizable,
    quantize_tensor,
    quantize_tokens,
    stored,
    tensor_scales,
)
from coat_jax.fp8.primitive import Types, bind, new_primitive
from coat_jax.meshes import on_explicit_mesh
from coat_jax.quantization.formats import E4M3, E5M2
from pallas_kernels import GroupTiles, Scaled, numerics, versions
from pallas_kernels.dispatch import array_types, operations

# The time of a matmul with fewer rows is the time to read its weights.
FEWEST_ROWS = 16


def fp8_ragged_dot(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Int[Array, " g"],
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: jax.sharding.NamedSharding | P | None = None,
) -> Float[Array, "m n"]:
    """Computes `jax.lax.ragged_dot` in FP8.

    It multiplies rows that are sorted by group, each by the matrix of its group. Groups
    may have any sizes, which the host need not know. Rows after the last group give
    zeros, and have zero gradients. `lhs` is saved in FP8, and `rhs`, the weights, by
    reference.

    On a mesh k or n may be sharded over devices, but every device has all tokens and
    groups. Sharded tokens need `jax.shard_map`, where each device sorts its own tokens,
    or `jax.vmap` over the sharded axis.

    If `lhs` has fewer than 16 rows, `jax.lax.ragged_dot` computes the matmul.

    Args:
      lhs: The tokens, sorted by group.
      rhs: The weights of each group.
      group_sizes: The number of rows of each group.
      precision: Ignored, because FP8 matmuls have only one precision.
      preferred_element_type: The dtype of the result; by default the promoted dtype of
        `lhs` and `rhs`.
      out_sharding: The sharding of the result on a mesh with explicit axes, which needs
        jax 0.11 or newer.

    Raises:
      ValueError: If an operand is not floating, or if JAX is too old for
        `out_sharding`.
      TypeError: If shapes or dtypes do not fit `jax.lax.ragged_dot`.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> tokens = jnp.ones((32, 8), jnp.bfloat16)
      >>> experts = jnp.stack([jnp.ones((8, 4)), jnp.full((8, 4), 2.0)])
      >>> y = coat.fp8_ragged_dot(tokens, experts, jnp.array([10, 20]))
      >>> y[jnp.array([0, 10, 30]), 0].round().tolist()
      [8.0, 16.0, 0.0]
    """
    del precision
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating, got dtype {operand.dtype}")
    dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
    options = versions.ragged_dot_options(out_sharding)
    in_jax = partial(lax.ragged_dot, preferred_element_type=dtype, **options)
    # `lax.ragged_dot` checks the shapes.
    expected = jax.eval_shape(in_jax, lhs, rhs, group_sizes)
    if len(lhs) < FEWEST_ROWS or not rhs.size:
        return in_jax(lhs, rhs, group_sizes)
    compute = partial(_bound, dtype=jnp.dtype(dtype))
    if jax.typeof(lhs).sharding.mesh.explicit_axes:
        compute = on_explicit_mesh(compute, lhs, expected)
    arrays = array_types.varying_alike((lhs, rhs, group_sizes.astype(jnp.int32)))
    # `explain` counts calls, also of functions that JAX has traced before.
    with operations.counted():
        return compute(*arrays)


@cache
def _jitted(dtype: jnp.dtype) -> Callable:
    """Returns a jitted function of x, w and group sizes that returns a list.

    The list has one array, the FP8 `ragged_dot` of the arguments in `dtype`.
    """

    def fp8_ragged_dot(x, w, group_sizes):
        return [_ragged_dot(x, w, group_sizes, dtype)]

    return jax.jit(fp8_ragged_dot)


def _type_of_result(
    x: jax.core.ShapedArray,
    w: jax.core.ShapedArray,
    group_sizes: jax.core.ShapedArray,
    *,
    dtype: jnp.dtype,
) -> Types:
    # An array's type has more than a shape and a dtype: also the mesh axes over which
    # the array varies.
    in_jax = partial(lax.ragged_dot, preferred_element_type=dtype)
    return jax.make_jaxpr(in_jax)(x, w, group_sizes).out_avals


def _bound(x: Array, w: Array, group_sizes: Array, *, dtype: jnp.dtype) -> Array:
    arrays = x, w, group_sizes
    (y,) = bind(fp8_ragged_dot_p, _jitted(dtype), *arrays, dtype=dtype)
    return y


fp8_ragged_dot_p = new_primitive("fp8_ragged_dot", _jitted, _type_of_result)


@jax.jit
def _quantized_experts(w: Float[Array, "g k n"]) -> list[Array]:
    """Returns codes for the forward pass, their scales, and a scale per expert.

    The codes are transposed, [g, n, k], with a scale for each output, [g, n].
    """
    codes, scale = kernels.quantize_columns(quantizable(w))
    largest = jnp.max(scale, axis=1) * E4M3.max
    return [codes, scale, numerics.tensor_scale(largest, E4M3.dtype)]


def _types_of_experts(w: jax.core.ShapedArray) -> Types:
    return jax.make_jaxpr(_quantized_experts)(w).out_avals


# This is one primitive, so that `fp8_remat` saves the scales and does not compute them
# again.
_experts_p = new_primitive("fp8_experts", lambda: _quantized_experts, _types_of_experts)


class _Residuals(NamedTuple):
    """The arrays that the backward pass reads.

    Attributes:
      x: The transposed codes of tokens, in which groups are padded.
      x_scale: The per-tensor scale of these codes.
      w: The weights.
      w_scale: The scale of each group's weights.
      group_sizes: The number of rows of each group.
      tiles: The tiles of the rows; see `pallas_kernels.group_tiles`.
      like: An empty array with the dtype of the tokens.
    """

    x: Float[Array, "k padded"]
    x_scale: Float[Array, ""]
    w: Float[Array, "g k n"]
    w_scale: Float[Array, " g"]
    group_sizes: Int[Array, " g"]
    tiles: GroupTiles
    like: Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ragged_dot(x, w, group_sizes, dtype):
    return _ragged_dot_fwd(x, w, group_sizes, dtype)[0]


def _ragged_dot_fwd(x, w, group_sizes, dtype):
    x, w, group_sizes = array_types.with_common_mesh((x, w, group_sizes))
    tiles = kernels.group_tiles(group_sizes, rows=len(x))
    rows = quantize_tokens(x)
    codes, w_scale = quantized_experts(w)
    y = grouped(rows, codes, group_sizes, tiles, dtype)
    # Rows of no group must not affect the per-tensor scale.
    of_groups = jnp.where(has_group(x, group_sizes), rows.scale, 0)
    (x_scale,) = tensor_scales(rows._replace(scale=of_groups))
    transposed = _transposed(x, group_sizes, x_scale, E4M3.dtype)
    residuals = _Residuals(
        transposed, x_scale, w, w_scale, group_sizes, tiles, dtype_of(x)
    )
    return once(y), residuals


def _ragged_dot_bwd(dtype, residuals, dy):
    residuals, dy = array_types.with_common_mesh((residuals, dy))
    x, x_scale, w, w_scale, group_sizes, tiles, like = residuals
    dy_scale = gradient_scale(dy, has_group(dy, group_sizes))
    rows = quantize_tensor(dy, E5M2, copies="row", scale=dy_scale)
    codes = codes_of_experts(w, w_scale)
    dx = grouped(Scaled(rows.row, dy_scale), codes, group_sizes, tiles, like.dtype)
    transposed = _transposed(dy, group_sizes, dy_scale, E5M2.dtype)
    dw = kernels.grouped_weight_gradient(
        x, transposed, group_sizes, x_scale, dy_scale, out_dtype=stored(w.dtype)
    )
    no_gradient = np.zeros(group_sizes.shape, jax.dtypes.float0)
    return dx, dw.astype(w.dtype), no_gradient


_ragged_dot.defvjp(_ragged_dot_fwd, _ragged_dot_bwd)


def quantized_experts(w: Float[Array, "g k n"]) -> tuple[Scaled, Float[Array, " g"]]:
    """Returns the weights' codes for the forward pass, and a scale for each expert.

    The codes [g, n, k] have a scale for each output. The scales of experts are for the
    backward pass.
    """
    codes, scale, of_experts = bind(_experts_p, _quantized_experts, w)
    return Scaled(codes, scale), of_experts


def codes_of_experts(w: Float[Array, "g k n"], scale: Float[Array, " g"]) -> Scaled:
    """Quantizes weights with a given scale per expert, for the gradients of rows."""
    of_rows = jnp.broadcast_to(scale[:, None], w.shape[:2])
    return Scaled(kernels.quantize_rows(quantizable(w), of_rows).codes, scale)


def gradient_scale(
    dy: Float[Array, "m n"], counts: Bool[Array, " m"]
) -> Float[Array, ""]:
    """Returns the per-tensor E5M2 scale of a gradient's rows where `counts` is true."""
    values = jnp.where(counts[:, None], dy.astype(jnp.float32), 0)
    return numerics.tensor_scale(numerics.magnitude(values), E5M2.dtype)


def grouped(
    x: Scaled,
    w: Scaled,
    group_sizes: Int[Array, " g"],
    tiles: GroupTiles,
    dtype: DTypeLike,
    *,
    keep_maxima: bool = False,
) -> Any:
    """Multiplies each row of `x` by the weights of its group.

    `x` [m, k] and `w` [g, n, k] are codes. The result is [m, n] in `dtype`, a floating
    dtype. With `keep_maxima` the amax of each part of the result is returned as well.
    """
    arrays = x.codes, w.codes, group_sizes, x.scale, w.scale
    options = {"tiles": tiles, "out_dtype": stored(dtype)}
    if not keep_maxima:
        return kernels.grouped_matmul(*arrays, **options).astype(dtype)
    y, maxima = kernels.grouped_matmul(*arrays, **options, keep_maxima=True)
    return y.astype(dtype), maxima


def _transposed(
    x: Float[Array, "m n"], group_sizes: Array, scale: Array, dtype: DTypeLike
) -> Float[Array, "n padded"]:
    return kernels.grouped_transpose(quantizable(x), group_sizes, scale, dtype=dtype)


def has_group(x: Shaped[Array, "m *n"], group_sizes: Array) -> Bool[Array, " m"]:
    """Returns whether each row belongs to a group."""
    return jnp.arange(len(x)) < jnp.sum(group_sizes)
