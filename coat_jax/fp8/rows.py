"""Gathers rows, and sums the rows that each token was copied to."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

import pallas_kernels as kernels
from coat_jax.fp8.matmul import once, stored


def taken(x: Shaped[Array, "n *m"], index: Int[Array, " k"]) -> Shaped[Array, "k *m"]:
    """Gathers rows of `x` by index; the index n gives zeros."""
    per_word = 4 // x.dtype.itemsize
    if x.ndim < 2 or per_word < 2 or x.shape[-1] % per_word:
        return x.at[index].get(mode="fill", fill_value=0)
    # Each thread of XLA's gather moves one element, so elements are 32-bit words here.
    words = x.reshape(*x.shape[:-1], x.shape[-1] // per_word, per_word)
    words = lax.bitcast_convert_type(words, jnp.uint32)
    rows = words.at[index].get(mode="fill", fill_value=0)
    return lax.bitcast_convert_type(rows, x.dtype).reshape(len(index), *x.shape[1:])


def wide_order(order: Int[Array, " m"]) -> Int[Array, " m"]:
    """Returns a permutation in at least 32 bits, so that it can hold its length."""
    return order if order.dtype.itemsize >= 4 else order.astype(jnp.int32)


def inverted(order: Int[Array, " m"]) -> Int[Array, " m"]:
    """Returns the inverse of a permutation."""
    order = wide_order(order)
    numbers = jnp.arange(len(order), dtype=order.dtype)
    inverse = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
    # Without the barrier XLA would scatter again for each reader of the inverse.
    return once(inverse)


def sums(
    x: Float[Array, "m *n"], order: Int[Array, " m"], tokens: int
) -> Float[Array, "tokens *n"]:
    """Sums the rows of each token in float32, or in float64 if `x` is float64.

    Args:
      x: The rows. Row i belongs to token `order[i] // (m // tokens)`.
      order: A permutation.
      tokens: The number of tokens.
    """
    inverse = inverted(order)
    if tokens == len(x):
        return taken(x, inverse)
    each = x.at[inverse.reshape(tokens, -1)].get(mode="promise_in_bounds")
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return jnp.sum(each.astype(wide), axis=1).astype(x.dtype)


def total(
    x: Float[Array, "m n"],
    places: Int[Array, "tokens k"],
    add: Float[Array, "tokens n"] | None = None,
    *,
    dtype: DTypeLike,
) -> Float[Array, "tokens n"]:
    """Sums the rows of each token, which are at `places` in `x`, and adds `add`.

    Sums are computed in float32 and rounded once, to `dtype`. Differentiation raises an
    error.
    """
    arrays = x.astype(stored(x.dtype)), places.astype(jnp.int32), add
    y = kernels.sum_rows(*arrays, out_dtype=stored(dtype))
    return y.astype(dtype)
