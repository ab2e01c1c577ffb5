"""Tests that checkpoints are read to the bit, in pieces of bounded memory."""

import dataclasses
import json
import os
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers.marks import slow

from coat_jax.models import hf
from coat_jax.models.hf import config as configs
from coat_jax.models.hf import layout, pieces, safetensors
from coat_jax.models.llama import LlamaConfig

# Sizes that no size of a piece divides.
_ODD = LlamaConfig(
    vocab_size=257,
    hidden_size=24,
    intermediate_size=37,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
)
_LARGE = dataclasses.replace(_ODD, vocab_size=2**14, hidden_size=512, num_layers=1)
MIB = 2**20


def write(folder, config, dtype, numbers):
    """Writes a checkpoint with `numbers(shape)` in each tensor; returns its tensors."""
    tensors = {
        parameter.name(tensor, layer): numbers(shape)
        for parameter in layout.parameters(config)
        for layer in range(config.num_layers if parameter.of_layers else 1)
        for tensor, shape in parameter.tensors()
    }
    folder.mkdir()
    values = configs.written(config, {}) | {"torch_dtype": np.dtype(dtype).name}
    (folder / "config.json").write_text(json.dumps(values))
    kinds = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    safetensors.write(folder / "model.safetensors", kinds, iter(tensors.items()))
    return tensors


def assembled(tensors, config):
    """Returns the model's parameters by path, assembled from a checkpoint's tensors."""
    heads, h = config.num_kv_heads, config.hidden_size

    def stack(name):
        layers = range(config.num_layers)
        return np.stack([tensors[f"model.layers.{i}.{name}.weight"] for i in layers])

    qkv = [
        stack(f"self_attn.{name}_proj").reshape(config.num_layers, heads, -1, h)
        for name in "qkv"
    ]
    return {
        "embedding": tensors["model.embed_tokens.weight"],
        "head": tensors["lm_head.weight"].T,
        "norm": tensors["model.norm.weight"],
        "layers/attention_norm": stack("input_layernorm"),
        "layers/mlp_norm": stack("post_attention_layernorm"),
        "layers/qkv": np.concatenate(qkv, 2).reshape(config.num_layers, -1, h),
        "layers/out": stack("self_attn.o_proj"),
        "layers/gate_up": np.stack([stack("mlp.gate_proj"), stack("mlp.up_proj")], 1),
        "layers/down": stack("mlp.down_proj"),
    }


def params_of(model):
    """Returns the model's parameters as NumPy arrays, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix(
            "/value"
        ): np.asarray(x)
        for path, x in leaves
    }


@pytest.mark.parametrize("piece", [0, 7777, 2**25])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, slow(np.float16)])
def test_every_bit_arrives(tmp_path, monkeypatch, dtype, piece):
    rng = np.random.default_rng(0)
    # Random bits have subnormals, infinities and NaNs of all kinds.
    itemsize = np.dtype(dtype).itemsize

    def numbers(shape):
        return np.frombuffer(rng.bytes(np.prod(shape) * itemsize), dtype).reshape(shape)

    tensors = write(tmp_path / "in", _ODD, dtype, numbers)
    monkeypatch.setattr(pieces, "PIECE", piece)
    monkeypatch.setattr(pieces, "READERS", 2)  # Memory is used again and again.
    # The default device may be named by its platform.
    with jax.default_device("cpu"):
        actual = params_of(hf.load(tmp_path / "in"))
    expected = assembled(tensors, _ODD)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == dtype
        assert actual[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("param_dtype", [None, jnp.bfloat16])
def test_memory_is_bounded(tmp_path, monkeypatch, param_dtype):
    rng = np.random.default_rng(0)
    write(tmp_path / "in", _LARGE, "float32", lambda s: rng.random(s, np.float32))
    monkeypatch.setattr(pieces, "PIECE", MIB)
    monkeypatch.setattr(pieces, "READERS", 3)
    # NumPy reports its memory to tracemalloc, and devices' arrays are not in it.
    tracemalloc.start()
    try:
        hf.load(tmp_path / "in", param_dtype=param_dtype)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # There are four pieces, and JAX's objects and what three threads convert.
    conversions = 0 if param_dtype is None else 3 * 2 * MIB
    assert peak < 4 * MIB + conversions + 6 * MIB


def test_a_file_that_ends_early_stops_all_readers(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    write(tmp_path / "in", _ODD, "float32", lambda s: rng.random(s, np.float32))
    monkeypatch.setattr(pieces, "PIECE", 0)
    preadv, reads = os.preadv, []

    def short(*args):
        reads.append(args)
        return 0 if len(reads) > 100 else preadv(*args)

    monkeypatch.setattr(safetensors.os, "preadv", short)
    threads = threading.active_count()
    with pytest.raises(ValueError, match="ends before its last tensor"):
        hf.load(tmp_path / "in")
    assert threading.active_count() == threads
    assert len(reads) < 130


@pytest.mark.parametrize(
    ("out", "rule"),
    [
        (np.empty((3, 2), np.float32), r"out must be float32 \[2, 2\]"),
        (np.empty((2, 2), np.int32), "got int32"),
        (np.empty((2, 2), np.float32).T, "out must be contiguous"),
    ],
)
def test_memory_of_another_kind_is_refused(tmp_path, out, rule):
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    path = tmp_path / "a.safetensors"
    safetensors.write(path, {"x": (array.dtype, array.shape)}, iter([("x", array)]))
    with safetensors.TensorFile(path) as file:
        assert file.read("x", slice(1, 3), np.empty((2, 2), np.float32))[1, 1] == 5
        with pytest.raises(ValueError, match=rule):
            file.read("x", slice(1, 3), out)
