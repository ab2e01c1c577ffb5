"""A vision transformer: the image encoder of a vision-language model.

Its blocks are as in SigLIP and CLIP: LayerNorms with parameters, biases, attention
without a mask and an MLP with one GELU. The FP8 flow of `coat_jax.layers` has only
causal attention and gated MLPs. So the blocks consist of `nnx.Linear`, and their
recipes use `coat.fp8_dot_general` and `coat.fp8_remat`, as users do in their own
models.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.fp8.dot_general import fp8_dot_general
from coat_jax.layers import recipes
from coat_jax.layers.attention import full_attention
from coat_jax.layers.functional import layer_norm
from coat_jax.meshes import of_tokens, on_explicit_tokens, whole
from coat_jax.models.llama import apply_layers
from coat_jax.remat.api import fp8_remat, rerun
from pallas_kernels.checks import check_floating, check_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitConfig:
    """Shape and precision of a `Vit`.

    Attributes:
      image_size: The height and width of an image in pixels.
      patch_size: The height and width of a patch, which becomes one token.
      num_channels: The number of channels of an image.
      hidden_size: The size of the residual stream.
      intermediate_size: The size of the MLP's hidden layer.
      num_layers: The number of blocks.
      num_heads: The number of heads.
      norm_eps: The number that the norms add to the variance.
      dtype: The dtype of the computation.
      param_dtype: The dtype of the parameters.
      recipe: The precision recipe of the blocks: "bf16", "te", "coat", "coat_max" or
        "coat_bf16".
    """

    image_size: int
    patch_size: int
    num_channels: int = 3
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float = 1e-6
    dtype: DTypeLike = jnp.bfloat16
    param_dtype: DTypeLike = jnp.float32
    recipe: recipes.RecipeName = "coat"

    def __post_init__(self) -> None:
        sizes = ("image_size", "patch_size", "num_channels", "hidden_size")
        sizes += ("intermediate_size", "num_layers", "num_heads")
        check_sizes(**{name: getattr(self, name) for name in sizes})
        for size, part in (("image_size", "patch_size"), ("hidden_size", "num_heads")):
            if getattr(self, size) % getattr(self, part):
                raise ValueError(
                    f"{part} must divide {size}, got {getattr(self, part)}, "
                    f"{getattr(self, size)}"
                )
        if self.recipe not in _PRECISIONS:
            names = ", ".join(_PRECISIONS)
            raise ValueError(f"recipe must be one of {names}, got {self.recipe!r}")
        check_floating(dtype=self.dtype, param_dtype=self.param_dtype)

    @property
    def grid_size(self) -> int:
        """The number of rows of patches in an image, and of patches in a row."""
        return self.image_size // self.patch_size


def _identity(fn: Callable) -> Callable:
    return fn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The matmuls of a recipe, and the wrappers that choose the residuals to save.

    Attributes:
      dot_general: The `dot_general` of `nnx.Linear`.
      pointwise: The wrapper of norms and of GELU.
      segment: The wrapper of a norm with the matmuls after it.
      attention: The wrapper of attention and the output projection after it.
    """

    dot_general: Callable[..., Array]
    pointwise: recipes.Wrapper = _identity
    segment: recipes.Wrapper = _identity
    attention: recipes.Wrapper = _identity


def _for_flax(dot_general: Callable[..., Array]) -> Callable[..., Array]:
    """Wraps the `dot_general` of `nnx.Linear`, for weights that a mesh may split.

    On explicit mesh axes results are split like the tokens that they are of.
    """

    def multiply(x, kernel, dimension_numbers, **options):
        options["dimension_numbers"] = dimension_numbers
        return of_tokens(partial(dot_general, **options))(x, kernel)

    return multiply


_bf16_matmul, _fp8_matmul = map(_for_flax, (lax.dot_general, fp8_dot_general))
_PRECISIONS: dict[recipes.RecipeName, Precision] = {
    "bf16": Precision(dot_general=_bf16_matmul),
    # Norms and GELU are recomputed from their BF16 inputs.
    "te": Precision(dot_general=_fp8_matmul, pointwise=jax.checkpoint),
    # Attention saves queries, keys, values and outputs in BF16.
    "coat": Precision(dot_general=_fp8_matmul, segment=fp8_remat),
    "coat_max": Precision(dot_general=_fp8_matmul, segment=fp8_remat, attention=rerun),
    "coat_bf16": Precision(dot_general=_bf16_matmul, segment=fp8_remat),
}


def precision(recipe: recipes.RecipeName) -> Precision:
    """Returns the matmuls and wrappers of a recipe."""
    return _PRECISIONS[recipe]


