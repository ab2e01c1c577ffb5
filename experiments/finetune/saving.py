"""Saves the trained models of a fine-tuning, for other programs to load."""

import shutil
from functools import partial
from pathlib import Path

from coat_jax.models import hf, llama
from coat_jax.models.hf.loading import Origin
from experiments.finetune.settings import FinetuneRun
from experiments.training import processes

FOLDER = "models"


def save_models(
    run: FinetuneRun, recipe: str, model: llama.Llama, origin: Origin | None
) -> list[Path]:
    """Saves a recipe's model as a Hugging Face folder, and a copy in FP8 if set.

    The run's folder gets models/RECIPE, and with `settings.save_format`
    models/RECIPE-FORMAT. Earlier folders are replaced. All processes must call this
    function.

    Args:
      run: The run.
      recipe: The recipe's name.
      model: The trained model.
      origin: The folder that the training started from, or None.

    Returns:
      The paths of the folders.
    """
    model.origin = origin
    formats = {recipe: None}
    if run.settings.save_format != "none":
        formats[f"{recipe}-{run.settings.save_format}"] = run.settings.save_format
    paths = []
    for name, format in formats.items():
        path = run.folder / FOLDER / name
        incomplete = path.with_name(f"{name}.new")
        processes.on_main(partial(shutil.rmtree, incomplete, ignore_errors=True))
        hf.save(model, incomplete, format=format)
        if processes.is_main():
            shutil.rmtree(path, ignore_errors=True)
            incomplete.replace(path)
        paths.append(path)
    return paths
