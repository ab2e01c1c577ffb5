"""Settings of a fine-tuning, and their defaults by preset."""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.finetune.tasks import FAMILIES
from experiments.training.runs import Run, read_settings
from experiments.training.settings import PRESETS, RECIPES, Recipe, Settings

# All parameters are BF16. Updates of a fine-tuning are smaller than the distance of two
# neighbours, and would be lost if they were rounded to nearest.
_DEFAULTS = {
    "param_dtype": "bfloat16",
    "rounding": "stochastic",
    "weight_decay": 0.0,
    "warmup_steps": 100,
    "steps": 1000,
}
_SHORTEST = 256  # Tokens of a sequence, in which every generated problem fits as bytes.
_LR_OF_BASE = 0.1  # The peak learning rate, as a part of pretraining's.
# Random parameters of the smallest preset learn these problems in minutes on a CPU.
_PRESET = "tiny"
_WITHOUT_BASE: dict[str, Any] = {
    "families": ("expressions",),
    "largest": 9,
    "problems": 500,
    "test_questions": 50,
    "eval_questions": 50,
    "steps": 500,
    "batch_size": 16,
    "seq_len": 128,
    "lr": 3e-3,
    "eval_every": 50,
    "save_every": 100,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Settings):
    """All settings that decide what a fine-tuning computes.

    `data` holds .jsonl files of conversations; empty means generated problems.

    Attributes:
      base: Folder of the run of `experiments.pretrain` to start from; empty means
        random parameters.
      base_recipe: Recipe of that run; None without a base.
      test: Files of conversations with last answers to generate; empty means a part
        of the generated problems.
      largest: Largest number in the questions of generated problems.
      problems: Number of generated problems to train on.
      families: Families of generated problems.
      eval_questions: Number of test questions that validations ask, the first ones.
      test_questions: Largest number of test questions that are asked at the end.
    """

    base: str = ""
    base_recipe: Recipe | None = None
    test: tuple[str, ...] = ()
    largest: int = 99
    problems: int = 20_000
    families: tuple[str, ...] = tuple(FAMILIES)
    eval_questions: int = 64
    test_questions: int = 2000

    rounds = tuple(RECIPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("problems", "eval_questions", "test_questions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.data and not self.test:
            raise ValueError("--data needs --test, files of questions to ask")
        if self.test and not self.data:
            raise ValueError("--test needs --data, files of answers to train on")


class FinetuneRun(Run):
    """The folder of a fine-tuning."""

    kind = FinetuneSettings


def settings(overrides: dict[str, Any]) -> FinetuneSettings:
    """Returns the defaults, overridden by the given settings.

    A base decides the model's shape and its tokens.

    Raises:
      ValueError: If the base has another preset than the given one, or has no recipe of
        the given name, or a setting is invalid.
    """
    overrides = dict(overrides)
    if base := overrides.get("base"):
        overrides |= _of_base(Path(base), overrides)
    elif "base_recipe" in overrides:
        raise ValueError("--base-recipe needs a --base")
    preset = PRESETS[overrides.get("preset", _PRESET)].settings
    values = dataclasses.asdict(preset) | _DEFAULTS
    values["seq_len"] = max(preset.seq_len, _SHORTEST)
    if base:
        values["lr"] = _LR_OF_BASE * preset.lr
    elif preset.preset == _PRESET:
        values |= _WITHOUT_BASE
    return FinetuneSettings(**values | overrides)


def _of_base(folder: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    base_settings = read_settings(folder)
    if overrides.get("preset", base_settings.preset) != base_settings.preset:
        raise ValueError(
            f"--preset must be the base's, {base_settings.preset}, "
            f"got {overrides['preset']}"
        )
    default = "bf16" if "bf16" in base_settings.recipes else base_settings.recipes[0]
    recipe = overrides.get("base_recipe", default)
    if recipe not in base_settings.recipes:
        names = ", ".join(base_settings.recipes)
        raise ValueError(
            f"{folder} has the recipes {names}, got --base-recipe {recipe}"
        )
    return {
        "preset": base_settings.preset,
        **base_settings.sizes,
        "base_recipe": recipe,
        "tokenizer": base_settings.tokenizer,
        "vocab_size": base_settings.text_vocab_size,
    }
