"""Recipes: ways to compute a transformer layer, and the activations that they save.

The recipes "coat" and "coat_max" run the FP8 precision flow of COAT (arXiv 2410.19313,
section 5), which is in `coat_jax.layers.flow`. The other recipes compute the same layer
from plain functions, for comparison.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.fp8 import matmul
from coat_jax.fp8.dot_general import fp8_dot_general
from coat_jax.layers import blockwise, flow, shards
from coat_jax.layers.experts import flow as expert_flow
from coat_jax.layers.experts.parallel import ExpertAxis
from coat_jax.layers.experts.products import fp8_product, plain_product
from coat_jax.layers.experts.routing import Experts, Shares
from coat_jax.layers.flow import Params
from coat_jax.layers.heads import QkNorm
from coat_jax.layers.parts import Heads, Norm, Stream
from coat_jax.layers.plain import PlainRecipe, identity
from coat_jax.layers.recipe import (
    GATES,
    LLAMA_ATTENTION,
    NORMS,
    Attended,
    Attention,
    NormPlacement,
    Recipe,
    Residual,
    Scaling,
    Wrapper,
)
from coat_jax.meshes import batch_shards, of_tokens
from coat_jax.optimizers.adam import fp8_adamw
from coat_jax.remat.api import fp8_remat, rerun
from pallas_kernels import Activation
from pallas_kernels.checks import WIDE, check_dtype

RecipeName = Literal["bf16", "te", "coat", "coat_max", "coat_block", "coat_bf16"]


@of_tokens
def _plain_linear(x: Array, w: Array) -> Array:
    return jnp.tensordot(x, w.astype(x.dtype), axes=(-1, -1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Recipe(Recipe):
    """The FP8 flow: segments save activations in FP8, with a scale for each group.

    The backward pass recomputes the outputs of norms and gates from the saved
    activations.

    Attributes:
      attention: The wrapper of attention and the output projection after it.
    """

    attention: Wrapper = identity
    scalings: ClassVar[tuple[Scaling, ...]] = ("just_in_time", "delayed")
    optimizer: ClassVar[Callable[..., Any]] = staticmethod(fp8_adamw)
    takes_codes: ClassVar[bool] = True
    pointwise: ClassVar[Wrapper] = staticmethod(jax.checkpoint)
    outside: ClassVar[Wrapper] = staticmethod(identity)

    def enter(
        self, x: Float[Array, "b s h"], batch_axes: str | tuple[str, ...] | None = None
    ) -> Residual:
        """Returns `x` as a `Stream`, which also carries its gradient's scale."""
        check_dtype("the residual stream", x.dtype, WIDE)
        return Stream.of(x, batch_shards(x, batch_axes))

    def attention_in(
        self, params: Params, x: Residual, *, norm: Norm | None, heads: Heads
    ) -> Attended:
        """Computes queries, keys and values in the FP8 flow.

        `Recipe.attention_in` documents the arguments and the results.
        """
        # A wrapper such as `fp8_remat` saves its own copies of q, k and v. Steps before
        # attention compute other q, k and v, which attention saves itself.
        saves = self.attention is identity and heads.context is None
        copies = heads.rotated and saves
        return flow.attention_in(params, x, norm, heads, copies)

    def attention_out(
        self,
        params: Params,
        q: Array,
        k: Array,
        v: Array,
        kept: tuple[Array, ...],
        x: Residual,
        segment_ids: Array | None = None,
        *,
        attention: Attention = LLAMA_ATTENTION,
        local: Array | None = None,
    ) -> Residual:
        """Computes attention and the output projection in the FP8 flow.

        `Recipe.attention_out` documents the arguments and the result.
        """
        params = dict(params)
        of_heads = params.pop("heads", None)
        # A wrapper of attention already saves only the inputs of the steps.
        saving = fp8_remat if self.attention is identity else identity

        def segment(params, q, k, v, x):
            params, of_heads = params
            if attention.steps is not None:
                start = attention.starts(x.x)
                steps = partial(attention.steps.apply, start=start, local=local)
                q, k, v = saving(steps)(of_heads, q, k, v)
            o = attention.run(q, k, v, kept, segment_ids, local)
            return flow.attention_out(params, o, x, attention.context)

        return self.attention(segment)((params, of_heads), q, k, v, x)

    def gated_mlp(
        self,
        params: Params,
        x: Residual,
        *,
        norm: Norm | None,
        gate: Activation = "silu",
        out_norm: Norm | None = None,
    ) -> Residual:
        """Computes the gated MLP and the residual sum in the FP8 flow.

        `Recipe.gated_mlp` documents the arguments and the result.
        """
        return flow.gated_mlp(params, x, norm, gate)

    @property
    def has_experts(self) -> bool:
        """True, because the FP8 flow has matmuls of experts."""
        return True

    def experts(
        self,
        params: Params,
        x: Residual,
        *,
        norm: Norm,
        gate: Activation,
        experts: Experts,
        batch_axes: str | tuple[str, ...] | None = None,
        sent: bool = True,
    ) -> tuple[Residual, Shares]:
        """Adds the outputs of each token's experts to `x` in the FP8 flow.

        `Recipe.experts` documents the arguments and the results.
        """
        axis = ExpertAxis.of(params, x.x, batch_axes, experts, sent)
        return expert_flow.experts_mlp(params, x, norm, gate, experts, axis)

    def leave(self, x: Residual) -> Float[Array, "b s h"]:
        """Returns the array of the stream.

        The backward pass computes the scale of the stream's gradient; see
        `shards.leave`.
        """
        return shards.leave(x)


