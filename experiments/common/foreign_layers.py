"""Transformer layers as users of Flax write them, without or with `coat.attention`.

They have what the library's own layers do not have, or not in this form: separate
matmuls for queries, keys and values, norms of single heads, biases, LayerNorm, cross
attention, the modulation of DiT, and names and sharding constraints of activations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import coat_jax as coat
from experiments.common.layer_cases import Shape

DotGeneral = Callable[..., Array] | None
# The bound of attention's scores in Gemma 2.
SOFTCAP = 50.0


class Modules:
    """A factory of Flax modules that compute in BF16.

    `dot_general` replaces the matmul of linear layers, if it is not None.
    """

    def __init__(self, dot_general: DotGeneral, rngs: nnx.Rngs):
        self._options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        self._options["rngs"] = rngs
        self._matmul = {} if dot_general is None else {"dot_general": dot_general}

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> nnx.Linear:
        """Returns a linear layer with BF16 parameters."""
        options = self._matmul | self._options
        return nnx.Linear(inputs, outputs, use_bias=bias, **options)

    def rms_norm(self, size: int) -> nnx.RMSNorm:
        """Returns an RMSNorm over `size` features."""
        return nnx.RMSNorm(size, **self._options)

    def layer_norm(self, size: int, affine: bool = True) -> nnx.LayerNorm:
        """Returns a LayerNorm, with a weight and a bias if `affine`."""
        options = {"use_scale": affine, "use_bias": affine} | self._options
        return nnx.LayerNorm(size, **options)


class Layer(nnx.Module):
    """The base class of these layers, with a method for attention.

    Attributes:
      inputs: The number of arrays that the layer takes.
      attention_in: The `implementation` of `jax.nn.dot_product_attention` on GPUs:
        "cudnn", or "xla" for attention with plain matmuls and a softmax.
    """

    inputs = 1
    attention_in = "cudnn"

    def __init__(self, shape: Shape, make: Modules):
        self.head_dim = shape.head_dim

    def heads(self, x: Float[Array, "b s m"]) -> Float[Array, "b s n d"]:
        """Splits an array into heads."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def attention(
        self, q: Array, k: Array, v: Array, causal: bool = True
    ) -> Float[Array, "b s m"]:
        """Computes attention, and concatenates the heads of the result."""
        on_gpu = jax.default_backend() == "gpu"
        implementation = self.attention_in if on_gpu else None
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation=implementation
        )
        return out.reshape(*out.shape[:2], -1)


