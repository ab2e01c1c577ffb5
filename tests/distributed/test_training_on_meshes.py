"""Tests the main job on eight virtual devices: meshes, checkpoints, two processes."""

import dataclasses
import functools
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.main_job import bits, rows_of, tiny, write_letters
from helpers.marks import slow

from experiments.common import meshes
from experiments.pretrain import program as pretrain
from experiments.training import job
from experiments.training import trainer as training
from experiments.training.checkpoints import Checkpoints, Progress
from experiments.training.interrupts import STOPPED
from experiments.training.settings import Settings, model_config

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:a parameter of shape"),
]
MIXED = "data=2,fsdp=2,tensor=2"
CONTEXT = "data=2,fsdp=2,context=2"
STEPS = 4
_TINY = ["--preset", "tiny", "--recipes", "bf16", "--batch-size", "8"]


def _settings(**changes) -> Settings:
    return tiny(batch_size=8, **changes)


@functools.cache
def _trainer(mesh=None, recipe="bf16", dtype=jnp.float32, **changes):
    settings = _settings(**changes)
    config = dataclasses.replace(model_config(settings, recipe, 257), dtype=dtype)
    mesh = mesh and meshes.make(meshes.parse(mesh))
    return training.Trainer(config, settings, steps=10, mesh=mesh)


def _batches(count=STEPS):
    shape = count, 8, _settings().seq_len + 1
    return np.random.default_rng(0).integers(0, 257, shape, np.int32)


def _advance(trainer, state, batches):
    actual = []
    for batch in batches:
        state, metrics = trainer.step(state, batch)
        actual.append([metrics.loss, metrics.grad_norm])
    return state, np.asarray(actual, np.float64)


@functools.cache
def _rows(*args, **changes):
    """Returns losses and gradient norms of a few steps, and then a validation loss."""
    trainer = _trainer(*args, **changes)
    state, actual = _advance(trainer, trainer.init(), _batches())
    return np.append(actual, trainer.evaluate(state, [*_batches(1)]))


@pytest.mark.parametrize(
    "mesh", [MIXED, CONTEXT, *map(slow, ("fsdp=8", "data=8", "tensor=8"))]
)
def test_meshes_train_as_one_device_does(mesh):
    np.testing.assert_allclose(_rows(mesh), _rows(), rtol=1e-4)


def test_microbatches_on_a_mesh_sum_to_the_batch():
    np.testing.assert_allclose(
        _rows("data=2,tensor=4", accumulate=4), _rows(), rtol=1e-4
    )


@pytest.mark.parametrize("mesh", ["fsdp=8", MIXED])
def test_each_device_has_its_shards_alone_and_they_are_donated(mesh):
    trainer = _trainer(mesh)
    state = trainer.init()
    over = 8 if mesh == "fsdp=8" else 4
    total = 0
    for x in jax.tree.leaves(state):
        shard = x.addressable_shards[0].data
        total += shard.nbytes
        if x.size >= 4096:
            assert shard.size * over == x.size
    compiled, _ = trainer.compiled
    assert compiled.memory_analysis().alias_size_in_bytes == total
    after, _ = trainer.step(state, _batches(1)[0])
    for x, like in zip(
        jax.tree.leaves(after), jax.tree.leaves(trainer.abstract_state()), strict=True
    ):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


def test_a_checkpoint_has_the_same_bits_on_any_mesh(tmp_path):
    saved = _trainer("fsdp=8")
    state, _ = _advance(saved, saved.init(), _batches(2))
    expected = bits(state)
    with Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(state, Progress(step=2))
    for mesh in ("fsdp=8", MIXED, None):
        trainer = _trainer(mesh)
        with Checkpoints(tmp_path / "saved") as checkpoints:
            restored = checkpoints.state(trainer.abstract_state())
        assert bits(restored) == expected
        if mesh == "fsdp=8":
            resumed, rows = _advance(trainer, restored, _batches()[2:])
            undisturbed, remaining = _advance(trainer, state, _batches()[2:])
            assert bits(resumed) == bits(undisturbed)
            np.testing.assert_array_equal(rows, remaining)


def test_what_a_mesh_does_not_divide_is_refused():
    settings = _settings()
    devices = meshes.make({"fsdp": 8})
    odd = dataclasses.replace(model_config(settings, "bf16", 257), num_kv_heads=2)
    odd = dataclasses.replace(odd, intermediate_size=100)
    with pytest.raises(
        ValueError, match=r"axis 2 of layers/gate_up into 8 parts.* 100"
    ):
        training.Trainer(odd, settings, steps=2, mesh=devices)
    with pytest.raises(ValueError, match="--mesh fsdp=4 needs 4 devices, got 8"):
        meshes.make({"fsdp": 4})
    with pytest.raises(ValueError, match="multiple of 8, for the mesh fsdp=8; got 12"):
        meshes.check_batch("--batch-size", 12, devices)
    devices = meshes.make({"context": 8})
    with pytest.raises(ValueError, match=r"multiple of 8, for the mesh context=8; got"):
        meshes.check_length("--seq-len", 12, devices)
    with pytest.raises(ValueError, match=r"number must be a multiple of 8, .* got 2"):
        training.Trainer(
            model_config(settings, "bf16", 257), settings, steps=2, mesh=devices
        )


@pytest.fixture
def text(tmp_path):
    return ["--data", str(write_letters(tmp_path / "text.txt"))]


@pytest.fixture
def on_devices(monkeypatch):
    """Returns a function that runs the main job on the first `count` devices."""
    all_devices = jax.devices()
    monkeypatch.setattr(job, "seconds_per_step", lambda *_: 1.0)

    def run(count, *argv):
        monkeypatch.setattr(meshes, "_devices", lambda: all_devices[:count])
        return pretrain.main([*map(str, argv), "--mesh", f"fsdp={count}"])

    return run


def _logged(folder):
    return [
        [row["loss"], row["grad_norm"], row.get("val_loss", 0)]
        for row in rows_of(folder)
    ]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_as_one_and_stop_together(text, tmp_path, on_devices):
    """A signal to the second process stops both, and one process resumes the run."""
    argv = [*_TINY, *text, "--steps", "60", "--eval-every", "60"]
    out, alone = tmp_path / "run", tmp_path / "alone"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    coordinator = f"localhost:{_free_port()}"
    command = [sys.executable, "-m", "experiments.pretrain", *argv, "--out", str(out)]
    command += ["--mesh", "data=2,fsdp=2", "--processes", "2"]
    command += ["--coordinator", coordinator, "--process-id"]
    running = [
        subprocess.Popen(
            [*command, str(index)],
            env=os.environ | {"XLA_FLAGS": flags},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    rows = out / "metrics.jsonl"
    while all(process.poll() is None for process in running):
        if rows.exists() and '"step": 5,' in rows.read_text():
            running[1].send_signal(signal.SIGINT)
            break
        time.sleep(0.05)
    output = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [STOPPED] * 2, output
    assert f"--resume {out}" in output[0][0]
    assert "compil" not in output[1][0]
    assert on_devices(4, *argv, "--out", alone) == 0
    few = len(_logged(out))
    assert 5 <= few < 60
    np.testing.assert_allclose(_logged(out)[:5], _logged(alone)[:5], rtol=2e-3)
    assert on_devices(2, "--resume", out) == 0
    assert len(_logged(out)) == 60
    np.testing.assert_allclose(_logged(out)[-1], _logged(alone)[-1], rtol=0.02)