# This saves exactly the arrays that jax.vjp saves.
UNQUANTIZED = PlainRecipe(linear=_plain_linear, product=plain_product)
RECIPES: dict[RecipeName, Recipe] = {
    "bf16": UNQUANTIZED,
    # FP8 matmuls save FP8 operands, as in TransformerEngine. Norms, gates and RoPE are
    # recomputed from BF16 inputs.
    "te": PlainRecipe(
        linear=matmul.linear, product=fp8_product, pointwise=jax.checkpoint
    ),
    # Attention saves queries, keys, values and outputs in BF16.
    "coat": Fp8Recipe(),
    # Queries, keys and values are saved in FP8, and attention runs again.
    "coat_max": Fp8Recipe(attention=rerun),
    # Matmuls have scales of blocks. `fp8_remat` saves what the segments of "coat" save,
    # and the projection reads the output that attention saves.
    "coat_block": PlainRecipe(
        linear=blockwise.linear,
        outside=jax.checkpoint,
        segment=fp8_remat,
        projection=jax.checkpoint,
        optimizer=fp8_adamw,
    ),
    # The same is saved, but all matmuls are in BF16.
    "coat_bf16": PlainRecipe(
        linear=_plain_linear,
        product=plain_product,
        outside=jax.checkpoint,
        segment=fp8_remat,
        projection=jax.checkpoint,
        optimizer=fp8_adamw,
    ),
}


@of_tokens
def _fp8_linear(x: Array, w: Array) -> Array:
    contracted = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
    return fp8_dot_general(x, w, contracted, preferred_element_type=x.dtype)


def _again(segment: Callable) -> Callable:
    """Wraps a segment so that the backward pass runs it again on FP8 residuals."""
    return jax.checkpoint(fp8_remat(segment))


# Replacements of the recipes with the FP8 flow, for layers that its segments do not
# fit: layers with norms on the outputs of attention and the MLP. Matmuls are in FP8,
# and `fp8_remat` saves in FP8 the activations that the flow saves. The projection runs
# again in backward, and reads the output that attention saves.
_COMPOSED: dict[RecipeName, Recipe] = {
    "coat": PlainRecipe(
        linear=_fp8_linear,
        stacked=False,
        segment=fp8_remat,
        projection=_again,
        optimizer=fp8_adamw,
    ),
    "coat_max": PlainRecipe(
        linear=_fp8_linear,
        stacked=False,
        segment=fp8_remat,
        attention=rerun,
        optimizer=fp8_adamw,
    ),
}


def recipe_of(name: RecipeName | Recipe, placement: NormPlacement = "before") -> Recipe:
    """Returns the recipe of this name for layers with this placement of norms.

    A `Recipe`, which `coat_jax.models.lora` passes, is returned as it is.

    The segments of the FP8 flow begin with a norm and end with a residual sum. Layers
    with norms on outputs, as OLMo 2 and Gemma have, are composed with `fp8_dot_general`
    and `fp8_remat` in the recipes "coat" and "coat_max". They save as little as the
    flow, and run the kernels of norms, gates and sums where `fp8_remat` can fuse them.
    """
    if isinstance(name, Recipe):
        return name
    fits = placement == "before" or name not in _COMPOSED
    return RECIPES[name] if fits else _COMPOSED[name]


def check_experts(
    recipe: RecipeName, scaling: Scaling, placement: NormPlacement
) -> None:
    """Raises ValueError unless layers with experts support these options."""
    if placement != "before":
        raise ValueError(f"experts need norm_placement='before', got {placement!r}")
    if not RECIPES[recipe].has_experts:
        names = ", ".join(name for name, r in RECIPES.items() if r.has_experts)
        raise ValueError(f"experts need a recipe among {names}, got {recipe!r}")
    if scaling != "just_in_time":
        raise ValueError(f"experts need scaling='just_in_time', got {scaling!r}")


def check_names(*, scaling: Any, recipe: Any, **options: Any) -> None:
    """Raises ValueError unless all options are known and fit together.

    Args:
      scaling: The scaling of gradients.
      recipe: The name of the recipe.
      **options: Values of `norm`, `gate`, `norm_placement` and `qk_norm`.
    """
    known = {
        "recipe": tuple(RECIPES),
        "scaling": get_args(Scaling),
        "norm": tuple(NORMS),
        "gate": tuple(GATES),
        "norm_placement": get_args(NormPlacement),
        "qk_norm": get_args(QkNorm),
    }
    for option, value in {"recipe": recipe, "scaling": scaling, **options}.items():
        if value not in known[option]:
            names = ", ".join(known[option])
            raise ValueError(f"{option} must be one of {names}, got {value!r}")
    placement = options.get("norm_placement", "before")
    if scaling not in recipe_of(recipe, placement).scalings:
        flow = "the FP8 flow, with norms before segments alone"
        raise ValueError(
            f"scaling={scaling!r} needs {flow}, not {recipe!r} with norms {placement}"
            if scaling in RECIPES[recipe].scalings
            else f"scaling={scaling!r} needs the FP8 flow, not {recipe!r}"
        )
    if placement != "before" and options["norm"] != "rms":
        raise ValueError(
            f"norm_placement={placement!r} needs norm='rms', got {options['norm']!r}"
        )
