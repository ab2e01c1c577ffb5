"""Gathers of rows, at the rate of memory."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


def taken(x: Shaped[Array, "n *m"], index: Int[Array, " k"]) -> Shaped[Array, "k *m"]:
    """Returns rows of `x`, and zeros for an index of n."""
    per_word = 4 // x.dtype.itemsize
    if x.ndim < 2 or per_word < 2 or x.shape[-1] % per_word:
        return x.at[index].get(mode="fill", fill_value=0)
    # A thread of XLA's kernel moves an element at a time, so it moves words of 32 bits.
    words = x.reshape(*x.shape[:-1], x.shape[-1] // per_word, per_word)
    words = lax.bitcast_convert_type(words, jnp.uint32)
    rows = words.at[index].get(mode="fill", fill_value=0)
    return lax.bitcast_convert_type(rows, x.dtype).reshape(len(index), *x.shape[1:])