class LayerNorm(nnx.Module):
    """A LayerNorm with parameters.

    Flax's LayerNorm computes the same, but saves two arrays of the size of its input
    for the backward pass. This module saves one.

    Args:
      size: The size of the last axis.
      eps: The number that is added to the variance.
      param_dtype: The dtype of the parameters.
    """

    scale: nnx.Param[Array]
    bias: nnx.Param[Array]

    def __init__(self, size: int, eps: float, param_dtype: DTypeLike):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(size, param_dtype))
        self.bias = nnx.Param(jnp.zeros(size, param_dtype))

    def __call__(self, x: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        """Computes the norm in float32; the result has the dtype of `x`."""
        return layer_norm(x, self.scale[...], self.bias[...], eps=self.eps)


class Vit(nnx.Module):
    """An image encoder; `blocks` holds the stacked parameters of all blocks.

    The matmul that embeds patches runs in `config.dtype` in all recipes.

    Args:
      config: The shape and precision of the model.
      rngs: The random number generators for the initialization, which does not depend
        on the recipe.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.models import vit
      >>> from flax import nnx
      >>> config = vit.VitConfig(
      ...     image_size=32, patch_size=8, hidden_size=64, intermediate_size=128,
      ...     num_layers=2, num_heads=4)
      >>> model = vit.Vit(config, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((1, 32, 32, 3))).shape
      (1, 16, 64)
    """

    config: VitConfig
    patches: nnx.Linear
    positions: nnx.Param[Array]
    blocks: "EncoderBlock"
    norm: LayerNorm

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.config = config
        depth = config.patch_size**2 * config.num_channels
        self.patches = nnx.Linear(
            depth,
            config.hidden_size,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            dot_general=_bf16_matmul,
            rngs=rngs,
        )
        # SigLIP's initialization: much smaller embeddings of positions would be lost
        # among the embeddings of pixels.
        init = nnx.initializers.normal(1 / math.sqrt(config.hidden_size))
        shape = config.grid_size**2, config.hidden_size
        self.positions = nnx.Param(init(rngs.params(), shape, config.param_dtype))
        stack = nnx.vmap(lambda rngs: EncoderBlock(config, rngs=rngs))
        self.blocks = nnx.split_rngs(splits=config.num_layers)(stack)(rngs)
        self.norm = _norm(config)

    def __call__(
        self, images: Float[Array, "b height width c"]
    ) -> Float[Array, "b patches h"]:
        """Computes the final norm's output for each patch, row by row.

        Args:
          images: Images, usually with values in [-1, 1].

        Raises:
          ValueError: If images are not floating or not of the configuration's size.
        """
        size, channels = self.config.image_size, self.config.num_channels
        if images.ndim != 4 or images.shape[1:] != (size, size, channels):
            raise ValueError(
                f"images must have the shape [b, {size}, {size}, {channels}], got "
                f"{images.shape}"
            )
        if not jnp.issubdtype(images.dtype, jnp.floating):
            raise ValueError(f"images must be floating, got dtype {images.dtype}")
        x = self.patches(cut(images.astype(self.config.dtype), self.config.patch_size))
        x = x + whole(self.positions[...]).astype(x.dtype)
        x, _ = apply_layers(self.blocks, x)
        wrappers = precision(self.config.recipe)
        return wrappers.segment(wrappers.pointwise(LayerNorm.__call__))(self.norm, x)


class EncoderBlock(nnx.Module):
    """A pre-norm block: attention to all patches, and an MLP with one GELU.

    `qkv` computes the queries of all heads, then their keys, then their values.

    Args:
      config: The shape and precision of the model.
      rngs: The random number generators for the initialization.
    """

    config: VitConfig
    attention_norm: LayerNorm
    qkv: nnx.Linear
    out: nnx.Linear
    mlp_norm: LayerNorm
    up: nnx.Linear
    down: nnx.Linear

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.config = config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.attention_norm = _norm(config)
        self.qkv = linear(hidden, 3 * hidden, config, rngs)
        self.out = linear(hidden, hidden, config, rngs)
        self.mlp_norm = _norm(config)
        self.up = linear(hidden, intermediate, config, rngs)
        self.down = linear(intermediate, hidden, config, rngs)

    def __call__(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        """Applies the block to the residual stream."""
        wrappers = precision(self.config.recipe)
        attended = wrappers.segment(EncoderBlock._attention_in)(self, x)
        x = wrappers.attention(EncoderBlock._attention_out)(self, *attended, x)
        return wrappers.segment(EncoderBlock._mlp)(self, x)

    def _attention_in(self, x: Array) -> tuple[Array, Array, Array]:
        """Computes queries, keys and values [b, s, n, d]."""
        y = self.qkv(self._normed(self.attention_norm, x))
        heads = self.config.num_heads
        y = y.reshape(*x.shape[:2], 3, heads, self.config.hidden_size // heads)
        return y[:, :, 0], y[:, :, 1], y[:, :, 2]

    def _attention_out(self, q: Array, k: Array, v: Array, x: Array) -> Array:
        return x + self.out(full_attention(q, k, v).reshape(x.shape))

    def _mlp(self, x: Array) -> Array:
        y = self.up(self._normed(self.mlp_norm, x))
        return x + self.down(precision(self.config.recipe).pointwise(jax.nn.gelu)(y))

    def _normed(self, norm: LayerNorm, x: Array) -> Array:
        pointwise = precision(self.config.recipe).pointwise
        return pointwise(LayerNorm.__call__)(norm, x)


def cut(
    images: Float[Array, "b height width c"], size: int
) -> Float[Array, "b patches depth"]:
    """Cuts images, or grids of vectors, into squares of `size` by `size`.

    Squares follow one another row by row; so do the pixels in a square.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.models.vit import cut
      >>> cut(jnp.arange(16.0).reshape(1, 4, 4, 1), 2)[0, 1]
      Array([2., 3., 6., 7.], dtype=float32)
    """
    batch, height, width, channels = images.shape

    def squares(x):
        x = x.reshape(batch, height // size, size, width // size, size, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)

    return on_explicit_tokens(squares, images, 1)(images)


def linear(inputs: int, outputs: int, config: VitConfig, rngs: nnx.Rngs) -> nnx.Linear:
    """Returns a linear layer with the recipe's matmuls."""
    return nnx.Linear(
        inputs,
        outputs,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        dot_general=precision(config.recipe).dot_general,
        rngs=rngs,
    )


def _norm(config: VitConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, config.param_dtype)
