"""Trains a Linen transformer with Kauldron's `TrainStep`."""

import jax
import numpy as np
from ecosystem.harness import STEPS, compare, main, tokens
from flax import linen as nn
from kauldron import kd

_BATCH, _LENGTH, _VOCAB, _WIDTH = 8, 64, 128, 128


class _Model(nn.Module):
    tokens: kd.kontext.Key = "batch.tokens"

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(_VOCAB, _WIDTH)(tokens)
        x += self.param("places", nn.initializers.normal(0.02), (_LENGTH, _WIDTH))
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x += nn.MultiHeadDotProductAttention(4)(y, y, mask=np.tri(_LENGTH)[None])
            y = nn.Dense(4 * _WIDTH)(nn.LayerNorm()(x))
            x += nn.Dense(_WIDTH)(nn.gelu(y))
        return {"logits": nn.Dense(_VOCAB)(x)[:, :-1]}


def _batch(number):
    walk = tokens(number, batch=_BATCH, length=_LENGTH, vocab=_VOCAB)
    return {"tokens": walk, "next": walk[:, 1:, None]}


class Run:
    """Trains a transformer with `TrainStep.step`."""

    def __init__(self, tx):
        loss = kd.losses.SoftmaxCrossEntropyWithIntLabels(
            logits="preds.logits", labels="batch.next"
        )
        self._trainer = kd.train.Trainer(
            workdir="/tmp/ecosystem_kauldron",
            train_ds=None,
            model=_Model(),
            optimizer=tx,
            train_losses={"cross_entropy": loss},
            num_train_steps=STEPS,
        )
        specs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _batch(0)
        )
        self._state = self._trainer.trainstep.init(specs)

    def step(self, number):
        """Trains on batch `number` and returns the loss."""
        self._state, aux = self._trainer.trainstep.step(
            self._state, _batch(number), return_losses=True
        )
        return float(aux.compute().loss_values["losses/cross_entropy"])

    def arrays(self):
        """Returns Kauldron's train state."""
        return self._state

    def restore(self, arrays):
        """Replaces Kauldron's train state."""
        self._state = arrays

    def opt_state(self):
        """Returns the optimizer's state."""
        return self._state.opt_state


def rows():
    """Trains the model of this program and returns its row of results."""
    return [compare("Kauldron TrainStep, a transformer", Run, packages=["kauldron"])]


if __name__ == "__main__":
    main(rows)
