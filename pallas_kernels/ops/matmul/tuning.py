"""Choice of a matmul's tile sizes and settings: from measurements, or a heuristic.

`python -m experiments.kernels.tune` measures and writes the table next to this file.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pallas_kernels.ops.matmul.plan import BLOCK, PIECE_M, TILE_K, Product, Tuning

_SWIZZLED = 32  # The fewest bytes of a row that the copy engine swizzles.
_ROWS = 8  # Rows that the copy engine swizzles together.
TABLE = Path(__file__).with_name("tuning.json")
_PAIRED = 8 * 132 * 128 * 256  # Output elements: eight tiles per multiprocessor.
_TRIPLE = {"tile_m": 192, "tile_n": 128, "stages": 4, "warpgroups": 3}


def candidates(product: Product) -> list[Tuning]:
    """Returns the settings to try, the best first."""
    narrow = {"tile_n": 128, "stages": 6}
    if product.scaling == "blocks":
        triple = [Tuning(**_TRIPLE), Tuning(**_TRIPLE, parts=2)]
        return [*triple, Tuning(tile_n=128, stages=5, chunks=2)]
    if product.promote == 128:
        return [Tuning(**_TRIPLE), Tuning(**narrow, chunks=4, width=16)]
    if product.promote:
        thirds = {"tile_n": 192, "parts": 3}
        return [
            Tuning(**thirds, cluster="m", width=16),
            Tuning(**thirds),
            Tuning(**narrow),
        ]
    # A wgmma instruction with more columns takes less energy per column, and a training
    # step runs at the GPU's power limit. Ping-pong warpgroups store a tile while the
    # next tile is computed.
    turns = functools.partial(Tuning, together=False)
    wide = {"tile_n": 160, "stages": 5}
    wider = {"tile_n": 192, "stages": 4}
    low = {"tile_m": 64, "tile_n": 256, "stages": 4}
    lows = [turns(**low, cluster="m"), turns(**low, cluster="m", width=16)]
    tall = {"tile_m": 256, "tile_n": 128}
    if product.heads:
        return [
            *lows,
            turns(**narrow),
            turns(**narrow, width=4),
            turns(**narrow, cluster="m"),
            Tuning(**tall, cluster="n"),
        ]
    large = {"tile_m": 256, "tile_n": 192, "stages": 3}
    transposed = [
        Tuning(**large, transposed=True),
        Tuning(**large, cluster="n", transposed=True),
        turns(**wider, cluster="m", transposed=True),
        turns(**wider, width=16, transposed=True),
    ]
    return [
        Tuning(width=16),
        Tuning(width=4),
        Tuning(),
        Tuning(cluster="m"),
        Tuning(cluster="m", width=4),
        Tuning(**tall, cluster="n"),
        turns(**wider, cluster="m"),
        turns(**wider, width=4),
        turns(**wider, width=16),
        Tuning(**large),
        Tuning(**large, cluster="n"),
        *lows,
        turns(**wide),
        turns(**narrow, cluster="m"),
        turns(**narrow),
        Tuning(tile_n=224),
        *(transposed if _transposable(product) else []),
    ]


def obstacle(product: Product, tuning: Tuning, m: int, n: int) -> str | None:
    """Returns why these settings cannot compute an output [m, n]; None if they can."""
    tiles = f"tiles of {tuning.tile_m} x {tuning.tile_n}"
    if tuning.transposed:
        if not _transposable(product) or tuning.tile_n % PIECE_M or n % PIECE_M:
            return f"{tiles} of the transpose: bfloat16, one scale, n by {PIECE_M}"
        m, n = n, m
    if m < tuning.span[0] or n < tuning.span[1]:
        pair = f", two along {tuning.cluster}" if tuning.cluster else ""
        return f"{m} x {n} is less than {tiles}{pair}"
    least = _SWIZZLED // jnp.dtype(product.out_dtype).itemsize
    if (columns := tuning.store_n(product)) < least:
        return f"tiles need a multiple of {least} columns, got {tuning.tile_n}"
    if n % columns:
        return f"n must be a multiple of {columns}, got {n}"
    if tuning.height % PIECE_M or tuning.tile_n % tuning.parts:
        return f"{PIECE_M} rows a warpgroup and equal parts are needed, got {tuning}"
    if product.scaling == "blocks" and tuning.tile_n != BLOCK:
        return f"tiles need the {BLOCK} columns of a block, got {tuning.tile_n}"
    if product.heads and (
        tuning.tile_n % product.heads.size or product.heads.size % columns
    ):
        return f"{tiles} are no whole heads of {product.heads.size}"
    return None


def _transposable(product: Product) -> bool:
    """Returns whether tiles of the transpose can compute the output.

    They are stored as square subtiles, which only plain bfloat16 outputs with
    per-tensor scales support.
    """
    plain = dataclasses.replace(product, maxima=False)
    return plain == Product(out_dtype=jnp.dtype(jnp.bfloat16))


def needs(product: Product) -> str:
    """Describes the outputs that at least one of the candidates can compute."""
    tried = candidates(product)
    rows, columns = (min(t.span[i] for t in tried) for i in (0, 1))
    multiple = min(t.store_n(product) for t in tried)
    heads = f", heads that divide {columns}" if product.heads else ""
    return f"{rows} x {columns} or more, n a multiple of {multiple}{heads}"


def choose(product: Product, m: int, n: int, k: int) -> Tuning | None:
    """Returns the settings for the shape; None if XLA is faster or no tiles fit."""
    measured = _table().get(key(product, m, n, k))
    # XLA first writes the matmul in float32 if scales are per-token. It reads the
    # result again for the amax. The table has neither cost, so the kernel runs.
    plain = product.scaling != "rows" and not product.maxima
    if measured and measured["xla"] and plain:
        return None
    return tiles(product, m, n, k)


def tiles(product: Product, m: int, n: int, k: int) -> Tuning | None:
    """Returns the fastest settings for the shape, or the heuristic's if unmeasured.

    Measurements are with per-tensor scales. Settings that transpose do not support
    per-token scales. In that case the heuristic is used, too.
    """
    if measured := _table().get(key(product, m, n, k)):
        fastest = Tuning(**measured["tiles"])
        if obstacle(product, fastest, m, n) is None:
            return fastest
    return heuristic(product, m, n)


@functools.cache
def heuristic(product: Product, m: int, n: int) -> Tuning | None:
    """Returns the first candidate that computes at most 4% of the output twice.

    If there is none, returns the candidate that computes the fewest elements twice, or
    None if no candidate can compute the output. Thread blocks with few tiles each are
    not paired in clusters, because they would wait for one another.
    """
    tried = (t for t in candidates(product) if not t.transposed)
    able = [t for t in tried if obstacle(product, t, m, n) is None]
    found = [t for t in able if t.cluster is None or m * n >= _PAIRED] or able
    frugal = (t for t in found if _computed(t, m, n) <= 1.04 * m * n)
    return next(frugal, min(found, key=lambda t: _computed(t, m, n), default=None))


def _computed(tuning: Tuning, m: int, n: int) -> int:
    """Returns how many elements of the output [m, n] the tiles compute together.

    If tiles do not divide the output, they overlap. Elements in two tiles count twice.
    """
    rows, columns = tuning.span
    return -(-m // rows) * rows * -(-n // columns) * columns


def key(product: Product, m: int, n: int, k: int) -> str:
    """Returns the key in the table for a matmul of [m, k] and [n, k]."""
    kind = product.scaling if product.scaling == "blocks" else "tensor"
    kind += f", promote {product.promote}" if product.promote else ""
    kind += f", heads of {product.heads.size}" if product.heads else ""
    kind += ", added" if product.accumulate else ""
    return f"{m} x {n} x {k}, {kind}"


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())["tuning"] if TABLE.exists() else {}


def refusal(
    product: Product, shape: tuple[int, int, int], chosen: Tuning | None
) -> str | None:
    """Returns why the kernel cannot run with the chosen settings, or None."""
    m, n, k = shape
    if not min(m, n, k):
        return f"{m} x {n} x {k} is empty"
    if k % TILE_K:
        return f"k must be a multiple of {TILE_K}, got {k}"
    if m % _ROWS:
        return f"rows of a must be a multiple of {_ROWS}, got {m}"
    if product.scaling == "blocks" and n % BLOCK:
        return f"n must be a multiple of {BLOCK}, got {n}"
    if chosen is None:
        return f"no tiles fit {m} x {n}: they need {needs(product)}"
    return obstacle(product, chosen, m, n)
