"""Tests checkpoints of every family against logits of transformers."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers.gradients import compiled, cosine
from helpers.hf_folders import CASES, FIXTURES, TOKENS, fixture, write_folder
from helpers.marks import slow, slow_except
from safetensors import safe_open
from safetensors.numpy import load_file

import coat_jax as coat
from coat_jax.models import hf, llama
from coat_jax.models.hf import config as configs
from coat_jax.models.hf import safetensors, saving


def old_spelling(config: dict) -> dict:
    """Returns a config.json with the keys that transformers 4 wrote."""
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype")}
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    old["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        old["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return old | {"torch_dtype": config["dtype"]}


def logits_of(model: llama.Llama) -> np.ndarray:
    graph, state = nnx.split(model)
    tokens = jnp.array(TOKENS)
    return np.asarray(compiled(lambda s: nnx.merge(graph, s)(tokens), state))


def expected_logits(case: str) -> np.ndarray:
    return np.load(FIXTURES / f"{case}.npz")["logits"]


# The case of llama3 is tested in bfloat16 below.
@pytest.mark.parametrize(
    "case",
    slow_except({*CASES} - {"llama3", "mistral", "qwen2_windows", "qwen3_moe"}, CASES),
)
def test_logits_are_those_of_transformers(tmp_path, case):
    model = hf.load(write_folder(tmp_path / "new", case), recipe="bf16")
    np.testing.assert_allclose(logits_of(model), expected_logits(case), atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_old_and_new_spellings_are_one_configuration(case):
    config, _ = fixture(case)
    assert configs.read(old_spelling(config)) == configs.read(config)
    assert configs.dtype_of(old_spelling(config)) == configs.dtype_of(config)


@pytest.mark.parametrize("case", CASES)
def test_what_goes_in_comes_out(tmp_path, case):
    folder = write_folder(tmp_path / "in", case, "bfloat16")
    (folder / "tokenizer.json").write_bytes(b'{"any": "bytes"}\r\n')
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "tekken.json").write_text("{}")
    template = "additional_chat_templates/tool_use.jinja"
    (folder / template).parent.mkdir()
    (folder / template).write_text("{{ messages }}")
    hf.save(hf.load(folder), tmp_path / "out")
    entries = {path.name for path in (tmp_path / "out").iterdir()}
    assert entries == {path.name for path in folder.iterdir()}
    for name in ("tokenizer.json", "generation_config.json", "tekken.json", template):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    original, saved = (
        load_file(p / "model.safetensors") for p in (folder, tmp_path / "out")
    )
    assert original.keys() == saved.keys()
    for name, values in original.items():
        assert saved[name].dtype == values.dtype == ml_dtypes.bfloat16
        assert saved[name].tobytes() == values.tobytes()
    texts = ((p / "config.json").read_text() for p in (folder, tmp_path / "out"))
    assert json.loads(next(texts)) == json.loads(next(texts))


def test_saving_needs_the_files_of_the_loaded_folder(tmp_path):
    folder = write_folder(tmp_path / "new", "llama")
    for name in ("tokenizer.json", "vocab.json"):
        (folder / name).write_text("{}")
    model = hf.load(folder)
    folder.rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=r"it lacks 'tokenizer\.json, vocab\.json'; noth"
    ):
        hf.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "moved").rename(folder)
    hf.save(model, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    (folder / "additional_chat_templates").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="must be a folder, got a link"):
        hf.load(folder)


@pytest.mark.parametrize("case", CASES)
def test_a_model_without_a_folder_has_a_config_that_reads_back(tmp_path, case):
    config, _ = fixture(case)
    shape = configs.read(config)
    written = configs.written(shape, {})
    assert configs.read(written) == shape
    assert written["model_type"] == config["model_type"]
    changed = dataclasses.replace(shape, vocab_size=128)
    assert configs.read(configs.written(changed, config)) == changed


@pytest.mark.parametrize("case", ["qwen3", *map(slow, ("mistral", "gemma3", "olmo2"))])
@pytest.mark.parametrize("recipe", ["coat", slow("coat_max"), slow("te")])
def test_recipes_compute_nearly_the_logits_of_transformers(tmp_path, case, recipe):
    model = hf.load(
        write_folder(tmp_path / "new", case), recipe=recipe, dtype="bfloat16"
    )
    assert cosine(logits_of(model), expected_logits(case)) > 0.99


def test_bfloat16_differs_by_its_rounding(tmp_path):
    model = hf.load(write_folder(tmp_path / "new", "llama3", "bfloat16"), recipe="bf16")
    assert model.config.dtype == model.config.param_dtype == jnp.bfloat16
    actual, expected = logits_of(model), expected_logits("llama3")
    assert 0 < np.abs(actual - expected).max() < 2**-5 * np.abs(expected).max()


def test_several_files_have_an_index(tmp_path, monkeypatch):
    model = hf.load(write_folder(tmp_path / "new", "qwen2"))
    monkeypatch.setattr(saving, "FILE_BYTES", 10_000)
    hf.save(model, tmp_path / "files")
    files = sorted(p.name for p in (tmp_path / "files").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads(
        (tmp_path / "files" / "model.safetensors.index.json").read_text()
    )
    for name, values in fixture("qwen2")[1].items():
        with safe_open(tmp_path / "files" / index["weight_map"][name], "np") as file:
            np.testing.assert_array_equal(file.get_tensor(name), values)
    again = nnx.state(hf.load(tmp_path / "files"), nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, again, nnx.state(model, nnx.Param))


def _unfused(case: str, tensor: str) -> np.ndarray:
    return fixture(case)[1][f"model.layers.0.{tensor}.weight"]


def _dequantized(folder: Path, tensor: str, suffix: str) -> np.ndarray:
    """Returns a tensor's codes, multiplied by the scales of their blocks."""
    with safe_open(folder / "model.safetensors", "np") as file:
        assert file.get_slice(f"{tensor}.weight").get_dtype() == "F8_E4M3"
        scales = file.get_tensor(f"{tensor}.{suffix}")
    with safetensors.TensorFile(folder / "model.safetensors") as file:
        codes = file.read(f"{tensor}.weight").astype(np.float32)
    sizes = (-(-n // m) for n, m in zip(codes.shape, scales.shape, strict=True))
    for axis, size in enumerate((128, 128) if suffix.endswith("inv") else sizes):
        scales = np.repeat(scales, size, axis)
    return codes * scales[: codes.shape[0], : codes.shape[1]]


@pytest.mark.parametrize(
    ("format", "suffix", "group"),
    [("fp8-block", "weight_scale_inv", None), ("fp8-channel", "weight_scale", 0)],
)
def test_fp8_checkpoints(tmp_path, format, suffix, group):
    folder = write_folder(tmp_path / "new", "qwen2", "bfloat16")
    hf.save(hf.load(folder), tmp_path / "fp8", format=format)
    again = hf.load(tmp_path / "fp8")
    hf.save(again, tmp_path / "wide")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    for name in (
        "self_attn.q_proj",
        "self_attn.v_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ):
        tensor = f"model.layers.0.{name}"
        values = _dequantized(tmp_path / "fp8", tensor, suffix)
        weight = _unfused("qwen2", name)
        largest = np.abs(weight).max(axis=None if group is None else 1, keepdims=True)
        # The largest step of E4M3 is 2**-3 of a number, and a number rounds by half.
        # The bfloat16 scale moves the largest number by 2**-8 at most.
        bound = 2**-4 * np.abs(weight) + 2**-7 * largest
        assert np.all(np.abs(values - weight) <= bound)
        expected = values.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(wide[f"{tensor}.weight"], expected)
    for name, values in fixture("qwen2")[1].items():
        if "proj.weight" not in name:
            np.testing.assert_array_equal(wide[name].astype(np.float32), values)
    settings = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert "quantization_config" in settings
    assert "quantization_config" not in json.loads(
        (tmp_path / "wide" / "config.json").read_text()
    )


@pytest.mark.parametrize("case", ["mixtral", slow("qwen3_moe")])
@pytest.mark.parametrize(
    ("format", "suffix"),
    [("fp8-block", "weight_scale_inv"), ("fp8-channel", "weight_scale")],
)
def test_fp8_checkpoints_of_experts(tmp_path, case, format, suffix):
    folder = write_folder(tmp_path / "new", case, "bfloat16")
    hf.save(hf.load(folder), tmp_path / "fp8", format=format)
    hf.save(hf.load(tmp_path / "fp8"), tmp_path / "wide")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    for tensor, weight in fixture(case)[1].items():
        if ".experts." not in tensor:
            continue
        values = _dequantized(tmp_path / "fp8", tensor.removesuffix(".weight"), suffix)
        assert np.linalg.norm(values - weight) < 0.05 * np.linalg.norm(weight)
        expected = values.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(wide[tensor], expected)
    routers = [
        name for name in wide if name.endswith(("moe.gate.weight", "mlp.gate.weight"))
    ]
    assert len(routers) == 2
    text = json.loads((tmp_path / "fp8" / "config.json").read_text())
    settings = text["quantization_config"]
    skipped = settings.get("ignore", settings.get("ignored_layers"))
    assert set(skipped) == {"lm_head", *(n.removesuffix(".weight") for n in routers)}
    for name in routers:
        np.testing.assert_array_equal(
            wide[name].astype(np.float32), fixture(case)[1][name]
        )


def test_layers_without_experts_are_refused(tmp_path):
    for changes, rule in (
        ({"mlp_only_layers": [0]}, "mlp_only_layers in config.json must be empty"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step in config.json must be 1"),
        ({"num_experts": 3}, "num_local_experts in config.json must be num_experts 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok .* must be at most 8"),
    ):
        folder = tmp_path / next(iter(changes))
        with pytest.raises(ValueError, match=rule):
            hf.load(write_folder(folder, "qwen3_moe", **changes))


def test_saved_codes_are_those_that_training_reads(tmp_path):
    model = hf.load(write_folder(tmp_path / "new", "qwen3", "bfloat16"), recipe="coat")
    hf.save(model, tmp_path / "fp8", format="fp8-channel")
    nnx.jit(llama.Llama.quantize_weights)(model)
    codes = model.layers.codes["qkv"]
    rows, scales = (np.asarray(codes[name][0]) for name in ("rows", "rows_scale"))
    d, queries = model.config.head_dim, 2 * model.config.head_dim
    with safetensors.TensorFile(tmp_path / "fp8" / "model.safetensors") as file:
        for j in range(model.config.num_kv_heads):
            first = j * (queries + 2 * d)
            for name, start, count in (("q", 0, queries), ("k", queries, d)):
                tensor = f"model.layers.0.self_attn.{name}_proj.weight"
                in_qkv = slice(first + start, first + start + count)
                in_tensor = slice(j * count, (j + 1) * count)
                assert file.read(tensor, in_tensor).tobytes() == rows[in_qkv].tobytes()
                saved_scales = file.read(f"{tensor}_scale", in_tensor)[:, 0]
                np.testing.assert_array_equal(saved_scales, scales[in_qkv])


def test_generation_with_a_window_is_that_of_whole_passes(tmp_path):
    model = hf.load(write_folder(tmp_path / "new", "gemma3"), recipe="bf16")
    prompt, tokens = TOKENS[0][:9], []
    graph, state = nnx.split(model)
    forward = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    for _ in range(6):
        padded = (prompt + tokens + [0] * 6)[:15]
        scores = forward(state, jnp.array([padded]))[0, len(prompt) + len(tokens) - 1]
        tokens.append(int(scores.argmax()))
    generation = coat.generate(model, [prompt, prompt[5:]], max_new_tokens=6)
    assert generation.tokens[0].tolist() == tokens


def test_experts_of_mixtral_are_as_transformers_has_them(tmp_path):
    folder = write_folder(tmp_path / "new", "mixtral", "bfloat16")
    values = json.loads((folder / "config.json").read_text())
    # Mixtral knows no such key, and adds up the loads of both experts of a token.
    values |= {"norm_topk_prob": False, "router_aux_loss_coef": 0.25}
    (folder / "config.json").write_text(json.dumps(values))
    model = hf.load(folder)
    top_k = values["num_experts_per_tok"]
    assert model.config.experts.normalized
    assert model.config.experts.balance_weight == 0.25 * top_k
    changes = {"balance_weight": 0.5 * top_k, "z_weight": 0.1}
    experts = dataclasses.replace(model.config.experts, **changes)
    model.config = dataclasses.replace(model.config, experts=experts)
    hf.save(model, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["router_aux_loss_coef"] == 0.5
    experts = dataclasses.replace(experts, normalized=False)
    model.config = dataclasses.replace(model.config, experts=experts)
    with pytest.raises(ValueError, match="no model of the type mixtral"):
        hf.save(model, tmp_path / "unnormalized")
