"""The optimizer of a training: its recipe's AdamW, gradient clipping and a schedule."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from coat_jax.layers.recipes import RECIPES
from coat_jax.layers.recipes import RecipeName as Recipe
from experiments.common.optimizers import COAT_RECIPES, in_float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The settings of every training's optimizer.

    Attributes:
      steps: Largest number of optimizer steps.
      batch_size: Sequences per step.
      lr: Peak learning rate, reached after the warm-up. A cosine then lowers it.
      end_lr: Learning rate of the last step, as a fraction of the peak.
      warmup_steps: Steps of the linear warm-up; at most a tenth of all steps are used.
      weight_decay: Weight decay of matrices; the scales of norms do not decay.
      b1: Decay rate of the first moment.
      b2: Decay rate of the second moment.
      clip_norm: Global norm to which gradients with a larger norm are scaled down.
    """

    steps: int
    batch_size: int
    lr: float
    end_lr: float = 0.1
    warmup_steps: int = 1000
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    clip_norm: float = 1.0


def learning_rate(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """Returns a linear warm-up, and then a cosine down to `end_lr` times the peak."""
    warmup_steps = min(settings.warmup_steps, steps // 10)
    return optax.warmup_cosine_decay_schedule(
        init_value=settings.lr / (warmup_steps + 1),
        peak_value=settings.lr,
        warmup_steps=warmup_steps,
        decay_steps=steps,
        end_value=settings.end_lr * settings.lr,
    )


class Optimizer(NamedTuple):
    """A variant of AdamW with optax's arguments.

    Attributes:
      adamw: `optax.adamw`, `coat.fp8_adamw` with any options of its own, or another
        function with the same arguments.
      fused: Whether `adamw` is `coat.fp8_adamw`, and its steps run in
        `coat.fused_update`.
    """

    adamw: Callable[..., optax.GradientTransformation]
    fused: bool

    @classmethod
    def of(cls, recipe: Recipe) -> "Optimizer":
        """Returns the optimizer of a recipe."""
        return cls(RECIPES[recipe].optimizer, fused=recipe in COAT_RECIPES)

    def transformation(
        self, settings: OptimizerSettings, steps: int, *, clips: bool = True
    ) -> optax.GradientTransformation:
        """Returns the optimizer, with gradient clipping before it if `clips`.

        The moments are FP8 if `fused` and float32 otherwise, for any parameter dtype.
        """
        tx = optax.chain(
            optax.clip_by_global_norm(settings.clip_norm)
            if clips
            else optax.identity(),
            self.adamw(
                learning_rate(settings, steps),
                b1=settings.b1,
                b2=settings.b2,
                weight_decay=settings.weight_decay,
                mask=is_matrix,
            ),
        )
        return tx if self.fused else in_float32(tx)


def is_matrix(params: nnx.State) -> Any:
    """Returns a tree of booleans: False for the scales of norms, which do not decay.

    A parameter belongs to a norm if its path contains "norm".
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" not in jax.tree_util.keystr(path), params
    )
