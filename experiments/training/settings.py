"""Settings of a training run, and presets of settings with a model's shape."""

import dataclasses
import math
import typing
from typing import Any, Literal, Self

import jax.numpy as jnp

from coat_jax.layers.recipes import RECIPES, Scaling
from coat_jax.layers.recipes import RecipeName as Recipe
from coat_jax.models import llama
from experiments.common.optimizers import COAT_RECIPES, without_fp8_matmuls
from experiments.training.data import TokenDtype, Tokenizer
from experiments.training.optimizer import Optimizer, OptimizerSettings
from experiments.training.text import BYTES_VOCAB_SIZE

ParamDtype = Literal["float32", "bfloat16"]
Rounding = Literal["nearest", "stochastic"]
BadStep = Literal["stop", "skip", "rollback"]
Release = Literal["no", "clip", "once"]
_BPE_VOCAB_SIZE = 16_384
_POSITIVE = ("vocab_size", "steps", "minutes", "batch_size", "seq_len", "lr")
_POSITIVE += ("clip_norm", "eval_every", "eval_batches", "save_every", "keep")
_POSITIVE += ("health_every", "accumulate")
SIZES = ("layers", "hidden", "intermediate", "heads", "kv_heads")
_NOT_NEGATIVE = ("seed", "warmup_steps", "weight_decay", "end_lr", "bf16_last")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(OptimizerSettings):
    """All settings that decide what a run computes, stored as JSON in its folder.

    The optimizer's settings are inherited from `OptimizerSettings`.

    Attributes:
      preset: The name of the preset that gives the model's shape and default settings.
      layers: The number of layers; None means the preset's.
      hidden: The size of the residual stream; None means the preset's.
      intermediate: The size of the MLP's hidden layer; None means the preset's ratio to
        `hidden`, in multiples of 128.
      heads: The number of query heads; None means heads of the preset's size.
      kv_heads: The number of key and value heads; None means the preset's ratio to
        `heads`.
      recipes: The recipes to train with, one after another. All start from the same
        initialization and read the data in the same order.
      data: Files or folders; empty means Python's standard library.
      tokenizer: The tokenizer of text: "bytes" or "bpe".
      vocab_size: The vocabulary size of a trained BPE tokenizer or of token files; None
        means 16,384 for BPE and the preset's size for token files.
      token_dtype: The dtype of token files without a header.
      seed: The seed of the initialization, the data's order and stochastic rounding.
      param_dtype: The dtype in which parameters are stored.
      rounding: The rounding of BF16 parameters by `coat.fp8_adamw`. The other recipes
        use `optax.adamw`, which always rounds to nearest.
      scaling: The scales of gradients in recipes that have a choice: "just_in_time" or
        "delayed".
      bf16_last: The part of the steps at the end in which recipes with FP8 matmuls
        have BF16 matmuls: `te` becomes `bf16`, and the other recipes `coat_bf16`.
      minutes: The time budget of the first recipe, which may lower `steps`; None means
        no budget.
      seq_len: The number of tokens per sequence.
      accumulate: The number of microbatches of a step. Their gradients are summed.
      release: Whether the optimizer runs inside the backward pass, layer by layer, so
        that gradients take little memory: "no", "clip" with a second backward pass for
        the global norm, or "once" without clipping.
      eval_every: The number of steps between validations; the last step is always
        validated.
      eval_batches: The number of batches per validation.
      save_every: The number of steps between checkpoints; the last step is always
        saved.
      keep: The number of checkpoints that are kept. A resumed run falls back to an
        older checkpoint if the newest is damaged.
      bad_step: The reaction to a step with a loss that is NaN or a spike, or with a
        gradient that is not finite: "stop", "skip" its update, or "rollback" to the
        latest checkpoint and continue with the batches that follow.
      spike: The factor above which a loss is a spike, relative to the median of the
        recipe's last 50 losses; None means that no finite loss is a spike.
      health_every: The number of steps between reports of amax, saturation and
        underflow; None means no reports.
    """

    preset: str
    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    recipes: tuple[Recipe, ...] = ("bf16", "coat")
    data: tuple[str, ...] = ()
    tokenizer: Tokenizer = "bytes"
    vocab_size: int | None = None
    token_dtype: TokenDtype = "uint16"
    seed: int = 0
    param_dtype: ParamDtype = "float32"
    rounding: Rounding = "nearest"
    scaling: Scaling = "just_in_time"
    bf16_last: float = 0.0
    minutes: float | None = None
    seq_len: int
    accumulate: int = 1
    release: Release = "no"
    eval_every: int
    eval_batches: int
    save_every: int
    keep: int = 2
    bad_step: BadStep = "stop"
    spike: float | None = None
    health_every: int | None = None

    # The recipes that can round BF16 parameters stochastically. Without an annotation
    # this name is no field of the dataclass.
    rounds = COAT_RECIPES

    def __post_init__(self) -> None:
        for recipe in self.recipes:
            if recipe not in RECIPES:
                raise ValueError(f"recipes are {', '.join(RECIPES)}; got {recipe!r}")
        if not self.recipes or len(set(self.recipes)) < len(self.recipes):
            raise ValueError(f"recipes must be one or more, each once: {self.recipes}")
        for name in SIZES + _POSITIVE + _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is None or (value == 0 and name in _NOT_NEGATIVE):
                continue
            if not value > 0:
                rule = "zero or more" if name in _NOT_NEGATIVE else "positive"
                raise ValueError(f"{name} must be {rule}, got {value}")
            if isinstance(value, int) and value >= 2**31:
                raise ValueError(f"{name} must be below 2**31, got {value}")
            if not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if self.vocab_size and self.tokenizer == "bytes" and not self.data:
            raise ValueError(
                f"vocab_size is for a BPE and for token files, got {self.vocab_size}"
            )
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                rule = "must be at least 0 and below 1"
                raise ValueError(f"{name} {rule}, got {getattr(self, name)}")
        for recipe in self.recipes:
            try:
                Optimizer.of(recipe).transformation(self, self.steps)
            except ValueError as error:
                raise ValueError(f"{recipe}'s optimizer: {error}") from None

        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate must divide batch_size, got {self.accumulate} and "
                f"{self.batch_size}"
            )

        if self.sizes:
            _shape(self)

        self._check_release()
        self._check_bf16_last()
        if self.spike is not None and not 1 < self.spike < math.inf:
            raise ValueError(f"spike must be above 1 and finite, got {self.spike}")

        rounded = set(self.recipes) & set(self.rounds)
        if self.rounding == "stochastic" and not (
            rounded and self.param_dtype == "bfloat16"
        ):
            raise ValueError(
                "rounding='stochastic' needs param_dtype='bfloat16' and one of the "
                f"recipes {', '.join(self.rounds)}; got {self.param_dtype!r} and "
                f"{', '.join(self.recipes)}"
            )

        able = [name for name in RECIPES if self.scaling in RECIPES[name].scalings]
        if not set(self.recipes) & set(able):
            raise ValueError(
                f"scaling={self.scaling!r} needs one of the recipes "
                f"{', '.join(able)}; got {', '.join(self.recipes)}"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the model that replace the preset's sizes, by name."""
        sizes = {name: getattr(self, name) for name in SIZES}
        return {name: size for name, size in sizes.items() if size is not None}

    def _check_release(self) -> None:
        """Raises ValueError if `release` is set and settings need all gradients."""
        if self.release == "no":
            return
        needs = {"accumulate": 1, "scaling": "just_in_time", "health_every": None}
        for name, value in needs.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"release={self.release!r} needs {name}={value!r}, because no step "
                    f"has all gradients at once; got {getattr(self, name)!r}"
                )

    def _check_bf16_last(self) -> None:
        """Raises ValueError if `bf16_last` is not a part, or has no effect."""
        if not self.bf16_last:
            return
        if self.bf16_last >= 1:
            raise ValueError(f"bf16_last must be below 1, got {self.bf16_last}")
        if all(without_fp8_matmuls(recipe) == recipe for recipe in self.recipes):
            raise ValueError(
                "bf16_last needs a recipe with FP8 matmuls, got "
                f"{', '.join(self.recipes)}"
            )
        if self.scaling != "just_in_time":
            raise ValueError(
                "bf16_last needs scaling='just_in_time', because BF16 matmuls record "
                f"no scales; got {self.scaling!r}"
            )

    def last_recipe(self, recipe: Recipe) -> Recipe:
        """Returns the recipe that the last step of a recipe's training has."""
        return without_fp8_matmuls(recipe) if self.bf16_last else recipe

    def early_steps(self, recipe: Recipe, steps: int) -> int:
        """Returns how many of a training's `steps` come before `bf16_last` begins."""
        if self.last_recipe(recipe) == recipe:
            return steps
        late = max(1, round(self.bf16_last * steps))
        return max(min(1, steps), steps - late)

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens of a batch."""
        return self.batch_size * self.seq_len

    @property
    def text_vocab_size(self) -> int | None:
        """The vocabulary size of text: `vocab_size`, by default 16,384 for BPE.

        It is None for bytes without `vocab_size`.
        """
        return self.vocab_size or (_BPE_VOCAB_SIZE if self.tokenizer == "bpe" else None)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """Returns the names of presets."""
        return tuple(PRESETS)

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Returns the settings in a JSON object, in which tuples are lists.

        Raises:
          ValueError: If `values` is not an object with valid settings.
        """
        if not isinstance(values, dict):
            raise ValueError(f"settings must be an object, got {values!r:.100}")
        lists = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
        arguments, types = values | lists, typing.get_type_hints(cls)
        for name, value in arguments.items():
            if name not in types or not _is_of(value, types[name]):
                raise ValueError(f"there is no setting {name:.100}={value!r:.100}")
        fields = dataclasses.fields(cls)
        needed = {f.name for f in fields if f.default is dataclasses.MISSING}
        if missing := sorted(needed - arguments.keys()):
            raise ValueError(f"settings must have {', '.join(missing)}")
        if arguments["preset"] not in cls.presets():
            raise ValueError(f"there is no preset {arguments['preset']!r:.100}")
        return cls(**arguments)


