"""Tests checkpoints on meshes: devices read their shards, and saving gathers them."""

import json
import os

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.hf_folders import write_folder
from helpers.hf_values import values_of
from jax.sharding import PartitionSpec as P

from coat_jax.models import hf
from coat_jax.models.hf import pieces, safetensors

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("case", "piece"), [("qwen2", 0), ("qwen2", 2**25), ("gemma3", 0), ("gemma3", 3000)]
)
def test_a_mesh_holds_the_same_checkpoint(tmp_path, monkeypatch, case, piece):
    folder = write_folder(tmp_path / "in", case)
    alone = hf.load(folder)
    monkeypatch.setattr(pieces, "PIECE", piece)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    model = hf.load(folder, mesh=mesh)
    assert model.layers.down[...].sharding.spec == P(None, "fsdp", "tensor")
    of_gates = model.layers.gate_up[...].sharding.spec
    assert of_gates == P(None, None, ("fsdp", "tensor"), None)
    states = (nnx.state(m, nnx.Param) for m in (model, alone))
    jax.tree.map(np.testing.assert_array_equal, *states)
    hf.save(model, tmp_path / "out")
    hf.save(alone, tmp_path / "alone")
    of_mesh, of_one = (
        (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("out", "alone")
    )
    assert of_mesh == of_one


def test_axes_that_do_not_divide_are_whole(tmp_path):
    folder = write_folder(tmp_path / "in", "llama")
    mesh = jax.make_mesh((7,), ("fsdp",), devices=jax.devices()[:7])
    model = hf.load(folder, mesh=mesh)
    assert model.layers.qkv[...].sharding.is_fully_replicated
    expected = values_of("model.norm.weight", (32,), "llama")
    np.testing.assert_array_equal(model.norm[...], expected)
    assert json.loads(model.origin.config)["model_type"] == "llama"


@pytest.mark.parametrize("piece", [3000, 2**25])
def test_shards_of_experts_are_read_once(tmp_path, monkeypatch, piece):
    folder = write_folder(tmp_path / "in", "mixtral")
    expected = nnx.state(hf.load(folder), nnx.Param)
    monkeypatch.setattr(pieces, "PIECE", piece)
    preadv, counts = os.preadv, []

    def counted(*args):
        counts.append(preadv(*args))
        return counts[-1]

    monkeypatch.setattr(safetensors.os, "preadv", counted)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "expert"))
    model = hf.load(folder, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), expected)
    # The head is split along the rows of its tensor, which each part reads whole; two
    # small pieces may share a few rows.
    size = (folder / "model.safetensors").stat().st_size + 3 * model.head[...].nbytes
    assert size <= sum(counts) <= size * (1.5 if piece == 3000 else 1)
