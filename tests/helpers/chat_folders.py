"""Tiny Hugging Face folders with a tokenizer and a chat template."""

import json
from pathlib import Path

import jax.numpy as jnp
import tokenizers
from flax import nnx

from coat_jax.models import hf, llama

SPECIAL = ("<|end|>", "<|start|>", "<think>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + "
    "'<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """Writes a byte-level BPE with special tokens and the added token "<think>"."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL[:2]),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["user\nassistant\nsystem\nWhat is 7 + 5? It is 12. "] * 9
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_tokens([SPECIAL[2]])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": {"content": SPECIAL[0]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder: Path, **changes: object) -> Path:
    """Writes a tiny Llama in BF16 and its tokenizer, and returns `folder`."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2}
    config = llama.LlamaConfig(
        **sizes,
        vocab_size=384,
        num_heads=4,
        num_kv_heads=2,
        tie_embeddings=True,
        param_dtype=jnp.bfloat16,
        **changes,
    )
    hf.save(llama.Llama(config, rngs=nnx.Rngs(0)), folder)
    write_tokenizer(folder)
    return folder
