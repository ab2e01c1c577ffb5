"""Tests fine-tuning on virtual devices: losses, microbatches, adapters, the program."""

import json

import numpy as np
import pytest
from helpers.chat_folders import write_model

from experiments.common import meshes
from experiments.finetune import program, settings
from experiments.finetune.base import base_of_folder
from experiments.finetune.training import AdapterTrainer, AnswerTrainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:a parameter of shape"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a tiny model with biases."""
    return write_model(tmp_path_factory.mktemp("base") / "model", qkv_bias=True)


def _losses(folder, mesh=None, kind=AnswerTrainer, **changes):
    values = {"model": str(folder), "batch_size": 8, "seq_len": 32, "lr": 1e-3}
    of_run = settings.settings(values | {"recipes": ("bf16",)} | changes)
    base = base_of_folder(folder)
    mesh = mesh and meshes.make(meshes.parse(mesh))
    config = base.config(of_run, of_run.recipes[0])
    trainer = kind(config, of_run, steps=10, base=base.load, mesh=mesh)
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 384, (8, 3, 33)).astype(np.int32)
    batch[:, 1] = 1 + (np.arange(33) > 20)
    batch[:, 2] = rng.random((8, 33)) < np.linspace(0.1, 0.9, 8)[:, None]
    fewer = batch * (np.arange(33) % 3 != 0)
    state, losses = trainer.init(), []
    for _ in range(3):
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics.loss))
    return [*losses, trainer.evaluate(state, [batch, fewer])]


def test_meshes_and_microbatches_train_as_one_device_does(folder):
    nearest = {"rounding": "nearest", "param_dtype": "float32"}
    expected = _losses(folder, **nearest)
    assert expected[2] < expected[0]
    for changes in (
        {"mesh": "data=2,fsdp=4"},
        {"mesh": "fsdp=2,data=2,tensor=2", "accumulate": 2},
        {"mesh": "fsdp=4,context=2"},
    ):
        actual = _losses(folder, **changes, **nearest)
        np.testing.assert_allclose(actual, expected, rtol=2e-3)


def test_adapters_train_on_several_devices_as_on_one(folder):
    changes = {"kind": AdapterTrainer, "lora": 4, "recipes": ("coat",), "lr": 0.01}
    expected = _losses(folder, **changes)
    assert expected[2] < expected[0]
    actual = _losses(folder, mesh="data=8", **changes)
    # Each device has a scale of its own for the gradients of its rows.
    np.testing.assert_allclose(actual, expected, rtol=1e-2)
    with pytest.raises(
        ValueError, match="--lora takes --mesh data=N alone, got fsdp=8"
    ):
        _losses(folder, mesh="fsdp=8", **changes)


@pytest.mark.slow
def test_the_program_trains_and_saves_on_a_mesh(folder, tmp_path):
    lines = (
        {"question": f"What is {n} + 5?", "answer": f"It is {n + 5}."}
        for n in range(200)
    )
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    paths = [str(tmp_path / "chat.jsonl")] * 2
    flags = ["--model", str(folder), "--data", paths[0], "--test", paths[1]]
    flags += ["--test-questions", "10", "--eval-questions", "4"]
    flags += [
        "--recipe",
        "bf16",
        "--mesh",
        "fsdp=8",
        "--batch-size",
        "8",
        "--steps",
        "2",
    ]
    flags += ["--seq-len", "64", "--eval-every", "2", "--out", str(tmp_path / "run")]
    assert program.main(flags) == 0
    assert (tmp_path / "run/models/bf16/model.safetensors").exists()
