"""Transformer layers as users of Flax write them: nothing here is of this library.

They differ in what the library's own layers fix: separate matmuls for queries, keys and
values, norms of single heads, biases, LayerNorm, cross attention.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from experiments.common.layer_cases import Shape

DotGeneral = Callable[..., Array] | None


class Modules:
    """Makes BF16 modules."""

    def __init__(self, dot_general: DotGeneral, rngs: nnx.Rngs):
        self._options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        self._options["rngs"] = rngs
        self._matmul = {} if dot_general is None else {"dot_general": dot_general}

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> nnx.Linear:
        """Returns a linear layer."""
        options = self._matmul | self._options
        return nnx.Linear(inputs, outputs, use_bias=bias, **options)

    def rms_norm(self, size: int) -> nnx.RMSNorm:
        """Returns a norm."""
        return nnx.RMSNorm(size, **self._options)

    def layer_norm(self, size: int) -> nnx.LayerNorm:
        """Returns a norm with a bias."""
        return nnx.LayerNorm(size, **self._options)


class Layer(nnx.Module):
    """The base of all layers, with attention.

    Attributes:
      inputs: The number of arrays that the layer takes.
    """

    inputs = 1

    def __init__(self, shape: Shape, make: Modules):
        self.head_dim = shape.head_dim

    def heads(self, x: Float[Array, "b s m"]) -> Float[Array, "b s n d"]:
        """Splits an array into heads."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def attention(
        self, q: Array, k: Array, v: Array, causal: bool = True
    ) -> Float[Array, "b s m"]:
        """Computes attention of queries, keys and values, with heads joined."""
        implementation = "cudnn" if jax.default_backend() == "gpu" else None
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation=implementation
        )
        return out.reshape(*out.shape[:2], -1)


def rope(x: Float[Array, "b s n d"], theta: float = 500_000.0) -> Array:
    """Applies rotary embeddings to the halves of heads."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Llama(Layer):
    """RMSNorm, grouped queries, RoPE and a gated MLP."""

    def __init__(self, shape: Shape, make: Modules):
        super().__init__(shape, make)
        h, f, kv = shape.hidden, shape.intermediate, shape.kv_heads * shape.head_dim
        self.norms = nnx.List([make.rms_norm(h) for _ in range(2)])
        self.q, self.o = make.linear(h, h), make.linear(h, h)
        self.k, self.v = make.linear(h, kv), make.linear(h, kv)
        self.gate, self.up = make.linear(h, f), make.linear(h, f)
        self.down = make.linear(f, h)

    def qkv(self, h: Array) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values."""
        q, k, v = (self.heads(linear(h)) for linear in (self.q, self.k, self.v))
        return rope(q), rope(k), v

    def __call__(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        """Computes the layer."""
        x = x + self.o(self.attention(*self.qkv(self.norms[0](x))))
        h = self.norms[1](x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class Qwen(Llama):
    """A Llama layer with norms of queries and keys, as in Qwen 3."""

    def __init__(self, shape: Shape, make: Modules):
        super().__init__(shape, make)
        self.q_norm, self.k_norm = (make.rms_norm(shape.head_dim) for _ in range(2))

    def qkv(self, h: Array) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values."""
        q, k, v = (self.heads(linear(h)) for linear in (self.q, self.k, self.v))
        return rope(self.q_norm(q)), rope(self.k_norm(k)), v


class VisionTransformer(Layer):
    """LayerNorm, attention to all tokens, a GELU MLP, and biases everywhere."""

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


class Decoder(Layer):
    """The decoder layer of an encoder-decoder, with attention to the encoder."""

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


LAYERS: dict[str, type[Layer]] = {
    "llama": Llama,
    "qwen": Qwen,
    "vision transformer": VisionTransformer,
    "encoder-decoder": Decoder,
}


def made(name: str, shape: Shape, dot_general: DotGeneral = None) -> Any:
    """Returns a layer's graph and its abstract parameters."""
    return nnx.split(
        nnx.eval_shape(lambda: LAYERS[name](shape, Modules(dot_general, nnx.Rngs(0))))
    )
