"""Tests of experts that users write with `ragged_dot`, on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat

pytestmark = pytest.mark.distributed
TOKENS, CHOICES, EXPERTS, HIDDEN, INNER = 24, 2, 4, 32, 32


@coat.fp8_remat
def layer(params, x, ids):
    """Copies tokens to rows, applies experts, and sums the rows of each token."""
    order, sizes = jnp.argsort(ids), jnp.bincount(ids, length=EXPERTS)
    rows = coat.fp8_ragged_dot(x[order // CHOICES], params["gate_up"], sizes)
    gate, up = jnp.split(rows, 2, axis=-1)
    y = coat.fp8_ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)
    return jnp.sum(y[jnp.argsort(order)].reshape(len(x), CHOICES, -1), axis=1)


def _mesh(axis):
    kinds = (AxisType.Auto,)
    return jax.make_mesh((2,), (axis,), axis_types=kinds, devices=jax.devices()[:2])


def arguments():
    params = {
        "gate_up": normal(0, EXPERTS, HIDDEN, 2 * INNER, scale=0.2),
        "down": normal(1, EXPERTS, INNER, HIDDEN, scale=0.2),
    }
    ids = np.random.default_rng(0).integers(0, EXPERTS, 2 * TOKENS * CHOICES)
    return params, normal(2, 2 * TOKENS, HIDDEN), jnp.asarray(ids, jnp.int32)


def results(fn, params, x, ids):
    def loss(params, x):
        return jnp.sum(jnp.sin(fn(params, x, ids)))

    assert "fused_matmul" in str(jax.make_jaxpr(loss)(params, x))
    return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x))


def test_each_device_sorts_its_own_tokens():
    mesh = _mesh("data")
    specs = P(), P("data"), P("data")
    spread = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("data"))

    def alone(params, x, ids):
        parts = (jnp.split(v, 2) for v in (x, ids))
        return jnp.concatenate(
            [layer(params, *part) for part in zip(*parts, strict=True)]
        )

    pairs = zip(
        results(spread, *arguments()), results(alone, *arguments()), strict=True
    )
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_weights_may_be_split():
    params, x, ids = arguments()
    mesh = _mesh("tensor")
    expected = results(layer, params, x, ids)
    for specs in ((P(None, None, "tensor"), P(None, "tensor")), (P("tensor"),) * 2):
        names = dict(zip(params, specs, strict=True))
        split = {
            name: jax.device_put(params[name], NamedSharding(mesh, spec))
            for name, spec in names.items()
        }
        whole = jax.device_put(x, NamedSharding(mesh, P()))
        for a, b in zip(results(layer, split, whole, ids), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
