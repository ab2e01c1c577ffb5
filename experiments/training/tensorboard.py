"""Writes a run's rows as events for TensorBoard, in one folder per recipe.

    uv run python -m experiments.pretrain --tensorboard
    tensorboard --logdir runs

The events repeat the numbers of metrics.jsonl, moments.jsonl and health.jsonl. A
resumed run reads these files, and not the events.
"""

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

_NOT_NAMES = ("recipe", "step")


class Board:
    """A writer of a recipe's events after a step; a context manager.

    Args:
      folder: The folder of the events.
      step: The number of steps that are done. TensorBoard hides older events of later
        steps, which a killed process may have written.

    Raises:
      ModuleNotFoundError: If tensorboardX is not installed; see `check_installed`.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._open(step)

    def _open(self, step: int) -> None:
        from tensorboardX import SummaryWriter  # An optional dependency.

        # tensorboardX names files by seconds, and would overwrite a file of the same
        # second.
        self._folder.mkdir(parents=True, exist_ok=True)
        number = len(list(self._folder.iterdir()))
        self._writer = SummaryWriter(
            str(self._folder), purge_step=step + 1, filename_suffix=f".{number:04}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._writer.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes the finite numbers of a row, with the tags that `scalars` returns."""
        for tag, value in scalars(row).items():
            self._writer.add_scalar(tag, value, row["step"])

    def drop_after(self, step: int) -> None:
        """Hides the events of steps after `step`."""
        self._writer.close()
        self._open(step)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns a row's finite numbers by tag.

    A tag consists of the row's strings and layer, followed by the number's name.

    Examples:
      >>> scalars({"recipe": "coat", "step": 3, "loss": 2.5, "lr": 0.001})
      {'loss': 2.5, 'lr': 0.001}
      >>> scalars({"step": 3, "of": "gradients", "path": "qkv", "layer": 1, "amax": 4})
      {'gradients/qkv/layer 1/amax': 4.0}
    """
    names, numbers = [], {}
    for name, value in row.items():
        if name in _NOT_NAMES or value is None or isinstance(value, bool):
            continue
        if isinstance(value, str):
            names.append(value)
        elif name == "layer":
            names.append(f"layer {value}")
        elif isinstance(value, int | float) and math.isfinite(value):
            numbers[name] = float(value)
    return {"/".join([*names, name]): number for name, number in numbers.items()}


def check_installed() -> None:
    """Raises ValueError if tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "--tensorboard needs the package tensorboardX, which is not installed: "
            "pip install tensorboardX"
        )
