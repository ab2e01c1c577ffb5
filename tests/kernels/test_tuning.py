"""Tests which tiles matmuls take, and the order in which they visit them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels import BF16

import pallas_kernels
from experiments.common import kernel_cases
from pallas_kernels.ops.matmul import tuning
from pallas_kernels.ops.matmul.plan import Product, Tuning
from pallas_kernels.ops.matmul.walk import snake


def visits(rows, columns, width):
    """Yields (row, column) of all tiles, stripe by stripe, by plain loops."""
    for number, first in enumerate(range(0, rows, width)):
        stripe = range(first, min(first + width, rows))
        order = range(columns) if number % 2 == 0 else reversed(range(columns))
        for column in order:
            for row in stripe:
                yield row, column


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("grid", [(43, 32), (3, 200), (1, 1)])
def test_visits_go_to_and_fro_in_stripes(grid, width):
    numbers = jnp.arange(grid[0] * grid[1], dtype=jnp.int32)
    visit = jax.jit(jax.vmap(lambda number: snake(number, grid, width)))
    rows, columns = visit(numbers)
    actual = zip(np.asarray(rows).tolist(), np.asarray(columns).tolist(), strict=True)
    assert list(actual) == list(visits(*grid, width))


@pytest.mark.parametrize("width", [7, 15])
def test_shares_of_the_last_stripe_are_whole_numbers(width):
    """The division in float32 is exact for more tiles than a matmul has."""
    columns = 60_000
    numbers = jnp.arange(width * columns, dtype=jnp.int32)
    visit = jax.jit(jax.vmap(lambda n: snake(n, (width, columns), 16)))
    rows, actual = visit(numbers)
    np.testing.assert_array_equal(actual, np.arange(width * columns) // width)
    np.testing.assert_array_equal(rows, np.arange(width * columns) % width)


def test_the_table_says_what_runs(monkeypatch):
    """A Hopper GPU takes the table's tiles, or XLA where the table prefers it."""
    product = Product(out_dtype=jnp.dtype(BF16))
    table = {
        tuning.key(product, 256, 512, 384): {"tiles": {"stages": 3}, "xla": True},
        tuning.key(product, 256, 256, 384): {"tiles": {"tile_n": 128}, "xla": False},
    }
    monkeypatch.setattr(tuning, "_table", lambda: table)
    monkeypatch.setattr("pallas_kernels.dispatch.devices.has_hopper", lambda: True)
    faster, tuned, other = (
        pallas_kernels.explain(
            pallas_kernels.matmul, *kernel_cases.operands("product", (256, n, 384))[:2]
        )
        for n in (512, 256, 1024)
    )
    assert [e.choices[0].implementation for e in (faster, tuned, other)] == [
        "reference",
        "mosaic",
        "mosaic",
    ]
    assert "XLA is faster for 256 x 512 x 384" in str(faster)
    assert tuning.choose(product, 256, 256, 384) == Tuning(tile_n=128)
    assert tuning.choose(product, 256, 512, 384) is None
    # XLA needs another pass over the result for scales of rows or for the amax.
    for more in ({"scaling": "rows"}, {"maxima": True}):
        wants_more = dataclasses.replace(product, **more)
        assert tuning.choose(wants_more, 256, 512, 384) == Tuning(stages=3)
    # Matmuls that add to an accumulator are measured separately.
    addend = dataclasses.replace(product, accumulate=True)
    assert tuning.choose(addend, 256, 256, 384) == tuning.heuristic(addend, 256, 256)
    odd = Tuning(tile_n=160, stages=2, together=False)
    entry = {"tiles": dataclasses.asdict(odd), "xla": False}
    table[tuning.key(addend, 256, 256, 384)] = entry
    assert tuning.choose(addend, 256, 256, 384) == odd


def test_the_table_holds_tiles_that_fit():
    table = json.loads(tuning.TABLE.read_text())
    assert table["device"]["name"]
    products = list(kernel_cases.PRODUCTS.values())
    for key, actual in table["tuning"].items():
        m, n, k = map(int, key.split(",")[0].split(" x "))
        (product,) = (p for p in products if tuning.key(p, m, n, k) == key)
        tiles = Tuning(**actual["tiles"])
        assert tuning.obstacle(product, tiles, m, n) is None
        assert tiles.stages >= tiles.held(product)
        assert actual["xla"] in (True, False)


@pytest.mark.parametrize("kind", kernel_cases.PRODUCTS)
def test_unmeasured_shapes_take_tiles_that_compute_little_twice(kind):
    product = kernel_cases.PRODUCTS[kind]
    for m, n in ((8192, 4096), (5504, 2048), (8192, 128), (128, 8192), (8200, 384)):
        tiles = tuning.heuristic(product, m, n)
        assert tuning.obstacle(product, tiles, m, n) is None
        rows, columns = tiles.span
        computed = -(-m // rows) * rows * -(-n // columns) * columns
        assert computed <= 1.6 * m * n
    assert tuning.heuristic(product, 64, 4096) is None


def test_tiles_that_do_not_do_for_another_product_of_the_shape(monkeypatch):
    product = kernel_cases.PRODUCTS["product"]
    shape, transposed = (256, 512, 384), Tuning(transposed=True)
    table = {tuning.key(product, *shape): {"tiles": {"transposed": True}, "xla": False}}
    monkeypatch.setattr(tuning, "_table", lambda: table)
    for maxima in (False, True):
        requested = dataclasses.replace(product, maxima=maxima)
        assert tuning.choose(requested, *shape) == transposed
    of_rows = dataclasses.replace(product, scaling="rows")
    assert tuning.choose(of_rows, *shape) == tuning.heuristic(of_rows, 256, 512)
