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
      steps: The largest number of optimizer steps.
      batch_size: The number of sequences per step.
      lr: The peak learning rate, reached after the warm-up. A cosine then lowers it.
      end_lr: The learning rate of the last step, as a fraction of the peak.
      warmup_steps: The number of steps of the linear warm-up; at most a tenth of all
        steps are used.
      weight_decay: The weight decay of weights; the parameters of norms do not decay.
      b1: The decay rate of the first moment.
      b2: The decay rate of the second moment.
      clip_norm: The global norm to which gradients with a larger norm are scaled down.
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
    """Returns the schedule: a linear warm-up, then a cosine down to the end.

    `steps` is the length of the schedule. Its last learning rate is `end_lr` times the
    peak.
    """
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
      adamw: `optax.adamw`, `coat.fp8_adamw` with any further options, or another
        function with the same arguments.
      fused: Whether `adamw` is `coat.fp8_adamw`, and its steps run in
        `coat.fused_update`.
    """

    adamw: Callable[..., optax.GradientTransformation]
    fused: bool

    @classmethod
    def of(cls, recipe: Recipe) -> "Optimizer":
        """Returns the optimizer of the recipe named `recipe`."""
        return cls(RECIPES[recipe].optimizer, fused=recipe in COAT_RECIPES)

    def transformation(
        self, settings: OptimizerSettings, steps: int, *, clips: bool = True
    ) -> optax.GradientTransformation:
        """Returns the optimizer, after gradient clipping if `clips`.

        `steps` is the length of the learning rate schedule. Moments are FP8 if `fused`
        and otherwise float32, for any parameter dtype.
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
    """Returns a tree of booleans: whether each parameter decays.

    The parameters of norms do not decay: their paths contain "norm".
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" not in jax.tree_util.keystr(path), params
    )
