"""The operations on queries, keys and values between the `qkv` matmul and attention.

Llama has only RoPE there, which the FP8 flow applies in the kernel of the matmul.
Biases, norms of queries and keys, and RoPE with a base that differs between the layers
of a stack are computed in plain JAX here, for all recipes. XLA fuses them into one
pass.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from coat_jax.layers.functional import rms_norm
from coat_jax.layers.rope import Rope
from coat_jax.meshes import whole
from pallas_kernels.ops.rope.api import turned

QkNorm = Literal["none", "head", "width"]
HeadArrays = tuple[
    Float[Array, "b s n d"], Float[Array, "b s k d"], Float[Array, "b s k d"]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSteps:
    """A bias, norms of queries and keys, and RoPE, in this order.

    Attributes:
      rope: RoPE of layers without local attention.
      local_rope: RoPE of layers with local attention; None means `rope`.
      norm: The norms of queries and keys: "none"; "head", RMSNorm over each head as in
        Qwen3; or "width", RMSNorm over all heads together as in OLMo 2.
      eps: The number that the norms add to the mean square.
    """

    rope: Rope
    local_rope: Rope | None = None
    norm: QkNorm = "none"
    eps: float = 1e-6

    def apply(
        self,
        params: Mapping[str, Array],
        q: Float[Array, "b s n d"],
        k: Float[Array, "b s k d"],
        v: Float[Array, "b s k d"],
        *,
        start: Int[Array, "*b"] | int = 0,
        local: Bool[Array, ""] | None = None,
    ) -> HeadArrays:
        """Returns queries, keys and values for attention, in the dtype of `q`.

        Args:
          params: The parameters of the operations that are used: `bias`
            [k * (n / k + 2) * d] in the order of `Heads`, and `q_norm` and `k_norm`,
            [d] for norms of heads, [n * d] and [k * d] for norms of the width.
          q: Queries, as the matmul returns them.
          k: Keys.
          v: Values.
          start: The position of the first token, or of each row's first token.
          local: Whether attention is local, which selects `local_rope`; None selects
            `rope`.
        """
        if "bias" in params:
            q, k, v = _with_bias(params["bias"], q, k, v)
        if self.norm != "none":
            q, k = self._normed(q, params["q_norm"]), self._normed(k, params["k_norm"])
        cos, sin = self._angles(q.shape[1], q.shape[-1], start, local)
        return (
            turned(q, cos, sin).astype(q.dtype),
            turned(k, cos, sin).astype(k.dtype),
            v,
        )

    def _normed(self, x: Array, weight: Array) -> Array:
        if self.norm == "head":
            return rms_norm(x, weight, eps=self.eps)
        joined = x.reshape(*x.shape[:2], -1)
        return rms_norm(joined, weight, eps=self.eps).reshape(x.shape)

    def _angles(
        self, length: int, dim: int, start: Array | int, local: Array | None
    ) -> tuple[Array, Array]:
        cos, sin = self.rope.angles(length, dim, start)
        if self.local_rope is None or local is None:
            return cos, sin
        local_cos, local_sin = self.local_rope.angles(length, dim, start)
        return jnp.where(local, local_cos, cos), jnp.where(local, local_sin, sin)


def _with_bias(bias: Array, q: Array, k: Array, v: Array) -> HeadArrays:
    """Adds a bias, which is in the order of `Heads`; each sum is rounded once."""
    parts = whole(bias).astype(jnp.float32).reshape(k.shape[2], -1, k.shape[-1])
    of_queries = parts[:, :-2].reshape(q.shape[2:])
    sums = q + of_queries, k + parts[:, -2], v + parts[:, -1]
    return tuple(total.astype(q.dtype) for total in sums)
