"""`jax.lax.dot_general` in FP8, for the layers of other libraries.

Operands have per-tensor scales, as in `matmul.linear`. Each matmul is one equation of a
jaxpr. Its primitive is `fp8_dot_p`, by which `fp8_remat` recognizes the matmul.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import batching
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.fp8.matmul import fp8_matmul
from coat_jax.fp8.primitive import Types, bind, new_primitive
from coat_jax.meshes import on_explicit_mesh
from pallas_kernels.dispatch import array_types, operations

# The time of a matmul with fewer rows is the time to read its weights. FP8 would take
# longer, because the weights must be quantized as well.
FEWEST_ROWS = 16


def fp8_dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: jax.sharding.Sharding | P | None = None,
) -> Float[Array, "..."]:
    """Computes `jax.lax.dot_general` in FP8.

    Pass it as `dot_general=` to `nn.Dense` or `nnx.Linear`. It takes any dimension
    numbers. With batch dimensions every batch entry has its own scale. `lhs` is saved
    in FP8, and `rhs`, the weights, by reference. Within `fp8_remat` several matmuls of
    one `lhs` are merged, each token has its own scale, and `fp8_remat` decides whether
    `lhs` is saved or recomputed.

    If `lhs` has fewer than 16 rows, as the condition of a diffusion model may have,
    `jax.lax` computes the matmul: FP8 would take longer and save nothing. `vmap` over
    `lhs` alone multiplies the number of rows.

    Args:
      lhs: The activations.
      rhs: The weights.
      dimension_numbers: The dimension numbers of `jax.lax.dot_general`.
      precision: Ignored, because FP8 matmuls have only one precision.
      preferred_element_type: The dtype of the result; by default the promoted dtype of
        `lhs` and `rhs`.
      out_sharding: The sharding of the result on a mesh with explicit axes.

    Raises:
      ValueError: If an operand is not floating.
      TypeError: If the dimension numbers do not fit the operands.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> layer = nn.Dense(8, dtype=jnp.bfloat16, dot_general=coat.fp8_dot_general)
      >>> params = layer.init(jax.random.key(0), jnp.ones((2, 4)))
      >>> layer.apply(params, jnp.ones((2, 4))).shape
      (2, 8)
    """
    del precision
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating, got dtype {operand.dtype}")
    dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
    # `lax.dot_general` checks the dimension numbers, and its errors name the axes.
    expected = jax.eval_shape(
        partial(lax.dot_general, lhs, rhs, dimension_numbers, out_sharding=out_sharding)
    )
    if jax.typeof(lhs).sharding.mesh.explicit_axes:
        # XLA shards codes and scales; arguments and results have explicit shardings.
        fn = partial(
            fp8_dot_general,
            dimension_numbers=dimension_numbers,
            preferred_element_type=dtype,
        )
        return on_explicit_mesh(fn, lhs, expected)(lhs, rhs)
    if not lhs.size or not rhs.size:
        return lax.dot_general(
            lhs, rhs, dimension_numbers, preferred_element_type=dtype
        )
    lhs, rhs = array_types.varying_alike((lhs, rhs))
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = [i for i in range(lhs.ndim) if i not in (*lhs_contract, *lhs_batch)]
    rhs_free = [i for i in range(rhs.ndim) if i not in (*rhs_contract, *rhs_batch)]
    a = lax.transpose(lhs, (*lhs_batch, *lhs_free, *lhs_contract))
    b = lax.transpose(rhs, (*rhs_batch, *rhs_contract, *rhs_free))
    batch = [lhs.shape[i] for i in lhs_batch]
    rows = [lhs.shape[i] for i in lhs_free]
    cols = [rhs.shape[i] for i in rhs_free]
    depth = math.prod(lhs.shape[i] for i in lhs_contract)
    a = a.reshape(*batch, math.prod(rows), depth)
    b = b.reshape(*batch, depth, math.prod(cols))
    # `explain` counts calls, also of functions that JAX has traced before.
    with operations.counted():
        (y,) = bound(a, b, jnp.dtype(dtype))
    return y.reshape(expected.shape)


def is_fp8(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is a matmul that is computed in FP8."""
    return eqn.primitive is fp8_dot_p and _has_enough_rows(eqn.invars[0].aval)


def _has_enough_rows(x: Array | jax.core.ShapedArray) -> bool:
    return x.shape[-2] >= FEWEST_ROWS


@cache
def _jitted(dtype: jnp.dtype) -> Callable:
    """Returns a jitted function of x [*batch, m, k] and w [*batch, k, n].

    The function returns a list with one array, x @ w in `dtype`.
    """

    def fp8_dot(x, w):
        if not _has_enough_rows(x):
            return [_in_jax(x, w, dtype=dtype)]
        multiply = partial(fp8_matmul, dtype=dtype, contract=0)
        for _ in range(x.ndim - 2):
            multiply = jax.vmap(multiply)
        return [multiply(x, w)]

    return jax.jit(fp8_dot)


def _in_jax(x: Array, w: Array, *, dtype: jnp.dtype) -> Array:
    batch = tuple(range(x.ndim - 2))
    numbers = (((x.ndim - 1,), (w.ndim - 2,)), (batch, batch))
    return lax.dot_general(x, w, numbers, preferred_element_type=dtype)


def _type_of_result(
    x: jax.core.ShapedArray, w: jax.core.ShapedArray, *, dtype: jnp.dtype
) -> Types:
    # An array's type has more than a shape and a dtype: also the mesh axes over which
    # the array varies.
    return jax.make_jaxpr(partial(_in_jax, dtype=dtype))(x, w).out_avals


def bound(x: Array, w: Array, dtype: jnp.dtype) -> list[Array]:
    """Computes x [*batch, m, k] @ w [*batch, k, n] as one equation of a jaxpr.

    Returns:
      The product in `dtype`, in a list.
    """
    return bind(fp8_dot_p, _jitted(dtype), x, w, dtype=dtype)


def _mapped(
    operands: list, axes: list, *, dtype: jnp.dtype, body: Any
) -> tuple[list, list[int]]:
    (x, w), (of_x, of_w) = operands, axes
    if of_w is None:
        # All examples share the weight, so their rows form one matmul.
        x = jnp.moveaxis(x, of_x, -3)
        *batch, count, m, k = x.shape
        (y,) = bound(x.reshape(*batch, count * m, k), w, dtype)
        return [y.reshape(*batch, count, m, y.shape[-1])], [len(batch)]
    if of_x is None:
        return jax.vmap(_jitted(dtype), in_axes=(None, of_w))(x, w), [0]
    # Each batch entry has its own scales, so the mapped axis is one more batch axis.
    x, w = jnp.moveaxis(x, of_x, 0), jnp.moveaxis(w, of_w, 0)
    return bound(x, w, dtype), [0]


fp8_dot_p = new_primitive("fp8_dot", _jitted, _type_of_result)
batching.primitive_batchers[fp8_dot_p] = _mapped
