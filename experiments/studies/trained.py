"""Trains models on which errors are measured.

The experiments on activations and gradients share this module and its options.
"""

import argparse
from pathlib import Path
from typing import Any

from tqdm import tqdm

from coat_jax.models import llama
from experiments.common.programs import results_path
from experiments.common.results import default_path
from experiments.common.trained import Trained
from experiments.pretrain import program as pretrain
from experiments.training import arguments, data
from experiments.training.job import Inputs, train_batches
from experiments.training.settings import RECIPES, Recipe, Settings, model_config
from experiments.training.trainer import Trainer


def trainer_and_inputs(
    settings: Settings, recipe: Recipe
) -> tuple[Trainer, llama.LlamaConfig, Inputs]:
    """Returns the trainer, config and data of `experiments.pretrain` for a recipe."""
    paths = [Path(path) for path in settings.data]
    corpus = data.load_corpus(paths, token_dtype=settings.token_dtype)
    inputs = pretrain.select_inputs(corpus, settings)
    config = model_config(settings, recipe, inputs.vocab_size)
    return Trainer(config, settings, steps=settings.steps), config, inputs


def train(settings: Settings, recipe: Recipe) -> Trained:
    """Trains the model of `experiments.pretrain` with a recipe, and returns it."""
    trainer, config, inputs = trainer_and_inputs(settings, recipe)
    state, batches = trainer.init(), train_batches(inputs, settings)
    for _ in tqdm(range(settings.steps), recipe, unit="step", disable=None):
        state, _ = trainer.step(state, next(batches))
    return Trained(
        config=config,
        params=state.params,
        batches=inputs.validation,
        loss=trainer.evaluate(state, inputs.validation),
    )


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of `experiments.pretrain` for one training.

    The preset gives the settings that a command line does not give.

    Args:
      name: The program's module, without "experiments.".
      description: The program's description.
    """
    top = arguments.training_parser(f"experiments.{name}", description)
    add = top.add_argument_group("what is trained, and where results go").add_argument
    add("--recipe", choices=RECIPES, help="to train with (bf16)")
    add("--seed", type=int, help="of the initialization and the data's order (0)")
    add(
        "--out",
        type=results_path,
        help="results file; figures go next to it",
        metavar="FILE",
    )
    return top


def train_as(flags: dict[str, Any]) -> Trained:
    """Trains a model according to `flags`, and removes `recipe` from them."""
    recipe = flags.pop("recipe", "bf16")
    return train(arguments.settings(flags), recipe)


def results_file(name: str, flags: dict[str, Any]) -> Path:
    """Returns the path of the results file, and removes `out` from `flags`.

    `name` is the name of the experiment.

    Raises:
      ValueError: If the file's folder does not exist.
    """
    out = flags.pop("out", None)
    out = out or default_path(name, f"{name}_{flags.get('preset', 'cpu')}")
    if not out.parent.is_dir():
        raise ValueError(f"no folder {out.parent} to write {out.name} to")
    return out
