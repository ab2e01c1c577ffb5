"""Tests saved activations by operation, against the sizes in the paper's table 2."""

import contextlib
import io
import json

import jax.numpy as jnp
import pytest

from coat_jax.remat.report import residual_report
from experiments.activations import memory as activation_memory
from experiments.activations import operations as activation_operations
from experiments.common.layer_cases import CASES, Shape

_SHAPE = "--hidden 256 --intermediate 640 --heads 4 --kv-heads 2 --batch 2 --seq 128"
# Sizes relative to a BF16 array [b, s, h]: queries, keys and values; the MLP's hidden
# activation; FP8 groups of 16 with their scales.
_HEADS, _INSIDE, _GROUPS = 1 + 2 * 2 / 4, 640 / 256, 0.5 * (1 + 2 / 16)


_SMALL = Shape(hidden=32, seq=8, batch=1, intermediate=48, kv_heads=2, head_dim=8)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns the results file of a small layer, and the text printed for it."""
    out = tmp_path_factory.mktemp("memory") / "saved.json"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        activation_memory.main([*_SHAPE.split(), "--details", "--out", str(out)])
    return out, printed.getvalue()


@pytest.fixture(scope="module")
def rows(written):
    actual = json.loads(written[0].read_text())["rows"]
    return {row["recipe"]: row for row in actual}


def test_operations_add_up_to_what_is_saved(rows):
    assert rows.keys() == CASES.keys()
    for row in rows.values():
        names = activation_operations.TITLES
        total = sum(row[f"{name}_units"] for name in names)
        assert total == pytest.approx(row["units"])
        assert row["mib"] * 2**20 == pytest.approx(row["units"] * 2 * 128 * 256 * 2)


@pytest.mark.parametrize(
    ("case", "operation", "units"),
    [
        ("bf16", "attention", _HEADS),
        ("bf16", "linear", 3 + _INSIDE),
        ("bf16, nothing saved", "norm", 1),
        ("bf16, products saved", "gate", 2 * _INSIDE),
        ("bf16, products saved", "attention", _HEADS),
        ("te", "norm", 2),
        ("te", "gate", 2 * _INSIDE),
        ("te", "attention", _HEADS),
        ("te", "linear", (3 + _INSIDE) / 2),
        ("coat", "norm", 2 * _GROUPS),
        ("coat", "gate", 2 * _INSIDE * _GROUPS),
        ("coat", "attention", _HEADS),
        ("coat", "linear", 1),
        ("coat_max", "norm", 2 * _GROUPS),
        ("coat_max", "gate", 2 * _INSIDE * _GROUPS),
    ],
)
def test_operations_save_what_they_read(case, operation, units, rows):
    assert rows[case][f"{operation}_units"] == pytest.approx(units, abs=0.01)


def _saved(*shape, dtype=jnp.bfloat16):
    """Returns the report row of a function that saves an array of this shape."""
    (row,) = residual_report(jnp.sin, jnp.zeros(shape, dtype)).rows
    return row


@pytest.mark.parametrize(
    ("shape", "operation"),
    [
        ((2, 1, 8, 32), "norm"),
        ((2, 1, 8, 2), "norm"),
        ((2, 1, 8, 1), "norm"),
        ((2, 1, 8, 2, 48), "gate"),
        ((2, 1, 8, 2, 3), "gate"),
        ((2, 1, 8, 4, 8), "attention"),
        ((2, 1, 8, 2, 8), "attention"),
        ((2, 1, 4, 8), "attention"),
        ((2, 1, 4, 8, 1), "attention"),
        ((2, 1, 8, 64), "attention"),
        ((2, 1, 1), "linear"),
    ],
    ids=str,
)
def test_shapes_tell_operations(shape, operation):
    assert activation_operations.operation(_saved(*shape), _SMALL) == operation


def test_unknown_arrays_are_refused():
    with pytest.raises(ValueError, match="no operation of a layer saves"):
        activation_operations.operation(_saved(2, 1, 8, 77), _SMALL)


def test_heads_divide_the_hidden_size():
    args = activation_memory.parser().parse_args(["--heads", "3"])
    with pytest.raises(ValueError, match="heads must divide 4096, got 3"):
        activation_memory.shape_of(args)


def test_command_line(written):
    out, printed = written
    actual = json.loads(out.read_text())
    assert actual["shape"]["seq"] == 128
    targets = [(bar["name"], bar["target"]) for bar in actual["bars"]]
    assert targets == [
        ("coat, U", "<= 8.3"),
        ("coat_max, U", "<= 6.5"),
        ("bf16 / bf16, fp8_remat", ">= 1.8"),
    ]
    assert out.with_suffix(".png").stat().st_size
    assert "22.66" in printed
    assert "coat_max, 2 layers" in printed
