"""Tests moment_report against the errors that rounding really made."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.marks import slow
from helpers.optimizers import SHAPE, assert_same_bits, either_scheme, gradients, run
from jax.tree_util import GetAttrKey

import coat_jax as coat

every_format = pytest.mark.parametrize(
    "format", [coat.E4M3, slow(coat.E5M2), coat.DE8], ids=repr
)


def quantized(mu, nu, **options) -> coat.QuantizedState:
    """Returns the state of FP8 Adam with these moments, rounded once."""
    like = coat.scale_by_fp8_adam(rounding="nearest", **options).init({"w": mu})
    exact = optax.ScaleByAdamState(jnp.int32(1), {"w": mu}, {"w": nu})
    return coat.from_optax_state(exact, like)


def random_moments(seed: int = 0, octaves: float = 3) -> tuple:
    """Returns mu and nu; nu varies by a few octaves, mu / sqrt(nu) is about normal."""
    rng = np.random.default_rng(seed)
    nu = np.exp2(octaves * rng.standard_normal((64, 320)) - 20)
    mu = rng.standard_normal(nu.shape) * np.sqrt(nu)
    return jnp.asarray(mu, jnp.float32), jnp.asarray(nu, jnp.float32)


def real_errors(state, mu, nu) -> dict[str, float]:
    """Returns relative RMS errors of u = mu / sqrt(nu) from rounding mu or nu."""
    u, new_nu = mu / np.sqrt(nu), state.nu["w"].dequantize()
    new_mu = state.mu["w"].dequantize()
    new = {
        "mu": new_mu
        if dict(state.layout.moments)[GetAttrKey("mu"),].over_root_of
        else new_mu / np.sqrt(nu)
    }
    new["nu"] = mu / np.sqrt(new_nu)
    return {
        name: float(np.sqrt(np.sum(np.square(x - u)) / np.sum(np.square(u))))
        for name, x in new.items()
    }


@functools.cache
def reported(format, normalize_mu, octaves):
    """Returns random moments, their state and its report."""
    mu, nu = random_moments(octaves=octaves)
    if octaves == 3:
        mu = mu.at[:3].set(0)
    options = {"mu_format": format, "nu_format": format}
    state = quantized(mu, nu, normalize_mu=normalize_mu, **options)
    return mu, nu, state, coat.moment_report({"other": 1.0, "state": [state]})


@either_scheme
@every_format
@pytest.mark.parametrize("octaves", [slow(1), 3])
def test_the_error_is_what_rounding_did(format, normalize_mu, octaves):
    mu, nu, state, report = reported(format, normalize_mu, octaves)
    expected = real_errors(state, mu, nu)
    # DE8's lowest codes are factors of ten apart, so the density within such a step is
    # not smooth.
    close = {"rel": 0.2 if format is coat.DE8 else 0.1}
    for stats in report.moments:
        assert stats.error == pytest.approx(expected[stats.moment], **close)


@either_scheme
@every_format
def test_shares_and_powers_are_counted(format, normalize_mu):
    mu, _, state, report = reported(format, normalize_mu, 3)
    for stats, q in zip(report.moments, (state.mu["w"], state.nu["w"]), strict=True):
        assert (stats.parameter, stats.size, stats.format) == ("w", mu.size, format)
        values = np.asarray(format.decode(q.codes))
        assert stats.zero_share == pytest.approx(np.mean(values == 0))
        assert stats.max_share == pytest.approx(np.mean(np.abs(values) == format.max))
        if q.exponent is None:
            assert (stats.power, stats.k_counts) == (format.power, None)
        else:
            counts, _ = np.histogram(np.asarray(q.exponent) / 16, bins=np.arange(17))
            np.testing.assert_array_equal(stats.k_counts, counts)
            assert stats.power is None
    assert report.moments[0].zero_share >= 3 / 64
    assert report.moments[0].max_share > 0


def test_a_large_row_is_counted_exactly():
    """A float32 sum of this many ones, added one by one, would be wrong."""
    size = 2**24 + 2**21
    q = coat.quantize(jnp.zeros(size, jnp.bfloat16).at[7].set(1))
    state = coat.scale_by_fp8_adam().init(jnp.zeros(8192))
    inner = state.inner_state._replace(mu=q, nu=q)
    state = state._replace(inner_state=inner)
    stats = coat.moment_report(state).moments[0]
    assert float(stats.zero_share) == pytest.approx(1 - 1 / size, rel=1e-7)


def test_a_fresh_state_has_no_error():
    for stats in coat.moment_report(coat.fp8_adamw(1e-3).init(jnp.ones(SHAPE))).moments:
        assert (stats.error, stats.zero_share, stats.max_share) == (0, 1, 0)


def test_jit_and_stacked_states():
    tx = coat.fp8_adamw(1e-2)
    grads = [jnp.asarray(gradients(i)) for i in range(2)]
    _, _, state = run(tx, jnp.ones(SHAPE), grads, jit=True)
    report = coat.moment_report(state)
    inside = jax.jit(lambda s: (coat.moment_report(s), s[0].count))(state)[0]
    assert_same_bits(inside, report)
    assert all(leaf.size <= 16 for leaf in jax.tree.leaves(report))
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    for both, one in zip(coat.moment_report(stack).rows(), report.rows(), strict=True):
        assert both["error"] == pytest.approx(one["error"], rel=1e-5)
        assert both["zero_share"] == pytest.approx(one["zero_share"])
        assert both["size"] == 2 * one["size"]


def test_a_report_on_a_stack_stores_no_float32_array_of_it():
    """A training that fills the device's memory can log its moments."""
    stack = jnp.ones((32, 512, 1024), jnp.float32)
    state = jax.eval_shape(coat.fp8_adamw(1e-2).init, stack)
    memory = jax.jit(coat.moment_report).lower(state).compile().memory_analysis()
    assert memory.temp_size_in_bytes < stack.nbytes
    assert memory.output_size_in_bytes < 1024


