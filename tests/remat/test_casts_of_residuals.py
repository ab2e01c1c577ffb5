"""Tests residuals that are casts or broadcasts of other residuals.

Plain JAX is the oracle.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers.gradients import distances, value_and_vjp
from helpers.models import normal

import coat_jax as coat

WIDE = jnp.float32
K = 128


def cast(w, x, y):
    """Divides by a cast of an array that a matmul reads, too."""
    h = x @ w
    return y / h.astype(WIDE), h @ w


def repeated(w, x, y):
    h = x @ w
    return y / jnp.repeat(h[:, None], 2, axis=1), h @ w


def products_offloaded(primitive, *args, **params):
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    )
    return primitive.name != "dot_general" or offload(primitive, *args, **params)


OPTIONS = {
    "default": {},
    "where": {"where": lambda residual: residual.dtype != WIDE},
    "policy": {"policy": jax.checkpoint_policies.everything_saveable},
    "offloaded": {"policy": products_offloaded},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("fn", [cast, repeated])
def test_they_follow_from_exact_arrays(fn, options):
    w, x, y = normal(0, K, K) / 10, normal(1, 2 * K, K), normal(2, 2 * K, K)
    arrays = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16), y
    if fn is repeated:
        arrays = *arrays[:2], jnp.stack([y, y], axis=1)
    types = jax.eval_shape(fn, *arrays)
    dy = jax.tree.map(lambda y: jnp.ones(y.shape, y.dtype), types)
    light = coat.fp8_remat(fn, **options)
    actual, expected = (value_and_vjp(f, dy, *arrays) for f in (light, fn))
    assert max(distances(actual, expected)) <= 0.04
    assert matmuls(light, *arrays) == matmuls(fn, *arrays)


def matmuls(fn, *args):
    """Returns the number of matmuls of a function and its gradients."""

    def passes(*args):
        y, vjp = jax.vjp(fn, *args)
        return vjp(jax.tree.map(jnp.ones_like, y))

    return str(jax.make_jaxpr(passes)(*args)).count("dot_general[")
