"""Tests of the rows that a run writes for TensorBoard."""

import json
import math
import struct

import pytest
from helpers.kills import Killed, on_call
from helpers.main_job import write_letters
from tensorboardX.proto.event_pb2 import Event

from experiments.pretrain import program as pretrain
from experiments.training import tensorboard
from experiments.training.tensorboard import Board, scalars

pytestmark = pytest.mark.usefixtures("shared_trainers")


def _events(folder):
    """Yields the steps, tags and values in the files of a folder, in their order."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name[-4:]):
        content = path.read_bytes()
        while content:
            # A record is its length, a checksum, its data and another checksum.
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value


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
    losses = {step: value for step, tag, value in _events(tmp_path) if tag == "loss"}
    assert losses == {1: 1.0, 2: 7.0}


@pytest.fixture
def command(tmp_path):
    """A command line without `--tensorboard`, and the folder of its run."""
    text = write_letters(tmp_path / "text.txt")
    flags = ["--preset", "tiny", "--recipes", "bf16", "--steps", "4", "--eval-every"]
    flags += ["2", "--save-every", "2", "--health-every", "3", "--data", str(text)]
    return [*flags, "--out", str(tmp_path / "run")], tmp_path / "run"


def test_a_run_and_its_resume_write_all_rows(command, monkeypatch):
    flags, folder = command
    with monkeypatch.context() as patch:
        on_call(patch, Board, "write", 3)
        with pytest.raises(Killed):
            pretrain.main([*flags, "--tensorboard"])
    assert pretrain.main(["--resume", str(folder), "--tensorboard"]) == 0
    events = list(_events(folder / "tensorboard" / "bf16"))
    values = {(step, tag): value for step, tag, value in events}
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for name in ("loss", "grad_norm", "lr", "val_loss"):
            if name in row:
                assert values[row["step"], name] == pytest.approx(row[name], rel=1e-6)
    assert any(tag.endswith("amax") for step, tag in values if step == 3)


def test_a_run_without_the_flag_writes_nothing(command):
    flags, folder = command
    assert pretrain.main(flags) == 0
    assert not (folder / "tensorboard").exists()


def test_a_missing_package_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    assert pretrain.main(["--tensorboard", "--out", str(tmp_path / "run")]) == 2
    assert "pip install tensorboardX" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
