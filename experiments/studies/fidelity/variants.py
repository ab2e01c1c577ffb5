"""Variants to train: recipes, and the recipe `bf16` or `coat` with one change."""

import dataclasses
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

import coat_jax as coat
from coat_jax.layers.plain import PlainRecipe
from coat_jax.layers.recipe import NORMS, Recipe
from coat_jax.layers.recipes import RECIPES, UNQUANTIZED
from experiments.studies.fidelity.operands import Grid, Operands, Weight
from experiments.training.optimizer import Optimizer

REFERENCE = "bf16"
_WIDE = Optimizer(optax.adamw, fused=False)


class Late(NamedTuple):
    """Another recipe for the last steps of a training.

    Attributes:
      recipe: The recipe of layers.
      part: The part of the steps that it trains.
    """

    recipe: Recipe
    part: float


class Forward(NamedTuple):
    """The precisions of a model's forward and backward passes.

    Attributes:
      recipe: The recipe of layers.
      ends: The recipe of the first and the last layer.
      head: The precision of the matmul of the logits.
    """

    recipe: Recipe
    ends: Recipe
    head: Literal["bf16", "fp8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A recipe, an optimizer and dtypes to train with.

    Attributes:
      name: The name on command lines and in results.
      about: What differs from the reference, for tables.
      recipe: The recipe of layers.
      ends: The recipe of the first and the last layer; None means `recipe`.
      head: The precision of the matmul of the logits.
      late: Another recipe of all layers in the last steps, or None.
      optimizer: The optimizer.
      param_dtype: The dtype in which parameters are stored.
      stochastic: Whether BF16 parameters are rounded stochastically.
      b2: The decay rate of the second moment.
      nudge: A factor on the initial parameters. A factor close to 1 shows how far
        trainings drift apart from rounding alone.
      reference: The name of the variant to compare with.
    """

    name: str
    about: str
    recipe: Recipe = UNQUANTIZED
    ends: Recipe | None = None
    head: Literal["bf16", "fp8"] = "bf16"
    late: Late | None = None
    optimizer: Optimizer = _WIDE
    param_dtype: DTypeLike = jnp.float32
    stochastic: bool = False
    b2: float = 0.95
    nudge: float = 1.0
    reference: str = REFERENCE

    @property
    def forward(self) -> Forward:
        """The precisions of the model's passes, except in steps of a `late` recipe."""
        return Forward(self.recipe, self.ends or self.recipe, self.head)

    @property
    def last_forward(self) -> Forward:
        """The precisions of the model's passes in the last step."""
        if self.late is None:
            return self.forward
        return Forward(self.late.recipe, self.late.recipe, self.head)

    def late_steps(self, steps: int) -> int:
        """Returns how many of a training's `steps` the late recipe trains."""
        return 0 if self.late is None else round(self.late.part * steps)


class _NormCopies(PlainRecipe):
    """A recipe in BF16 with FP8 copies of the inputs of norms for the backward pass."""

    def norm(self, norm):
        """Returns a function of weight and x that saves only an FP8 copy of x.

        The function computes the norm of x.
        """
        fn = NORMS[norm.kind]
        return coat.fp8_remat(lambda weight, x: fn(x, weight, eps=norm.eps))


class _GateCopies(PlainRecipe):
    """A recipe in BF16 with FP8 copies of the inputs of gates for the backward pass.

    Its norms save no FP8 copies.
    """

    def norm(self, norm):
        """Returns the norm of the recipe `bf16`, a function of weight and x."""
        return UNQUANTIZED.norm(norm)


def _layers(kind: type[PlainRecipe] = PlainRecipe, **changes) -> PlainRecipe:
    return kind(**{"linear": UNQUANTIZED.linear} | changes)


def _operands(
    name: str, about: str, only: Weight | None = None, **grids: Grid
) -> Variant:
    recipe = _layers(linear=Operands(only=only, **grids))
    return Variant(name=name, about=about, recipe=recipe)


def _gradients(name: str, about: str, grid: Grid) -> Variant:
    return _operands(name, about, dy_for_dx=grid, dy_for_dw=grid)


_FP8 = Optimizer(coat.fp8_adamw, fused=True)
# This optimizer has float32 moments, and can round BF16 parameters stochastically.
_WIDE_FUSED = Optimizer(
    partial(
        coat.fp8_adamw,
        quantize_mask=lambda params: jax.tree.map(lambda _: False, params),
    ),
    fused=True,
)
# A kernel can apply a scale per column if its matmul sums over rows.
_TENSOR, _ROW, _COLUMN = Grid(), Grid(scales="row"), Grid(scales="column")
_E5M2 = Grid(format=coat.E5M2)
_BF16 = {"param_dtype": jnp.bfloat16, "optimizer": _WIDE_FUSED}
_SLOW = {"b2": 0.999, "reference": "b2_999"}

_RECIPES = (
    Variant(name="bf16", about="BF16 matmuls, float32 parameters and moments"),
    Variant(name="again", about="bf16 from parameters that are 1e-6 larger",
            nudge=1 + 1e-6),
    Variant(name="te", about="the recipe te", recipe=RECIPES["te"]),
    Variant(name="coat", about="the recipe coat", recipe=RECIPES["coat"],
            optimizer=_FP8),
    Variant(name="coat_max", about="the recipe coat_max", recipe=RECIPES["coat_max"],
            optimizer=_FP8),
    Variant(name="coat_block", about="the recipe coat_block",
            recipe=RECIPES["coat_block"], optimizer=_FP8),
    Variant(name="coat_bf16", about="the recipe coat_bf16", recipe=RECIPES["coat_bf16"],
            optimizer=_FP8),
    Variant(name="coat_moments_32", about="coat with float32 moments",
            recipe=RECIPES["coat"]),
    Variant(name="coat_ends_bf16", about="coat, first and last layer in BF16",
            recipe=RECIPES["coat"], ends=UNQUANTIZED, optimizer=_FP8),
    Variant(name="coat_head_fp8", about="coat, logits in FP8", recipe=RECIPES["coat"],
            head="fp8", optimizer=_FP8),
    *(
        Variant(name=f"coat_last_{part:.0%}".rstrip("%"),
                about=f"coat, the last {part:.0%} of the steps as coat_bf16",
                recipe=RECIPES["coat"], late=Late(RECIPES["coat_bf16"], part),
                optimizer=_FP8)
        for part in (0.05, 0.1, 0.2)
    ),
)  # fmt: skip
_CHANGES = (
    Variant(name="moments", about="moments in FP8", optimizer=_FP8),
    Variant(name="head_fp8", about="logits in FP8", head="fp8"),
    _operands("forward", "forward operands E4M3, a scale per row", x=_ROW, w=_ROW),
    _operands("forward_tensor", "forward operands E4M3, a scale per tensor",
              x=_TENSOR, w=_TENSOR),
    _operands("forward_x", "forward activations E4M3, a scale per row", x=_ROW),
    _operands("forward_w", "forward weights E4M3, a scale per row", w=_ROW),
    *(
        _operands(f"forward_{name}", f"forward operands E4M3 of {name} alone",
                  only=name, x=_ROW, w=_ROW)
        for name in get_args(Weight)
    ),
    _gradients("gradients", "gradients E5M2, a scale per tensor", _E5M2),
    _gradients("gradients_stochastic", "gradients E5M2, rounded stochastically",
               Grid(format=coat.E5M2, stochastic=True)),
    _gradients("gradients_e4m3", "gradients E4M3, a scale per tensor", _TENSOR),
    _operands("gradients_channel", "gradients E4M3, a scale per token or channel",
              dy_for_dx=_ROW, dy_for_dw=_COLUMN),
    _gradients("gradients_block", "gradients E4M3, a scale per 128 x 128",
               Grid(scales="block")),
    _operands("gradients_dx", "gradients E5M2 for input gradients alone",
              dy_for_dx=_E5M2),
    _operands("gradients_dw", "gradients E5M2 for weight gradients alone",
              dy_for_dw=_E5M2),
    _operands("backward_w", "weights E4M3 for input gradients, a scale per tensor",
              w_for_dx=_TENSOR),
    _operands("backward_w_channel", "weights E4M3 for input gradients, per channel",
              w_for_dx=_COLUMN),
    _operands("backward_x", "activations E4M3 for weight gradients, per tensor",
              x_for_dw=_TENSOR),
    _operands("backward_x_channel", "activations E4M3 for weight gradients, a channel",
              x_for_dw=_COLUMN),
    _operands("saved", "activations in groups of 16 for weight gradients",
              x_for_dw=Grid(scales="group")),
    Variant(name="norms", about="norms' backward from FP8 copies",
            recipe=_layers(_NormCopies)),
    Variant(name="gates", about="gates' backward from FP8 copies",
            recipe=_layers(
                _GateCopies, pointwise=partial(coat.fp8_remat, params_argnums=()))),
    Variant(name="segments", about="all copies of fp8_remat, matmuls in BF16",
            recipe=_layers(segment=coat.fp8_remat, projection=coat.fp8_remat)),
    Variant(name="qkv", about="attention runs again from FP8 q, k and v",
            recipe=_layers(
                attention=partial(coat.fp8_remat, rerun_attention=True))),
    Variant(name="params_nearest", about="BF16 parameters, rounded to nearest",
            **_BF16),
    Variant(name="params_stochastic", about="BF16 parameters, rounded stochastically",
            stochastic=True, **_BF16),
    Variant(name="b2_999", about="bf16 with b2 = 0.999", b2=0.999),
    Variant(name="moments_b2_999", about="moments in FP8, b2 = 0.999",
            optimizer=_FP8, **_SLOW),
    Variant(name="coat_b2_999", about="the recipe coat, b2 = 0.999",
            recipe=RECIPES["coat"], optimizer=_FP8, **_SLOW),
)  # fmt: skip
VARIANTS = {variant.name: variant for variant in (*_RECIPES, *_CHANGES)}


def chosen(names: str) -> tuple[Variant, ...]:
    """Returns the variants in `names`, a list with commas; "all" means all variants.

    The references of these variants come first, even if they are not named.

    Raises:
      ValueError: If a name is not the name of a variant, or is given twice.

    Examples:
      >>> [variant.name for variant in chosen("coat,te")]
      ['bf16', 'coat', 'te']
    """
    requested = list(VARIANTS) if names == "all" else names.split(",")
    for name in requested:
        if name not in VARIANTS:
            raise ValueError(f"variants are {', '.join(VARIANTS)}; got {name!r}")
    if len(set(requested)) < len(requested):
        raise ValueError(f"variants must be named once, got {names!r}")
    references = dict.fromkeys(VARIANTS[name].reference for name in requested)
    return tuple(VARIANTS[name] for name in dict.fromkeys([*references, *requested]))
