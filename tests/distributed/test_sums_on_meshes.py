"""Tests of matmuls with their contracted axis sharded over eight virtual devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.dots import assert_near, linear
from helpers.models import normal
from helpers.sharded import as_kernels
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from coat_jax import fp8_remat

pytestmark = pytest.mark.distributed
M, N, K = 512, 256, 512


def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("result", [P("data"), P("data", "tensor")])
def test_the_accumulator_is_added_once(result, monkeypatch):
    as_kernels(monkeypatch)
    a, b = (normal(i, n, K).astype(jnp.float8_e4m3fn) for i, n in enumerate((M, N)))
    addend = normal(2, M, N)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T + addend
    where = mesh()
    arrays = on(where, a, "data", "tensor"), on(where, b, None, "tensor")
    run = jax.jit(
        lambda a, b, addend: pk.matmul(a, b, 1.0, 1.0, addend, out_dtype=jnp.float32),
        out_shardings=NamedSharding(where, result),
    )
    compiled = run.lower(*arrays, on(where, addend, "data")).compile()
    actual = compiled(*arrays, on(where, addend, "data"))
    np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-3)
    assert "all-gather" not in compiled.as_text()


def test_a_blocks_last_matmul_stays_split(monkeypatch):
    """The residual stream is added, and no device computes another device's part."""
    as_kernels(monkeypatch)
    f = 4 * K

    def block(params, x):
        gate, up, down = params
        return x + linear(nn.silu(linear(x, gate)) * linear(x, up), down)

    params = normal(0, K, f), normal(1, K, f), normal(2, f, K)
    params = [0.1 * p.astype(jnp.bfloat16) for p in params]
    x = normal(3, M, K, dtype=jnp.bfloat16)
    where = mesh()
    specs = (None, "tensor"), (None, "tensor"), ("tensor", None)
    split = [on(where, p, *spec) for p, spec in zip(params, specs, strict=True)]
    fn = jax.jit(fp8_remat(block))
    compiled = fn.lower(split, on(where, x, "data")).compile()
    products = 3 * 2 * M * K * f / where.size
    assert products < compiled.cost_analysis()["flops"] < 1.5 * products
    actual, alone = compiled(split, on(where, x, "data")), fn(params, x)
    assert_near(actual, np.asarray(alone, np.float64))
