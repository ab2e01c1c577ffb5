"""Tests that bad checkpoints end in one line that says what is wrong."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.hf_folders import fixture, write_folder
from safetensors.numpy import load_file, save_file

from coat_jax.models import hf

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_EMBEDDING = "model.embed_tokens.weight"
_QUERIES = "model.layers.0.self_attn.q_proj.weight"
Damage = Callable[[Path], object]


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(change: Callable[[dict], object]) -> Damage:
    """Returns a damage that changes the header of the file with tensors."""

    def damage(folder: Path) -> None:
        header, data = header_of(folder / _WEIGHTS)
        change(header)
        text = json.dumps(header).encode()
        size = len(text).to_bytes(8, "little")
        (folder / _WEIGHTS).write_bytes(size + text + data)

    return damage


def with_entry(**fields: Any) -> Damage:
    """Returns a damage that changes what the header says of a tensor."""
    return with_header(lambda header: header[_EMBEDDING].update(fields))


def with_bytes(change: Callable[[bytes], bytes], name: str = _WEIGHTS) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def with_config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config = {k: v for k, v in {**config, **changes}.items() if v != "missing"}
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def with_tensors(change: Callable[[dict], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / _WEIGHTS)
        change(tensors)
        save_file(tensors, folder / _WEIGHTS)

    return damage


def with_index(change: Callable[[dict], object]) -> Damage:
    """Returns a damage that renames the file of tensors and changes its new index."""

    def damage(folder: Path) -> None:
        (folder / _WEIGHTS).rename(folder / "a.safetensors")
        tensors, _ = header_of(folder / "a.safetensors")
        names = [name for name in tensors if name != "__metadata__"]
        index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
        change(index)
        (folder / _INDEX).write_text(json.dumps(index))

    return damage


def linked(name: str) -> Damage:
    """Returns a damage that moves a file out of the folder and leaves a link to it."""

    def damage(folder: Path) -> None:
        outside = folder.parent / f"outside-{name}"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return damage


def replaced(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def overlapping(header: dict) -> None:
    first, second = list(header)[1:3]
    start, stop = header[first]["data_offsets"]
    header[second]["data_offsets"] = [start, stop]
    header[second]["shape"] = header[first]["shape"]
    header[second]["dtype"] = header[first]["dtype"]


def in_fp8(change: Callable[[dict], object], **settings: Any) -> Damage:
    """Returns a damage that makes an FP8 checkpoint with block scales and changes it.

    Args:
      change: Changes the tensors by name.
      **settings: Changes to the quantization settings in config.json.
    """

    def damage(folder: Path) -> None:
        tensors = load_file(folder / _WEIGHTS)
        codes = tensors[_QUERIES].astype(ml_dtypes.float8_e4m3fn)
        shapes = {name: x.shape for name, x in tensors.items()}
        tensors[_QUERIES] = codes.view(np.uint8)
        tensors[f"{_QUERIES}_scale_inv"] = np.ones((1, 1), np.float32)
        change(tensors)
        save_file(tensors, folder / _WEIGHTS)
        retyped = {"dtype": "F8_E4M3", "shape": shapes[_QUERIES]}
        with_header(lambda header: header[_QUERIES].update(retyped))(folder)
        method = {"quant_method": "fp8", "weight_block_size": [128, 128], **settings}
        with_config(quantization_config=method)(folder)

    return damage


def nothing(tensors: dict) -> None:
    """Leaves the tensors as they are."""


DAMAGES: dict[str, tuple[Damage, str]] = {
    # Files.
    "no folder": (lambda f: f.rename(f.parent / "elsewhere"), "must be a folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "no weights": (lambda f: (f / _WEIGHTS).unlink(), "unpickling"),
    "pickled weights": (
        lambda f: (f / _WEIGHTS).rename(f / "pytorch_model.bin"),
        "unpickling",
    ),
    "weights linked out": (linked(_WEIGHTS), "link out"),
    "config linked out": (linked("config.json"), "link out"),
    "weights are a folder": (replaced(_WEIGHTS, Path.mkdir), "model.safetensors"),
    "weights are a pipe": (replaced(_WEIGHTS, os.mkfifo), "model.safetensors"),
    "config is a folder": (replaced("config.json", Path.mkdir), "config.json"),
    "config is large": (
        with_bytes(lambda b: b + b" " * 2**21, "config.json"),
        "at most",
    ),
    # Headers.
    "empty file": (with_bytes(lambda b: b""), "8 bytes"),
    "length alone": (with_bytes(lambda b: b[:8]), "header"),
    "cut header": (with_bytes(lambda b: b[:100]), "header"),
    "cut data": (with_bytes(lambda b: b[:-1]), "bytes"),
    "longer data": (with_bytes(lambda b: b + b"\0"), "bytes"),
    "header of all bytes": (with_bytes(lambda b: b"\xff" * 8 + b[8:]), "header"),
    "header that lies": (
        with_bytes(lambda b: (10**6).to_bytes(8, "little") + b[8:]),
        "header",
    ),
    "header is no JSON": (with_bytes(lambda b: b[:8] + b"x" + b[9:]), "JSON"),
    "header is no text": (with_bytes(lambda b: b[:9] + b"\xff" + b[10:]), "JSON"),
    "header is a list": (
        with_bytes(lambda b: (2).to_bytes(8, "little") + b"[]"),
        "object",
    ),
    "header is deep": (
        with_bytes(lambda b: (10**5).to_bytes(8, "little") + b"[" * 10**5),
        "JSON",
    ),
    "a name twice": (
        with_bytes(lambda b: (20).to_bytes(8, "little") + b'{"a":{}, "a":{}    }'),
        "twice",
    ),
    "entry is a list": (with_header(lambda h: h.update({_EMBEDDING: []})), "dtype"),
    "entry without shape": (with_header(lambda h: h[_EMBEDDING].pop("shape")), "shape"),
    "entry with more": (with_entry(code="os.abort()"), "dtype"),
    "unknown dtype": (with_entry(dtype="F4"), "F4"),
    "dtype is a list": (with_entry(dtype=["F32"]), "dtype"),
    "narrow dtype": (with_entry(dtype="BF16"), "bytes for"),
    "shape of huge sizes": (with_entry(shape=[2**62, 2**62]), "bytes for"),
    "shape of a fraction": (with_entry(shape=[1.5, 2]), "shape"),
    "shape of booleans": (with_entry(shape=[True, 96]), "shape"),
    "negative shape": (with_entry(shape=[-96, -32]), "shape"),
    "shape of many axes": (with_entry(shape=[1] * 100), "shape"),
    "negative offsets": (with_entry(data_offsets=[-8, 0]), "at"),
    "offsets in reverse": (with_entry(data_offsets=[8, 0]), "at"),
    "one offset": (with_entry(data_offsets=[0]), "at"),
    "offsets beyond the file": (
        with_entry(data_offsets=[10**12, 10**12 + 96 * 32 * 4]),
        "gap",
    ),
    "overlap": (with_header(overlapping), "overlap"),
    # Tensors.
    "missing tensor": (with_tensors(lambda t: t.pop(_QUERIES)), _QUERIES),
    "extra tensor": (
        with_tensors(lambda t: t.update(adapter=np.ones(3, np.float32))),
        "adapter",
    ),
    "extra tensor of an odd name": (
        with_tensors(lambda t: t.update({"é\n\x1b[2J": np.ones(3, np.float32)})),
        "must not have",
    ),
    "misshapen tensor": (
        with_tensors(lambda t: t.update({_QUERIES: t[_QUERIES][:-1]})),
        "shape",
    ),
    "transposed tensor": (
        with_tensors(
            lambda t: t.update(
                {f"model.layers.0.mlp.{n}_proj.weight": np.ones((32, 48), np.float32)}
                if (n := "up")
                else {}
            )
        ),
        "shape",
    ),
    "integers": (
        with_tensors(lambda t: t.update({_QUERIES: t[_QUERIES].astype(np.int32)})),
        "int32",
    ),
    "doubles": (
        with_tensors(lambda t: t.update({_QUERIES: t[_QUERIES].astype(np.float64)})),
        "float64",
    ),
    "mixed dtypes": (
        with_tensors(lambda t: t.update({_QUERIES: t[_QUERIES].astype(np.float16)})),
        "float16 like",
    ),
    "tied head that differs": (with_config(tie_word_embeddings=True), "lm_head"),
    # Indices.
    "index without map": (with_index(lambda i: i.pop("weight_map")), "weight_map"),
    "index of a list": (with_index(lambda i: i.update(weight_map=[1])), "weight_map"),
    "index of a missing file": (
        with_index(lambda i: i["weight_map"].update({_QUERIES: "b.safetensors"})),
        "b.safetensors",
    ),
    "index that leads out": (
        with_index(lambda i: i["weight_map"].update({_QUERIES: "../b.safetensors"})),
        "plain name",
    ),
    "index of a pickle": (
        with_index(lambda i: i["weight_map"].update({_QUERIES: "b.bin"})),
        "b.bin",
    ),
    "index of a missing tensor": (
        with_index(lambda i: i["weight_map"].update(more="a.safetensors")),
        "more",
    ),
    "index without a tensor": (
        with_index(lambda i: i["weight_map"].pop(_QUERIES)),
        _QUERIES,
    ),
    # Configurations.
    "config is no JSON": (with_bytes(lambda b: b"import os", "config.json"), "JSON"),
    "config is a list": (with_bytes(lambda b: b"[1]", "config.json"), "object"),
    "unknown type": (with_config(model_type="mamba"), "mamba"),
    "type is a list": (with_config(model_type=["llama"]), "model_type"),
    "remote code": (with_config(model_type="x", auto_map={"A": "b.C"}), "model_type"),
    "other class": (
        with_config(architectures=["LlamaForSequenceClassification"]),
        "architectures",
    ),
    "vision": (
        with_config(
            model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"]
        ),
        "gemma3",
    ),
    "missing size": (with_config(hidden_size="missing"), "hidden_size"),
    "size is text": (with_config(hidden_size="32"), "hidden_size"),
    "size is infinite": (with_config(rms_norm_eps=float("inf")), "rms_norm_eps"),
    "huge vocabulary": (with_config(vocab_size=2**30), "shape"),
    "huge number of layers": (with_config(num_hidden_layers=2**30), "at most"),
    "wrong number of layers": (with_config(num_hidden_layers=9), "layers.2"),
    "odd heads": (with_config(num_key_value_heads=3), "num_key_value_heads"),
    "unknown activation": (with_config(hidden_act="relu2"), "hidden_act"),
    "biases": (with_config(attention_bias=True), "attention_bias"),
    "partial rotation": (with_config(partial_rotary_factor=0.5), "partial_rotary"),
    "unknown RoPE": (
        with_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        "rope_type",
    ),
    "RoPE is a list": (with_config(rope_parameters=[1]), "rope_parameters"),
    "unknown dtype in config": (with_config(dtype="int8"), "dtype"),
    "tie is text": (with_config(tie_word_embeddings="no"), "tie_word_embeddings"),
    # FP8.
    "codes without scheme": (
        with_header(lambda h: h[_QUERIES].update(dtype="F8_E4M3", shape=[128, 32])),
        "shape",
    ),
    "codes without scales": (
        in_fp8(lambda t: t.pop(f"{_QUERIES}_scale_inv")),
        "scale_inv",
    ),
    "misshapen scales": (
        in_fp8(
            lambda t: t.update({f"{_QUERIES}_scale_inv": np.ones((2, 1), np.float32)})
        ),
        "shape",
    ),
    "scales that are integers": (
        in_fp8(
            lambda t: t.update({f"{_QUERIES}_scale_inv": np.ones((1, 1), np.int32)})
        ),
        "int32",
    ),
    "other quantization": (in_fp8(nothing, quant_method="gptq"), "quantization_config"),
    "blocks of size 0": (in_fp8(nothing, weight_block_size=[0, 128]), "blocks"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_bad_checkpoints_are_refused_in_one_line(tmp_path, name):
    folder = write_folder(tmp_path / "bad", "llama")
    damage, contained = DAMAGES[name]
    damage(folder)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^[\x20-\x7e]+$") as error:
            hf.load(folder)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(error.value)
    assert contained in message
    assert len(message) < 400
    assert most < 2**23


def test_good_variants_of_these_checkpoints_load(tmp_path):
    """Checkpoints in FP8 and with an index load, if nothing in them is damaged."""
    folder = write_folder(tmp_path / "fp8", "llama")
    in_fp8(nothing)(folder)
    weight = fixture("llama")[1][_QUERIES].astype(ml_dtypes.float8_e4m3fn)
    loaded = np.asarray(hf.load(folder).layers.qkv[...][0])
    heads = loaded.reshape(4, 3, 8, 32)[:, 0].reshape(32, 32)
    np.testing.assert_array_equal(heads, weight.astype(np.float32))
    folder = write_folder(tmp_path / "index", "llama")
    with_index(lambda index: None)(folder)
    assert hf.load(folder).config.num_layers == 2


@pytest.mark.parametrize("format", ["fp8", "FP8-block", "", 8])
def test_unknown_formats_are_refused(tmp_path, format):
    model = hf.load(write_folder(tmp_path / "new", "llama"))
    with pytest.raises(ValueError, match="format must be"):
        hf.save(model, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_stays_and_gets_the_files(tmp_path, monkeypatch):
    """Mount points, the current folder and links to folders cannot be replaced."""
    model = hf.load(write_folder(tmp_path / "new", "llama"))
    folder, link, lost = (tmp_path / name for name in ("out", "link", "lost"))
    (folder / ".incomplete").mkdir(parents=True)
    (folder / ".incomplete" / "model.safetensors").write_text("interrupted")
    folder.chmod(0o2770)
    before = folder.stat()
    monkeypatch.chdir(folder)
    hf.save(model, ".")
    after = folder.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    names = sorted(os.listdir("."))
    assert names == ["config.json", "model.safetensors"]
    hf.load(".")

    (tmp_path / "disk").mkdir()
    link.symlink_to(tmp_path / "disk")
    lost.symlink_to(tmp_path / "unmade" / "deep")
    for path in (link, lost):
        hf.save(model, path)
        assert path.is_symlink()
        assert sorted(os.listdir(path)) == names
    lost.unlink()
    lost.symlink_to(lost)
    with pytest.raises(ValueError, match=r"is a link to itself, got .*lost"):
        hf.save(model, lost)


def test_saving_does_not_overwrite(tmp_path):
    folder = write_folder(tmp_path / "new", "llama")
    model = hf.load(folder)
    with pytest.raises(ValueError, match="must be empty"):
        hf.save(model, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be empty"):
        hf.save(model, tmp_path / "file")
