"""Flax modules over the library's functions."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax import blocks
from coat_jax.linear import Codes, Fp8Weight, Weight


class WeightCodes(nnx.Variable):
    """FP8 codes of a weight, or their scale, for more than one pass."""


class DecoderLayer(nnx.Module):
    """A pre-norm decoder layer: grouped-query attention and a gated MLP.

    Args:
      hidden_size: Size of the residual stream, h.
      intermediate_size: Size of the MLP's inside, f.
      num_heads: Number of query heads.
      num_kv_heads: Number of key and value heads; divides `num_heads`.
      head_dim: Size of a head.
      recipe: What to multiply with and what backward keeps; see `blocks.RECIPES`.
      norm: "rms" with a weight, or "layer" without parameters as in OLMo.
      norm_eps: Epsilon of the norms.
      gate: Activation of the MLP's gate.
      rope_theta: Base of the rotary embedding.
      param_dtype: Dtype of the parameters.
      output_scale: Factor on the initialization of the two products that write to the
        residual stream.
      rngs: Source of the initialization.

    Raises:
      ValueError: If `num_kv_heads` does not divide `num_heads`, or a name is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.modules import DecoderLayer
      >>> from flax import nnx
      >>> layer = DecoderLayer(64, 128, 4, 2, 16, recipe="coat", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8, 64), jnp.bfloat16)).shape
      (2, 8, 64)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        recipe: blocks.RecipeName = "coat",
        norm: blocks.NormName = "rms",
        norm_eps: float = 1e-5,
        gate: blocks.GateName = "silu",
        rope_theta: float = 10_000.0,
        param_dtype: DTypeLike = jnp.float32,
        output_scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got {num_kv_heads}, {num_heads}"
            )
        for option, value, known in (
            ("recipe", recipe, blocks.RECIPES),
            ("norm", norm, blocks.NORMS),
            ("gate", gate, blocks.GATES),
        ):
            if value not in known:
                names = ", ".join(known)
                raise ValueError(f"{option} must be one of {names}, got {value!r}")
        self.recipe = recipe
        self.norm = blocks.Norm(kind=norm, eps=norm_eps)
        self.heads = blocks.Heads(
            num_kv_heads=num_kv_heads, head_dim=head_dim, theta=rope_theta
        )
        self.gate = gate

        def weight(*shape: int, scale: float = 1.0) -> nnx.Param:
            init = nnx.initializers.normal(0.02 * scale)
            return nnx.Param(init(rngs.params(), shape, param_dtype))

        def norm_weight() -> nnx.Param | None:
            parametric = norm == "rms"
            return nnx.Param(jnp.ones(hidden_size, param_dtype)) if parametric else None

        heads = num_heads + 2 * num_kv_heads
        self.codes = nnx.data(None)
        self.attention_norm = norm_weight()
        self.qkv = weight(hidden_size, heads * head_dim)
        self.out = weight(num_heads * head_dim, hidden_size, scale=output_scale)
        self.mlp_norm = norm_weight()
        self.gate_up = weight(hidden_size, 2, intermediate_size)
        self.down = weight(intermediate_size, hidden_size, scale=output_scale)

    def quantize_weights(self) -> None:
        """Quantizes the weights now, for all passes until it is called again.

        Without it each pass quantizes them. It pays where a step has several passes, as
        in gradient accumulation, and takes 2 bytes a parameter. The codes are variables
        of the type `WeightCodes`; no gradient is taken of them.

        Raises:
          ValueError: If the recipe has no FP8 products.
        """
        if self.recipe == "bf16":
            raise ValueError("there are no FP8 products in the recipe 'bf16'")
        self.codes = nnx.Dict()
        for name in ("qkv", "out", "gate_up", "down"):
            codes = Fp8Weight.of(getattr(self, name)[...]).codes._asdict()
            self.codes[name] = nnx.Dict({k: WeightCodes(x) for k, x in codes.items()})

    def _weight(self, name: str) -> Weight:
        weight = getattr(self, name)[...]
        if self.codes is None:
            return weight
        codes = {k: x[...] for k, x in self.codes[name].items()}
        return Fp8Weight(weight, Codes(**codes))

    def __call__(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        """Applies the layer to the residual stream."""
        recipe = blocks.RECIPES[self.recipe]
        params = {"norm": _value(self.attention_norm), "qkv": self._weight("qkv")}
        q, k, v, x = blocks.attention_in(
            recipe, params, x, norm=self.norm, heads=self.heads
        )
        x = blocks.attention_out(recipe, {"out": self._weight("out")}, q, k, v, x)
        params = {
            "norm": _value(self.mlp_norm),
            "gate_up": self._weight("gate_up"),
            "down": self._weight("down"),
        }
        return blocks.gated_mlp(recipe, params, x, norm=self.norm, gate=self.gate)


def _value(param: nnx.Param | None) -> jax.Array | None:
    return None if param is None else param[...]