def percent(part: float) -> str:
    """Returns a part, such as `bf16_last`, in percent with all digits that it needs.

    Examples:
      >>> percent(0.1), percent(0.004)
      ('10%', '0.4%')
    """
    return f"{100 * part:.12g}%"


def _is_of(value: Any, kind: Any) -> bool:
    """Returns whether a value from JSON has the type `kind` of a setting."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(x, args[0]) for x in value)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if args:
        return any(_is_of(value, one) for one in args)
    kinds = (int, float) if kind is float else kind
    return isinstance(value, kinds) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's shape and the settings to train it with.

    Attributes:
      model: The model's shape. `model_config` sets its recipe, scaling, vocabulary and
        parameter dtype.
      settings: The default settings, which a command line can override.
    """

    model: llama.LlamaConfig
    settings: Settings


def _small(
    hidden: int, intermediate: int, *, layers: int, heads: int, kv_heads: int
) -> llama.LlamaConfig:
    return llama.LlamaConfig(
        vocab_size=BYTES_VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        tie_embeddings=True,
    )


def _large(preset: str, steps: int, batch_size: int, seq_len: int, lr: float) -> Preset:
    """Returns a preset with a published shape, and a batch that fits on one device."""
    return Preset(
        model=llama.CONFIGS[preset],
        settings=Settings(
            preset=preset,
            steps=steps,
            batch_size=batch_size,
            seq_len=seq_len,
            lr=lr,
            param_dtype="float32" if preset in _FLOAT32 else "bfloat16",
            eval_every=500,
            eval_batches=32,
            save_every=500,
            warmup_steps=1000,
        ),
    )


