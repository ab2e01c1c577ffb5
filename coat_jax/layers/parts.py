"""The parts of the FP8 flow: the residual stream, norms, and the order of heads.

`coat_jax.layers.flow` builds the segments of a layer from these parts.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from coat_jax.fp8.matmul import checked, quantize_tensor
from coat_jax.layers import functional
from coat_jax.layers.context import ContextParallel
from coat_jax.layers.rope import Rope, RopeScaling
from coat_jax.meshes import on_explicit_tokens
from coat_jax.quantization.delayed import delayed_scale
from coat_jax.quantization.formats import E5M2
from pallas_kernels import Codes, NormKind, Scaled
from pallas_kernels.ops.rope.api import split_heads


class Stream(NamedTuple):
    """The residual stream, and a dummy that carries the scale of the stream's gradient.

    Only one operation may read a stream. JAX would add the gradients of two readers,
    and the scale would not fit the sum.

    Attributes:
      x: The stream [b, s, h].
      scale: A float32 dummy, a scalar or an array with an entry for each shard of the
        batch. Its gradient carries the per-tensor scales with which the gradient of `x`
        is quantized. It is unused if scaling is delayed.
      token: A float32 dummy scalar if there are several shards, else None. Its gradient
        is zero, and is available once the devices have summed the weight gradients of
        the later segments. So operations that read this gradient run after the sums.
    """

    x: Float[Array, "b s h"]
    scale: Float[Array, "*shards"]
    token: Float[Array, ""] | None = None

    @classmethod
    def of(cls, x: Float[Array, "b s h"], shards: int = 1) -> "Stream":
        """Returns a stream with a dummy scale, which exists only to have a gradient.

        The scale is computed from `x`, so that under `vmap` each example of a batch has
        a scale of its own, with a gradient of its own. XLA drops the computation,
        because nothing reads its result.
        """
        if shards == 1:
            return cls(x, jnp.sum(jnp.isnan(x), dtype=jnp.float32))

        def nans(x):
            return jnp.sum(jnp.isnan(x).reshape(shards, -1), axis=1, dtype=jnp.float32)

        return cls(x, on_explicit_tokens(nans, x, 1)(x), jnp.zeros(()))

    def with_array(self, x: Float[Array, "b s h"]) -> "Stream":
        """Returns this stream with another array and a new scale for each shard."""
        stream = Stream.of(x, self.scale.size)
        return stream._replace(token=self.token)

    def tokens(self) -> "Stream":
        """Returns a `Stream` of the number of leading token axes of each array.

        The axis of `scale`, if it has one, is split over a mesh like the batch.
        """
        return Stream(2, self.scale.ndim, None if self.token is None else 0)

    @classmethod
    def gradient(
        cls, dx: Float[Array, "b s h"], maxima: Array | None = None
    ) -> "Stream":
        """Returns a stream of the gradient `dx` and its per-tensor scale for E5M2.

        `maxima` holds the amax of each part of `dx`; if it is None, they are computed.
        """
        maxima = kernels.maxima(dx) if maxima is None else maxima
        (scale,) = kernels.tensor_scales(kernels.Bound((maxima,)), dtype=E5M2.dtype)
        return cls(dx, scale)

    def codes(self, history: Array | None) -> Codes:
        """Quantizes this stream, a gradient, to E5M2 codes and their transpose.

        The scale is computed from the amax history, or is the stream's scale if
        `history` is None.
        """
        scale = self.scale if history is None else None
        return quantize_tensor(
            self.x, E5M2, copies="both", scale=scale, history=history
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """The order of heads in the output columns of the `qkv` matmul, and their RoPE.

    For every key head the columns are its query heads, the key head, and the value
    head.

    Attributes:
      num_kv_heads: The number of key heads, k.
      head_dim: The size of a head, d.
      theta: The base of RoPE's frequencies.
      scaling: A change of RoPE's frequencies; None means no change.
      rotated: Whether RoPE is applied here. If not, the angles are zero, and
        `HeadSteps` applies RoPE.
      context: How sequences are split over devices; None means that they are whole.
    """

    num_kv_heads: int
    head_dim: int
    theta: float
    scaling: RopeScaling | None = None
    rotated: bool = True
    context: ContextParallel | None = None

    def starts(self, x: Float[Array, "b s ..."]) -> Int[Array, " b"] | int:
        """Returns the position of the first token of each row of the stream `x`."""
        return 0 if self.context is None else self.context.starts(*x.shape[:2])

    def angles(
        self, length: int, start: Int[Array, "*b"] | int = 0
    ) -> tuple[Array, Array]:
        """Returns the cosines and sines of RoPE's angles, each [*b, length, d / 2].

        The positions are `start`, `start + 1` and so on, for each start of an array.
        """
        if not self.rotated:
            shape = length, self.head_dim // 2
            return jnp.ones(shape), jnp.zeros(shape)
        return Rope(theta=self.theta, scaling=self.scaling).angles(
            length, self.head_dim, start
        )

    def split(
        self, y: Float[Array, "b s m"], start: Int[Array, "*b"] | int = 0
    ) -> tuple[Array, Array, Array]:
        """Splits `y` into heads and applies RoPE to queries and keys.

        Args:
          y: The columns of all heads.
          start: The position of the first token, or of each row's first token.

        Returns:
          Queries [b, s, n, d], keys and values [b, s, k, d].
        """
        angles = self.angles(y.shape[1], start)
        return split_heads(y, *angles, num_kv_heads=self.num_kv_heads, dtype=y.dtype)

    def gradient(
        self,
        q: Array,
        k: Array,
        v: Array,
        history: Array | None = None,
        start: Int[Array, "*b"] | int = 0,
    ) -> Codes:
        """Computes E5M2 codes of the gradient of `split`'s input.

        `q`, `k` and `v` are the gradients of the results of `split`, and `start` is as
        in `split`. With an amax `history` the scale is delayed. The kernel that
        quantizes also applies the inverse of RoPE.
        """
        cos, sin = self.angles(q.shape[1], start)
        dtype = E5M2.dtype
        if history is not None:
            arrays = q, k, v, cos, sin, delayed_scale(history, E5M2)
            return checked(kernels.join_heads(*arrays, dtype=dtype, keep_maxima=True))
        # A rotation increases the amax by a factor of sqrt(2) at most.
        bound = kernels.Bound((kernels.maxima(q, k, v),), math.sqrt(2))
        (scale,) = kernels.tensor_scales(bound, dtype=dtype)
        return kernels.join_heads(q, k, v, cos, sin, scale, dtype=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm without its weight: RMSNorm or LayerNorm.

    Attributes:
      kind: "rms" for RMSNorm or "layer" for LayerNorm.
      eps: The number that is added to the mean square, or to the variance.
    """

    kind: NormKind
    eps: float

    def forward(
        self, x: Float[Array, "b s h"], weight: Array | None
    ) -> tuple[Scaled, Scaled]:
        """Returns codes of the norm's output, and of its input `x`, in FP8.

        The codes of the output have a scale per token. The codes of `x` have a scale
        per group of 16, and are for the backward pass.
        """
        out = kernels.norm(
            x, weight, kind=self.kind, eps=self.eps, scale="row", keep_groups=True
        )
        return Scaled(out.y, out.scale), out.groups

    def values(
        self, x: Float[Array, "... h"], weight: Array | None
    ) -> Float[Array, "... h"]:
        """Computes the norm in float32, for a router."""
        x = x.astype(jnp.float32)
        if self.kind == "layer":
            return functional.layer_norm(x, weight, eps=self.eps)
        return functional.rms_norm(x, weight, eps=self.eps)

    def rate(self, x: Float[Array, "... h"]) -> Float[Array, "... 1"]:
        """Returns the reciprocal of each token's root mean square, in float32."""
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return lax.rsqrt(square + self.eps)

    def backward(
        self,
        x: Scaled,
        dy: Array,
        weight: Array | None,
        scale: Float[Array, ""] | None,
        add: Array,
        delayed: bool,
    ) -> tuple[Stream, Array | None, Float[Array, "h tokens"] | None]:
        """Computes the gradients of the norm's input and weight; recomputes its output.

        Args:
          x: The codes of the norm's input, in groups of 16.
          dy: The gradient of the norm's output.
          weight: The norm's weight, or None.
          scale: The per-tensor scale of the recomputed output; None skips it.
          add: An array to add to the gradient of the input.
          delayed: Whether scaling is delayed, so that the gradient needs no scale.

        Returns:
          A stream of the input's gradient plus `add`, with its scale unless scaling is
          delayed; the gradient of the weight, or None; and the norm's output as
          transposed E4M3 codes, or None.
        """
        # The kernel adds bfloat16 arrays only.
        fused = add.dtype == jnp.bfloat16
        out = kernels.norm_grad(
            x,
            dy,
            weight,
            kind=self.kind,
            eps=self.eps,
            y_scale=scale,
            add=add if fused else None,
            keep_maxima=fused and not delayed,
        )
        dx = out.dx if fused else out.dx.astype(add.dtype) + add
        stream = Stream.of(dx) if delayed else Stream.gradient(dx, out.largest)
        return stream, None if weight is None else out.dweight, out.y
