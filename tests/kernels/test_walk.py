"""Tests the order in which a matmul visits its tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ops.matmul.walk import snake


def visits(rows, columns, width):
    """Yields the tiles stripe by stripe, as a person would list them."""
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
