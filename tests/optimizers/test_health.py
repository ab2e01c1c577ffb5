"""Tests health_report against NumPy with ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import oracle
from helpers.quantization import spread

import coat_jax as coat

# The oracle's format and block by role; a block of None is the whole array.
_ROLES = {
    "operand": (oracle.E4M3, lambda x: x.shape[-1:]),
    "saved": (oracle.E4M3, lambda x: (16,)),
    "gradient": (oracle.E5M2, lambda x: None),
}


def expected(x: np.ndarray, role: str) -> dict[str, float]:
    """Returns amax and shares of zeros and underflow, by the specification."""
    format, block = _ROLES[role]
    x = np.asarray(x).astype(np.float32)
    _, codes = oracle.quantize(x, format, block(x))
    return {
        "amax": np.abs(x).max(),
        "zero_share": np.mean(x == 0),
        "saturated_share": 0.0,
        "underflow_share": np.mean((x != 0) & (codes == 0)),
    }


def wide(rng, shape, octaves=16) -> np.ndarray:
    """Returns numbers of many sizes, one in ten of them zero."""
    x = spread(rng, shape, octaves)
    x[rng.random(shape) < 0.1] = 0
    return x


def numbers(row) -> dict[str, float]:
    return {k: v for k, v in row.items() if k not in ("path", "size", "layer")}


def test_every_array_is_reported_in_the_order_of_the_tree():
    tree = [{"a/b": jnp.ones(3), "a": {"b": jnp.ones(4)}}, *map(jnp.ones, range(1, 11))]
    rows = coat.health_report(tree).rows()
    paths = ["0/a/b", "0/a/b", *map(str, range(1, 11))]
    assert [row["path"] for row in rows] == paths
    assert [row["size"] for row in rows] == [4, 3, *range(1, 11)]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("role", _ROLES)
def test_statistics_are_those_of_the_codes(rng, role, dtype):
    tree = {"a": wide(rng, (5, 40)), "b": {"c": wide(rng, (2, 3, 16), 20)}}
    tree = jax.tree.map(lambda x: x.astype(dtype), tree)
    rows = coat.health_report(tree, role=role).rows()
    assert [row["path"] for row in rows] == ["a", "b/c"]
    for row, x in zip(rows, [tree["a"], tree["b"]["c"]], strict=True):
        assert row["size"] == x.size
        assert numbers(row) == pytest.approx(expected(x, role), rel=1e-6)
    if role != "saved":  # Groups of 16 rarely span E4M3's range.
        assert rows[0]["underflow_share"] > 0


def test_layers_have_statistics_of_their_own(rng):
    x = wide(rng, (3, 4, 32))
    tree = {"layers": {"w": jnp.asarray(x)}, "head": jnp.asarray(x[0])}
    report = coat.health_report(tree, role="gradient", stacked="layers")
    rows = {(row["path"], row.get("layer")): row for row in report.rows()}
    assert list(rows) == [("head", None), *(("layers/w", k) for k in range(3))]
    for layer in range(3):
        row = rows["layers/w", layer]
        assert row["size"] == 128
        assert numbers(row) == pytest.approx(expected(x[layer], "gradient"))


def test_elements_beyond_a_given_amax_saturate():
    # The scale of this amax is 1, so that values are codes. E5M2 ends at 57,344, and
    # numbers up to 61,440 round to it.
    x = jnp.array([57_344.0, 61_000.0, -62_000.0, 1e9, 0.0, 1e-6, 1.0, 2.0])
    [row] = coat.health_report({"x": x}, role="gradient", amax=57_344.0).rows()
    assert numbers(row) == pytest.approx(
        {
            "amax": 1e9,
            "zero_share": 1 / 8,
            "saturated_share": 2 / 8,
            "underflow_share": 1 / 8,
        }
    )


def test_stored_codes_are_counted_as_they_are(rng):
    x = wide(rng, (8, 256), 12)
    q = coat.quantize(x, granularity=coat.PerGroup(128))
    codes = np.asarray(q.codes).astype(np.float32)
    assert np.mean(codes == 0) > np.mean(x == 0)
    [row] = coat.health_report({"mu": {"w": q}}).rows()
    assert row["path"] == "mu/w"
    assert numbers(row) == pytest.approx(
        {
            "amax": np.abs(np.asarray(q.dequantize())).max(),
            "zero_share": np.mean(codes == 0),
            "saturated_share": np.mean(np.abs(codes) == 448),
            "underflow_share": np.mean(codes == 0),
        }
    )
    rows = coat.health_report({"mu": {"w": q}}, stacked="mu").rows()
    assert [row["zero_share"] for row in rows] == list(np.mean(codes == 0, axis=1))


def test_nan_and_infinity_show_in_the_amax():
    tree = {"a": jnp.array([1.0, jnp.nan]), "b": jnp.array([1.0, -jnp.inf])}
    first, second = coat.health_report(tree, role="gradient").rows()
    assert np.isnan(first["amax"])
    assert second["amax"] == np.inf


def test_it_runs_within_a_jitted_step_and_prints(rng):
    x = jnp.asarray(wide(rng, (4, 64)))
    tree = {"w": x, "count": jnp.int32(3), "none": jnp.zeros((0, 4)), "s": x[0, 0]}
    report = jax.jit(lambda tree: coat.health_report(tree))(tree)
    rows = report.rows()
    assert rows == coat.health_report(tree).rows()
    assert [row["path"] for row in rows] == ["s", "w"]
    lines = str(report).splitlines()
    assert lines[0].split()[:2] == ["size", "amax"]
    assert lines[2].split()[:2] == ["w", "256"]
    assert sum(leaf.size for leaf in jax.tree.leaves(report)) == 8


def test_sown_activations_and_boxed_parameters():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
            y = nn.Dense(4, kernel_init=init)(x)
            self.sow("intermediates", "hidden", y)
            return y

    x = jnp.ones((2, 8))
    params = Model().init(jax.random.key(0), x)
    _, sown = Model().apply(params, x, mutable=["intermediates"])
    [row] = coat.health_report(sown).rows()
    assert (row["path"], row["amax"]) == ("intermediates/hidden/0", 8)
    rows = coat.health_report(params["params"]).rows()
    assert [row["path"] for row in rows] == ["Dense_0/bias", "Dense_0/kernel"]


def test_float32_moments_are_arrays_like_others():
    state = optax.adamw(1e-3).init({"w": jnp.ones((4, 8))})
    rows = coat.health_report(state).rows()
    assert [row["path"] for row in rows] == ["0/mu/w", "0/nu/w"]
