"""Sums the rows of each token, such as the results of the token's experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import WIDE, check_dtype, check_shape
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import Axes
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic import rows as mosaic_rows
from pallas_kernels.mosaic.rows import Row
from pallas_kernels.numerics import GROUP

_MOST = 16  # Rows of a token that the kernel reads at once, in registers.


def sum_rows(
    x: Float[Array, "rows n"],
    places: Int[Array, "tokens k"],
    add: Float[Array, "tokens n"] | None = None,
    *,
    out_dtype: DTypeLike = jnp.float32,
    implementation: operations.Implementation | None = None,
) -> Float[Array, "tokens n"]:
    """Computes `y[t] = add[t] + x[places[t, 0]] + x[places[t, 1]] + ...` in float32.

    The sum is rounded once, to `out_dtype`. In a mixture of experts this adds up the
    results of a token's experts, and the gradients of the rows that a token was copied
    to. On a mesh n can be split over devices, but neither rows nor tokens.

    Args:
      x: The rows, bfloat16 or float32.
      places: The rows of each token, int32. All must be rows of `x`, which is not
        checked.
      add: An array that is added, bfloat16 or float32, or None.
      out_dtype: bfloat16 or float32.
      implementation: The implementation; None means the kernel where it can run.

    Raises:
      ValueError: If a dtype or shape is not supported, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import sum_rows
      >>> x = jnp.array([[1.0], [2.0], [4.0]])
      >>> sum_rows(x, jnp.array([[0, 2], [1, 1]], jnp.int32)).tolist()
      [[5.0], [4.0]]
    """
    if x.ndim != 2 or places.ndim != 2 or not places.shape[1]:
        raise ValueError(
            "x and places must be [rows, n] and [tokens, k] with k of 1 or more, got "
            f"{x.shape} and {places.shape}"
        )
    check_dtype("x", x.dtype, WIDE)
    check_dtype("places", places.dtype, (jnp.int32,))
    check_dtype("out_dtype", out_dtype, WIDE)
    if add is not None:
        check_dtype("add", add.dtype, WIDE)
        check_shape("add", add, (len(places), x.shape[1]))
    operation = _SumRows(out_dtype=jnp.dtype(out_dtype))
    return operation(x, places, add, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SumRows(operations.Operation):
    """The operation of `sum_rows`."""

    out_dtype: jnp.dtype
    name = "sum_rows"

    def obstacle(self, x, places, add) -> str | None:
        tokens, k = places.shape
        if k > _MOST:
            return f"it adds up to {_MOST} rows of a token, got {k}"
        if not len(x):
            return "there are no rows"
        return mosaic_rows.obstacle((tokens, x.shape[1]))

    def reference(self, x, places, add) -> Array:
        each = jnp.asarray(x).at[places].get(mode="promise_in_bounds")
        total = jnp.sum(each.astype(jnp.float32), axis=1)
        total = total if add is None else add.astype(jnp.float32) + total
        return total.astype(self.out_dtype)

    def axes(self, x, places, add) -> tuple:
        of_add = None if add is None else Axes("_ n")
        return (Axes("_ n"), Axes("_ _"), of_add), Axes("_ n")

    def kernel(self, x, places, add) -> Array:
        run = functools.partial(_run, dtype=self.out_dtype)
        return jax.custom_batching.sequential_vmap(run)(x, places, add)


@functools.partial(jax.jit, static_argnames="dtype")
def _run(x: Array, places: Array, add: Array | None, *, dtype: DTypeLike) -> Array:
    """Runs the kernel, in which each thread block adds up the rows of a token.

    `dtype` is the dtype of the result; the other arguments are as in `sum_rows`.
    """
    (tokens, k), n = places.shape, x.shape[1]
    tiles, groups = Row(n=n), n // GROUP

    def kernel(x, places, add, out):
        token = lax.axis_index("token")

        def row(ref, index):
            return ref.at[pl.ds(index * groups, groups)]

        of_token = [row(x, places[token, j]) for j in range(k)]
        if add is not None:
            of_token.append(row(add, token))
        to = row(out, token)
        for tile in tiles.tiles:
            # All loads are issued before the first sum, so that their latencies
            # overlap.
            values = [tiles.load(ref, tile) for ref in of_token]
            total = functools.reduce(jnp.add, values)
            mosaic.store(tiles.tile(to, tile), total.astype(dtype))

    def flat(x):
        return None if x is None else x.reshape(-1, GROUP)

    return mosaic.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tokens * groups, GROUP), dtype),
        kernel_name="sum_rows",
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=mosaic.by_lanes(),
    )(flat(x), places, flat(add)).reshape(tokens, n)
