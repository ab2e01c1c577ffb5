"""Hugging Face checkpoints: `load` reads a decoder from one, and `save` writes one.

A checkpoint is a folder with config.json and safetensors files. `layout` says which
rows of which tensors make each parameter, `config` says which values of config.json are
supported, and `quantized` defines the formats of FP8 checkpoints.
"""

from coat_jax.models.hf.loading import load
from coat_jax.models.hf.saving import save
from coat_jax.models.hf.text import ChatTemplate, chat_text, load_tokenizer
from coat_jax.models.hf.token_bytes import token_bytes

__all__ = ["ChatTemplate", "chat_text", "load", "load_tokenizer", "save", "token_bytes"]
