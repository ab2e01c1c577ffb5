"""Writes a Hugging Face folder of a published shape with random weights.

    uv run python -m experiments.studies.made_up FOLDER --preset llama3-8b

The folder replaces a checkpoint that cannot be downloaded, and has the memory, the
speed and the files of the real checkpoint. The tokenizer has a token for each byte and
three special tokens.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from coat_jax.models import hf, llama
from experiments.common.programs import new_parser, usage_errors

_SPECIAL = ("<|end|>", "<|start|>", "<|unknown|>")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + "
    "'<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    top = new_parser("experiments.studies.made_up", __doc__)
    top.add_argument("folder", type=Path)
    top.add_argument("--preset", choices=llama.CONFIGS, default="llama3-8b")
    args = top.parse_args(argv)
    with usage_errors(top):
        write(args.folder, llama.CONFIGS[args.preset])
    print(args.folder)
    return 0


def write(folder: Path, config: llama.LlamaConfig) -> None:
    """Writes the folder, with BF16 weights as the library initializes them.

    Raises:
      ValueError: If the folder exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"the folder to write must be new or empty, got {folder}")
    config = dataclasses.replace(config, param_dtype=jnp.bfloat16, recipe="bf16")
    model = nnx.jit(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))()
    hf.save(model, folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of bytes and a chat template."""
    import tokenizers

    byte_level = tokenizers.pre_tokenizers.ByteLevel
    letters = sorted(byte_level.alphabet())
    vocab = {word: number for number, word in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"chat_template": _TEMPLATE, "eos_token": _SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
