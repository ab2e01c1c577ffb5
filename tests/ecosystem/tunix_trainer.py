"""Trains a Qwen3 with tunix's `PeftTrainer`: all parameters, or LoRA's alone."""

import functools

import jax.numpy as jnp
import numpy as np
import qwix
from ecosystem.harness import STEPS, compare, main, tokens
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils

from coat_jax.integrations.qwix import FP8Provider

_BATCH, _LENGTH, _VOCAB = 8, 64, 128
_CONFIG = qwen3.ModelConfig(
    num_layers=2,
    vocab_size=_VOCAB,
    embed_dim=128,
    hidden_dim=384,
    num_heads=4,
    head_dim=32,
    num_kv_heads=2,
    rope_theta=1_000_000,
    norm_eps=1e-6,
)


def _inputs(batch):
    ones = jnp.ones(batch.input_tokens.shape, bool)
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(ones),
        "attention_mask": utils.make_causal_attn_mask(ones),
    }


def _example(number):
    batch = tokens(number, batch=_BATCH, length=_LENGTH, vocab=_VOCAB)
    return peft_trainer.TrainingInput(
        input_tokens=batch, input_mask=np.ones_like(batch)
    )


class _Trainer(peft_trainer.PeftTrainer):
    """A trainer that remembers the last loss."""

    def _post_process_train_step(self, aux):
        self.last_loss = aux


class Run:
    """Trains a Qwen3 with `PeftTrainer.train`, one batch per call."""

    def __init__(self, tx, change=lambda model: model):
        self._model = change(qwen3.Qwen3(_CONFIG, rngs=nnx.Rngs(0)))
        config = peft_trainer.TrainingConfig(eval_every_n_steps=10 * STEPS)
        trainer = _Trainer(self._model, tx, config).with_gen_model_input_fn(_inputs)
        default = trainer.loss_fn

        def loss(model, input_tokens, input_mask, positions, attention_mask):
            value = default(model, input_tokens, input_mask, positions, attention_mask)
            return value, value

        self._trainer = trainer.with_loss_fn(loss, has_aux=True)
        self._trainer.is_managed_externally = True

    def step(self, number):
        """Trains on batch `number` and returns the loss."""
        self._trainer.train([_example(number)])
        return float(self._trainer.last_loss)

    def _state(self):
        return self._trainer.model, self._trainer.optimizer

    def arrays(self):
        """Returns the state of model and optimizer."""
        return nnx.state(self._state())

    def restore(self, arrays):
        """Replaces the state of model and optimizer."""
        nnx.update(self._state(), arrays)

    def opt_state(self):
        """Returns the optimizer's state as arrays instead of `nnx.Variable`."""
        return nnx.as_pure(self._trainer.optimizer.opt_state)


def _arguments():
    inputs = _inputs(_example(0))
    return inputs["input_tokens"], inputs["positions"], None, inputs["attention_mask"]


def _with_lora(model):
    provider = qwix.LoraProvider(
        module_path=".*q_proj|.*kv_proj|.*gate_proj|.*down_proj|.*up_proj",
        rank=64,
        alpha=64.0,
    )
    return qwix.apply_lora_to_model(model, provider, *_arguments())


def _with_fp8(model):
    rule = qwix.QuantizationRule(module_path="layers/.*", weight_qtype="float8_e4m3fn")
    return qwix.quantize_model(model, FP8Provider([rule]), *_arguments())


def rows():
    """Trains all models of this program and returns a row of results for each."""
    packages = ["google-tunix", "qwix"]
    lora = functools.partial(Run, change=_with_lora)

    return [
        compare("tunix PeftTrainer, a Qwen3", Run, packages=packages),
        compare("tunix PeftTrainer, LoRA on a Qwen3", lora, packages=packages),
        compare(
            "tunix PeftTrainer, a Qwen3 with FP8Provider",
            Run,
            ours=functools.partial(Run, change=_with_fp8),
            packages=packages,
            note="FP8 matmuls by a rule of qwix, beside optax without",
        ),
    ]


if __name__ == "__main__":
    main(rows)