# Published shapes: steps, batch size, sequence length and peak learning rate.
_LARGE = {
    "124m": (10_000, 32, 1024, 6e-4),
    "300m": (10_000, 32, 1024, 4e-4),
    "moe-300m": (10_000, 32, 1024, 4e-4),
    "olmo-1b": (50_000, 8, 2048, 4e-4),
    "llama2-7b": (50_000, 2, 2048, 3e-4),
    "llama2-13b": (50_000, 1, 2048, 3e-4),
    "llama3-8b": (50_000, 2, 8192, 3e-4),
    "llama-30b": (50_000, 1, 2048, 1.5e-4),
}
_FLOAT32 = ("124m", "300m", "moe-300m", "olmo-1b")
PRESETS: dict[str, Preset] = {
    "cpu": Preset(
        model=_small(128, 384, layers=4, heads=4, kv_heads=2),
        settings=Settings(
            preset="cpu",
            steps=600,
            batch_size=8,
            seq_len=128,
            # At 3e-3 the losses of two seeds differ by a percent, which hides the gaps
            # between recipes.
            lr=2e-3,
            eval_every=100,
            eval_batches=16,
            save_every=100,
        ),
    ),
    "tiny": Preset(
        model=_small(64, 128, layers=2, heads=2, kv_heads=1),
        settings=Settings(
            preset="tiny",
            steps=20,
            batch_size=4,
            seq_len=32,
            lr=3e-3,
            eval_every=10,
            eval_batches=2,
            save_every=5,
        ),
    ),
} | {preset: _large(preset, *sizes) for preset, sizes in _LARGE.items()}


