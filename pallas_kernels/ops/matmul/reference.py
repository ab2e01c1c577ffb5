"""FP8 matmuls in jnp."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

BLOCK = 128  # Rows and columns of a block of b, columns of a group of a.
_NT = (((1,), (1,)), ((), ()))


def matmul(
    a: Float[Array, "m k"],
    b: Float[Array, "n k"],
    a_scale: Float[Array, "..."],
    b_scale: Float[Array, "..."],
    accumulator: Float[Array, "m n"] | None,
    *,
    out_dtype: DTypeLike,
    promote: int | None,
) -> Float[Array, "m n"]:
    """Computes `pallas_kernels.matmul` in jnp.

    On GPUs it becomes a cuBLASLt call, except with per-block scales.
    """
    wide, precision = jnp.float32, "highest" if promote else None
    if a_scale.ndim == 2:
        a = a.astype(wide) * jnp.repeat(a_scale, BLOCK, axis=1)
        b_scale = jnp.repeat(jnp.repeat(b_scale, BLOCK, axis=0), BLOCK, axis=1)
        b = b.astype(wide) * b_scale[: b.shape[0]]
        y = lax.dot_general(a, b, _NT, precision="highest")
    elif a_scale.ndim == b_scale.ndim == 0 and accumulator is None:
        # Per-tensor scales are powers of two, so scaling the rounded matmul is exact.
        # XLA folds scales into the cuBLASLt call only in this order.
        wide = jnp.dtype(out_dtype)
        y = lax.dot_general(a, b, _NT, precision, wide)
        return y * (a_scale * b_scale).astype(wide)
    else:
        y = lax.dot_general(a, b, _NT, precision, wide)
        y = y * a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
    return (y if accumulator is None else y + accumulator).astype(out_dtype)
