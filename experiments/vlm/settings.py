"""Settings of `experiments.vlm`, and presets of settings and of models' shapes."""

import dataclasses
import math
from typing import NamedTuple

from coat_jax.layers.recipes import RECIPES
from coat_jax.layers.recipes import RecipeName as Recipe
from coat_jax.models import llama, vit, vlm
from experiments.training.optimizer import OptimizerSettings
from experiments.vlm.questions import KINDS
from experiments.vlm.scenes import MARGIN, places

# The largest numbers of words of a caption's question, and of a thing in a caption.
_QUESTION, _THING = 3, 9
_POSITIVE = ("seeds", "steps", "batch_size", "lr", "clip_norm", "test_questions")
_POSITIVE += ("train_scenes", "most_things", "names_per_category")


class VlmShape(NamedTuple):
    """A model's shape; `model_config` sets its vocabulary and its recipes.

    Attributes:
      vision: The config of the encoder, which also sets the size of images.
      text: The config of the decoder.
      merge_size: The side of the square of patches that becomes an image token.
    """

    vision: vit.VitConfig
    text: llama.LlamaConfig
    merge_size: int


def _shape(image: int, vision: dict[str, int], text: dict[str, int]) -> VlmShape:
    heads = text["num_heads"]
    return VlmShape(
        vit.VitConfig(image_size=image, **vision),
        llama.LlamaConfig(vocab_size=1, num_kv_heads=heads, **text),
        merge_size=2,
    )


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
    )


SHAPES: dict[str, VlmShape] = {
    "tiny": _shape(24, _sizes(32, 48, 1, 2) | {"patch_size": 6}, _sizes(32, 48, 1, 2)),
    "cpu": _shape(
        48, _sizes(64, 128, 1, 2) | {"patch_size": 12}, _sizes(64, 128, 2, 2)
    ),
    "gpu": _shape(
        96, _sizes(384, 1536, 6, 6) | {"patch_size": 8}, _sizes(512, 1408, 8, 8)
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VlmSettings(OptimizerSettings):
    """All settings that decide what a run computes.

    The optimizer's settings are inherited from `OptimizerSettings`. Each sequence of a
    batch is one question.

    Attributes:
      preset: The name of the preset that gives the model's shape and default settings.
      recipes: The recipes to train with. The first is "bf16", with which the other
        recipes are compared.
      seeds: The number of trainings of each recipe, with the seeds 0, 1, ...
      data_seed: The seed of the scenes and questions, which all trainings share.
      grid: The number of cells in a row of a scene, which is also the number of rows.
      most_things: The largest number of things in a scene.
      names_per_category: The number of drawings of each category.
      train_scenes: The number of scenes for training, each with a question of every
        kind that the scene allows.
      test_questions: The number of questions for tests, each about another scene.
    """

    preset: str
    recipes: tuple[Recipe, ...] = ("bf16", "te", "coat", "coat_max")
    seeds: int = 1
    data_seed: int = 0
    grid: int
    most_things: int
    names_per_category: int
    train_scenes: int
    test_questions: int
    warmup_steps: int = 200
    weight_decay: float = 0.05

    # Settings that `ModelTrainer` reads, with fixed values. Without annotations these
    # names are no fields.
    accumulate = 1
    rounding = "nearest"
    bad_step = "stop"

    def __post_init__(self) -> None:
        if self.preset not in SHAPES:
            raise ValueError(f"presets are {', '.join(SHAPES)}; got {self.preset!r}")
        for recipe in self.recipes:
            if recipe not in RECIPES:
                raise ValueError(f"recipes are {', '.join(RECIPES)}; got {recipe!r}")
        if self.recipes[:1] != ("bf16",) or len(set(self.recipes)) < len(self.recipes):
            raise ValueError(
                f"recipes must be bf16 and then others, each once: {self.recipes}"
            )
        for name in _POSITIVE:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.data_seed < 0:
            raise ValueError(f"data_seed must be zero or more, got {self.data_seed}")
        cells = len(places(self.grid))
        if self.most_things > cells:
            raise ValueError(
                f"most_things must be at most the {cells} cells, got {self.most_things}"
            )
        if self.batch_size > self.train_scenes:
            raise ValueError(
                "batch_size must be at most train_scenes, got "
                f"{self.batch_size}, {self.train_scenes}"
            )
        if self.test_questions < 2 * len(KINDS):  # Intervals need two of each kind.
            raise ValueError(
                f"test_questions must be at least {2 * len(KINDS)}, two of each kind, "
                f"got {self.test_questions}"
            )

    @property
    def picture_size(self) -> int:
        """The height and width of drawings and digits, in pixels."""
        return SHAPES[self.preset].vision.image_size // self.grid - MARGIN

    @property
    def tokens_per_image(self) -> int:
        """The number of image tokens of an image."""
        shape = SHAPES[self.preset]
        return (shape.vision.grid_size // shape.merge_size) ** 2

    @property
    def length(self) -> int:
        """The number of tokens of a sequence, including the last target.

        The number of input tokens is a multiple of four.
        """
        longest = self.tokens_per_image + _QUESTION + _THING * self.most_things
        return -(-longest // 4) * 4 + 1


PRESETS: dict[str, VlmSettings] = {
    "tiny": VlmSettings(
        preset="tiny",
        recipes=("bf16", "coat"),
        grid=2,
        most_things=2,
        names_per_category=2,
        train_scenes=16,
        test_questions=12,
        steps=4,
        batch_size=4,
        lr=3e-3,
    ),
    "cpu": VlmSettings(
        preset="cpu",
        recipes=("bf16", "te", "coat"),
        grid=2,
        most_things=2,
        names_per_category=2,
        train_scenes=2500,
        test_questions=480,
        steps=200,
        batch_size=32,
        lr=4e-3,
    ),
    "gpu": VlmSettings(
        preset="gpu",
        seeds=3,
        grid=3,
        most_things=4,
        names_per_category=16,
        train_scenes=40_000,
        test_questions=2400,
        steps=3000,
        batch_size=256,
        lr=6e-4,
    ),
}


def model_config(
    settings: VlmSettings, recipe: Recipe, vocab_size: int, image_token: int
) -> vlm.VlmConfig:
    """Returns the model's config: the preset's shape, with one recipe in all parts.

    The vocabulary is `vocab_size` rounded up to a multiple of 128. `image_token` is the
    token that stands for a part of an image.
    """
    shape = SHAPES[settings.preset]
    padded = -(-vocab_size // 128) * 128  # Whole tiles of a matmul.
    return vlm.VlmConfig(
        vision=dataclasses.replace(shape.vision, recipe=recipe),
        text=dataclasses.replace(shape.text, recipe=recipe, vocab_size=padded),
        image_token=image_token,
        merge_size=shape.merge_size,
    )
