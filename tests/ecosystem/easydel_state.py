"""Trains a Llama with EasyDeL's `EasyDeLState`: `init_tx` and `apply_gradients`."""

import easydel
import jax
import jax.numpy as jnp
from easydel.infra.base_state import EasyDeLState
from ecosystem.harness import LEARNING_RATE, compare, main, next_token_loss, tokens
from flax import nnx

import coat_jax as coat
from coat_jax.integrations.fused import with_apply_updates_hook

_BATCH, _LENGTH, _VOCAB = 8, 64, 128


def _state():
    config = easydel.LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_LENGTH,
        use_cache=False,
        attn_mechanism="vanilla",
        scan_layers=False,
    )
    with config.mesh:
        model = easydel.LlamaForCausalLM(
            config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
        )
    return EasyDeLState.create(model=model, step=0), config.mesh


class Run:
    """Trains a Llama with `apply_gradients` under jit."""

    def __init__(self, tx):
        state, self._mesh = _state()
        with self._mesh:
            self._state = state.init_tx(tx)

        def loss(graphstate, state, batch):
            module = state.merge(graphstate)
            return next_token_loss(module(input_ids=batch).logits, batch)

        @jax.jit
        def step(state, batch):
            value, grads = jax.value_and_grad(loss)(state.graphstate, state, batch)
            return state.apply_gradients(grads=grads), value

        self._step = step

    def step(self, number):
        """Trains on batch `number` and returns the loss."""
        batch = jnp.asarray(tokens(number, batch=_BATCH, length=_LENGTH, vocab=_VOCAB))
        with self._mesh:
            self._state, loss = self._step(self._state, batch)
        return float(loss)

    def arrays(self):
        """Returns EasyDeL's state."""
        return self._state

    def restore(self, arrays):
        """Replaces EasyDeL's state."""
        self._state = arrays

    def opt_state(self):
        """Returns the optimizer's state."""
        return self._state.opt_state


def rows():
    """Trains all models of this program and returns a row of results for each."""
    packages = ["easydel", "eformer"]

    def hooked(tx):
        return Run(with_apply_updates_hook(coat.fp8_adamw(LEARNING_RATE)))

    return [
        compare("EasyDeLState, a Llama", Run, packages=packages),
        compare(
            "EasyDeLState, a Llama, apply_updates_hook",
            Run,
            ours=hooked,
            packages=packages,
            note="coat.fused_update by with_apply_updates_hook",
        ),
    ]


if __name__ == "__main__":
    main(rows)
