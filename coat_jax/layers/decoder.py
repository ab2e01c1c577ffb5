"""The decoder layer as a Flax module, and the types of its variables."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from coat_jax.layers import recipes, segment_params
from coat_jax.layers.attention import (
    LLAMA_SCORES,
    Scores,
    cached_attention,
    causal_attention,
)
from coat_jax.layers.context import ContextParallel
from coat_jax.layers.experts.routing import Experts, Routing, Shares
from coat_jax.layers.heads import HeadSteps, QkNorm
from coat_jax.layers.rope import Rope, RopeScaling
from coat_jax.quantization.delayed import OverwriteWithGradient, new_history
from pallas_kernels import Activation, NormKind
from pallas_kernels.checks import check_floating, check_positive

WEIGHTS = ("qkv", "out", "gate_up", "down")
# The initial amax of a gradient. E5M2 covers 2**-31 of it, so a first gradient fits.
_GRADIENT = 1.0


class SelectionBias(nnx.Variable[Array]):
    """A variable for the bias with which a router chooses experts; see `Experts`."""


class LayerKind(nnx.Variable[Array]):
    """A variable that says whether a layer's attention is local; see `DecoderLayer`."""


class DecoderLayer(nnx.Module):
    """A decoder layer: grouped-query attention, and a gated MLP or experts.

    Weights are [out, in]. In the forward matmuls of the FP8 flow each output feature
    has its own scale.

    Biases, norms of queries and keys, and local bases of RoPE, which other models than
    Llama have, are computed in plain JAX after the matmul. With norms on outputs the
    recipes "coat" and "coat_max" are composed of other functions; see
    `recipes.recipe_of`.

    Args:
      hidden_size: The size of the residual stream, h.
      intermediate_size: The size of the MLP's hidden layer, f.
      num_heads: The number of query heads.
      num_kv_heads: The number of key and value heads; divides `num_heads`.
      head_dim: The size of a head.
      recipe: The kind of matmuls and the saved activations; see `recipes.RECIPES`.
      scaling: The scaling of gradients, "just_in_time" or "delayed". Delayed scales
        come from histories in variables of the type `OverwriteWithGradient`; their
        gradients are their next values. They need the recipe "coat" or "coat_max".
      norm: "rms" with a weight, or "layer" without parameters as in OLMo.
      norm_eps: The number that the norms add to the mean square, or to the variance.
      gate: The activation of the MLP's gate.
      rope_theta: The base of RoPE's frequencies.
      rope_scaling: A change of RoPE's frequencies for long sequences.
      local_rope_theta: The base in layers with local attention, where `rope_scaling`
        does not apply; None means the same RoPE in all layers.
      qkv_bias: Whether queries, keys and values have a bias.
      qk_norm: The RMSNorm of queries and keys before RoPE: "none", "head" for each head
        by itself, or "width" for all heads together.
      norm_placement: Where norms are: "before" attention and the MLP, "after" them, on
        what is added to the residual stream, or "both".
      norm_offset: A number that is added to the weights of norms, 1 in Gemma.
      scores: The scale, soft cap and window of attention's scores.
      param_dtype: The dtype of the parameters.
      experts: The experts that take the MLP's place, each of the size
        `intermediate_size`; None means one MLP. Experts need a recipe that has matmuls
        for them, `norm_placement` "before", and `scaling` "just_in_time".
      batch_axes: The mesh axes that split the batch. They are needed if the mesh has
        automatic axes, and one named "expert" splits the experts.
      output_scale: A factor on the initialization of the two weights `out` and `down`,
        the last ones before the residual stream.
      context: How sequences are split over devices. The layer then takes and returns
        the rows of `ContextParallel.enter`, but segment ids of whole sequences.
      rngs: The random number generators for the initialization.

    Raises:
      ValueError: If a size is not positive, `num_kv_heads` does not divide `num_heads`,
        `head_dim` is odd, a name is unknown, options do not go together, or `context`
        cannot split the heads evenly.

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
    attention: recipes.Attention
    local: Any
    qkv_bias: nnx.Param[Array] | None
    q_norm: nnx.Param[Array] | None
    k_norm: nnx.Param[Array] | None
    attention_out_norm: nnx.Param[Array] | None
    mlp_out_norm: nnx.Param[Array] | None
    router: nnx.Param[Array] | None
    router_bias: Any

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
        rope_scaling: RopeScaling | None = None,
        local_rope_theta: float | None = None,
        qkv_bias: bool = False,
        qk_norm: QkNorm = "none",
        norm_placement: recipes.NormPlacement = "before",
        norm_offset: float = 0.0,
        scores: Scores = LLAMA_SCORES,
        experts: Experts | None = None,
        batch_axes: str | tuple[str, ...] | None = None,
        param_dtype: DTypeLike = jnp.float32,
        output_scale: float = 1.0,
        context: ContextParallel | None = None,
        rngs: nnx.Rngs,
    ):
        check_positive(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        check_floating(param_dtype=param_dtype)
        if head_dim % 2:
            raise ValueError(
                f"head_dim must be even for rotary embeddings, got {head_dim}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got {num_kv_heads}, {num_heads}"
            )
        recipes.check_names(
            recipe=recipe,
            scaling=scaling,
            norm=norm,
            gate=gate,
            norm_placement=norm_placement,
            qk_norm=qk_norm,
        )
        if experts is not None:
            recipes.check_experts(recipe, scaling, norm_placement)
        if context is not None:
            context.check(num_heads)
        self.experts = experts
        self.batch_axes = batch_axes
        self.recipe = recipe
        self.norm = recipes.Norm(kind=norm, eps=norm_eps)
        self.norm_placement = norm_placement
        self.norm_offset = norm_offset
        # The matmul's kernel applies RoPE, unless a step comes before it.
        rotated = not qkv_bias and qk_norm == "none" and local_rope_theta is None
        self.heads = recipes.Heads(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            theta=rope_theta,
            scaling=rope_scaling,
            rotated=rotated,
            context=context,
        )
        local_rope = None if local_rope_theta is None else Rope(theta=local_rope_theta)
        steps = HeadSteps(
            rope=Rope(theta=rope_theta, scaling=rope_scaling),
            local_rope=local_rope,
            norm=qk_norm,
            eps=norm_eps,
        )
        self.attention = recipes.Attention(
            scores=scores,
            steps=None if rotated else steps,
            out_norm=None if norm_placement == "before" else self.norm,
            context=context,
        )
        self.local = nnx.data(None)
        self.gate = gate

        def weight(*shape: int, scale: float = 1.0) -> nnx.Param[Array]:
            init = nnx.initializers.normal(0.02 * scale)
            return nnx.Param(init(rngs.params(), shape, param_dtype))

        def norm_weight(size: int, present: bool) -> nnx.Param[Array] | None:
            if not present:
                return None
            return nnx.Param(jnp.full(size, 1 - norm_offset, param_dtype))

        norms_before = norm == "rms" and norm_placement != "after"
        after = norm_placement != "before"
        of_head, width = qk_norm == "head", qk_norm == "width"
        heads = num_heads + 2 * num_kv_heads
        self.codes = nnx.data(None)
        self.attention_norm = norm_weight(hidden_size, norms_before)
        self.qkv = weight(heads * head_dim, hidden_size)
        self.out = weight(hidden_size, num_heads * head_dim, scale=output_scale)
        self.mlp_norm = norm_weight(hidden_size, norms_before)
        each = () if experts is None else (experts.num_groups,)
        self.gate_up = weight(*each, 2, intermediate_size, hidden_size)
        self.down = weight(*each, hidden_size, intermediate_size, scale=output_scale)
        self.attention_out_norm = norm_weight(hidden_size, after)
        self.mlp_out_norm = norm_weight(hidden_size, after)
        q_size, k_size = (
            head_dim if of_head else count * head_dim
            for count in (num_heads, num_kv_heads)
        )
        self.q_norm = norm_weight(q_size, of_head or width)
        self.k_norm = norm_weight(k_size, of_head or width)
        bias = jnp.zeros(heads * head_dim, param_dtype)
        self.qkv_bias = nnx.Param(bias) if qkv_bias else None
        biased = experts is not None and experts.selection_bias
        self.router = None if not each else weight(experts.num_experts, hidden_size)
        bias = SelectionBias(jnp.zeros(experts.num_experts)) if biased else None
        self.router_bias = nnx.data(bias)
        self.amax = nnx.data(None)
        if scaling == "delayed":
            self.amax = nnx.Dict(
                {
                    f"{name}_grad": OverwriteWithGradient(new_history(_GRADIENT))
                    for name in WEIGHTS
                }
            )

    def quantize_weights(self) -> None:
        """Quantizes the weights now, for all passes until the next call.

        Without this call each pass quantizes the weights. The codes take 2 bytes per
        parameter, and are worthwhile if a step has several passes, as in gradient
        accumulation. They are variables of the type `WeightCodes`, which have no
        gradients. The weights of experts are still quantized in each pass.

        Raises:
          ValueError: If the recipe does not use the FP8 flow.
        """
        if not self._recipe.takes_codes:
            raise ValueError(
                f"only the FP8 flow takes codes, not {self.recipe!r} with norms "
                f"{self.norm_placement}"
            )
        self.codes = nnx.Dict()
        for name in WEIGHTS if self.experts is None else WEIGHTS[:2]:
            self.codes[name] = segment_params.codes_of(getattr(self, name)[...])

    @property
    def _recipe(self) -> recipes.Recipe:
        return recipes.recipe_of(self.recipe, self.norm_placement)

    @property
    def _in_norm(self) -> recipes.Norm | None:
        return None if self.norm_placement == "after" else self.norm

    def _mlp(
        self, recipe: recipes.Recipe, x: recipes.Residual, codes: bool = True
    ) -> tuple[recipes.Residual, Shares | None]:
        """Computes the MLP or the experts; also returns the experts' `Shares`.

        A layer without experts returns None for them. If `codes` is false, the codes of
        `quantize_weights` are not used, and tokens are not sent to other devices.
        """
        params = segment_params.mlp(self, codes=codes)
        if self.experts is not None:
            options = {"experts": self.experts, "batch_axes": self.batch_axes}
            # Without codes these are steps of generation, with too few tokens to split.
            options["sent"] = codes
            return recipe.experts(params, x, norm=self.norm, gate=self.gate, **options)
        out_norm = self.attention.out_norm
        options = {"norm": self._in_norm, "gate": self.gate, "out_norm": out_norm}
        return recipe.gated_mlp(params, x, **options), None

    @property
    def _local(self) -> Array | None:
        return None if self.local is None else self.local[...]

    def __call__(
        self, x: recipes.Residual, segment_ids: Int[Array, "b s"] | None = None
    ) -> recipes.Residual:
        """Applies the layer to the residual stream [b, s, h]; see `with_routing`.

        Raises:
          ValueError: If the recipe uses the FP8 flow ("coat" or "coat_max") and `x` is
            neither bfloat16 nor float32.
        """
        return self.with_routing(x, segment_ids)[0]

    def with_routing(
        self, x: recipes.Residual, segment_ids: Int[Array, "b s"] | None = None
    ) -> tuple[recipes.Residual, Routing | None]:
        """Applies the layer; also returns the routing of its experts, or None.

        `segment_ids` has the number of each token's document in packed sequences.
        Attention does not cross documents. None means that a sequence is one document.

        In the FP8 flow `x` may be a `Stream`, which `Recipe.enter` returns and
        `Recipe.leave` takes. Its gradient passes from layer to layer with its scale.
        For a plain array each layer computes this scale again.

        Raises:
          ValueError: If the recipe uses the FP8 flow ("coat" or "coat_max") and `x` is
            neither bfloat16 nor float32.
        """
        recipe = self._recipe
        plain = not isinstance(x, recipes.Stream)
        x = recipe.enter(x) if plain else x
        params = segment_params.attention_in(self)
        attended = recipe.attention_in(params, x, norm=self._in_norm, heads=self.heads)
        x = recipe.attention_out(
            segment_params.attention_out(self),
            *attended,
            segment_ids,
            attention=self.attention,
            local=self._local,
        )
        x, shares = self._mlp(recipe, x)
        routing = None if shares is None else Routing.of(shares)
        return recipe.leave(x) if plain else x, routing

    def attend(
        self,
        q: Float[Array, "b s n d"],
        k: Float[Array, "b s k d"],
        v: Float[Array, "b s k d"],
        segment_ids: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b s n d"]:
        """Computes the layer's causal attention; see `causal_attention`."""
        return causal_attention(
            q, k, v, (), segment_ids, scores=self.attention.scores, local=self._local
        )

    def attend_to_cache(
        self,
        q: Float[Array, "b 1 n d"],
        keys: Float[Array, "b t k d"],
        values: Float[Array, "b t k d"],
        position: Int[Array, ""],
        visible: Bool[Array, "b t"],
    ) -> Float[Array, "b 1 n d"]:
        """Computes the layer's attention to a cache; see `cached_attention`."""
        kind = {"scores": self.attention.scores, "local": self._local}
        return cached_attention(q, keys, values, position, visible, **kind)

    def unquantized[Extra](
        self,
        x: Float[Array, "b s h"],
        attention: Callable[[Array, Array, Array], tuple[Array, Extra]],
        *,
        start: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "b s h"], Extra]:
        """Applies the layer in the dtype of `x`, with the given attention function.

        A layer of any recipe can be applied in this way. Generation does so, because
        the matmuls of single tokens are too small for FP8 to help.

        Args:
          x: The residual stream.
          attention: A function of queries [b, s, n, d], keys and values [b, s, k, d],
            after RoPE. It returns the output [b, s, n, d] and anything else, such as a
            cache with the new keys and values.
          start: The position of the first token, for RoPE.

        Returns:
          The residual stream, and the second result of `attention`.
        """
        recipe = recipes.UNQUANTIZED
        params = segment_params.attention_in(self, codes=False)
        y = recipe.project_in(params, x, norm=self._in_norm)
        q, k, v = self.heads.split(y, start)
        if self.attention.steps is not None:
            position = {"start": start, "local": self._local}
            q, k, v = self.attention.steps.apply(
                segment_params.heads(self), q, k, v, **position
            )
        o, extra = attention(q, k, v)
        out_norm = self.attention.out_norm
        x = recipe.project_out(
            segment_params.attention_out(self, codes=False), o, x, norm=out_norm
        )
        x, _ = self._mlp(recipe, x, codes=False)
        return x, extra
