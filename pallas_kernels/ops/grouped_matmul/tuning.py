"""Choice of the tile sizes and settings of grouped matmuls."""

from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels.ops.grouped_matmul.tiles import BLOCK, ROWS
from pallas_kernels.ops.matmul.plan import PIECE_M, TILE_K, Product, Tuning, tile_k

_WIDE = Tuning(width=16)
_TURNS = Tuning(tile_n=192, stages=4, together=False)
_NARROW = Tuning(tile_n=128, stages=6, together=False)
# All but the last have tiles of equal height, so that they can share a list of tiles.
ALONG_M = (
    _WIDE,
    Tuning(),
    _TURNS,
    _NARROW,
    Tuning(cluster="n"),
    Tuning(tile_m=256, tile_n=128, cluster="n"),
)
ALONG_K = (Tuning(), _TURNS, _NARROW)
# The time of the epilogue counts with this many steps along k or fewer. Ping-pong
# warpgroups store a tile while the next one is computed.
_FEW_STEPS = 16


def along_m(
    product: Product, n: int, k: int, dtype: jnp.dtype, height: int
) -> Tuning | None:
    """Returns the settings of a matmul that is grouped along m; None if none fit.

    The settings are the fastest that were measured on an H100 for 16,384 to 65,536 rows
    in 8 to 128 groups, with tiles of `height` rows. `dtype` is the operands' dtype.
    """
    few = k // tile_k(dtype) <= _FEW_STEPS
    order = (_TURNS, _WIDE, _NARROW) if few else (_WIDE, _TURNS, _NARROW)
    if height != BLOCK:
        order = tuple(t for t in ALONG_M if t.tile_m == height)
    able = [t for t in order if columns_obstacle(product, t, n) is None]
    return _first_frugal(able, [(t.span[1], n) for t in able])


def along_k(product: Product, n: int, k: int) -> Tuning | None:
    """Returns the settings of a matmul that is grouped along k; None if none fit.

    The result of the matmul is [groups, n, k].
    """
    able = [t for t in ALONG_K if size_obstacle(product, t, n, k) is None]
    return _first_frugal(able, [(t.tile_n, k) for t in able])


def _first_frugal(
    able: Sequence[Tuning], spans: Sequence[tuple[int, int]]
) -> Tuning | None:
    """Returns the first settings that compute at most 4% of the columns twice.

    If there are none, returns the settings that compute the fewest columns twice, or
    None if `able` is empty.

    Args:
      able: The settings that can compute the matmul.
      spans: For each of these settings, the number of columns of a tile or of a pair of
        tiles, and the number of columns of the result.
    """
    computed = [-(-n // span) * span / n for span, n in spans]
    for tuning, share in zip(able, computed, strict=True):
        if share <= 1.04:
            return tuning
    pairs = sorted(zip(computed, range(len(able)), strict=True))
    return able[pairs[0][1]] if pairs else None


def columns_obstacle(product: Product, tuning: Tuning, n: int) -> str | None:
    """Returns why these settings cannot compute n columns of grouped rows, or None."""
    columns = TILE_K // jnp.dtype(product.out_dtype).itemsize
    if n < tuning.span[1]:
        return f"{n} columns are less than tiles of {tuning.span[1]}"
    # The copy engine stores parts of a subtile from rows of 128 bytes.
    if n % columns or tuning.tile_n % columns:
        return f"n and tiles must be multiples of {columns}, got {n}, {tuning.tile_n}"
    return _general_obstacle(tuning)


def rows_obstacle(rows: int, k: int, dtype: jnp.dtype, height: int) -> str | None:
    """Returns why no kernel reads rows [rows, k] in tiles of `height` rows, or None."""
    if k % tile_k(dtype) or not k:
        return f"k must be a multiple of {tile_k(dtype)}, got {k}"
    if rows % ROWS or rows < height:
        return f"rows must be a multiple of {ROWS} and {height} or more, got {rows}"
    return None


def size_obstacle(product: Product, tuning: Tuning, n: int, k: int) -> str | None:
    """Returns why these settings cannot compute a result [groups, n, k], or None."""
    columns = tuning.store_n(product)
    if n < tuning.tile_m or k < tuning.tile_n:
        return f"{n} x {k} is less than tiles of {tuning.tile_m} x {tuning.tile_n}"
    if n % ROWS or k % columns:
        return f"n must be a multiple of {ROWS} and k of {columns}, got {n} x {k}"
    return _general_obstacle(tuning)


def _general_obstacle(tuning: Tuning) -> str | None:
    if tuning.cluster == "m":
        return "neighbouring tiles along m may have different groups"
    if tuning.transposed or tuning.parts > 1 or tuning.chunks > 1:
        return f"tiles are neither transposed nor in parts, got {tuning}"
    if tuning.height % PIECE_M:
        return f"{PIECE_M} rows a warpgroup are needed, got {tuning}"
    return None
