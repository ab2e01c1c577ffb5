"""Small modules and functions that several tests differentiate."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from coat_jax.remat.api import fp8_remat
from helpers.gradients import compiled


class Mlp(nnx.Module):
    """Three layers with GELU and a residual connection."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(width, 2 * width, rngs=rngs)
        self.middle = nnx.Linear(2 * width, 2 * width, rngs=rngs)
        self.last = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        h = nnx.gelu(self.first(x))
        h = h + nnx.gelu(self.middle(h))
        return self.last(h)


class Vit(nnx.Module):
    """A vision transformer with one encoder layer and a mean over tokens."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Conv(3, width, (4, 4), strides=4, padding="VALID", rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (64, width)))
        self.layer = VitLayer(width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images):
        x = self.embed(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.position[...]
        return self.head(self.layer(x).mean(axis=1))


class VitLayer(nnx.Module):
    """A pre-norm layer with attention and an MLP, each after a LayerNorm."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=width, decode=False, rngs=rngs
        )
        self.mlp = Mlp(width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Stateful(nnx.Module):
    """A module with parameters, batch statistics and a dropout stream."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(width, 2 * width, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * width, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x, *, train: bool = True):
        h = nnx.gelu(self.norm(self.first(x), use_running_average=not train))
        return self.last(self.dropout(h, deterministic=not train))


class LinenNet(nn.Module):
    """A Linen model with batch statistics and dropout; `wrap` wraps its first Dense."""

    width: int
    wrap: object = lambda target: target

    @nn.compact
    def __call__(self, x, train: bool = True):
        h = nn.LayerNorm()(x)
        h = self.wrap(nn.Dense)(2 * self.width)(h)
        h = nn.gelu(nn.BatchNorm(use_running_average=not train)(h))
        h = nn.Dropout(0.3, deterministic=not train)(h)
        return nn.Dense(self.width)(h)


def parameters(make):
    """Returns the structure and the initial state of the module that `make` makes."""
    graph, _ = nnx.split(nnx.eval_shape(make))
    return graph, compiled(lambda: nnx.split(make())[1])


def initialization(make):
    """Returns the text of the program that makes the initial state, and its tree."""
    program, state = jax.make_jaxpr(lambda: nnx.split(make())[1], return_shape=True)()
    return str(program), jax.tree.structure(state)


def normal(seed: int, *shape: int, dtype=jnp.float32, scale: float = 1.0) -> jax.Array:
    """Returns normal random numbers for this seed, which nothing has to compile."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray((scale * numbers).astype(dtype))


def two_products(params, x):
    """Computes `sin(x @ a) @ b.T`; parameters are cast, and `b` is transposed."""
    h = x @ params["a"].astype(x.dtype)
    return jnp.sin(h) @ params["b"].T.astype(x.dtype)


def two_product_arguments(dtype=jnp.float32):
    params = {"a": normal(1, 64, 128, scale=0.2), "b": normal(2, 48, 128, scale=0.2)}
    return params, normal(3, 96, 64, dtype=dtype)


def scanned(fn):
    def run(params, x):
        return jax.lax.scan(lambda x, p: (x + fn(p, x)[:, :1], None), x, params)[0]

    return run


def closing(params, x):
    return fp8_remat(lambda x: two_products(params, x), params_argnums=())(x)