def rope(x: Float[Array, "b s n d"], theta: float = 500_000.0) -> Array:
    """Applies rotary embeddings; element i of a head is paired with i + d / 2."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class FlaxLlama(Layer):
    """A Llama layer: RMSNorm, grouped-query attention, RoPE and a gated MLP."""

    def __init__(self, shape: Shape, make: Modules):
        super().__init__(shape, make)
        h, f, kv = shape.hidden, shape.intermediate, shape.kv_heads * shape.head_dim
        self.norms = nnx.List([make.rms_norm(h) for _ in range(2)])
        self.q, self.o = make.linear(h, h), make.linear(h, h)
        self.k, self.v = make.linear(h, kv), make.linear(h, kv)
        self.gate, self.up = make.linear(h, f), make.linear(h, f)
        self.down = make.linear(f, h)

    def mark(self, x: Array, name: str) -> Array:
        """Returns an activation unchanged; subclasses add a name or a constraint."""
        return x

    def qkv(self, h: Array) -> tuple[Array, Array, Array]:
        """Returns queries and keys after RoPE, and values."""
        q, k, v = (self.heads(linear(h)) for linear in (self.q, self.k, self.v))
        return rope(q), rope(k), v

    def __call__(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        """Computes the layer."""
        h = self.mark(self.norms[0](x), "attention_norm")
        x = x + self.mark(self.o(self.attention(*self.qkv(h))), "attention_out")
        h = self.mark(self.norms[1](x), "mlp_norm")
        product = self.mark(nnx.silu(self.gate(h)) * self.up(h), "mlp_product")
        return x + self.mark(self.down(product), "mlp_out")


class NamedLlama(FlaxLlama):
    """A Llama layer with names for policies of `jax.checkpoint`."""

    def mark(self, x: Array, name: str) -> Array:
        """Returns an activation with a name for policies of `jax.checkpoint`."""
        return checkpoint_name(x, name)


class ConstrainedLlama(FlaxLlama):
    """A Llama layer with sharding constraints, on a mesh of one device."""

    def mark(self, x: Array, name: str) -> Array:
        """Returns an activation with the constraint to be sharded along the batch."""
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))


class Qwen(FlaxLlama):
    """A Llama layer with norms of queries and keys, as in Qwen 3."""

    def __init__(self, shape: Shape, make: Modules):
        super().__init__(shape, make)
        self.q_norm, self.k_norm = (make.rms_norm(shape.head_dim) for _ in range(2))

    def qkv(self, h: Array) -> tuple[Array, Array, Array]:
        """Returns queries and keys after norms and RoPE, and values."""
        q, k, v = (self.heads(linear(h)) for linear in (self.q, self.k, self.v))
        return rope(self.q_norm(q)), rope(self.k_norm(k)), v


class QwenInXla(Qwen):
    """A Qwen 3 layer with attention in plain matmuls and a softmax."""

    attention_in = "xla"


class OffsetNorm(nnx.Module):
    """An RMSNorm that multiplies by 1 plus its weight, as in Gemma."""

    def __init__(self, size: int):
        self.norm_scale = nnx.Param(jnp.zeros(size, jnp.bfloat16))

    def __call__(self, x: Float[Array, "*b h"]) -> Float[Array, "*b h"]:
        """Computes the norm."""
        wide = x.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        scale = 1 + self.norm_scale[...].astype(jnp.float32)
        return (wide * factor * scale).astype(x.dtype)


class Gemma2(FlaxLlama):
    """A Gemma 2 layer: four norms, a GELU gate, and attention scores with a soft cap.

    Attention is plain jnp, because cuDNN's attention cannot cap scores.
    """

    def __init__(self, shape: Shape, make: Modules):
        super().__init__(shape, make)
        self.norms = nnx.List([OffsetNorm(shape.hidden) for _ in range(4)])

    def attention(
        self, q: Array, k: Array, v: Array, causal: bool = True
    ) -> Float[Array, "b s m"]:
        """Computes causal attention with capped scores, and concatenates the heads."""
        b, s, _, d = q.shape
        groups = q.reshape(b, s, k.shape[2], -1, d)
        wide = jnp.einsum(
            "bskgd,btkd->bkgst", groups, k, preferred_element_type=jnp.float32
        )
        capped = SOFTCAP * jnp.tanh(wide / (d**0.5 * SOFTCAP))
        earlier = jnp.tril(jnp.ones((s, s), bool))
        capped = jnp.where(earlier, capped, jnp.finfo(jnp.float32).min)
        shares = jax.nn.softmax(capped, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgst,btkd->bskgd", shares, v).reshape(b, s, -1)

    def __call__(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        """Computes the layer."""
        h = self.attention(*self.qkv(self.norms[0](x)))
        x = x + self.norms[1](self.o(h))
        h = self.norms[2](x)
        return x + self.norms[3](self.down(nnx.gelu(self.gate(h)) * self.up(h)))


class Gemma2InKernels(Gemma2):
    """A Gemma 2 layer with `coat.attention`, which has a kernel for soft caps."""

    def attention(
        self, q: Array, k: Array, v: Array, causal: bool = True
    ) -> Float[Array, "b s m"]:
        """Computes attention with capped scores, and concatenates the heads."""
        out = coat.attention(q, k, v, softcap=SOFTCAP, causal=causal)
        return out.reshape(*out.shape[:2], -1)


class VisionTransformer(Layer):
    """A ViT layer: LayerNorm, attention to all tokens, a GELU MLP, and biases."""

    def __init__(self, shape: Shape, make: Modules):
        super().__init__(shape, make)
        h, f = shape.hidden, 4 * shape.hidden
        linear = partial(make.linear, bias=True)
        self.norms = nnx.List([make.layer_norm(h) for _ in range(2)])
        self.q, self.k, self.v, self.o = (linear(h, h) for _ in range(4))
        self.up, self.down = linear(h, f), linear(f, h)

    def __call__(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        """Computes the layer."""
        h = self.norms[0](x)
        q, k, v = (self.heads(linear(h)) for linear in (self.q, self.k, self.v))
        x = x + self.o(self.attention(q, k, v, causal=False))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class VisionTransformerInXla(VisionTransformer):
    """A ViT layer with attention in plain matmuls and a softmax."""

    attention_in = "xla"


class Decoder(Layer):
    """A decoder layer of an encoder-decoder model, with cross attention."""

    inputs = 2

    def __init__(self, shape: Shape, make: Modules):
        super().__init__(shape, make)
        h, f = shape.hidden, 4 * shape.hidden
        self.norms = nnx.List([make.rms_norm(h) for _ in range(3)])
        self.own, self.cross = (
            nnx.List([make.linear(h, h) for _ in range(4)]) for _ in range(2)
        )
        self.up, self.down = make.linear(h, f), make.linear(f, h)

    def __call__(
        self, x: Float[Array, "b s h"], encoded: Float[Array, "b s h"]
    ) -> Float[Array, "b s h"]:
        """Computes the layer."""
        h = self.norms[0](x)
        q, k, v = (self.heads(linear(h)) for linear in self.own[:3])
        x = x + self.own[3](self.attention(q, k, v))
        q = self.heads(self.cross[0](self.norms[1](x)))
        k, v = (self.heads(linear(encoded)) for linear in self.cross[1:3])
        x = x + self.cross[3](self.attention(q, k, v, causal=False))
        return x + self.down(nnx.gelu(self.up(self.norms[2](x))))


class DiffusionTransformer(Layer):
    """A DiT block: attention and an MLP, modulated and gated by a condition.

    The norms have no parameters.
    """

    inputs = 2

    def __init__(self, shape: Shape, make: Modules):
        super().__init__(shape, make)
        h, f = shape.hidden, 4 * shape.hidden
        linear = partial(make.linear, bias=True)
        self.norm = make.layer_norm(h, affine=False)
        self.modulation = linear(h, 6 * h)
        self.q, self.k, self.v, self.o = (linear(h, h) for _ in range(4))
        self.up, self.down = linear(h, f), linear(f, h)

    def __call__(
        self, x: Float[Array, "b s h"], condition: Float[Array, "b s h"]
    ) -> Float[Array, "b s h"]:
        """Computes the block, conditioned on the mean of `condition` over tokens."""
        vector = nnx.silu(condition.mean(axis=1))
        parts = jnp.split(self.modulation(vector)[:, None], 6, axis=-1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        h = self.norm(x) * (1 + scale) + shift
        q, k, v = (self.heads(linear(h)) for linear in (self.q, self.k, self.v))
        x = x + gate * self.o(self.attention(q, k, v, causal=False))
        h = self.norm(x) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.down(nnx.gelu(self.up(h)))


LAYERS: dict[str, type[Layer]] = {
    "llama": FlaxLlama,
    "llama, named": NamedLlama,
    "llama, constrained": ConstrainedLlama,
    "qwen": Qwen,
    "gemma 2": Gemma2,
    "gemma 2, coat.attention": Gemma2InKernels,
    "vision transformer": VisionTransformer,
    "vision transformer, plain attention": VisionTransformerInXla,
    "encoder-decoder": Decoder,
    "diffusion transformer": DiffusionTransformer,
}


def made(name: str, shape: Shape, dot_general: DotGeneral = None) -> Any:
    """Returns a new layer's graph definition and its abstract parameters."""
    return nnx.split(
        nnx.eval_shape(lambda: LAYERS[name](shape, Modules(dot_general, nnx.Rngs(0))))
    )
