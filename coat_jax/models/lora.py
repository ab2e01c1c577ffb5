"""Low-rank adapters of frozen weights (LoRA, arXiv 2106.09685).

A matmul with an adapted weight computes

    y = x @ w.T + (alpha / rank) * (x @ a.T) @ b.T,

where `w` is frozen and `a` [rank, k] and `b` [..., rank] are trained. The weights of
queries, keys and values are one matrix here, and so are gate and up: each pair of
adapters belongs to the whole matrix. `b` is zero at first.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.fp8.frozen import freeze, frozen_linear, thawed
from coat_jax.layers.decoder import WEIGHTS
from coat_jax.layers.recipes import PlainRecipe, RecipeName
from coat_jax.meshes import of_tokens
from coat_jax.models.llama import Llama
from coat_jax.remat.api import fp8_remat, rerun
from pallas_kernels import Codes
from pallas_kernels.checks import is_positive_number, positive_int


class Frozen(nnx.Variable[Array]):
    """A variable that is not trained: a weight, its codes, or their scales."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "a", "b"],
    meta_fields=["factor"],
)
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A frozen weight with its adapters, for matmuls in place of a weight [..., k].

    Attributes:
      weight: The weight, or its codes and their scale.
      a: The adapter of the inputs.
      b: The adapter of the outputs.
      factor: The factor alpha / rank.
    """

    weight: Float[Array, "... k"] | Codes
    a: Float[Array, "rank k"]
    b: Float[Array, "... rank"]
    factor: float

    def astype(self, dtype: DTypeLike) -> Float[Array, "... k"]:
        """Returns the adapted matrix, weight + factor * (b @ a), in `dtype`."""
        is_codes = isinstance(self.weight, Codes)
        weight = self.weight if not is_codes else thawed(self.weight)
        a, b = (x.astype(jnp.float32) for x in (self.a, self.b))
        return (weight.astype(jnp.float32) + self.factor * (b @ a)).astype(dtype)


class AdaptedWeight(nnx.Module):
    """A module with the variables of an `Adapted` weight, in place of a parameter.

    Args:
      weight: The weights of all layers [layers, ..., k].
      rank: The rank of the adapters.
      alpha: The factor of the adapters, times the rank.
      quantizes: Whether the weight is kept in FP8.
      rngs: The random number generators for `a`.
    """

    def __init__(
        self,
        weight: Float[Array, "layers ... k"],
        *,
        rank: int,
        alpha: float,
        quantizes: bool,
        rngs: nnx.Rngs,
    ) -> None:
        layers, k = weight.shape[0], weight.shape[-1]
        self.factor = alpha / rank
        scaled = _frozen_layers(weight) if quantizes else None
        self.codes = Frozen(weight if scaled is None else scaled.row)
        self.scale = None if scaled is None else Frozen(scaled.scale)
        # The variance of the paper's code: uniform with a bound of 1 / sqrt(k).
        init = nnx.initializers.uniform(2 * k**-0.5)
        a = init(rngs.params(), (layers, rank, k), jnp.float32) - k**-0.5
        self.a = nnx.Param(a)
        self.b = nnx.Param(jnp.zeros((*weight.shape[:-1], rank), jnp.float32))

    def __getitem__(self, key: object) -> Adapted:
        """Returns the `Adapted` weight that matmuls read; the key is ignored."""
        weight = self.codes[...]
        if self.scale is not None:
            weight = Codes(weight, None, self.scale[...])
        return Adapted(weight, self.a[...], self.b[...], self.factor)


_freeze = jax.jit(freeze)


def _frozen_layers(weight: Float[Array, "layers ... k"]) -> Codes:
    """Quantizes the frozen weights of each layer; see `freeze`.

    On CPUs a loop in XLA would take several times as long as these calls.
    """
    layers = [_freeze(weight[layer]) for layer in range(len(weight))]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


@of_tokens
def linear(x: Float[Array, "*batch k"], w: Adapted) -> Float[Array, "..."]:
    """Computes a matmul with an adapted weight, in the dtype of `x`."""
    y = frozen_linear(x, w.weight)
    # The factor multiplies the smallest array, so that no large array is written again.
    low = jnp.tensordot(x, w.a.astype(x.dtype), axes=(-1, -1)) * w.factor
    return y + jnp.tensordot(low, w.b.astype(x.dtype), axes=(-1, -1))


# The projection reads the output that attention saves.
_COAT = PlainRecipe(linear=linear, segment=fp8_remat, projection=jax.checkpoint)
# The recipes of layers with adapters. No recipe computes gradients of frozen weights.
# "coat_max" saves queries, keys and values in FP8, and backward runs attention again.
RECIPES: dict[RecipeName, PlainRecipe] = {
    "bf16": PlainRecipe(linear=linear),
    "coat": _COAT,
    "coat_max": PlainRecipe(linear=linear, segment=fp8_remat, attention=rerun),
    "coat_bf16": _COAT,
}
_FROZEN_IN_FP8: tuple[RecipeName, ...] = ("coat", "coat_max")


def adapt(
    model: Llama,
    *,
    rank: int,
    alpha: float | None = None,
    recipe: RecipeName = "coat",
    rngs: nnx.Rngs,
) -> None:
    """Freezes a model's parameters in place, and gives its layers' matrices adapters.

    With the recipes "coat" and "coat_max" the layers' matrices become FP8 codes.
    Embeddings, the head, norms and biases stay as they are.

    Args:
      model: The model, with the recipe "bf16".
      rank: The rank of the adapters.
      alpha: The factor of the adapters, times the rank; None means twice the rank.
      recipe: The recipe of the layers: "bf16", "coat", "coat_max" or "coat_bf16".
      rngs: The random number generators for the adapters.

    Raises:
      ValueError: If the rank is not a positive integer, `alpha` is not a positive
        number, `recipe` has no support for adapters, or the model has experts,
        adapters, or another recipe than "bf16".

    Examples:
      >>> import jax
      >>> from coat_jax.models import lora
      >>> from coat_jax.models import llama
      >>> from flax import nnx
      >>> config = llama.LlamaConfig(
      ...     vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
      ...     num_heads=4, num_kv_heads=2, recipe="bf16")
      >>> model = llama.Llama(config, rngs=nnx.Rngs(0))
      >>> lora.adapt(model, rank=2, rngs=nnx.Rngs(1))
      >>> sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
      3328
    """
    positive_int("rank", rank)
    alpha = 2.0 * rank if alpha is None else alpha
    if not is_positive_number(alpha):
        raise ValueError(f"alpha must be a positive number, got {alpha!r}")
    if model.config.experts is not None:
        raise ValueError("adapters need a model without experts")
    if is_adapted(model):
        raise ValueError("the model has adapters already")
    if recipe not in RECIPES or model.config.recipe != "bf16":
        raise ValueError(
            f"adapters need a model of the recipe bf16 and one of {', '.join(RECIPES)} "
            f"for its layers, got {model.config.recipe} and {recipe}"
        )
    options = {
        "rank": rank,
        "alpha": alpha,
        "quantizes": recipe in _FROZEN_IN_FP8,
        "rngs": rngs,
    }
    layers = model.layers
    for name in WEIGHTS:
        setattr(layers, name, AdaptedWeight(getattr(layers, name)[...], **options))
    for module in (model, layers):
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param):
                setattr(module, name, Frozen(value[...]))
    layers.recipe = RECIPES[recipe]


def is_adapted(model: Llama) -> bool:
    """Returns whether `adapt` has changed a model."""
    return isinstance(model.layers.qkv, AdaptedWeight)


def merged(model: Llama, dtype: DTypeLike) -> Llama:
    """Returns a model without adapters, with their effect added to the weights.

    Args:
      model: A model that `adapt` has changed.
      dtype: The dtype of the parameters.

    Raises:
      ValueError: If the model has no adapters.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.models import llama, lora
      >>> from flax import nnx
      >>> config = llama.LlamaConfig(
      ...     vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
      ...     num_heads=4, num_kv_heads=2, recipe="bf16")
      >>> model = llama.Llama(config, rngs=nnx.Rngs(0))
      >>> lora.adapt(model, rank=2, rngs=nnx.Rngs(1))
      >>> lora.merged(model, jnp.bfloat16).layers.qkv.dtype
      dtype(bfloat16)
    """
    if not is_adapted(model):
        raise ValueError("the model has no adapters")
    config = dataclasses.replace(model.config, param_dtype=dtype)
    plain = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    for source, target in ((model, plain), (model.layers, plain.layers)):
        for name, value in list(vars(source).items()):
            if isinstance(value, AdaptedWeight):
                array = lax.map(lambda adapted: adapted.astype(dtype), value[...])
                setattr(target, name, nnx.Param(array))
            elif isinstance(value, Frozen):
                setattr(target, name, nnx.Param(value[...].astype(dtype)))
    plain.layers.local = model.layers.local
    plain.origin = model.origin
    return plain
