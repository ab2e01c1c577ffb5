"""Flax modules of the decoder layer and its FP8 weights."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from coat_jax.fp8.matmul import Fp8Weight, Weight
from coat_jax.layers import recipes
from coat_jax.quantization.delayed import OverwriteWithGradient, new_history
from pallas_kernels import Activation, NormKind, Scaled
from pallas_kernels.checks import check_positive

_WEIGHTS = ("qkv", "out", "gate_up", "down")
# The initial amax of a gradient. E5M2 covers 2**-31 of it, so a first gradient fits.
_GRADIENT = 1.0


class WeightCodes(nnx.Variable[Array]):
    """A variable for FP8 codes of a weight, or their scales, used by several passes."""


class DecoderLayer(nnx.Module):
    """A pre-norm decoder layer: grouped-query attention and a gated MLP.

    Weights are [out, in]. In forward matmuls of the FP8 flow each output feature has a
    scale of its own.

    Args:
      hidden_size: The size of the residual stream, h.
      intermediate_size: The size of the MLP's hidden layer, f.
      num_heads: The number of query heads.
      num_kv_heads: The number of key and value heads; divides `num_heads`.
      head_dim: The size of a head.
      recipe: The kind of matmuls and the saved activations; see `recipes.RECIPES`.
      scaling: The scaling of gradients, "just_in_time" or "delayed". Delayed scales
        come from histories in variables of the type `OverwriteWithGradient`, whose
        gradients are their next values. It needs the recipe "coat" or "coat_max".
      norm: "rms" with a weight, or "layer" without parameters as in OLMo.
      norm_eps: The number that the norms add to the mean square, or to the variance.
      gate: The activation of the MLP's gate.
      rope_theta: The base of RoPE's frequencies.
      param_dtype: The dtype of the parameters.
      output_scale: A factor on the initialization of the two weights whose matmuls
        write to the residual stream.
      rngs: The random number generators for the initialization.

    Raises:
      ValueError: If a size is not positive, `num_kv_heads` does not divide `num_heads`,
        `head_dim` is odd, or a name is unknown.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.layers.decoder import DecoderLayer
      >>> from flax import nnx
      >>> layer = DecoderLayer(64, 128, 4, 2, 16, recipe="coat", rngs=nnx.Rngs(0))
      >>> forward = nnx.jit(DecoderLayer.__call__)
      >>> forward(layer, jnp.ones((2, 8, 64), jnp.bfloat16)).shape
      (2, 8, 64)
    """

    norm: recipes.Norm
    heads: recipes.Heads
    codes: Any
    attention_norm: nnx.Param[Array] | None
    qkv: nnx.Param[Array]
    out: nnx.Param[Array]
    mlp_norm: nnx.Param[Array] | None
    gate_up: nnx.Param[Array]
    down: nnx.Param[Array]
    amax: Any

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        recipe: recipes.RecipeName = "coat",
        scaling: recipes.Scaling = "just_in_time",
        norm: NormKind = "rms",
        norm_eps: float = 1e-5,
        gate: Activation = "silu",
        rope_theta: float = 10_000.0,
        param_dtype: DTypeLike = jnp.float32,
        output_scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        check_positive(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        if head_dim % 2:
            raise ValueError(
                f"head_dim must be even for rotary embeddings, got {head_dim}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got {num_kv_heads}, {num_heads}"
            )
        recipes.check_names(recipe=recipe, scaling=scaling, norm=norm, gate=gate)
        self.recipe = recipe
        self.norm = recipes.Norm(kind=norm, eps=norm_eps)
        self.heads = recipes.Heads(
            num_kv_heads=num_kv_heads, head_dim=head_dim, theta=rope_theta
        )
        self.gate = gate

        def weight(*shape: int, scale: float = 1.0) -> nnx.Param[Array]:
            init = nnx.initializers.normal(0.02 * scale)
            return nnx.Param(init(rngs.params(), shape, param_dtype))

        def norm_weight() -> nnx.Param[Array] | None:
            parametric = norm == "rms"
            return nnx.Param(jnp.ones(hidden_size, param_dtype)) if parametric else None

        heads = num_heads + 2 * num_kv_heads
        self.codes = nnx.data(None)
        self.attention_norm = norm_weight()
        self.qkv = weight(heads * head_dim, hidden_size)
        self.out = weight(hidden_size, num_heads * head_dim, scale=output_scale)
        self.mlp_norm = norm_weight()
        self.gate_up = weight(2, intermediate_size, hidden_size)
        self.down = weight(hidden_size, intermediate_size, scale=output_scale)
        self.amax = nnx.data(None)
        if scaling == "delayed":
            self.amax = nnx.Dict(
                {
                    f"{name}_grad": OverwriteWithGradient(new_history(_GRADIENT))
                    for name in _WEIGHTS
                }
            )

    def quantize_weights(self) -> None:
        """Quantizes the weights now, for all passes until the next call.

        Without this call each pass quantizes the weights. The call is worthwhile if a
        step has several passes, as in gradient accumulation, and takes 2 bytes per
        parameter. The codes are variables of the type `WeightCodes`, which have no
        gradients.

        Raises:
          ValueError: If the recipe does not use the FP8 flow.
        """
        if not recipes.RECIPES[self.recipe].takes_codes:
            raise ValueError(f"only the FP8 flow takes codes, not {self.recipe!r}")
        self.codes = nnx.Dict()
        for name in _WEIGHTS:
            weight = Fp8Weight.of(getattr(self, name)[...])
            codes = {
                "rows": weight.rows.codes,
                "rows_scale": weight.rows.scale,
                "transposed": weight.transposed,
                "scale": weight.scale,
            }
            self.codes[name] = nnx.Dict({k: WeightCodes(x) for k, x in codes.items()})

    def _params(
        self, *names: str, norm: nnx.Param | None = None, codes: bool = True
    ) -> recipes.Params:
        """Returns the parameters of the segment with the weights `names`.

        Weights come with their codes if there are any and `codes` is true.
        """
        params = {name: self._weight(name, codes) for name in names}
        params["norm"] = None if norm is None else norm[...]
        if self.amax is not None:
            own = {k: v for k, v in self.amax.items() if k.startswith(names)}
            params["amax"] = {k: history[...] for k, history in own.items()}
        return params

    def _weight(self, name: str, codes: bool) -> Weight:
        weight = getattr(self, name)[...]
        if self.codes is None or not codes:
            return weight
        own = {k: x[...] for k, x in self.codes[name].items()}
        rows = Scaled(own.pop("rows"), own.pop("rows_scale"))
        return Fp8Weight(weight, rows, **own)

    def __call__(
        self,
        x: recipes.Residual,
        segment_ids: Int[Array, "b s"] | None = None,
    ) -> recipes.Residual:
        """Applies the layer to the residual stream [b, s, h].

        `segment_ids` numbers the documents of packed sequences; attention does not
        cross them. None means that a sequence is one document.

        In the FP8 flow `x` may be a `Stream`, which `Recipe.enter` returns and
        `Recipe.leave` takes. Its gradient passes from layer to layer with its scale.
        For a plain array each layer computes this scale again.

        Raises:
          ValueError: If the recipe uses the FP8 flow ("coat" or "coat_max") and `x` is
            neither bfloat16 nor float32.
        """
        recipe = recipes.RECIPES[self.recipe]
        plain = not isinstance(x, recipes.Stream)
        x = recipe.enter(x) if plain else x
        params = self._params("qkv", norm=self.attention_norm)
        attended = recipe.attention_in(params, x, norm=self.norm, heads=self.heads)
        x = recipe.attention_out(self._params("out"), *attended, segment_ids)
        params = self._params("gate_up", "down", norm=self.mlp_norm)
        x = recipe.gated_mlp(params, x, norm=self.norm, gate=self.gate)
        return recipe.leave(x) if plain else x

    def unquantized[Extra](
        self,
        x: Float[Array, "b s h"],
        attention: Callable[[Array, Array, Array], tuple[Array, Extra]],
        *,
        start: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "b s h"], Extra]:
        """Applies the layer in the dtype of `x`, with an attention of the caller's.

        Any recipe's layer can be applied in this way. Generation does, because the
        matmuls of single tokens are too small for FP8 to help.

        Args:
          x: The residual stream.
          attention: A function of queries [b, s, n, d], keys and values [b, s, k, d],
            behind RoPE. It returns the output [b, s, n, d] and anything else, such as a
            cache with the new keys and values.
          start: The position of the first token, for RoPE.

        Returns:
          The residual stream, and what else `attention` returned.
        """
        recipe = recipes.UNQUANTIZED
        params = self._params("qkv", norm=self.attention_norm, codes=False)
        y = recipe.project_in(params, x, norm=self.norm)
        o, extra = attention(*self.heads.split(y, start))
        x = recipe.project_out(self._params("out", codes=False), o, x)
        params = self._params("gate_up", "down", norm=self.mlp_norm, codes=False)
        return recipe.gated_mlp(params, x, norm=self.norm, gate=self.gate), extra
