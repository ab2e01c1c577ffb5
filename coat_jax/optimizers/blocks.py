"""Adam's step on a large array, block by block, where no kernel runs.

XLA computes the step in several passes over an array, because a scale needs the amax of
its group. Between two passes it stores seven float32 arrays of the parameter's size.
In a loop over blocks these arrays have the size of a block.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

import pallas_kernels
from coat_jax.optimizers.batch import as_dtype, stored_dtype
from pallas_kernels import AdamScalars, Moments
from pallas_kernels.ops.adam.reference import GROUP

# The number of elements of a block. Smaller blocks are slower, because the work on a
# block is split among the cores of a CPU.
_BLOCK = 2**20


def has_blocks(shape: tuple[int, ...]) -> bool:
    """Returns whether an array of this shape is larger than a block."""
    rows, width = _view(shape)
    return rows > max(1, _BLOCK // width)


def _view(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the shape [rows, columns] in which `adam_in_blocks` reads an array.

    A row is a group, or the last axis if groups do not divide it.
    """
    size, n = math.prod(shape), shape[-1]
    width = GROUP if n % GROUP == 0 else n
    return size // width, width


@jax.jit
def adam_in_blocks(
    scalars: AdamScalars,
    grads: Float[Array, "... n"],
    moments: Moments,
    seed: UInt32[Array, ""],
    stream: UInt32[Array, ""],
    params: Float[Array, "... n"] | None = None,
    salt: UInt32[Array, ""] | None = None,
) -> tuple[Float[Array, "... n"], Moments]:
    """Computes `pallas_kernels.adam` in a loop over blocks, which writes in place."""
    rows, width = _view(grads.shape)
    block, groups = max(1, _BLOCK // width), -(-width // GROUP)
    before = grads if params is None else params, moments
    dtypes = jax.tree.map(lambda x: x.dtype, before)

    def stored(x):
        # FP8 arrays are sliced as integers, because a CPU has no FP8 and would convert
        # all of them.
        return as_dtype(x, stored_dtype(x.dtype)).reshape(rows, -1)

    given = stored(grads)

    def step(first, count, results):
        def part(x, dtype):
            return as_dtype(lax.dynamic_slice_in_dim(x, first, count), dtype)

        result, moments = jax.tree.map(part, results, dtypes)
        result, moments = pallas_kernels.adam(
            scalars,
            part(given, grads.dtype),
            moments,
            seed,
            stream + jnp.uint32(first) * jnp.uint32(groups),
            None if params is None else result,
            salt,
        )

        def put(x, part):
            part = as_dtype(part, x.dtype)
            return lax.dynamic_update_slice_in_dim(x, part, first, axis=0)

        return jax.tree.map(put, results, (result, moments))

    results = jax.tree.map(stored, before)
    if params is None:
        results = jnp.zeros_like(results[0]), results[1]
    results = lax.fori_loop(
        0, rows // block, lambda i, results: step(i * block, block, results), results
    )
    if rest := rows % block:
        results = step(rows - rest, rest, results)
    return jax.tree.map(
        lambda x, like: as_dtype(x.reshape(like.shape), like.dtype), results, before
    )
