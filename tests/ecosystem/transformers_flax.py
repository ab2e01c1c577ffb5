"""Trains Flax models of Hugging Face's transformers, which version 5 has no longer.

Our runs convert the models with `coat.fp8`, too.
"""

import functools

import jax.numpy as jnp
import numpy as np
import transformers
from ecosystem.harness import TreeRun, compare, main, next_token_loss, tokens

import coat_jax as coat

_BATCH, _LENGTH, _VOCAB, _WIDTH = 8, 64, 128, 128
_batch = functools.partial(tokens, batch=_BATCH, length=_LENGTH, vocab=_VOCAB)
_MASK = np.ones((_BATCH, _LENGTH), np.int32)
_POSITIONS = np.tile(np.arange(_LENGTH), (_BATCH, 1))
_SIZES = {"vocab_size": _VOCAB, "max_position_embeddings": _LENGTH}


def gpt2():
    """Returns a GPT-2."""
    sizes = {"n_embd": _WIDTH, "n_layer": 2, "n_head": 4, "n_positions": _LENGTH}
    config = transformers.GPT2Config(vocab_size=_VOCAB, **sizes)
    return transformers.FlaxGPT2LMHeadModel(config, dtype=jnp.bfloat16)


def llama():
    """Returns a Llama."""
    sizes = {"hidden_size": _WIDTH, "intermediate_size": 256, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**_SIZES, **sizes, num_attention_heads=4)
    return transformers.FlaxLlamaForCausalLM(config, dtype=jnp.bfloat16)


def opt():
    """Returns an OPT."""
    sizes = {"hidden_size": _WIDTH, "word_embed_proj_dim": _WIDTH, "ffn_dim": 256}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OPTConfig(**_SIZES, **sizes, **layers)
    return transformers.FlaxOPTForCausalLM(config, dtype=jnp.bfloat16)


def run(model, tx, *, fp8=False):
    """Returns a run of a decoder."""
    module = coat.fp8(model.module) if fp8 else model.module

    def loss(params, batch):
        output = module.apply({"params": params}, batch, _MASK, _POSITIONS)
        return next_token_loss(output.logits, batch)

    return TreeRun(model.params, loss, _batch, tx)


def rows():
    """Trains all models of this program and returns a row of results for each."""
    models = {"GPT-2": gpt2, "Llama": llama, "OPT": opt}
    return [
        compare(
            f"transformers' Flax {name}",
            functools.partial(run, model_of()),
            ours=functools.partial(run, model_of(), fp8=True),
            packages=["transformers"],
            note="with `coat.fp8`, beside optax without",
        )
        for name, model_of in models.items()
    ]


if __name__ == "__main__":
    main(rows)
