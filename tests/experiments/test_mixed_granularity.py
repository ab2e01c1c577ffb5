"""Tests errors of stored activations, timed methods and the command line."""

import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import oracle, small_models
from helpers.gradients import compiled
from helpers.marks import slow

import pallas_kernels as pk
from experiments.activations import (
    granularity_report,
    granularity_studies,
    granularity_times,
)
from experiments.activations import layer_flow as flow
from experiments.activations.granularity_studies import FLOWS, GRANULARITIES
from experiments.studies import mixed_granularity, trained

_BLOCKS = {"4x4": (4, 4), "1x16": (16,), "per row": (10**6,), "per tensor": None}


def _stored(x, granularity):
    """Returns `x`, quantized and dequantized by the oracle."""
    block = _BLOCKS[granularity]
    scales, values = oracle.quantize(x, oracle.E4M3, block)
    return oracle.dequantize(values, scales, block, None, oracle.E4M3)


def _percent(stored, exact):
    return 100 * np.linalg.norm(stored - exact) / np.linalg.norm(exact)


def _run(layer, x, store=flow.keep):
    """Runs `flow.run`, compiled once for all layers."""
    graph, params = nnx.split(layer)
    return _program(graph, store)(params, x)


@functools.cache
def _program(graph, store):
    return jax.jit(lambda params, x: flow.run(nnx.merge(graph, params), x, store))


@pytest.fixture(scope="module")
def model():
    return small_models.trained(small_models.config(), batches=1)


@pytest.fixture(scope="module")
def rows(model):
    return granularity_studies.layer_rows(model)


@pytest.fixture(scope="module")
def exact(model):
    """Returns the residual stream after the second layer, and its activations."""
    x = jax.tree.leaves(model.params["embedding"])[0][model.batches[0][:, :-1]]
    x, _ = _run(small_models.layer_of(model, 0), x)
    return _run(small_models.layer_of(model, 1), x)


def test_operators_make_the_layer():
    changes = {"norm": "layer", "gate": "gelu", "head_dim": 16}
    model = small_models.trained(small_models.config(**changes), batches=1)
    layer = small_models.layer_of(model, 1)
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))

    def both(x):
        actual, inputs = flow.run(layer, x)
        assert list(inputs) == list(flow.SITES)
        return actual, inputs, layer(x)

    actual, inputs, expected = compiled(both, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(inputs["attention norm"], x)


def test_what_a_store_returns_is_what_is_read(model):
    layer = small_models.layer_of(model, 0)
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    zeros = {"out", "down"}
    actual, inputs = _run(layer, x, lambda s, x: 0 * x if s in zeros else x)
    np.testing.assert_array_equal(actual, x)
    assert {site for site, x in inputs.items() if not np.any(x)} == zeros


def test_errors_of_activations_are_the_oracles(rows, exact):
    actual = {
        (row["site"], row["granularity"]): row
        for row in rows
        if row["study"] == "arrays" and row["layer"] == 1
    }
    assert actual.keys() == {(s, g) for s in flow.SITES for g in GRANULARITIES}
    for (site, granularity), row in actual.items():
        x = np.asarray(exact[1][site])
        stored = _stored(x, granularity)
        expected = _percent(stored, x)
        assert row["error_percent"] == pytest.approx(expected, rel=1e-2)
        assert row["peak_over_rms"] == pytest.approx(
            np.abs(x).max() / np.sqrt(np.mean(x**2)), rel=1e-4
        )
        lost = 100 * np.mean((stored == 0) & (x != 0))
        assert row["lost_percent"] == pytest.approx(lost, abs=0.1)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("per tensor", "per tensor", "per tensor"),
        ("4x4", "4x4", "4x4"),
        ("1x16", "1x16", "1x16"),
        ("TE", None, "per tensor"),
        ("mixed", "1x16", "per tensor"),
        ("mixed, rows", "1x16", "per row"),
    ],
)
def test_flows_store_around_operators(name, inputs, outputs, rows, exact):
    def stored(x, granularity):
        return x if granularity is None else _stored(x, granularity)

    decoded = {site: np.asarray(x, np.float64) for site, x in exact[1].items()}
    gate, up = (stored(decoded[site], inputs) for site in ("gate", "up"))
    product = stored(gate / (1 + np.exp(-gate)) * up, outputs)
    actual = granularity_studies.mean_error(
        [row for row in rows if row.get("layer") == 1],
        "operators",
        operator="gate",
        flow=name,
    )
    assert actual == pytest.approx(_percent(product, decoded["down"]), rel=1e-2)


