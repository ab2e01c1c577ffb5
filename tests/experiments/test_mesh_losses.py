"""Tests of the comparison of meshes, with curves that are made up."""

import numpy as np
import pytest

from experiments.pretrain import mesh_losses
from experiments.pretrain.mesh_losses import ALONE, MESHES, Curve

_LOSSES = np.linspace(5.0, 4.0, 50)


def _curves(factor, val_factor):
    late = np.where(np.arange(50) < mesh_losses.EARLY, 1 + factor, 1 + 10 * factor)
    other = Curve(_LOSSES * late, 4.0 * val_factor)
    return {ALONE: Curve(_LOSSES, 4.0)} | dict.fromkeys(MESHES, other)


def test_differences_are_those_to_one_device():
    alone, *remaining = mesh_losses.summarize("bf16", _curves(1e-3, 1.02))
    assert (alone["mesh"], alone["largest_difference"]) == (ALONE, 0)
    assert [row["mesh"] for row in remaining] == list(MESHES)
    for row in remaining:
        assert row["dtype"] == "float32"
        assert row["largest_early_difference"] == pytest.approx(1e-3)
        assert row["largest_difference"] == pytest.approx(1e-2)
        assert row["val_gap_percent"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("recipe", "factor", "val_factor", "holds"),
    [
        ("bf16", 9e-5, 1.5, True),
        ("bf16", 2e-4, 1.0, False),
        ("coat", 1.0, 0.995, True),
        ("coat", 0.0, 0.98, False),
    ],
)
def test_bars_are_of_early_steps_or_of_validation(recipe, factor, val_factor, holds):
    rows = mesh_losses.summarize(recipe, _curves(factor, val_factor))
    actual = mesh_losses.bars(rows)
    assert [bar.holds for bar in actual] == [holds] * len(MESHES)


def test_other_devices_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(mesh_losses.jax, "devices", lambda: [None])
    with pytest.raises(SystemExit, match="2"):
        mesh_losses.main([])
    assert "this needs 8 devices, got 1" in capsys.readouterr().err
