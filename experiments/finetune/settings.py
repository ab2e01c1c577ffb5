"""Settings of a fine-tuning, and their defaults by preset."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from coat_jax.models import lora
from coat_jax.models.hf.quantized import FP8Format
from experiments.finetune.checkers import load_checker
from experiments.finetune.encoding import Loss, Markup
from experiments.finetune.tasks import FAMILIES
from experiments.training.record import read_settings
from experiments.training.runs import Run
from experiments.training.settings import (
    COAT_RECIPES,
    PRESETS,
    RECIPES,
    Recipe,
    Settings,
)

Long = Literal["cut", "skip", "refuse"]
SaveFormat = Literal["none", FP8Format]

# All parameters are BF16. Updates of a fine-tuning are smaller than the distance of
# neighbouring BF16 numbers, and would be lost if parameters were rounded to nearest.
_DEFAULTS = {
    "param_dtype": "bfloat16",
    "rounding": "stochastic",
    "weight_decay": 0.0,
    "warmup_steps": 100,
    "steps": 1000,
}
_SHORTEST = 256  # Tokens of a sequence, in which every generated problem fits as bytes.
_LR_OF_BASE = 0.1  # The peak learning rate, as a fraction of pretraining's.
_OF_PROBLEMS = ("largest", "problems", "families")
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
# The model's shape comes from the folder, not from a preset.
FOLDER_PRESET = "folder"
_OF_FOLDER: dict[str, Any] = {
    "preset": FOLDER_PRESET,
    "recipes": ("coat",),
    "seq_len": 1024,
    "batch_size": 8,
    "lr": 2e-5,
    "steps": 500,
    "eval_every": 100,
    "eval_batches": 16,
    "save_every": 100,
    "tokenizer": "bpe",
    "vocab_size": None,
}
# Adapters are float32, and frozen weights are not updated.
_OF_ADAPTERS: dict[str, Any] = {"lr": 2e-4, "rounding": "nearest"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Settings):
    """All settings that decide what a fine-tuning computes.

    `data` holds .jsonl or .parquet files of records; empty means generated problems.

    Attributes:
      model: The Hugging Face folder to start from; empty means a run or random
        parameters.
      base: The folder of the run of `experiments.pretrain` to start from; empty means
        no run.
      base_recipe: The recipe of the base's run; None without a base.
      test: The files of records to validate on, with last answers to generate; empty
        means a twentieth of the data, or a part of the generated problems.
      loss: The tokens that the loss counts: "answers" or "all".
      markup: The treatment of special tokens that texts, prompts or completions spell:
        "refuse", "plain" for characters, or "read" for tokens.
      long: The treatment of records longer than a sequence: "cut", "skip" or "refuse".
      lora: The rank of adapters over frozen weights; None trains every parameter.
      lora_alpha: The factor of the adapters, times the rank; None means twice the rank.
      checker: The checker of generated answers; see `experiments.finetune.checkers`.
      save_format: The FP8 format of a second saved folder; "none" means no second
        folder.
      largest: The largest number in the questions of generated problems.
      problems: The number of generated problems to train on.
      families: The families of generated problems.
      eval_questions: The number of test questions that validations ask, the first ones.
      test_questions: The largest number of test questions that are asked at the end.
    """

    model: str = ""
    base: str = ""
    base_recipe: Recipe | None = None
    test: tuple[str, ...] = ()
    loss: Loss = "answers"
    markup: Markup = "refuse"
    long: Long = "refuse"
    lora: int | None = None
    lora_alpha: float | None = None
    checker: str = "exact"
    save_format: SaveFormat = "none"
    largest: int = 99
    problems: int = 20_000
    families: tuple[str, ...] = tuple(FAMILIES)
    eval_questions: int = 64
    test_questions: int = 2000

    rounds = tuple(RECIPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (
            ("problems", 1),
            ("eval_questions", 0),
            ("test_questions", 0),
        ):
            if getattr(self, name) < least:
                rule = "positive" if least else "zero or more"
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")
        if not (self.data or self.test_questions):
            raise ValueError("test_questions must be positive for generated problems")
        if self.test and not self.data:
            raise ValueError("--test needs --data, files of answers to train on")
        if self.model and self.base:
            raise ValueError("a training starts from --model or --base, got both")
        if self.model and self.sizes:
            raise ValueError(f"a folder has its own sizes, got {self.sizes}")
        if bool(self.model) != (self.preset == FOLDER_PRESET):
            raise ValueError(f"--model has a shape of its own, got {self.preset!r}")
        if self.save_format != "none" and not self.model:
            raise ValueError("--save-format needs a --model, as a folder is saved")
        if self.markup != "refuse" and not self.model:
            raise ValueError(f"--markup needs a --model, got {self.markup!r}")
        self._check_lora()
        others = set(self.recipes) - set(COAT_RECIPES)
        if self.release != "no" and self.rounding == "stochastic" and others:
            raise ValueError(
                "release rounds stochastically with coat.fp8_adamw alone, so that "
                f"{', '.join(sorted(others))} would round to nearest; --rounding "
                "nearest allows it, got 'stochastic'"
            )

    def _check_lora(self) -> None:
        """Raises ValueError for settings that adapters do not support."""
        if self.lora is None:
            if self.lora_alpha is not None:
                raise ValueError(f"--lora-alpha needs --lora, got {self.lora_alpha}")
            return
        if not 1 <= self.lora < 2**16:
            raise ValueError(f"lora must be 1 or more, a rank, got {self.lora}")
        if self.lora_alpha is not None and not 0 < self.lora_alpha < 2**31:
            raise ValueError(f"lora_alpha must be positive, got {self.lora_alpha}")
        if not self.model:
            raise ValueError("--lora needs a --model, whose weights are frozen")
        if unable := set(self.recipes) - set(lora.RECIPES):
            raise ValueError(
                f"--lora takes the recipes {', '.join(lora.RECIPES)}, got "
                f"{', '.join(sorted(unable))}"
            )
        needs = {"release": "no", "scaling": "just_in_time", "rounding": "nearest"}
        needs |= {"health_every": None, "bf16_last": 0.0}
        for name, value in needs.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"--lora needs {name}={value!r}, got {getattr(self, name)!r}"
                )

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """Returns the names of presets, including the name for folders."""
        return (*PRESETS, FOLDER_PRESET)


class FinetuneRun(Run):
    """The run folder of a fine-tuning, with `FinetuneSettings`."""

    kind = FinetuneSettings


def settings(overrides: dict[str, Any]) -> FinetuneSettings:
    """Returns the defaults, overridden by the given settings.

    A base or a folder determines the model's shape and its tokenizer.

    Raises:
      ValueError: If the given preset is not the base's, the base lacks the given
        recipe, a setting of generated problems is given with data, or a setting is
        invalid.
    """
    overrides = dict(overrides)
    for name in _OF_PROBLEMS:
        if name in overrides and overrides.get("data"):
            raise ValueError(
                f"--{name} is of generated problems, and --data takes their place; got "
                f"--{name} {overrides[name]!r} and --data"
            )
    load_checker(overrides.get("checker", "exact"))
    if overrides.get("model"):
        return _of_folder(overrides)
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


def _of_folder(overrides: dict[str, Any]) -> FinetuneSettings:
    """Returns the settings for fine-tuning a model of a Hugging Face folder."""
    if "base_recipe" in overrides:
        raise ValueError("--base-recipe needs a --base")
    values = _DEFAULTS | _OF_FOLDER
    if overrides.get("lora"):
        values |= _OF_ADAPTERS
    elif overrides.get("param_dtype", "bfloat16") != "bfloat16":
        values["rounding"] = "nearest"
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
