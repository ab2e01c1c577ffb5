"""Tests of the rows that a run writes for TensorBoard."""

import math

from helpers.events import events

from experiments.pretrain import program as pretrain
from experiments.training import tensorboard
from experiments.training.tensorboard import Board, scalars


def test_tags_begin_with_what_a_row_is_about():
    row = {"recipe": "coat", "step": 3, "parameter": "layers/qkv", "moment": "mu"}
    row |= {"zero_share": 0.25, "k0": None, "skipped": True, "loss": math.nan}
    assert scalars(row) == {"layers/qkv/mu/zero_share": 0.25}
    row = {"of": "activations", "path": "qkv", "layer": 1, "amax": 4}
    assert scalars(row) == {"activations/qkv/layer 1/amax": 4.0}


def test_dropped_steps_are_hidden(tmp_path):
    with Board(tmp_path, 0) as board:
        for step in (1, 2):
            board.write({"recipe": "coat", "step": step, "loss": 1.0 * step})
        board.drop_after(1)
        board.write({"recipe": "coat", "step": 2, "loss": 7.0})
    losses = {step: value for step, tag, value in events(tmp_path) if tag == "loss"}
    assert losses == {1: 1.0, 2: 7.0}


def test_a_missing_package_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    assert pretrain.main(["--tensorboard", "--out", str(tmp_path / "run")]) == 2
    assert "pip install tensorboardX" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
