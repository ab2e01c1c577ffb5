"""Copies tokens to the rows that experts multiply."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import CODES, check_dtype, check_positive
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import Axes
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES, strip_layout
from pallas_kernels.mosaic.rows import LONGEST, Row
from pallas_kernels.numerics import GROUP

_MOST = 16  # Copies of a token, which the kernel stores one after another.
_WORD = 4  # Bytes of the integers that the kernel moves.
_STEP = _WORD * LANES


def copy_rows(
    x: Float[Array, "tokens n"],
    places: Int[Array, "tokens k"],
    *,
    rows: int,
    implementation: operations.Implementation | None = None,
) -> Float[Array, "rows n"]:
    """Returns rows y with `y[places[t, 0]] = y[places[t, 1]] = ... = x[t]`.

    This copies tokens to rows in the order of experts, and reads each token once. On a
    mesh n can be split over devices, but neither rows nor tokens. Rows of y that are
    not in `places` are undefined.

    Args:
      x: Codes of one token or more.
      places: The rows of each token, int32. All must differ and be less than `rows`,
        which is not checked.
      rows: The number of rows of y.
      implementation: The implementation; None means the kernel where it can run.

    Raises:
      ValueError: If a dtype or shape is not supported, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import copy_rows
      >>> x = jnp.array([[1.0], [2.0]], jnp.float8_e4m3fn)
      >>> copy_rows(x, jnp.array([[0, 3], [2, 1]], jnp.int32), rows=4)[:, 0].tolist()
      [1.0, 2.0, 2.0, 1.0]
    """
    if x.ndim != 2 or places.ndim != 2 or len(places) != len(x):
        raise ValueError(
            "x and places must be [tokens, n] and [tokens, k], got "
            f"{x.shape} and {places.shape}"
        )
    check_positive(tokens=len(x))
    check_dtype("x", x.dtype, CODES)
    check_dtype("places", places.dtype, (jnp.int32,))
    if rows < places.size:
        raise ValueError(f"rows must be {places.size} or more, got {rows}")
    return _CopyRows(rows=rows)(x, places, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CopyRows(operations.Operation):
    """The operation of `copy_rows`."""

    rows: int
    name = "copy_rows"

    def obstacle(self, x, places) -> str | None:
        k, n = places.shape[1], x.shape[1]
        if not 0 < k <= _MOST:
            return f"it copies a token 1 to {_MOST} times, got {k}"
        if not x.size:
            return "there are no rows"
        if n % _STEP or n > _WORD * LONGEST:
            most = f"{_STEP} bytes up to {_WORD * LONGEST} long"
            return f"rows must be multiples of {most}, got {n}"
        return None

    def reference(self, x, places) -> Array:
        tokens = jnp.arange(len(x), dtype=jnp.int32)
        tokens = jnp.broadcast_to(tokens[:, None], places.shape)
        index = jnp.full(self.rows, len(x), jnp.int32).at[places].set(tokens)
        return _codes(_words(x).at[index].get(mode="fill", fill_value=0), x)

    def axes(self, x, places) -> tuple:
        return (Axes("_ n"), Axes("_ _")), Axes("_ n")

    def kernel(self, x, places) -> Array:
        run = jax.custom_batching.sequential_vmap(self._run)
        return _codes(run(_words(x), places), x)

    def _run(self, x, places) -> Array:
        """Runs the kernel, in which each thread block copies the words of a token."""
        (tokens, k), n = places.shape, x.shape[1]
        row = Row(n=n)
        groups = n // GROUP

        def kernel(x, places, out):
            token = lax.axis_index("token")
            places = [places[token, j] for j in range(k)]
            for tile in row.tiles:

                def tile_at(ref, index, tile=tile):
                    ref = ref.at[pl.ds(index * groups, groups)]
                    return row.tile(ref, tile)

                layout = strip_layout(row.shape(tile))
                value = plgpu.load(tile_at(x, token), layout=layout, optimized=False)
                for index in places:
                    mosaic.store(tile_at(out, index), value)

        return mosaic.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((self.rows * groups, GROUP), x.dtype),
            kernel_name="copy_rows",
            grid=(tokens,),
            grid_names=("token",),
            compiler_params=mosaic.by_lanes(),
        )(x.reshape(-1, GROUP), places).reshape(self.rows, n)


def _words(x: Float[Array, "tokens n"]) -> Array:
    """Returns codes as 32-bit words; as bytes if a row does not fill its last word."""
    if x.shape[1] % _WORD:
        return lax.bitcast_convert_type(x, jnp.uint8)
    return lax.bitcast_convert_type(x.reshape(len(x), -1, _WORD), jnp.uint32)


def _codes(words: Array, like: Float[Array, "tokens n"]) -> Float[Array, "rows n"]:
    """Returns the codes that words hold, with the dtype and row length of `like`."""
    codes = lax.bitcast_convert_type(words, like.dtype)
    return codes.reshape(len(words), like.shape[1])