def test_errors_add_up_along_the_stream(model, rows):
    x = exact = jax.tree.leaves(model.params["embedding"])[0][model.batches[0][:, :-1]]
    for index in range(2):
        layer = small_models.layer_of(model, index)
        x, _ = _run(layer, x, FLOWS["mixed"])
        exact, _ = _run(layer, exact)
    (actual,) = (
        row["error_percent"]
        for row in rows
        if (row["study"], row["layer"], row.get("flow")) == ("stream", 1, "mixed")
    )
    assert actual == pytest.approx(_percent(x, exact), rel=1e-2)


def test_mean_errors_need_rows(rows):
    with pytest.raises(ValueError, match="no row is of"):
        granularity_studies.mean_error(rows, "stream", flow="2x2")


def _read_back(method, actual):
    """Decodes the codes of a timed method."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float32), actual)
    if method == "BF16":
        return wide
    if method == "per tensor, delayed":
        return wide * granularity_times._DELAYED_SCALE
    if method.startswith("mixed"):
        wide = wide[:-1] if method.endswith("rows") else wide[0]
    codes, scale = wide
    codes = codes.row if isinstance(codes, pk.Codes) else codes
    if scale.ndim == 1:
        return codes * scale[:, None]
    rows, columns = np.divide(codes.shape, scale.shape or codes.shape).astype(int)
    return codes * np.kron(scale, np.ones((rows, columns)))


@pytest.mark.parametrize("name", [slow("norm"), "gate"])
def test_timed_methods_quantize_the_output(name):
    operator, methods = granularity_times._OPERATORS[name]
    x = granularity_times._draw(name, (32, 64), jax.random.key(0))
    exact = None
    for method, run in methods.items():
        actual = _read_back(method, compiled(functools.partial(run, operator), x))
        exact = actual if exact is None else exact
        assert _percent(actual, exact) < (1e-6 if method == "BF16" else 4), method


@pytest.mark.slow
def test_timed_rows():
    rows = granularity_times.time_rows((32, 64))
    plain = {r["operator"]: r["ms"] for r in rows if r["method"] == "BF16"}
    assert len(rows) == 2 * len(granularity_times.METHODS) + 2
    for row in rows:
        assert row["ms"] > 0
        assert row["ms"] / plain[row["operator"]] == row["ratio_to_bf16"]


def test_command_line(model, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trained, "train", lambda settings, recipe: model)
    monkeypatch.setattr(mixed_granularity, "layer_rows", lambda model: [*rows])
    times = [
        {"study": "times", "operator": "norm", "method": method, "shape": "1 x 1"}
        | {"ms": 1.0, "ratio_to_bf16": 1.0}
        for method in ("BF16", "per tensor, just in time")
    ]
    monkeypatch.setattr(granularity_times, "time_rows", lambda shape: times)
    out = tmp_path / "mixed.json"
    argv = ["--preset", "tiny", "--shapes", "1,1", "--out", str(out)]
    assert mixed_granularity.main(argv) == 0
    actual = json.loads(out.read_text())
    assert (actual["preset"], actual["recipe"]) == ("tiny", "bf16")
    assert [row for row in actual["rows"] if row["study"] == "times"] == times
    assert {row["study"] for row in actual["rows"]} == {
        *("arrays", "operators", "stream", "times")
    }
    assert len(actual["bars"]) == 6
    for name in ("flows", "times"):
        assert (tmp_path / f"mixed_{name}.png").stat().st_size
    assert "What is lost behind an operator" in capsys.readouterr().out

    assert mixed_granularity.main(["--out", str(tmp_path / "no" / "x.json")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_tables_hold_what_rows_say(rows):
    table = granularity_report.flows(rows)
    names, *columns = ([*column.cells] for column in table.columns)
    assert names == list(FLOWS)
    errors = [
        granularity_studies.mean_error(rows, "operators", operator=o, flow="TE")
        for o in flow.OPERATORS
    ]
    row = names.index("TE")
    assert [c[row] for c in columns[:-1]] == [f"{error:.2f}" for error in errors]
