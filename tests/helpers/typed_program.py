"""A typed program of a user, which uses public names of the library."""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import coat_jax as coat


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, dot_general=coat.fp8_dot_general, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.linear(x))


class Dense(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.features, dot_general=coat.fp8_dot_general)(x)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    return factor * x


assert_type(coat.fp8_remat(Mlp), type[Mlp])
assert_type(coat.fp8_remat(Dense), type[Dense])
model = coat.fp8_remat(Mlp)(nnx.Rngs(0))
assert_type(model, Mlp)
y = coat.fp8_remat(scaled)(jnp.ones(3), 2.0)
assert_type(y, jax.Array)

tx = coat.fp8_adamw(1e-3, weight_decay=0.1)
params = {"w": jnp.ones((8, 8))}
state = tx.init(params)
updates, state = tx.update(params, state, params)
params = optax.apply_updates(params, updates)
params, state = coat.fused_update(tx, params, state, params)
lion = coat.with_quantized_state(optax.lion(1e-3))
report = coat.moment_report(state)
q = coat.quantize(jnp.ones((4, 16)), format=coat.E4M3, granularity=coat.PerGroup(16))
assert_type(q, coat.QuantizedArray)
assert_type(coat.dequantize(q), jax.Array)
