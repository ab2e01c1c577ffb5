"""Which tiles a matrix product takes: as measured, or what mostly does well.

`python -m experiments.tune` measures and writes the table beside this file.
"""

import functools
import json
from pathlib import Path
from typing import Any

from pallas_kernels.matmul_plan import Product, Tuning

TABLE = Path(__file__).with_name("tuning.json")
_BLOCKS = ({"chunks": 2}, {"chunks": 1}, {"chunks": 3}, {"chunks": 2, "cluster": "m"})
_TURNS = ({}, {"width": 16}, {"cluster": "m"}, {"cluster": "n"})


def candidates(product: Product) -> list[Tuning]:
    """What is tried; the first that divides a shape is what unmeasured shapes take."""
    narrow = {"tile_n": 128, "stages": 6}
    if product.scaling == "blocks":
        return [Tuning(**narrow, **more) for more in _BLOCKS]
    if product.promote == 128:
        return [Tuning(**narrow, chunks=4, width=16), Tuning(**narrow, chunks=2)]
    if product.promote:
        return [Tuning(parts=4, cluster="m"), Tuning(**narrow)]
    tall = {"tile_m": 256, "tile_n": 128}
    return [
        Tuning(cluster="m"),
        Tuning(),
        Tuning(**tall),
        Tuning(**tall, cluster="n"),
        Tuning(**tall, cluster="m"),
        Tuning(cluster="n"),
        Tuning(cluster="m", minor="n"),
        Tuning(cluster="m", width=16),
        *(Tuning(**narrow, together=False, **more) for more in _TURNS),
    ]


def divides(tuning: Tuning, m: int, n: int) -> bool:
    """Whether the tiles cover an output of this shape, and nothing else."""
    return m % tuning.span[0] == 0 and n % tuning.span[1] == 0


def choose(product: Product, m: int, n: int, k: int) -> Tuning | None:
    """What was fastest for the shape, or is taken unmeasured; None where XLA was."""
    measured = _table().get(key(product, m, n, k), {})
    if measured == "xla":
        return None
    return Tuning(**measured) if measured else heuristic(product, m, n)


def heuristic(product: Product, m: int, n: int) -> Tuning | None:
    """The first candidate that divides the output; None if none does."""
    return next((t for t in candidates(product) if divides(t, m, n)), None)


def key(product: Product, m: int, n: int, k: int) -> str:
    """The table's name for a product of a shape."""
    kind = product.scaling if product.scaling == "blocks" else "tensor"
    kind += f", promote {product.promote}" if product.promote else ""
    kind += f", groups of {product.group}" if product.group else ""
    return f"{m} x {n} x {k}, {kind}"


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())["tuning"] if TABLE.exists() else {}
