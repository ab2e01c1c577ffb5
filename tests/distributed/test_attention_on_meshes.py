"""Tests attention with sequences or heads sharded over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from pallas_kernels.ops.attention import api

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def definitions(monkeypatch):
    """Runs the reference instead of the kernel on each device's shard."""
    for operation in (api._Attention, api._AttentionGrad):
        monkeypatch.setattr(
            operation, "kernel", lambda self, *arrays: self.reference(*arrays)
        )
        monkeypatch.setattr(operation, "obstacle", lambda self, *arrays: None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("a"), P("a", None, "b"), P(None, None, ("a", "b"))])
def test_devices_compute_their_sequences_and_heads(kind, spec):
    rng = np.random.default_rng(0)
    sizes = [(4, 16, heads, 8) for heads in (8, 4, 4, 8)]
    arrays = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in sizes]
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (4, 16))), jnp.int32)

    def passes(q, k, v, do, ids, window, implementation):
        options = {"softcap": 2.0, "window": window, "segment_ids": ids}
        options |= {"implementation": implementation}
        out, lse = pk.attention(q, k, v, **options)
        return out, lse, *pk.attention_grad(do, q, k, v, out, lse, **options)

    run = jax.jit(passes, static_argnames="implementation")
    window = jnp.int32(5)
    expected = run(*arrays, ids, window, implementation="reference")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        ids = jax.device_put(ids, NamedSharding(mesh, P(spec[0])))
        actual = run(*placed, ids, window, implementation="mosaic")
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-5)
        parts = 4 if len(spec) > 1 else 2
        assert x.addressable_shards[0].data.size == x.size // parts


def test_more_devices_than_key_heads():
    """XLA would shard key heads over only a part of the axis that query heads use."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, 16, heads, 8)), jnp.float32)
        for heads in (8, 2, 2)
    )

    def attend(q, k, v, implementation):
        return pk.attention(q, k, v, implementation=implementation)[0]

    expected = attend(q, k, v, "reference")
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    q = jax.device_put(q, NamedSharding(mesh, P(None, None, "a")))
    actual = jax.jit(attend, static_argnums=3)(q, k, v, "mosaic")
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_have_some_query_heads_of_one_key_head(kind):
    rng = np.random.default_rng(0)
    sizes = [(4, 16, heads, 8) for heads in (8, 1, 1, 8)]
    arrays = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in sizes]

    def passes(q, k, v, do, implementation):
        options = {"softcap": 2.0, "implementation": implementation}
        out, lse = pk.attention(q, k, v, **options)
        return out, lse, *pk.attention_grad(do, q, k, v, out, lse, **options)

    run = jax.jit(passes, static_argnames="implementation")
    expected = run(*arrays, implementation="reference")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        specs = P("a", None, "b"), P("a"), P("a"), P("a", None, "b")
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        actual = run(*map(jax.device_put, arrays, shardings), implementation="mosaic")
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-5)
    out, lse, dq, _, _ = actual
    for x in (out, lse, dq):
        assert x.addressable_shards[0].data.size == x.size // 4