def model_config(
    settings: Settings, recipe: Recipe, vocab_size: int
) -> llama.LlamaConfig:
    """Returns the model's config: the shape in the settings, with a recipe.

    The vocabulary is `vocab_size` rounded up to a multiple of 128. The scaling and the
    parameter dtype are also from the settings.
    """
    scalings = RECIPES[recipe].scalings
    return dataclasses.replace(
        _shape(settings),
        recipe=recipe,
        scaling=settings.scaling if settings.scaling in scalings else "just_in_time",
        vocab_size=-(-vocab_size // 128) * 128,  # Whole tiles of a matmul.
        param_dtype=jnp.dtype(settings.param_dtype),
    )


def _shape(settings: Settings) -> llama.LlamaConfig:
    """Returns the preset's shape, changed by the sizes in the settings.

    Raises:
      ValueError: If the size of a head is not an even integer, or `heads` is not a
        multiple of `kv_heads`.
    """
    model = PRESETS[settings.preset].model
    if not settings.sizes:
        return model
    hidden = settings.hidden or model.hidden_size
    intermediate = settings.intermediate or 128 * math.ceil(
        hidden * model.intermediate_size / model.hidden_size / 128
    )
    heads = settings.heads or max(1, hidden * model.num_heads // model.hidden_size)
    kv_heads = max(1, heads * model.num_kv_heads // model.num_heads)
    shape = {
        "num_layers": settings.layers or model.num_layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": heads,
        "num_kv_heads": settings.kv_heads or kv_heads,
    }
    elements = shape["num_layers"] * hidden * max(hidden, intermediate)
    if elements >= 2**48:
        raise ValueError(
            "layers, times hidden, times the larger of hidden and intermediate, must "
            f"be below 2**48, got {shape['num_layers']}, {hidden} and {intermediate}"
        )
    kv_heads = shape["num_kv_heads"]
    if hidden % heads or hidden // heads % 2:
        raise ValueError(
            "hidden must be an even number of times heads, "
            f"got hidden {hidden} and heads {heads}"
        )
    if heads % kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}"
        )
    return dataclasses.replace(model, **shape)
