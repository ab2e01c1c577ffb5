"""The parameters that a fine-tuning starts from."""

import hashlib
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from experiments.training.checkpoints import Checkpoints
from experiments.training.files import is_tokens
from experiments.training.runs import read_settings
from experiments.training.settings import Recipe, model_config
from experiments.training.trainer import Trainer


def load_base(folder: Path, recipe: Recipe, vocab_size: int) -> nnx.State:
    """Returns the parameters of a pretraining's latest checkpoint, as NumPy arrays.

    Args:
      folder: The folder of a run of `experiments.pretrain`.
      recipe: The recipe of the checkpoint.
      vocab_size: The number of tokens of the run's text.

    Raises:
      ValueError: If the run is damaged, was of token files, or has no checkpoint.
    """
    settings = read_settings(folder)
    if any(is_tokens(Path(path)) for path in settings.data):
        raise ValueError(
            f"a base must be trained on text, but {folder} is of token files: "
            f"{settings.data[0]}"
        )
    states = folder / "checkpoints" / recipe
    if not states.is_dir():
        raise ValueError(f"the base has no checkpoint of {recipe}: no {states}")
    config = model_config(settings, recipe, vocab_size)
    trainer = Trainer(config, settings, steps=settings.steps)
    with Checkpoints(states) as checkpoints:
        if not checkpoints.progress().step:
            raise ValueError(f"the base has no checkpoint of {recipe} in {states}")
        state = checkpoints.state(trainer.abstract_state())
    return jax.tree.map(np.asarray, state.params)


def params_fingerprint(params: nnx.State) -> str:
    """Returns a hash of all parameters."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf).view(np.uint8))
    return digest.hexdigest()
