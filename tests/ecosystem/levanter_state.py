"""Trains a Llama of haliax's named arrays with Levanter's `TrainerState`."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from ecosystem.harness import compare, main, next_token_loss, tokens
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.trainer_state import TrainerState

_BATCH, _LENGTH, _VOCAB = 8, 64, 128
_CONFIG = LlamaConfig(
    max_seq_len=_LENGTH,
    hidden_dim=128,
    intermediate_dim=384,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)


class Run:
    """Trains a Llama with `TrainerState.take_step`."""

    def __init__(self, tx):
        vocab, batch_axis = hax.Axis("vocab", _VOCAB), hax.Axis("batch", _BATCH)
        places = _CONFIG.max_Pos
        model = _CONFIG.build(vocab, key=jax.random.key(0))

        @eqx.filter_jit
        def init(model):
            return TrainerState.init(tx, model, key=jax.random.key(1))

        def loss(model, batch):
            named = hax.named(batch, (batch_axis, places))
            logits = model(named, attn_mask=AttentionMask.causal())
            return next_token_loss(logits.array, batch)

        @eqx.filter_jit
        def step(state, batch):
            value, grads = eqx.filter_value_and_grad(loss)(state.model, batch)
            state, _ = state.take_step(grads, key=state.training_key)
            return state, value

        self._state, self._step = init(model), step

    def step(self, number):
        """Trains on batch `number` and returns the loss."""
        batch = jnp.asarray(tokens(number, batch=_BATCH, length=_LENGTH, vocab=_VOCAB))
        self._state, loss = self._step(self._state, batch)
        return float(loss)

    def arrays(self):
        """Returns the arrays of the trainer's state."""
        return eqx.filter(self._state, eqx.is_array)

    def restore(self, arrays):
        """Replaces the arrays of the trainer's state."""
        self._state = eqx.combine(arrays, self._state)

    def opt_state(self):
        """Returns the optimizer's state."""
        return self._state.opt_state


def rows():
    """Trains the model of this program and returns its row of results."""
    packages = ["marin-levanter", "marin-haliax", "equinox"]
    return [compare("Levanter TrainerState, a Llama", Run, packages=packages)]


if __name__ == "__main__":
    main(rows)
