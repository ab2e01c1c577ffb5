"""Small trainings in this process, with several seeds and several kinds of text.

The trainings take a minute and write no files. `experiments.pretrain` is for longer
trainings.
"""

import dataclasses
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.common.tables import grouped
from experiments.pretrain import held_out, paper_flow, program
from experiments.training import data
from experiments.training.job import Inputs, train_batches
from experiments.training.settings import PRESETS, Settings
from experiments.training.state import TrainState
from experiments.training.trainer import Trainer

Row = dict[str, Any]
SETTINGS = dataclasses.replace(
    PRESETS["tiny"].settings,
    steps=240,
    batch_size=8,
    seq_len=64,
    lr=1e-3,  # At 2e-3 gaps between recipes differ by percents from seed to seed.
    eval_every=60,
    eval_batches=16,
)
VALIDATION = "standard library"  # Its validation files.


class Trainings(NamedTuple):
    """Measurements of trainings with several recipes and seeds.

    Attributes:
      settings: The settings; `settings.seed` is not used.
      metrics: A row for each recipe, seed and step.
      texts: A row for each recipe, seed and kind of text: the final loss in nats per
        byte, and the loss of the same weights in BF16.
    """

    settings: Settings
    metrics: list[Row]
    texts: list[Row]


def train(
    settings: Settings = SETTINGS, seeds: int = 3, *, with_paper_flow: bool = True
) -> Trainings:
    """Trains with each recipe and seed on bytes, and validates on all kinds of text.

    A seed determines the initialization and the order of the data, so trainings with
    the same seed share both.

    Args:
      settings: The settings, including the recipes.
      seeds: The number of seeds.
      with_paper_flow: Whether to train with `paper_flow`, too.
    """
    inputs = program.select_inputs(data.load_corpus(), settings)
    texts = {VALIDATION: inputs.validation} | held_out.batches(
        held_out.documents(), settings
    )
    trainings = Trainings(settings, [], [])
    with paper_flow.known() as paper:
        for recipe in (*settings.recipes, *[paper] * with_paper_flow):
            trainer = inputs.trainer(settings, recipe, settings.steps)
            for seed in range(seeds):
                names = {"recipe": recipe, "seed": seed}
                state, rows = _trained(trainer, inputs, settings, seed)
                trainings.metrics.extend(names | row for row in rows)
                for kind, batches in texts.items():
                    row = {"text": kind, "loss": trainer.evaluate(state, batches)}
                    row["loss_in_bf16"] = trainer.evaluate_in_bf16(state, batches)
                    trainings.texts.append(names | row)
    return trainings


def _trained(
    trainer: Trainer, inputs: Inputs, settings: Settings, seed: int
) -> tuple[TrainState, list[Row]]:
    """Runs a training with a seed; returns the last state and a row for each step."""
    seeded = dataclasses.replace(settings, seed=seed)
    state, batches = trainer.init(seed), train_batches(inputs, seeded)
    rows = []
    name = f"{trainer.config.recipe}, seed {seed}"
    for step in tqdm(range(1, settings.steps + 1), name, unit="step", disable=None):
        state, metrics = trainer.step(state, next(batches))
        row = {"step": step, "loss": float(metrics.loss)}
        if step % settings.eval_every == 0 or step == settings.steps:
            row |= inputs.measure(trainer, state)
        rows.append(row)
    return state, rows


def mean_curves(metrics: Sequence[Row]) -> list[Row]:
    """Returns a row for each recipe and step, with means of losses over seeds."""
    groups = grouped(metrics, itemgetter("recipe", "step"))
    return [
        {"recipe": recipe, "step": step}
        | {
            key: float(np.mean([row[key] for row in rows]))
            for key in ("loss", "val_loss")
            if key in rows[0]
        }
        for (recipe, step), rows in groups.items()
    ]
