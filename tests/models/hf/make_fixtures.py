"""Makes the fixtures of the tests of checkpoints, with torch and transformers.

    pip install torch transformers safetensors
    python tests/models/hf/make_fixtures.py make          # writes fixtures/
    python tests/models/hf/make_fixtures.py make mixtral  # some of them alone
    python tests/models/hf/make_fixtures.py check FOLDER  # prints logits as JSON

A fixture is the config.json of a tiny model, the shapes of its tensors, and its logits.
`helpers/hf_values.py` makes the tensors' values from their names.
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

# Other helpers have names of modules that transformers imports.
_VALUES = Path(__file__).parents[2] / "helpers" / "hf_values.py"
values_of = runpy.run_path(str(_VALUES))["values_of"]

FIXTURES = Path(__file__).parent / "fixtures"
TOKENS = [[3, 17, 88, 5, 41, 2, 60, 9, 33, 71, 12, 90, 4, 55, 28, 66, 19, 7, 80, 31]]
_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = _SIZES | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
_EXPERTS = {
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
CASES = {
    "llama": ("Llama", _SIZES | {"num_key_value_heads": 4}),
    "llama3": (
        "Llama",
        _SIZES
        | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "mistral": ("Mistral", _SIZES | {"sliding_window": 5}),
    "qwen2": ("Qwen2", _SIZES | {"rope_parameters": {"rope_theta": 1e6}}),
    "qwen2_windows": (
        "Qwen2",
        _SIZES
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", _SIZES | {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        _GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3",
        _GEMMA
        | _KINDS
        | {
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": _LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "olmo2": ("Olmo2", _SIZES),
    "mixtral": ("Mixtral", _SIZES | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", _SIZES | _EXPERTS),
}


def make(*cases: str) -> None:
    """Writes the fixtures of cases, of all by default."""
    for name in cases or CASES:
        kind, options = CASES[name]
        config_class = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
        config = getattr(transformers, config_class)(**options)
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        shapes = _shapes(model)
        config.architectures = [f"{kind}ForCausalLM"]
        fixture = {"config": config.to_diff_dict(), "shapes": shapes}
        logits = _logits(fixture, name)
        text = json.dumps(fixture, indent=1, sort_keys=True)
        FIXTURES.mkdir(exist_ok=True)
        (FIXTURES / f"{name}.json").write_text(text + "\n")
        np.savez_compressed(FIXTURES / f"{name}.npz", logits=logits.numpy())
        print(name, logits.abs().max().item(), logits.std().item())


def _shapes(model: torch.nn.Module) -> dict[str, list[int]]:
    """Returns the shapes of a checkpoint's tensors, by their names in files.

    A model may have the matrices of all experts in one parameter; files do not.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _logits(fixture: dict, case: str) -> torch.Tensor:
    """Returns the logits of a checkpoint with a case's values."""
    tensors = {
        name: torch.from_numpy(values_of(name, shape, case))
        for name, shape in fixture["shapes"].items()
    }
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(fixture["config"])
        (Path(folder) / "config.json").write_text(text)
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits


def check(folder: str) -> None:
    """Prints the logits that transformers computes with a folder's model."""
    options = {}
    quantized = json.loads((Path(folder) / "config.json").read_text()).get(
        "quantization_config", {}
    )
    if quantized.get("quant_method") == "fp8":
        options["quantization_config"] = transformers.FineGrainedFP8Config(
            dequantize=True
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )
    with torch.no_grad():
        print(json.dumps(model(torch.tensor(TOKENS)).logits.tolist()))


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](*sys.argv[2:])
