"""Tests of the benchmark of policies that offload."""

import pytest
from helpers.tables import text_of

from experiments.bench import offload
from experiments.common.layer_cases import Shape


def test_codes_take_little_more_than_half_of_the_host():
    shape = Shape(
        hidden=128, seq=32, batch=2, intermediate=192, kv_heads=2, head_dim=32
    )
    rows = [
        {"case": case, "offloads": offloads, "temporary_bytes": 2**20, "ms": 2.0}
        | {"host_bytes": offload.host_bytes(run, params, shape.input())}
        for case, offloads, run, params in offload.programs(shape, layers=2)
    ]
    at = {(row["case"], row["offloads"]): row["host_bytes"] for row in rows}
    # Queries and the output, keys and values, gate and up, of two bytes each. Nothing
    # reads the last matmul's result in backward.
    numbers = 2 * 64 * (2 * 128 + 2 * 64 + 2 * 192)
    assert at["bf16", True] == 2 * numbers
    # A code, and two bytes of scale for 16 of them.
    assert at["coat", True] == pytest.approx(numbers * (1 + 2 / 16))
    assert at["bf16", False] == at["coat", False] == 0
    (bar,) = offload.bars(rows)
    assert bar.name == "bytes on the host / bf16's"
    assert bar.measured == pytest.approx(0.5625)
    assert bar.holds
    assert text_of(offload.table(rows)).count("coat") == 2