def test_rows_and_the_table_name_each_moment():
    params = {"layer": [{"w": jnp.ones(SHAPE)}], "b": jnp.ones(8), "none": None}
    tx = optax.partition(
        {"a": coat.fp8_adamw(1e-2), "b": optax.sgd(1e-2)},
        {"layer": "a", "b": "b", "none": "b"},
    )
    report = coat.moment_report(tx.init(params))
    rows = report.rows()
    assert [(row["parameter"], row["moment"]) for row in rows] == [
        ("layer/0/w", "mu"),
        ("layer/0/w", "nu"),
    ]
    assert rows[0]["k"] == 3
    assert sum(rows[1][f"k{k}"] for k in range(16)) == 128
    flat = (str, int, float)
    assert all(isinstance(value, flat) for row in rows for value in row.values())
    header, first, second = str(report).splitlines()
    assert header.split()[:3] == ["parameter", "size", "format"]
    assert first.split() == [
        "layer/0/w",
        "mu",
        "10,240",
        "E4M3",
        "3",
        "100.00",
        "0.00",
        "0.00",
    ]
    assert second.split()[:4] == ["layer/0/w", "nu", "10,240", "UE4M4"]


def test_a_lost_group_shows_as_nan():
    bad = jnp.asarray(gradients(0)).at[3, 7].set(jnp.nan)
    _, _, state = run(coat.scale_by_fp8_adam(), jnp.ones(SHAPE), [bad], jit=True)
    assert all(np.isnan(row["error"]) for row in coat.moment_report(state).rows())


def test_only_fp8_states_have_a_report():
    state = coat.fp8_adamw(1e-3).init(jnp.ones(3))
    assert coat.moment_report(state).rows() == []
    with pytest.raises(ValueError, match=r"state of coat.fp8_adamw .* got tuple"):
        coat.moment_report(optax.adamw(1e-3).init(jnp.ones(SHAPE)))
